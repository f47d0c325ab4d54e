"""What `sharded` records about parameters: how each of them is split."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxcomm import _axes, _paths
from jaxcomm._axes import AxisName
from jaxcomm.transforms import _layout
from jaxcomm.transforms._layout import Layout, Leaf
from jaxcomm.transforms._options import Exempt
from jaxcomm.transforms._scheme import Scheme
from jaxcomm.transforms._specs import GIVEN_SPECS, axes_in, restrict
from jaxcomm.transforms.per_device import NOTHING, PerDevice, made_sharded


def layout_of(params: Any, scheme: Scheme, exempt: Exempt) -> Layout:
    """Reads the layout off parameters, in either view; the specs are those over the axis.

    Raises:
      ValueError: for a mesh with other axes, or a leaf that is not split as required.
    """
    axis_name = scheme.axis_name
    world, mesh = _axes.axis_size(axis_name), _axes.current_mesh()
    further = [name for name in mesh.axis_names if name not in _axes.names_of(axis_name)]
    if math.prod(mesh.shape[name] for name in further) > 1:
        raise ValueError(
            f"sharded takes a mesh of the axes {axis_name!r} alone, and this one also has "
            f"{', '.join(map(repr, further))}. Exchange over all of them, "
            f"{mesh.axis_names}, or shard parameters over {further[0]!r} only and exchange "
            "without jaxcomm.sharded."
        )
    manual = _axes.is_manual(axis_name)

    def described(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        spec = _spec_of(leaf, _paths.path_name(path), axis_name)
        shape = tuple(jnp.shape(leaf))
        if manual:  # of the shard
            entries = [*spec, *[None] * (len(shape) - len(spec))]
            shape = tuple(n * (world if e else 1) for n, e in zip(shape, entries, strict=True))
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.result_type(leaf), sharding=sharding)

    structs = jax.tree_util.tree_map_with_path(described, params)
    layout = _layout.layout_of(
        structs,
        axis_name,
        exempt,
        spec_of=lambda leaf, name, axis: leaf.sharding.spec,
        settings=scheme,
    )
    for leaf in layout.leaves:
        _check(leaf, layout, scheme)
    return layout


def split_dim(leaf: Leaf) -> int | None:
    """The dimension that is split over the axis, counted from the end; None if none is."""
    axes = axes_in(leaf.spec, len(leaf.shape))
    return next((d - len(axes) for d, names in enumerate(axes) if names), None)


def zero_residual(layout: Layout, scheme: Scheme) -> PerDevice:
    """With error feedback, a zero on every device for every element that is compressed."""
    if scheme.reduction is None or not scheme.reduction.keeps_errors:
        return NOTHING
    dtype = scheme.residual_dtype
    which = [i for i, leaf in enumerate(layout.leaves) if keeps_residual(leaf)]
    ranks = [1 + len(layout.leaves[i].shape) for i in which]
    own = PartitionSpec(layout.axis_name)
    specs = tuple(_axes.as_typed(own, layout.axis_name, rank) for rank in ranks)
    if _axes.is_manual(layout.axis_name):
        axes = _axes.checked_names(layout.axis_name)
        zeros = [jnp.zeros((1, *layout.leaves[i].shape), dtype) for i in which]
        return PerDevice([_axes.as_varying(x, axes) for x in zeros], specs)
    shapes = [(layout.world, *layout.leaves[i].shape) for i in which]
    return PerDevice(
        made_sharded(lambda: [jnp.zeros(shape, dtype) for shape in shapes], specs), specs
    )


def keeps_residual(leaf: Leaf) -> bool:
    """Whether a leaf has a residual, if the exchange keeps any."""
    return split_dim(leaf) is not None and not leaf.exempt and 0 not in leaf.shape


def _check(leaf: Leaf, layout: Layout, scheme: Scheme) -> None:
    """Raises unless a leaf is split along one dimension, over the whole axis."""
    dim, own = split_dim(leaf), _axes.names_of(layout.axis_name)
    if dim is None:
        if scheme.reduction is None or leaf.exempt or 0 in leaf.shape or layout.world == 1:
            return
        stack = f"jaxcomm.with_layer_axis(tx, [{leaf.path!r}]) if it is a stack of biases, or "
        raise ValueError(
            f"parameter {leaf.path} of shape {leaf.shape} is not split over {layout.axis_name!r}. "
            f"Place it with jaxcomm.shard(params, {layout.axis_name!r}), or keep it whole and "
            f"average its gradient in float32: {stack if len(leaf.shape) == 2 else ''}"
            f"exempt=[{leaf.path!r}] in the exchange."
        )
    mesh = _axes.current_mesh()

    def several(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if mesh.shape[name] > 1)

    split = [several(names) for names in axes_in(leaf.spec, len(leaf.shape))]
    named = [names for names in split if names]
    if layout.world > 1 and named != [several(own)]:
        raise ValueError(
            f"parameter {leaf.path} is split by {leaf.spec}, but sharded needs one dimension over "
            f"{layout.axis_name!r}; place it with jaxcomm.shard(params, {layout.axis_name!r})."
        )
    if leaf.shape[dim] % layout.world:
        raise ValueError(
            f"parameter {leaf.path} of shape {leaf.shape} does not divide evenly over the "
            f"{layout.world} devices of {layout.axis_name!r} along the dimension that {leaf.spec} "
            "splits; split another one, pad it, or keep it whole."
        )
    if leaf.stacked and dim == -len(leaf.shape):
        raise ValueError(
            f"parameter {leaf.path} is split along its axis of layers, which jax.lax.scan slices; "
            "also name the layers in jaxcomm.shard(params, axis, layers=[...])."
        )


def _spec_of(leaf: Any, name: str, axis_name: AxisName) -> PartitionSpec:
    """How a leaf is sharded: by its own sharding, or by what `with_param_specs` was given."""
    mesh, given = _axes.current_mesh(), GIVEN_SPECS.get({})
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    own = _axes.names_of(axis_name)
    traced = isinstance(leaf, Tracer)
    hidden = traced and any(kinds[axis] != AxisType.Explicit for axis in own)
    if hidden and name not in given:
        raise ValueError(
            f"cannot see here how parameter {name} is split over {axis_name!r}; use "
            "jaxcomm.with_param_specs(tx, params) with params from jaxcomm.shard, or call "
            "tx.init(params) on them outside jax.jit and jax.shard_map."
        )
    if hidden:
        spec = given[name]
    else:
        sharding = getattr(jax.typeof(leaf) if traced else leaf, "sharding", None)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
    return restrict(spec, frozenset(own))
