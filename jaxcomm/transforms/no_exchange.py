"""No exchange at all: for measuring, and as a control."""

from typing import Any, NamedTuple

import optax

from jaxcomm import _axes
from jaxcomm._axes import AxisName
from jaxcomm.transforms import _roles
from jaxcomm.transforms._exchange import local_leaves, on_every_device
from jaxcomm.transforms._layout import Layout, layout_of
from jaxcomm.transforms._scheme import Scheme, exchange
from jaxcomm.transforms._states import require_kind
from jaxcomm.transforms._wrappers import refuse_wrappers


class NoExchangeState(NamedTuple):
    """The state of `no_exchange`: no arrays, only what `init` recorded about the parameters."""

    layout: Layout
    roles = frozenset({_roles.MEANS})


def no_exchange(axis_name: AxisName) -> optax.GradientTransformation:
    """Leaves every device with its own gradients: for measuring, and as a control.

    A step with it is the same step without communication, so the time that `mean` adds is what
    communication costs. The updates are typed as equal on all devices, but they are not: parameters
    drift apart, so such a training run is the control that shows what communication is worth. A
    device's own copy is `x.addressable_shards[i].data`; jax treats all copies as one array.

    Args:
      axis_name: the mesh axis, or axes, over which the batch is spread.

    Returns:
      A transformation used like `jaxcomm.mean`.

    Raises:
      TypeError, ValueError: as for `jaxcomm.mean`.

    Wire: nothing.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.no_exchange("data")
      >>> with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
      ...     w = jaxcomm.replicate(jnp.zeros(1))
      ...     f = jaxcomm.value_and_grad(lambda w, x: jnp.sum(w * x), "data")
      ...     _, grads = jax.jit(f)(w, jnp.array([3.0, 4.0]))
      ...     updates, _ = jax.jit(tx.update)(grads, tx.init(w))
      >>> [copy.data.tolist() for copy in updates.addressable_shards]
      [[3.0], [4.0]]
    """
    _axes.names_of(axis_name)

    def init_fn(params: Any) -> Any:
        refuse_wrappers()
        return NoExchangeState(layout_of(params, axis_name))

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        require_kind(state, NoExchangeState)
        grads, treedef = local_leaves(updates, state.layout)
        alone, _ = on_every_device(lambda grads, own, shared: (grads, own), grads, state.layout)
        return treedef.unflatten(alone), state

    return exchange(init_fn, update_fn, Scheme(axis_name, None))
