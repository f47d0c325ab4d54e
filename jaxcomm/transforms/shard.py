"""Parameters split over the devices of a mesh axis."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxcomm import _axes, _paths
from jaxcomm._axes import AxisName
from jaxcomm._placing import constrained, place
from jaxcomm.transforms._layout import is_exempt
from jaxcomm.transforms._options import Exempt, check_patterns, fits


def shard(
    params: Any, axis_name: AxisName, *, exempt: Exempt = (), layers: Sequence[str] = ()
) -> Any:
    """Places parameters so that each device holds 1/N of every large one (FSDP, ZeRO-3).

    A leaf is split along its largest dimension that N divides; among equal ones, the last. Leaves
    that are sent in float32 (of at most one dimension, and `exempt`) are replicated.

    Inside `jax.jit` it constrains the sharding of each leaf, and compares nothing. Along an
    automatic axis XLA then makes only a device's own shards of a model that is initialised there.
    Along an Explicit axis each device makes whole leaves, unless the initializers are told the
    sharding, and keeps its shards.

    Args:
      params: a pytree of arrays, or of `jax.ShapeDtypeStruct`s; every process passes equal values.
      axis_name: the mesh axis, or axes, of the N devices.
      exempt: as in `jaxcomm.mean`; pass the same to both.
      layers: patterns of paths of leaves whose leading axis counts layers, the same as for
        `jaxcomm.with_layer_axis`; that axis is not split.

    Returns:
      The pytree placed on the current mesh; for structs, the structs with shardings.

    Raises:
      TypeError: if `layers` is not a list of patterns, or a leaf is not an array.
      ValueError: if no mesh is set, it has no such axis, or N divides no dimension of a leaf; the
        error names the leaf. Also if processes hold different values, and inside `jax.shard_map`.

    Wire: a checksum of each array, between processes.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
      ...     params = jaxcomm.shard({"w": jnp.zeros((6, 8)), "b": jnp.zeros(8)}, "data")
      >>> params["w"].sharding.spec, params["b"].sharding.spec
      (P(None, 'data'), P())
    """
    world, mesh = _axes.axis_size(axis_name), _axes.concrete_mesh()
    # Without axes of one device, as in the type of what a step returns.
    over = tuple(name for name in _axes.names_of(axis_name) if _axes.axis_size(name) > 1)
    over = over[0] if len(over) == 1 else over
    _paths.require_arrays(params, "parameter")
    pairs, treedef = jax.tree_util.tree_flatten_with_path(params)
    names = [_paths.path_name(path) for path, _ in pairs]
    check_patterns(layers, names, "layers")
    if not callable(exempt):
        check_patterns(exempt, names)

    def placed(name: str, leaf: Any) -> Any:
        shape, stacked = jnp.shape(leaf), fits(name, layers)
        spec = PartitionSpec()
        if over and 0 not in shape and not is_exempt(name, shape, stacked, exempt):
            spec = _split(name, shape, over, world, int(stacked))
        spec = _axes.as_typed(spec, axis_name, len(shape))
        sharding = NamedSharding(jax.sharding.get_abstract_mesh() if mesh is None else mesh, spec)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return constrained(leaf, spec) if mesh is None else sharding

    leaves = [leaf for _, leaf in pairs]
    found = [placed(name, leaf) for name, leaf in zip(names, leaves, strict=True)]
    where = [i for i, x in enumerate(found) if isinstance(x, NamedSharding)]
    arrays = place([names[i] for i in where], [leaves[i] for i in where], [found[i] for i in where])
    for i, array in zip(where, arrays, strict=True):
        found[i] = array
    return treedef.unflatten(found)


def _split(
    name: str, shape: tuple[int, ...], axis_name: AxisName, world: int, first: int
) -> PartitionSpec:
    """The spec of a leaf whose dimensions before `first` stay whole."""
    dim = split_dim_of(shape, world, first)
    if dim is None:
        raise ValueError(
            f"parameter {name} of shape {shape} has no dimension that divides evenly over the "
            f"{world} devices of {axis_name!r}. Pad it to a multiple of {world}, or keep it whole "
            f"on every device: exempt=[{name!r}], here and in the exchange."
        )
    return PartitionSpec(*[None] * dim, axis_name)


def split_dim_of(shape: tuple[int, ...], world: int, first: int = 0) -> int | None:
    """The dimension along which a leaf is split; None if `world` divides none from `first` on."""
    dims = [d for d in range(first, len(shape)) if shape[d] % world == 0]
    return max(dims, key=lambda d: (shape[d], d), default=None)
