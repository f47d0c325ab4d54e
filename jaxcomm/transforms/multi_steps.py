"""Gradient accumulation over steps: one exchange in several steps."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axes, _branches
from jaxcomm._marks import mark_local
from jaxcomm._numbers import is_integer
from jaxcomm.transforms import _roles
from jaxcomm.transforms._chains import (
    arrays_behind,
    decay_behind,
    moments_behind,
    schedules_behind,
)
from jaxcomm.transforms._exchange import local_leaves
from jaxcomm.transforms._layout import Layout, axis_of, filled_leaves, layout_of
from jaxcomm.transforms._states import require_kind
from jaxcomm.transforms._wrappers import (
    refuse_lookahead,
    refuse_movers,
    refuse_wrappers,
    with_extra_args,
)
from jaxcomm.transforms.local_params import LocalStepsState
from jaxcomm.transforms.per_device import (
    PerDevice,
    next_of,
    require_own,
    sharded_as_before,
    zeros_per_device,
)

_TURNS = 4  # of promotions
_INSIDE = "jaxcomm.multi_steps(optax.chain(exchange, optimizer), every)"


class MultiStepsState(NamedTuple):
    """The state of `multi_steps`.

    Attributes:
      layout: what `init` recorded about the parameters.
      mini_step: int32, how many gradients the accumulator holds.
      accumulated: float32, their mean on each device.
      inner: the state of the inner transformation.
    """

    layout: Layout
    mini_step: jax.Array
    accumulated: PerDevice
    inner: Any
    roles = frozenset({_roles.FINISHED})


def multi_steps(
    inner: optax.GradientTransformation, every: int
) -> optax.GradientTransformationExtraArgs:
    """Averages the gradients of several steps on each device, then exchanges and applies them once.

    This is `optax.MultiSteps` for local gradients: in the steps in between, the updates are zero
    and nothing is sent. `jaxcomm.accumulate` does the same for the microbatches of one step.

    Args:
      inner: a chain of an exchange and the optimizer.
      every: the number of steps per exchange.

    Returns:
      A transformation used like `inner`. It keeps one float32 copy of the gradients per device.
      `update(..., due=True)`, or False, decides instead of `every` whether this step exchanges,
      and makes no conditional: where steps are jitted, `due` is a static argument, and there are
      two programs. On GPUs, XLA overlaps an exchange only outside of conditionals.

    Raises:
      TypeError: by `update` if `due` is known on the devices only.
      ValueError: if `every` is not a positive integer, or `inner` has `optax.lookahead` in it; by
        `init` if `inner` exchanges nothing, or over several axes, or holds `local_steps`, or if an
        optimizer with moments, a schedule or other state follows in the chain: it would count the
        steps in between; by `update` if a decay of weights follows, or `due` is neither True nor
        False.

    Wire: that of `inner` in one step of `every`, in a branch of a conditional; otherwise nothing.
    With `due`, that of `inner` or nothing, and no conditional.

    Example:
      >>> import jaxcomm, optax
      >>> chain = optax.chain(jaxcomm.mean("data", "int8"), optax.adam(1e-3))
      >>> tx = jaxcomm.multi_steps(chain, every=4)
    """
    if not is_integer(every) or every < 1:
        raise ValueError(
            f"multi_steps needs a positive number of steps, got {every!r}; it takes no schedule."
        )
    inner = with_extra_args(inner, "multi_steps", "inner")
    refuse_lookahead(inner, "multi_steps", "inside")

    def init_fn(params: Any) -> Any:
        refuse_wrappers()
        if every > 1:
            _refuse_behind(params)
            refuse_movers("multi_steps")
        state = inner.init(params)
        _refuse_local_steps(state)
        layout = layout_of(params, axis_of(state, "multi_steps"), settings=every)
        own = zeros_per_device(layout, params, filled_leaves(layout))
        return MultiStepsState(layout, jnp.zeros((), jnp.int32), own, state)

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        require_kind(state, MultiStepsState)
        if every > 1 and decay_behind():
            raise ValueError(
                "optax.add_decayed_weights follows multi_steps in the chain, and would decay in "
                f"the steps in between too. Put it inside: {_INSIDE}."
            )
        grads, treedef = local_leaves(updates, state.layout)
        require_own(state.accumulated, state.layout)
        due, extra_args = _branches.known_on_the_host("multi_steps", extra_args)
        total = _add(grads, state)
        is_local = _axes.is_manual(state.layout.axis_name)
        means = list(grads)
        for i, t in total.items():
            means[i] = (t[0] if is_local else t).astype(grads[i].dtype)

        def exchange(given: tuple[Any, ...], kept: tuple[Any, Any]) -> tuple[Any, Any]:
            means, params = given
            local = mark_local(treedef.unflatten(means))
            return inner.update(local, kept[1], params, **extra_args)

        given = means, params
        is_last = due[0] if due else state.mini_step >= every - 1
        shapes, before = _promoted(lambda before: exchange(given, (None, before)), state.inner)
        kept = _zeros_like(shapes, grads, state.layout), before
        outgoing, inner_state = _branches.if_due(
            is_last, "multi_steps: exchange", every, exchange, given, kept
        )
        kept = [jnp.where(is_last, 0.0, t) for t in total.values()]
        accumulated = next_of(state.accumulated, kept)
        mini_step = jnp.where(is_last, 0, state.mini_step + 1)
        return outgoing, MultiStepsState(
            state.layout, mini_step, accumulated, sharded_as_before(inner_state)
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _refuse_behind(params: Any) -> None:
    """Raises, in `init`, if the steps in between would count in what follows in the chain."""
    kept = moments_behind(params) or schedules_behind(params) or arrays_behind(params)
    if kept:
        raise ValueError(
            f"a transformation with {', '.join(sorted(kept))} follows multi_steps in the chain, "
            "and would count the steps in between, whose updates are zero. Put it inside: "
            f"{_INSIDE}."
        )


def _refuse_local_steps(state: Any) -> None:
    """Raises, in `init`, if devices train parameters of their own, at which it takes gradients."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, LocalStepsState))
    if any(isinstance(node, LocalStepsState) for node in nodes):
        raise ValueError(
            "multi_steps is around local_steps, which has a gradient of every step. To average "
            "several, put optax.MultiSteps(optimizer, k).gradient_transformation() into it as "
            "inner, or use jaxcomm.accumulate."
        )


