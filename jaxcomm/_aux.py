"""Auxiliary values of a loss: those that are the same everywhere, and the means of the others."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm import _axes
from jaxcomm._attached import after_exchanges
from jaxcomm._axes import AxisName
from jaxcomm._pieces import cut

_AVERAGED = (jnp.integer, jnp.floating, jnp.bool_)


@jax.tree_util.register_pytree_node_class
class Same:
    """A value that all devices and microbatches have in common, so that it has no mean."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, nothing: None, children: Sequence[Any]) -> "Same":
        del nothing
        return cls(children[0])


def is_same(x: Any) -> bool:
    return isinstance(x, Same)


@jax.tree_util.register_pytree_node_class
class Aux:
    """The leaves of aux without its containers, some of which look at what is put into them.

    Attributes:
      leaves: arrays, and `Same`.
      tree: the containers.
    """

    def __init__(self, leaves: Sequence[Any], tree: Any) -> None:
        self.leaves, self.tree = leaves, tree

    def tree_flatten(self) -> tuple[Sequence[Any], Any]:
        return tuple(self.leaves), self.tree

    @classmethod
    def tree_unflatten(cls, tree: Any, leaves: Sequence[Any]) -> "Aux":
        return cls(leaves, tree)


def differing(
    f: Callable[[Any, Any], Sequence[Any]], levels: Sequence[str | None], inputs: Any, batch: Any
) -> list[tuple[bool, ...]]:
    """Along which axes of the batch the results of a function differ, by tracing it once.

    Args:
      f: from inputs and one device's batch, or one microbatch, to a loss and arrays.
      levels: for each leading axis of `batch` the mesh axis that its entries lie along, which is
        bound in `f`, or None.
      inputs: what is the same for all of them.
      batch: `jax.ShapeDtypeStruct`s.

    Returns:
      For each level, whether each result differs along it. Where that cannot be seen, all arrays
      do.

    Raises:
      Exception: if `f` cannot be traced this way.
    """
    found: list[tuple[bool, ...]] = []

    @jax.custom_batching.custom_vmap
    def look(marker: jax.Array, *results: jax.Array) -> tuple[jax.Array, ...]:
        return (marker, *results)

    @look.def_vmap
    def _(size: int, differ: Sequence[bool], *values: jax.Array) -> Any:
        del size
        found.append(tuple(differ[1:]))
        return look(*values), tuple(differ)

    def of_one(inputs: Any, marked: tuple[jax.Array, Any]) -> jax.Array:
        marker, batch = marked  # it differs along every level, so that each calls the rule
        return look(marker, *f(inputs, batch))[0]

    for name in reversed(levels):
        of_one = jax.vmap(of_one, in_axes=(None, 0), axis_name=name)
    sizes = jax.tree.leaves(batch)[0].shape[: len(levels)]
    traced = jax.make_jaxpr(of_one)(inputs, (jax.ShapeDtypeStruct(sizes, jnp.float32), batch))
    if _is_unclear(traced.jaxpr, frozenset(filter(None, levels))):
        found = [(differ[0], *[True] * len(differ[1:])) for differ in found]
    return found[::-1]


def _is_unclear(jaxpr: Any, names: frozenset[str]) -> bool:
    """Whether devices may differ in what `vmap` does not see.

    These are callbacks, and axes that are still named: in a function with a rule of its own for
    `vmap`, to which no operand that differs was passed.
    """
    for line in jaxpr.eqns:
        if line.primitive.name in ("io_callback", "pure_callback"):
            return True
        for value in line.params.values():
            for each in value if isinstance(value, tuple | list) else (value,):
                inside = getattr(each, "jaxpr", each)
                if hasattr(inside, "eqns") and _is_unclear(inside, names):
                    return True
                if isinstance(each, str) and each in names:
                    return True
    return False


def with_same(aux: Any, same: Collection[int], axis_name: AxisName, microbatches: int) -> Aux:
    """Marks the values in aux that are the same everywhere.

    Args:
      aux: what the loss of one device returned.
      same: which of its leaves are, where types cannot tell.
      axis_name: the axes of the devices.
      microbatches: their number.

    Raises:
      TypeError: for a leaf that is no real number.
    """
    names = _axes.checked_names(axis_name)

    def is_found(i: int, x: Any) -> bool:
        if names:  # types do not tell microbatches apart
            return microbatches == 1 and not (_axes.varying_axes(x) & names)
        return i in same

    def marked(i: int, path: Any, x: Any) -> Any:
        _require_number(path, x)
        return Same(jax.lax.convert_element_type(x, jnp.result_type(x))) if is_found(i, x) else x

    leaves, tree = jax.tree_util.tree_flatten_with_path(aux)
    return Aux([marked(i, *leaf) for i, leaf in enumerate(leaves)], tree)


def _require_number(path: Any, x: Any) -> None:
    name, dtype = f"aux{jax.tree_util.keystr(path)}", getattr(x, "dtype", type(x))
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise TypeError(
            f"{name} is a random key, which has no mean over devices; give the loss another key in "
            "every step, and return only what else changes, such as nnx.state(model, "
            "nnx.BatchStat)."
        )
    if not any(jnp.issubdtype(dtype, kind) for kind in _AVERAGED):
        raise TypeError(
            f"{name} is {dtype}, but the mean over devices is taken in float32, of real numbers "
            "only; leave it out of aux."
        )


def mean_dtype(x: Any) -> Any:
    """The dtype of a mean of such values."""
    dtype = jnp.result_type(x)
    return dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.float32


def mean_over(value: tuple[Any, Aux], axis_name: AxisName, grads: Any) -> tuple[Any, Any]:
    """The mean loss, and aux with the means of what is not `Same`.

    It is one all-reduce, after those of the backward pass.
    """
    loss, aux = value
    averaged = [jnp.asarray(x) for x in (loss, *aux.leaves) if not is_same(x)]
    axes = _axes.checked_names(axis_name)
    flat = [_axes.as_varying(x, axes).reshape(-1).astype(jnp.float32) for x in averaged]
    total = jax.lax.pmean(after_exchanges(grads, jnp.concatenate(flat)), axis_name)
    pieces = zip(cut(total, [x.size for x in flat]), averaged, strict=True)
    mean, *means = (piece.reshape(x.shape).astype(mean_dtype(x)) for piece, x in pieces)
    rest = iter(means)
    return mean, aux.tree.unflatten([x.value if is_same(x) else next(rest) for x in aux.leaves])
