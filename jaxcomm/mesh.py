"""The mesh, and getting parameters and batches onto it."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcomm import _axes, _paths
from jaxcomm._axes import AxisName


def data_mesh(axis_name: str = "data", devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of one axis over all devices of all processes.

    Args:
      axis_name: the name of the axis.
      devices: the devices, in order; None is all of them.

    Returns:
      The mesh, for `jax.set_mesh`.
    """
    devices = jax.devices() if devices is None else devices
    return jax.make_mesh(
        (len(devices),), (axis_name,), axis_types=(AxisType.Auto,), devices=devices
    )


def replicate(tree: Any) -> Any:
    """Places every array of a pytree on all devices of the current mesh.

    Args:
      tree: a pytree of arrays; every process passes equal values.

    Returns:
      The pytree with each array replicated over the mesh, in buffers of its own: donating it to
      a step leaves what was passed as it is.

    Raises:
      ValueError: if no mesh is set.
    """
    _axes.current_mesh()
    sharding = NamedSharding(jax.sharding.get_mesh(), PartitionSpec())
    return jax.device_put(tree, sharding, may_alias=False)


def global_batch(local_batch: Any, axis_name: AxisName) -> Any:
    """Joins the batches of all processes into one, sharded over an axis.

    Args:
      local_batch: a pytree of arrays with a common leading axis: this process's examples, as many
        on each of its devices. Every process passes equal shapes.
      axis_name: the mesh axis, or axes, that the examples are spread over.

    Returns:
      The pytree of global arrays, whose leading axis is the sum over all processes; the rows of a
      process lie on its own devices. `jaxcomm.value_and_grad` refuses a batch that did not come
      this way, but cannot see what computation hides: of a local batch that was made by `jnp`
      while a mesh is set, or changed before the gradient, rows are lost.

    Raises:
      ValueError: if no mesh is set, it has no such axis, the local leading axis is not a multiple
        of the number of local devices along it, or the batch is global already.
    """
    _axes.axis_size(axis_name)
    mesh = jax.sharding.get_mesh()
    sharding = NamedSharding(mesh, PartitionSpec(axis_name))
    local = math.prod(mesh.local_mesh.shape[name] for name in _axes.names_of(axis_name))
    for path, leaf in jax.tree_util.tree_leaves_with_path(local_batch):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise ValueError(
                f"{_paths.path_name(path) or 'the batch'} is global already: it spans devices of "
                "other processes, as all that jnp makes does while a mesh is set; pass this "
                "process's own rows as a numpy array."
            )
        rows = np.shape(leaf)[0] if np.ndim(leaf) else 0
        if rows == 0 or rows % local:
            raise ValueError(
                f"the local batch has {rows} rows at {_paths.path_name(path) or 'its leaf'}, "
                f"which do not divide over the {local} local devices of axis {axis_name!r}; "
                f"pass a positive multiple of {local} rows."
            )
    arrays = jax.tree.map(np.asarray, local_batch)
    if not mesh.is_multi_process:
        return jax.device_put(arrays, sharding)  # One call for all leaves.
    return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(sharding, leaf), arrays)
