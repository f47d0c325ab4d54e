"""The state of any optax transformation, one copy on every device."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxcomm import _axes, _paths
from jaxcomm._axes import AxisName
from jaxcomm.kernels.reductions import all_finite
from jaxcomm.transforms._exchange import Arrays, as_vectors, vectors_in_view
from jaxcomm.transforms._layout import Layout
from jaxcomm.transforms._specs import names_in
from jaxcomm.transforms.per_device import PerDevice, made_sharded


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Structure:
    """How the arrays of the inner state fit together.

    Attributes:
      treedef: the tree of the inner state.
      empty: for each of its arrays None, or its type if it has no elements: such arrays are not
        kept, because XLA does not keep them sharded.
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
        if len(leaves) != len(self.empty):
            raise ValueError(
                f"the state of the inner transformation has {len(self.empty)} arrays after `init` "
                f"and {len(leaves)} after `update`, as that of optax.monitor; take it out of what "
                "each device does by itself."
            )
        return [x for x, e in zip(leaves, self.empty, strict=True) if e is None]


def on_each_device(state: Any, layout: Layout) -> tuple[Structure, PerDevice]:
    """A state that every device starts with, and how its arrays fit together."""
    state = jax.tree.map(_as_array, state)
    leaves, treedef = jax.tree.flatten(state)
    empty = [None if x.size else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    structure = Structure(treedef, tuple(empty))
    kept, specs = structure.arrays_of(state), structure.arrays_of(_specs_of(state, layout))
    if _axes.is_manual(layout.axis_name):
        axes = _axes.checked_names(layout.axis_name)
        values = [_axes.as_varying(x[None], axes) for x in kept]
    else:
        world = layout.world
        values = made_sharded(
            lambda kept: [jnp.broadcast_to(x, (world, *x.shape)) for x in kept], specs, kept
        )
    return structure, PerDevice(values, tuple(specs))


def by_device(one: Callable[..., Any], axis_name: AxisName, *args: Any) -> Any:
    """`one(*args)` for every device in the global view: arrays have a leading device axis."""
    names = _axes.names_of(axis_name)
    if _axes.axis_size(axis_name) > 1 or not _axes.explicit_axes().issuperset(names):
        # Inside a checked region over other axes jax takes spmd_axis_name for a manual axis.
        checked = any(map(_axes.checks_on, _axes.manual_axes()))
        return jax.vmap(one, spmd_axis_name=None if checked else axis_name)(*args)

    # Where types show shardings, jax loses a device axis of one beside another dimension of one.
    def alone(x: jax.Array) -> jax.Array:
        return jax.reshard(x, PartitionSpec(None, *jax.typeof(x).sharding.spec[1:]))[0]

    def with_axis(x: jax.Array) -> jax.Array:
        return jax.reshard(x[None], PartitionSpec(axis_name, *jax.typeof(x).sharding.spec))

    return jax.tree.map(with_axis, one(*jax.tree.map(alone, args)))


def is_sound(updates: Any, new: Arrays, old: Arrays, own: PerDevice, layout: Layout) -> jax.Array:
    """Whether a step's updates are finite on one device, and its state where it was before.

    An optimizer may hide what is not finite: Lion's update is a sign and Adam's a quotient, while
    their averages keep it forever. The initial state may be infinite, such as a best loss so far.
    """
    whole, rest = [], []
    for a, b, spec in zip(new, old, own.specs, strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):
            kept = jnp.where(jnp.isfinite(b), a, jnp.zeros_like(a))
            (rest if names_in(PartitionSpec(*spec[1:])) else whole).append(kept)
    seen = vectors_in_view(jax.tree.leaves(updates), layout)
    return equal_on_shards(all_finite([*seen, *as_vectors(whole), *rest]), layout)


def equal_on_shards(finite: jax.Array, layout: Layout) -> jax.Array:
    """A device's flag, made equal on all shards of its parameters, in the manual view."""
    further = _axes.manual_axes().difference(_axes.names_of(layout.axis_name))
    if not further or not _axes.is_manual(layout.axis_name):
        return finite
    checked = frozenset(axis for axis in further if _axes.checks_on(axis))
    return _axes.on_all(_axes.as_varying(finite, checked), further)


def _as_array(x: Any) -> jax.Array:
    """An array, also from a mere shape, where `state_spec` asks for the shapes of a state."""
    is_shape = isinstance(x, jax.ShapeDtypeStruct)
    return jnp.zeros(x.shape, x.dtype) if is_shape else jnp.asarray(x)


def _specs_of(state: Any, layout: Layout) -> Any:
    """How the inner state is sharded: what mirrors a parameter like it, with a device axis.

    Its path ends in the parameter's, and the shapes are equal; shapes alone would mix up
    parameters that are sharded over different dimensions.
    """
    known = {(leaf.path, leaf.shape): leaf.spec for leaf in layout.leaves}

    def spec_of(path: Any, x: Any) -> PartitionSpec:
        endings = (_paths.path_name(path[i:]) for i in range(len(path) + 1))
        spec = next((known[e, x.shape] for e in endings if (e, x.shape) in known), ())
        return PartitionSpec(layout.axis_name, *spec)

    return jax.tree_util.tree_map_with_path(spec_of, state)
