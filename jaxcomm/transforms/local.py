"""Any optax transformation, on every device's own gradients."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxcomm import _axes, _paths
from jaxcomm._axes import AxisName
from jaxcomm._marks import mark_local
from jaxcomm.transforms._exchange import all_finite, local_leaves
from jaxcomm.transforms._layout import Layout, layout_of
from jaxcomm.transforms.per_device import PerDevice, made_sharded, next_of, require_own


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Structure:
    """How the arrays of the inner state hang together.

    Attributes:
      treedef: of the inner state.
      empty: for each of its arrays None, or what it is if it has no elements: those are not kept,
        because XLA does not keep them sharded.
    """

    treedef: Any
    empty: tuple[jax.ShapeDtypeStruct | None, ...]

    def state_of(self, arrays: list[jax.Array]) -> Any:
        """The inner state on one device."""
        rest = iter(arrays)
        leaves = [next(rest) if e is None else jnp.zeros(e.shape, e.dtype) for e in self.empty]
        return self.treedef.unflatten(leaves)

    def arrays_of(self, state: Any) -> list[Any]:
        """What is kept of the inner state, or of a tree like it."""
        leaves = jax.tree.leaves(state)
        return [x for x, e in zip(leaves, self.empty, strict=True) if e is None]


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


def local(
    axis_name: AxisName, inner: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Applies a transformation to each device's own gradients, before they are exchanged.

    Local momentum for Signum is `jaxcomm.local("data", optax.trace(0.9))`, clipping on every
    device `jaxcomm.local("data", optax.clip_by_global_norm(1.0))`. Without `local`, a
    transformation before the exchange takes the gradients of all devices for one gradient, in the
    global view.

    If `inner` returns anything that is not finite on any device, the state of every device stays as
    it was, so that a NaN costs one step and does not stay in a momentum.

    In the manual view `inner` sees what the device holds. Where parameters are sharded over a
    further axis these are shards, and a norm is not that of the whole gradient: clip in the global
    view.

    Args:
      axis_name: the mesh axis, or axes, over which the batch is spread.
      inner: a transformation that exchanges nothing.

    Returns:
      A transformation for the place before `jaxcomm.mean` or `jaxcomm.majority_vote`. Every device
      has a state of its own.

    Wire: one flag, an int32 or a bool; where leaves are sharded over a further axis, in the global
    view also one for each leaf over that axis.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm, optax
      >>> clip = jaxcomm.local("data", optax.clip_by_global_norm(1.0))
      >>> with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
      ...     state = clip.init(jnp.zeros(2))
      ...     clipped, _ = clip.update(jnp.array([[3.0, 4.0], [0.5, 0.0]]), state)
      >>> jaxcomm.unmark_local(clipped)
      Array([[0.6, 0.8],
             [0.5, 0. ]], dtype=float32)
    """
    _axes.names_of(axis_name)
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: Any) -> Any:
        layout = layout_of(params, axis_name)
        state = jax.tree.map(jnp.asarray, inner.init(params))
        leaves, treedef = jax.tree.flatten(state)
        empty = [None if x.size else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        structure = _Structure(treedef, tuple(empty))
        kept, specs = structure.arrays_of(state), structure.arrays_of(_specs_of(state, layout))
        if _axes.is_manual(axis_name):
            checked = _axes.checks_on(axis_name)
            axes = frozenset(_axes.names_of(axis_name) if checked else ())
            values = [_axes.as_varying(x[None], axes) for x in kept]
        else:
            values = made_sharded(
                lambda: [jnp.broadcast_to(x, (layout.world, *x.shape)) for x in kept], specs
            )
        return LocalState(layout, structure, PerDevice(values, tuple(specs)))

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        require_own(state.inner, state.layout)
        grads, treedef = local_leaves(updates, state.layout)

        def one(updates: Any, leaves: list[jax.Array]) -> tuple[Any, list[jax.Array], jax.Array]:
            inner_state = state.structure.state_of(leaves)
            updates, inner_state = inner.update(updates, inner_state, params, **extra_args)
            finite = all_finite(jax.tree.leaves(updates))
            return updates, state.structure.arrays_of(inner_state), finite

        if _axes.is_manual(axis_name):
            own = [x[0] for x in state.inner.values]
            updates, leaves, finite = one(treedef.unflatten(grads), own)
            leaves, finite = [x[None] for x in leaves], _on_all_devices(finite)
        else:
            each = jax.vmap(one, spmd_axis_name=axis_name)
            updates, leaves, finite = each(treedef.unflatten(grads), state.inner.values)
            finite = jnp.all(finite)
        leaves = [
            jnp.where(finite, new, old) for new, old in zip(leaves, state.inner.values, strict=True)
        ]
        return mark_local(updates), state._replace(inner=next_of(state.inner, leaves))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _on_all_devices(flag: jax.Array) -> jax.Array:
    """Whether the flag is set on all devices of the mesh, in the manual view."""
    axes = _axes.manual_axes()
    varying = axes if any(map(_axes.checks_on, axes)) else frozenset()
    flags = _axes.as_varying(flag.astype(jnp.int32), varying)
    return jax.lax.pmin(flags, tuple(sorted(axes))) == 1


def _specs_of(state: Any, layout: Layout) -> Any:
    """How the inner state is sharded: what mirrors a parameter as it is, with a device axis.

    Its path ends in the parameter's, and the shapes are equal; shapes alone would mix up
    parameters that are sharded over different dimensions.
    """
    known = {(leaf.path, leaf.shape): leaf.spec for leaf in layout.leaves}

    def spec_of(path: Any, x: Any) -> PartitionSpec:
        endings = (_paths.path_name(path[i:]) for i in range(len(path) + 1))
        spec = next((known[e, x.shape] for e in endings if (e, x.shape) in known), ())
        return PartitionSpec(layout.axis_name, *spec)

    return jax.tree_util.tree_map_with_path(spec_of, state)
