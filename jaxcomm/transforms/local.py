"""Any optax transformation, applied to each device's own gradients."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxcomm import _axes
from jaxcomm._axes import AxisName
from jaxcomm._marks import GRADIENT, mark
from jaxcomm.transforms import _roles
from jaxcomm.transforms._exchange import local_leaves
from jaxcomm.transforms._layout import Layout, layout_of
from jaxcomm.transforms._state_of_each import Structure, by_device, is_sound, on_each_device
from jaxcomm.transforms._states import require_kind, require_no_exchange
from jaxcomm.transforms._wrappers import with_extra_args
from jaxcomm.transforms.per_device import PerDevice, next_of, require_own


class LocalState(NamedTuple):
    """The state of `local`.

    Attributes:
      layout: what `init` recorded about the parameters.
      structure: the structure of the inner transformation's state.
      inner: the arrays of that state on every device, with a leading device axis, sharded over the
        axis; inside `jax.shard_map`, this device's only.
    """

    layout: Layout
    structure: Structure
    inner: PerDevice
    roles = frozenset({_roles.LOCAL})


def local(
    axis_name: AxisName, inner: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Applies a transformation to each device's own gradients, before they are exchanged.

    Local momentum for Signum is `jaxcomm.local("data", optax.trace(0.9))`; clipping on every device
    is `jaxcomm.local("data", optax.clip_by_global_norm(1.0))`. In the global view, a transformation
    before the exchange without `local` would treat the gradients of all devices as one gradient.

    If an update or the state of `inner` is no longer finite on any device, the state of every
    device stays as it was and that device's updates are NaN, so that all skip the step. So a NaN
    costs one step and does not remain in a momentum; nor does an infinity that a sign would hide.

    Random numbers of `inner`, such as those of `optax.add_noise`, are the same on every device.

    In the manual view (inside `jax.shard_map`), `inner` sees only what the device holds. Where
    parameters are sharded over another axis, these are shards, and a norm is not that of the whole
    gradient: clip in the global view.

    Args:
      axis_name: the mesh axis, or axes, over which the batch is spread.
      inner: a transformation that exchanges nothing.

    Returns:
      A transformation to put before `jaxcomm.mean` or another exchange. Every device has its own
      state.

    Raises:
      TypeError, ValueError: immediately, if `inner` is not a transformation; by `init` if it
        exchanges; otherwise as for `jaxcomm.mean`.

    Wire: one flag, an int32; where leaves are sharded over another axis, another flag over that
    axis (in the global view, one for each leaf).

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm, optax
      >>> clip = jaxcomm.local("data", optax.clip_by_global_norm(1.0))
      >>> with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
      ...     state = clip.init(jnp.zeros(2))
      ...     clipped, _ = jax.jit(clip.update)(jnp.array([[3.0, 4.0], [0.5, 0.0]]), state)
      >>> jaxcomm.unmark_local(clipped)
      Array([[0.6, 0.8],
             [0.5, 0. ]], dtype=float32)
    """
    _axes.names_of(axis_name)
    inner = with_extra_args(inner, "local", "inner")

    def init_fn(params: Any) -> Any:
        layout, state = layout_of(params, axis_name), inner.init(params)
        require_no_exchange(state, "local", "optax.trace(0.9)", "after it in the chain")
        structure, own = on_each_device(state, layout)
        return LocalState(layout, structure, own)

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        require_kind(state, LocalState)
        require_own(state.inner, state.layout)
        grads, treedef = local_leaves(updates, state.layout)
        if not grads and not state.inner.values:  # a part of `optax.partition` without leaves
            return updates, state

        def one(updates: Any, leaves: list[jax.Array]) -> tuple[Any, list[jax.Array], jax.Array]:
            inner_state = state.structure.state_of(leaves)
            updates, inner_state = inner.update(updates, inner_state, params, **extra_args)
            new = state.structure.arrays_of(inner_state)
            sound = is_sound(updates, new, leaves, state.inner, state.layout)
            updates = jax.tree.map(lambda u: jnp.where(sound, u, jnp.nan).astype(u.dtype), updates)
            return updates, new, sound

        if _axes.is_manual(axis_name):
            own = [x[0] for x in state.inner.values]
            updates, leaves, finite = one(treedef.unflatten(grads), own)
            leaves, finite = [x[None] for x in leaves], _on_all_devices(finite)
        else:
            both = treedef.unflatten(grads), state.inner.values
            updates, leaves, finite = by_device(one, axis_name, *both)
            # By hand, so that `jaxcomm.explain` sees it too.
            finite = jax.shard_map(
                lambda flag: _on_all_devices(flag[0]),
                in_specs=PartitionSpec(axis_name),
                out_specs=PartitionSpec(),
                check_vma=False,
            )(finite)
        leaves = [
            jnp.where(finite, new, old) for new, old in zip(leaves, state.inner.values, strict=True)
        ]
        marked = mark(updates, GRADIENT, _axes.names_of(axis_name))
        return marked, state._replace(inner=next_of(state.inner, leaves))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _on_all_devices(flag: jax.Array) -> jax.Array:
    """Whether the flag is set on all devices of the mesh, in the manual view."""
    axes = _axes.manual_axes()
    varying = axes if any(map(_axes.checks_on, axes)) else frozenset()
    return _axes.on_all(_axes.as_varying(flag, varying), axes)