def _add(grads: list[jax.Array], state: MultiStepsState) -> dict[int, jax.Array]:
    """The running means with one more gradient, by index of the leaf; empty leaves have none."""
    weight = 1 / (state.mini_step + 1).astype(jnp.float32)
    return {
        i: old + (grads[i].reshape(old.shape).astype(jnp.float32) - old) * weight
        for i, old in zip(filled_leaves(state.layout), state.accumulated.values, strict=True)
    }


def _promoted(exchange: Callable[[Any], tuple[Any, Any]], state: Any) -> tuple[Any, Any]:
    """The shapes of the updates, and the state with the dtypes that `exchange` returns it with.

    An optimizer's first update may promote its state, and both branches have to return the same.
    """
    for _ in range(_TURNS):  # one leaf after the other may be promoted
        shapes, new = jax.eval_shape(functools.partial(exchange, state))
        same = jax.tree.structure(state) == jax.tree.structure(new)
        types = [list(map(jnp.result_type, jax.tree.leaves(tree))) for tree in (state, new)]
        if not same or types[0] == types[1]:  # what differs otherwise is for the branch to say
            break
        state = jax.tree.map(_with_dtype_of, state, new)
    return shapes, state


def _with_dtype_of(x: Any, like: jax.ShapeDtypeStruct) -> Any:
    return x if jnp.result_type(x) == like.dtype else jnp.asarray(x, like.dtype)


def _zeros_like(updates: Any, grads: list[jax.Array], layout: Layout) -> Any:
    """Zero updates, typed as what the exchange makes of these gradients."""
    leaves, treedef = jax.tree.flatten(updates)

    def zeros(update: Any, grad: jax.Array) -> jax.Array:
        zero = jnp.zeros_like(update)  # also sharded as it is, if all axes are Explicit
        spec = jax.typeof(grad).sharding.spec[grad.ndim - zero.ndim :]
        if any(spec):  # along Explicit axes
            zero = jax.sharding.reshard(zero, jax.P(*spec))
        further = _axes.varying_axes(grad).difference(_axes.names_of(layout.axis_name))
        return _axes.as_varying(zero, further)

    return treedef.unflatten([zeros(*pair) for pair in zip(leaves, grads, strict=True)])
