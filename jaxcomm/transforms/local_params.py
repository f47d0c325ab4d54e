"""Each device's own parameters, where devices take their own steps."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import optax

from jaxcomm import _axes
from jaxcomm._axes import AxisName
from jaxcomm._marks import OWN_PARAMETER, mark
from jaxcomm.transforms import _roles
from jaxcomm.transforms._fragments import Fragments
from jaxcomm.transforms._layout import Layout, filled_leaves
from jaxcomm.transforms._state_of_each import Structure
from jaxcomm.transforms._states import require_kind
from jaxcomm.transforms.per_device import PerDevice, require_own


class LocalStepsState(NamedTuple):
    """The state of `local_steps`.

    Attributes:
      layout: what `init` recorded about the parameters.
      fragments: which leaf is exchanged when.
      tree: the structure of the parameters.
      step: int32, the steps taken.
      params: each device's own parameters, with a leading device axis, sharded over the axis;
        inside `jax.shard_map`, this device's only.
      structure: the structure of the inner state.
      inner: the arrays of the inner state on every device; likewise.
      taken: with a delay, each device's own parameters when its pseudo-gradient was taken; else
        empty.
      exchange: the state of the exchange of each fragment.
      outer: the state of the outer optimizer of each fragment, equal on all devices.
    """

    layout: Layout
    fragments: Fragments
    tree: Structure
    step: jax.Array
    params: PerDevice
    structure: Structure
    inner: PerDevice
    taken: PerDevice
    exchange: tuple[Any, ...]
    outer: tuple[Any, ...]
    roles = frozenset({_roles.FINISHED})


def local_params(state: Any) -> Any:
    """Each device's own parameters, only for `jaxcomm.value_and_grad`.

    Args:
      state: the state of `jaxcomm.local_steps`, or of a chain that has one.

    Returns:
      The pytree of the parameters, with a leading device axis under plain `jax.jit`, in a dtype
      that no arithmetic accepts. `jaxcomm.unmark_local` returns the values, for inspection.

    Raises:
      ValueError: if there is no such state, or several, or it covers a part of the parameters.

    Wire: nothing.

    Example:
      After one step without an exchange, the shared parameters are still 0:

      >>> import jax, jax.numpy as jnp, jaxcomm, optax
      >>> tx = jaxcomm.local_steps(optax.sgd(1.0), 2, optax.sgd(1.0), jaxcomm.mean("data"))
      >>> with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
      ...     w = jaxcomm.replicate(jnp.zeros(1))
      ...     state, f = tx.init(w), jaxcomm.value_and_grad(lambda w, x: jnp.sum(w * x), "data")
      ...     _, grads = jax.jit(f)(jaxcomm.local_params(state), jnp.array([3.0, 4.0]))
      ...     updates, state = jax.jit(tx.update)(grads, state, w)
      >>> updates.tolist(), jaxcomm.unmark_local(jaxcomm.local_params(state)).tolist()
      ([0.0], [[-3.0], [-4.0]])
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, LocalStepsState))
    found = [node for node in nodes if isinstance(node, LocalStepsState)]
    if len(found) != 1:
        raise ValueError(
            f"local_params needs the state of one jaxcomm.local_steps, found {len(found)}; pass "
            "what tx.init or tx.update returned."
        )
    # Leaves, as nnx.Optimizer keeps each array of a state in a variable.
    values = jax.tree.leaves(found[0].params.values)
    require_own(dataclasses.replace(found[0].params, values=values), found[0].layout)
    own = own_tree(found[0], values)
    if any(isinstance(x, optax.MaskedNode) for x in jax.tree.leaves(own, is_leaf=_is_masked)):
        raise ValueError(
            "this jaxcomm.local_steps has only a part of the parameters, and a model needs all. "
            "Freeze the others inside it, in the inner and in the outer optimizer alike: "
            "optax.partition({..., 'frozen': optax.set_to_zero()}, labels)."
        )
    return mark(own, OWN_PARAMETER, _axes.names_of(found[0].layout.axis_name))


def require_delay(state: Any, delay: int) -> None:
    """Raises a ValueError for a state that is not one of local steps with, or without, a delay."""
    require_kind(state, LocalStepsState)
    if filled_leaves(state.layout) and bool(state.taken.values) != bool(delay):
        made = "with" if state.taken.values else "without"
        raise ValueError(
            f"the state of local_steps was made {made} a delay, and this one has delay={delay}. "
            "Make tx as in the run that saved the state, or start over with tx.init(params)."
        )


def _is_masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)


def own_tree(state: LocalStepsState, values: Sequence[jax.Array]) -> Any:
    """Per-device arrays as the tree of the parameters, in the shapes of the current view."""
    axis_name = state.layout.axis_name
    if _axes.is_manual(axis_name):
        axes = _axes.checked_names(axis_name)
        tree = state.tree.state_of([x[0] for x in values])
        return jax.tree.map(lambda x: _axes.as_varying(x, axes), tree)
    empty = [
        None if e is None else jax.ShapeDtypeStruct((state.layout.world, *e.shape), e.dtype)
        for e in state.tree.empty
    ]
    tree = dataclasses.replace(state.tree, empty=tuple(empty)).state_of(list(values))
    explicit = set(_axes.names_of(axis_name)) & _axes.explicit_axes()
    return jax.tree.map(lambda x: x if x.size or not explicit else _over(x, axis_name), tree)


def _over(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """An array whose type says that its first axis is spread over an Explicit axis."""
    return jax.sharding.reshard(x, jax.P(axis_name))
