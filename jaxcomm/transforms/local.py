"""Any optax transformation, on every device's own gradients."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxcomm import _compat
from jaxcomm._compat import AxisName
from jaxcomm.transforms._layout import Layout, layout_of
from jaxcomm.transforms.per_device import PerDevice


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Structure:
    """How the arrays of the inner state hang together."""

    treedef: Any


class LocalState(NamedTuple):
    """The state of `local`.

    Attributes:
      layout: what `init` saw of the parameters.
      structure: of the inner transformation's state.
      inner: the arrays of that state, those of every device.
    """

    layout: Layout
    structure: _Structure
    inner: PerDevice


def local(inner: optax.GradientTransformation, axis_name: AxisName) -> optax.GradientTransformation:
    """Applies a transformation to each device's own gradients, before they are exchanged.

    Local momentum for Signum is `jaxcomm.local(optax.trace(0.9), "data")`, clipping on every
    device `jaxcomm.local(optax.clip_by_global_norm(1.0), "data")`. Without it, in the global view
    a transformation before the exchange would see the gradients of all devices as one.

    Args:
      inner: a transformation that exchanges nothing.
      axis_name: the mesh axis, or axes, over which the batch is spread.

    Returns:
      A transformation for the place before `jaxcomm.mean` or `jaxcomm.majority_vote`. Every device
      has a state of its own.

    Wire: nothing.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm, optax
      >>> clip = jaxcomm.local(optax.clip_by_global_norm(1.0), "data")
      >>> with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
      ...     state = clip.init(jnp.zeros(2))
      ...     clipped, _ = clip.update(jnp.array([[3.0, 4.0], [0.5, 0.0]]), state)
      >>> clipped
      Array([[0.6, 0.8],
             [0.5, 0. ]], dtype=float32)
    """
    _compat.names_of(axis_name)

    def init_fn(params: Any) -> Any:
        layout = layout_of(params, axis_name)
        leaves, treedef = jax.tree.flatten(inner.init(params))
        shapes = {leaf.shape: leaf.spec for leaf in layout.leaves}
        specs = tuple(
            PartitionSpec(axis_name, *shapes.get(jnp.shape(x), PartitionSpec())) for x in leaves
        )
        if _compat.is_manual(axis_name):
            checked = _compat.checks_on(axis_name)
            axes = frozenset(_compat.names_of(axis_name) if checked else ())
            values = [_compat.as_varying(jnp.asarray(x)[None], axes) for x in leaves]
        else:
            spread = jax.jit(
                lambda xs: [jnp.broadcast_to(x, (layout.world, *x.shape)) for x in xs],
                out_shardings=list(specs),
            )
            values = spread([jnp.asarray(x) for x in leaves])
        return LocalState(layout, _Structure(treedef), PerDevice(values, specs))

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def one(updates: Any, leaves: list[jax.Array]) -> tuple[Any, list[jax.Array]]:
            inner_state = state.structure.treedef.unflatten(leaves)
            updates, inner_state = inner.update(updates, inner_state, params)
            return updates, jax.tree.leaves(inner_state)

        if _compat.is_manual(axis_name):
            updates, leaves = one(updates, [x[0] for x in state.inner.values])
            leaves = [x[None] for x in leaves]
        else:
            updates, leaves = jax.vmap(one, spmd_axis_name=axis_name)(updates, state.inner.values)
        return updates, state._replace(inner=PerDevice(leaves, state.inner.specs))

    return optax.GradientTransformation(init_fn, update_fn)
