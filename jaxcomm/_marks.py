"""The dtype of local gradients, which no arithmetic accepts before they are exchanged.

The gradient of one device must not reach a parameter or an optimizer that all devices share. So it
has its own dtype, which jax refuses in all arithmetic: to add it to a parameter, clip it or scale
it raises a TypeError that names it, in every view, framework and wrapper. What only moves values
(reshape, select, `jax.lax.scan`, shardings, `jax.jit`) treats it like any other array.

jax calls such dtypes extended, and its public way to define one is a PRNG implementation, whose
arrays are "keys". Nothing about these is random: a key is the bits of one value, in a uint32. The
compiler removes the conversions in both directions, as a test checks in compiled programs.

The dtype also has the mesh axes over which `jaxcomm.value_and_grad` took a gradient, so that an
exchange over others is noticed.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl

GRADIENT, OWN_GRADIENT, OWN_PARAMETER = "gradient", "own gradient", "own parameter"
FINISHED = "finished gradient"
# Errors of jax show a dtype as key<tag>; the tag says what to do.
_TAGS = {
    GRADIENT: "local gradient in {}, not exchanged: jaxcomm.mean or another exchange comes first "
    "in a chain; jaxcomm.set_to_zero freezes what it leaves out, jaxcomm.local computes on each "
    "device, jaxcomm.accumulate adds up microbatches, jaxcomm.unmark_local returns the values",
    OWN_GRADIENT: "local gradient in {}, at each device's own parameters: only jaxcomm.local_steps "
    "takes it, and clipping and the like go into its inner optimizer",
    FINISHED: "gradient in {}, exchanged in the backward pass, with the state of its exchange: the "
    "jaxcomm.in_backward that attached it comes first in a chain",
    OWN_PARAMETER: "each device's own parameters in {}, which are not the model's: only "
    "jaxcomm.value_and_grad takes them; evaluate and save the shared parameters",
}
_UNSIGNED = {"float32": jnp.uint32, "bfloat16": jnp.uint16, "float16": jnp.uint16}


def _refuse(tag: str, *_: Any) -> Any:
    raise TypeError(f"this is not a random key, but {tag}.")


class _Mark(NamedTuple):
    """A dtype: the float dtype of the values, what they are, and the mesh axes, if it has them."""

    name: str
    kind: str
    axes: tuple[str, ...]


_MARKS: dict[Any, _Mark] = {}  # by their dtypes


@functools.cache
def _implementation(of: _Mark) -> Any:
    over = f"; they are over {', '.join(of.axes)}" if of.axes else ""
    tag = _TAGS[of.kind].format(of.name) + over
    refuse = functools.partial(_refuse, tag)
    made = define_prng_impl(
        key_shape=(1,),
        seed=refuse,
        split=refuse,
        random_bits=refuse,
        fold_in=refuse,
        name=" ".join(("jaxcomm", of.kind, "in", of.name, *of.axes)),
        tag=tag,
    )
    wrapped = functools.partial(jax.random.wrap_key_data, impl=made)
    _MARKS[jax.eval_shape(wrapped, jax.ShapeDtypeStruct((1,), jnp.uint32)).dtype] = of
    return made


def mark_local(grads: Any) -> Any:
    """Marks gradients as local, so that nothing can use them before an exchange.

    `jaxcomm.value_and_grad` does this automatically; use it for gradients made in another way.
    Inside a `jax.shard_map` that checks types, `jax.grad` with respect to parameters that are equal
    on all devices returns the sum over devices: first make the parameters vary with
    `jax.lax.pcast`.

    Args:
      grads: a pytree of float32, bfloat16 or float16 arrays: local gradients inside
        `jax.shard_map`; under plain `jax.jit`, gradients with a leading device axis.

    Returns:
      The pytree with the same shapes and an opaque dtype, for the `update` of a transformation of
      jaxcomm. Inside a `jax.jit` the mark costs nothing; as its arguments or results, 16-bit
      gradients take 32 bits. Leaves of other dtypes, and those already marked, are unchanged.

    Raises:
      TypeError: if it is differentiated.

    Wire: nothing.

    Example:
      >>> import jax.numpy as jnp, jaxcomm
      >>> jaxcomm.mark_local(jnp.ones(3)) + 1  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      ...
      TypeError: add does not accept dtypes key<local gradient in float32, not exchanged: ...
    """
    return mark(grads, GRADIENT)


def mark(tree: Any, kind: str, axes: tuple[str, ...] = ()) -> Any:
    """`mark_local`, for any of the kinds above, over these mesh axes; () leaves them open.

    Bits have no derivative: without a rule that raises, that of a gradient would silently be zero.
    """
    one = functools.partial(_mark, kind=kind, axes=axes)
    marked = jax.custom_jvp(functools.partial(jax.tree.map, one))
    marked.defjvp(_refuse_derivatives)
    return marked(tree)


def _refuse_derivatives(*_: Any) -> Any:
    raise TypeError(
        "local gradients cannot be differentiated: take second derivatives of the loss, such as "
        "jax.jvp(jax.grad(loss_fn), ...), inside loss_fn or inside a jax.shard_map, and mark the "
        "result with jaxcomm.mark_local. For the first derivative of the loss alone, differentiate "
        "loss_fn itself. In place of flax's DynamicScale, multiply the loss by a scale in loss_fn, "
        "and put optax.scale(1 / scale) after the exchange."
    )


def unmark_local(grads: Any) -> Any:
    """The values of local gradients, to inspect or to compute with on each device.

    Args:
      grads: a pytree of local gradients, such as those of `jaxcomm.value_and_grad`.

    Returns:
      The pytree of float arrays; leaves that are not marked are unchanged. After computing with
      them, mark them again with `jaxcomm.mark_local`.

    Wire: nothing.

    Example:
      >>> import jax.numpy as jnp, jaxcomm
      >>> jaxcomm.unmark_local(jaxcomm.mark_local(jnp.ones(3)))
      Array([1., 1., 1.], dtype=float32)
    """
    return jax.tree.map(_unmark, grads)


def marked_dtype(x: Any) -> str | None:
    """The name of the float dtype of a marked array; None if it is not marked."""
    of = _mark_of(x)
    return of and of.name


def kind_of(x: Any) -> str | None:
    """What a marked array is; None if it is not marked."""
    of = _mark_of(x)
    return of and of.kind


def axes_of(x: Any) -> tuple[str, ...]:
    """The mesh axes over which a gradient is local; () if it does not say."""
    of = _mark_of(x)
    return of.axes if of else ()


def _mark_of(x: Any) -> _Mark | None:
    return _MARKS.get(getattr(x, "dtype", None))


def _mark(x: Any, kind: str, axes: tuple[str, ...]) -> Any:
    dtype = jnp.result_type(x) if marked_dtype(x) is None else None
    if dtype is None or dtype.name not in _UNSIGNED:
        return x
    bits = jax.lax.bitcast_convert_type(jnp.asarray(x), _UNSIGNED[dtype.name])
    bits = bits.astype(jnp.uint32)[..., None]
    return jax.random.wrap_key_data(bits, impl=_implementation(_Mark(dtype.name, kind, axes)))


def _unmark(x: Any) -> Any:
    name = marked_dtype(x)
    if name is None:
        return x
    bits = jax.random.key_data(x)[..., 0].astype(_UNSIGNED[name])
    return jax.lax.bitcast_convert_type(bits, name)
