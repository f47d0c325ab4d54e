"""The mesh, and how parameters and batches are placed on it."""

import collections
import functools
import math
import warnings
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcomm import _axes, _paths
from jaxcomm._axes import AxisName
from jaxcomm._batches import check_rows
from jaxcomm._nnx import refuse_shared
from jaxcomm._numbers import are_keys
from jaxcomm._placing import constrained, place, require_equal_shapes
from jaxcomm._users_line import users_line


def data_mesh(axis_name: str = "data", devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of one axis over all devices of all processes.

    With several processes, call `jax.distributed.initialize` first: without it, each process sees
    only its own devices.

    Args:
      axis_name: the name of the axis.
      devices: the devices, in order; None means all of them.

    Returns:
      The mesh, for `jax.set_mesh`.

    Raises:
      TypeError: if the name is not a string, or `devices` not a sequence of devices.
      ValueError: if `devices` is empty, or names a device twice.

    Example:
      >>> import jax, jaxcomm
      >>> mesh = jaxcomm.data_mesh(devices=jax.devices()[:2])
      >>> dict(mesh.shape)
      {'data': 2}
    """
    if not isinstance(axis_name, str):
        raise TypeError(
            f'data_mesh takes the name of an axis, such as "data", got {axis_name!r}; devices are '
            "data_mesh(devices=jax.devices()[:4])."
        )
    devices = jax.devices() if devices is None else devices
    has_order = hasattr(devices, "__len__") and not isinstance(devices, Set | Mapping)
    is_list = has_order and getattr(devices, "ndim", 1) == 1
    if not is_list or not all(isinstance(d, jax.Device) for d in devices):
        raise TypeError(
            f"data_mesh takes a sequence of devices, got {devices!r}; write "
            "data_mesh(devices=jax.devices()[:4])."
        )
    if not len(devices):
        raise ValueError("data_mesh needs at least one device, got devices=[].")
    if twice := [d for d, n in collections.Counter(devices).items() if n > 1]:
        raise ValueError(f"data_mesh takes each device once, got {twice[0]} several times.")
    # Not `jax.make_mesh`: it reorders GPUs, and refuses those of several machines.
    return Mesh(np.asarray(devices, object), (axis_name,), axis_types=(AxisType.Auto,))


def replicate(tree: Any) -> Any:
    """Places every array of a pytree on all devices of the current mesh.

    Inside `jax.jit` it constrains the sharding of each array, and compares nothing.

    Args:
      tree: a pytree of arrays; every process passes equal values.

    Returns:
      The pytree with each array replicated over the mesh, in new buffers: donating these to a step
      does not affect the arrays that were passed.

    Warns:
      UserWarning: for an array that is split over an axis of the mesh: it becomes whole.

    Raises:
      TypeError: for a leaf that is neither an array nor a number.
      ValueError: if no mesh is set, the tree has state of each device, such as residuals, or is a
        Flax NNX model with shared variables, or processes hold different values; inside
        `jax.shard_map`. Values are not compared if only some of the processes have devices in the
        mesh.

    Wire: a checksum of each array, between processes.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
      ...     params = jaxcomm.replicate({"w": jnp.ones(3)})
      >>> [shard.data.shape for shard in params["w"].addressable_shards]
      [(3,), (3,)]
    """
    mesh, explicit = _axes.concrete_mesh(), _axes.explicit_axes()
    nodes = jax.tree.leaves(tree, is_leaf=_is_per_device)
    if any(_is_per_device(x) and jax.tree.leaves(x) for x in nodes):
        raise ValueError(
            "replicate takes parameters, got a state with arrays that differ from device to "
            "device, such as residuals; every step would gather them. Place the parameters alone: "
            "params = jaxcomm.replicate(params), then tx.init(params), also in TrainState.create."
        )
    _paths.require_arrays(tree, "leaf")
    refuse_shared(tree)

    def spec(x: Any) -> PartitionSpec:
        # Spelled like the type of what a step returns, or the second step would compile again.
        return PartitionSpec(*[None] * np.ndim(x) if explicit else ())

    if mesh is None:
        return jax.tree.map(lambda x: constrained(x, spec(x)), tree)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = [_paths.path_name(path) for path, _ in leaves]
    values = [leaf for _, leaf in leaves]
    _warn_of_splits(dict(zip(names, values, strict=True)), mesh)
    shardings = [NamedSharding(mesh, spec(x)) for x in values]
    return treedef.unflatten(place(names, values, shardings))


def _warn_of_splits(arrays: dict[str, Any], mesh: jax.sharding.Mesh) -> None:
    """Tensor parallelism, for example, would end here without a word."""
    for name, x in arrays.items():
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh.shape != mesh.shape:
            continue
        axes = [axis for entry in sharding.spec for axis in _axes.names_in_entry(entry)]
        if split := [axis for axis in axes if mesh.shape[axis] > 1]:
            warnings.warn(
                f"{name or 'the array'} is split over {split[0]!r}, and replicate makes it whole "
                "on every device. Parameters that are placed already need no replicate; to gather "
                "them, jax.device_put(x, NamedSharding(mesh, PartitionSpec())).",
                stacklevel=users_line(),
            )
            return


def _is_per_device(x: Any) -> bool:
    return getattr(type(x), "is_of_each_device", False)


def global_batch(local_batch: Any, axis_name: AxisName) -> Any:
    """Joins the batches of all processes into one, sharded over an axis.

    A thread that prefetches batches needs its own `with jax.set_mesh(mesh):`.

    Args:
      local_batch: a pytree of arrays with a common leading axis: this process's examples, the same
        number for each of its devices. Random keys are allowed. Every process passes the same
        shapes.
      axis_name: the mesh axis, or axes, that the examples are spread over.

    Returns:
      The pytree of global arrays, which have the rows of all processes; the rows of a process are
      on its own devices. `jaxcomm.value_and_grad` refuses a batch that was not made this way. But
      it cannot detect a local batch that `jnp` made while a mesh was set, or that was changed
      afterwards: some of its rows are then lost.

    Raises:
      ValueError: inside `jax.jit`; if no mesh is set or it has no such axis; if the local leading
        axis differs between leaves, or is not a multiple of the number of local devices along the
        mesh axis; if the batch is global already, so that other processes hold a part of it; or, in
        the first call outside of a thread, if processes pass other shapes.

    Wire: a checksum of shapes between processes, in the first call for an axis.

    Example:
      >>> import jax, jaxcomm, numpy as np
      >>> with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
      ...     batch = jaxcomm.global_batch(np.arange(4), "data")
      >>> [shard.data.tolist() for shard in batch.addressable_shards]
      [[0, 1], [2, 3]]
    """
    _axes.names_of(axis_name)  # before it is hashed
    mesh = _axes.concrete_mesh()
    if mesh is None:
        raise ValueError(
            "global_batch joins what processes hold, and jax.jit and other transformations of jax "
            "see one program; call it on each batch, before the jitted step."
        )
    sharding, local = _rows_over(mesh, axis_name)
    leaves, tree = jax.tree.flatten(local_batch)
    if not all(_fits(leaf, local) for leaf in leaves):
        _refuse(local_batch, local, axis_name)
    check_rows(local_batch)
    keys = {i: jax.random.key_impl(leaf) for i, leaf in enumerate(leaves) if are_keys(leaf)}
    data = [jax.random.key_data(leaf) if i in keys else leaf for i, leaf in enumerate(leaves)]
    data = [np.asarray(leaf) for leaf in data]
    if mesh.is_multi_process:
        if sharding not in _ASKED:  # in every step it would cost a message
            _ASKED.add(sharding)
            require_equal_shapes(data, local, sharding)
        world = _axes.axis_size(axis_name)
        shapes = [(len(leaf) // local * world, *leaf.shape[1:]) for leaf in data]
        make = jax.make_array_from_process_local_data
        placed = [make(sharding, x, shape) for x, shape in zip(data, shapes, strict=True)]
    else:
        placed = jax.device_put(data, sharding)  # One call for all leaves.
    for i, impl in keys.items():
        placed[i] = jax.random.wrap_key_data(placed[i], impl=impl)
    return jax.tree.unflatten(tree, placed)


_ASKED: set[NamedSharding] = set()  # of which processes have compared shapes


@functools.lru_cache(maxsize=16)  # Every step of a run asks for the same one.
def _rows_over(mesh: Mesh, axis_name: AxisName) -> tuple[NamedSharding, int]:
    """The sharding of rows over an axis of the current mesh, and its devices of this process."""
    _axes.axis_size(axis_name)  # Raises if there is no such axis.
    sharding = NamedSharding(mesh, PartitionSpec(axis_name))
    return sharding, math.prod(mesh.local_mesh.shape[name] for name in _axes.names_of(axis_name))


def _fits(leaf: Any, local: int) -> bool:
    """Whether a leaf has rows of this process that divide over its devices."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return False
    return np.ndim(leaf) > 0 and np.shape(leaf)[0] > 0 and np.shape(leaf)[0] % local == 0


def _refuse(local_batch: Any, local: int, axis_name: AxisName) -> None:
    """Raises for the first leaf that does not fit."""
    leaves = jax.tree_util.tree_leaves_with_path(local_batch)
    path, leaf = next((path, leaf) for path, leaf in leaves if not _fits(leaf, local))
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise ValueError(
            f"{_paths.path_name(path) or 'the batch'} is global already: it spans devices of "
            "other processes, as do all arrays that jnp makes while a mesh is set; pass this "
            "process's own rows as a numpy array, or random keys made before the mesh was set."
        )
    if not np.ndim(leaf):
        raise ValueError(
            f"{_paths.path_name(path) or 'the batch'} is {leaf!r}, which has no rows; lists are "
            "pytrees of their members, so pass arrays."
        )
    rows = np.shape(leaf)[0]
    raise ValueError(
        f"the local batch has {rows} rows at {_paths.path_name(path) or 'its leaf'}, "
        f"which do not divide evenly over the {local} local devices of axis {axis_name!r}; "
        f"pass a positive multiple of {local} rows."
    )
