"""Freezing: gradients that are not exchanged, and that move nothing."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from jaxcomm import _axes
from jaxcomm._axes import AxisName
from jaxcomm.transforms import _roles
from jaxcomm.transforms._exchange import local_leaves, on_every_device
from jaxcomm.transforms._layout import Layout, layout_of
from jaxcomm.transforms._scheme import Scheme, exchange
from jaxcomm.transforms._states import require_kind


class SetToZeroState(NamedTuple):
    """The state of `set_to_zero`: no arrays, only what `init` recorded about the parameters."""

    layout: Layout
    roles = frozenset({_roles.ZEROS})


def set_to_zero(axis_name: AxisName) -> optax.GradientTransformation:
    """Replaces local gradients by zero updates, without an exchange: for frozen parameters.

    This is `optax.set_to_zero` for local gradients: the leaves that `optax.partition` assigns to it
    are not sent. `optax.set_to_zero` after the exchange also freezes, but its leaves are sent. Put
    the optimizer inside the trained part: weight decay after the partition would move the frozen
    part.

    Args:
      axis_name: the mesh axis, or axes, over which the batch is spread.

    Returns:
      A transformation used like `jaxcomm.mean`.

    Raises:
      TypeError, ValueError: as for `jaxcomm.mean`.

    Wire: nothing.

    Example:
      >>> import jaxcomm, optax
      >>> trained = optax.chain(jaxcomm.mean("data"), optax.adam(1e-3))
      >>> labels = {"backbone": "frozen", "head": "trained"}
      >>> tx = optax.partition({"trained": trained, "frozen": jaxcomm.set_to_zero("data")}, labels)
    """
    _axes.names_of(axis_name)

    def init_fn(params: Any) -> Any:
        return SetToZeroState(layout_of(params, axis_name))

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        require_kind(state, SetToZeroState)
        grads, treedef = local_leaves(updates, state.layout)
        zeros, _ = on_every_device(
            lambda grads, own, shared: ([jnp.zeros_like(g) for g in grads], own),
            grads,
            state.layout,
        )
        return treedef.unflatten(zeros), state

    return exchange(init_fn, update_fn, Scheme(axis_name, None, frozen=True))
