"""The leaves of a batch: how rows are dealt to devices, and which batches are refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import _paths
from jaxcomm._axes import AxisName


def name_in_batch(path: Any) -> str:
    """Such as "leaf x of the batch"."""
    return f"leaf {_paths.path_name(path)} of the batch" if path else "the batch"


def check_rows(batch: Any) -> None:
    """Raises a ValueError if leaves have different numbers of rows.

    All leaves are split over the devices, and a table that all examples read would be split too.
    Random keys may have another number of rows, such as one for each device.
    """
    leaves = jax.tree.leaves(batch)
    if len({np.shape(leaf)[0] for leaf in leaves}) == 1:
        return
    rows = [
        (np.shape(leaf)[0], name_in_batch(path))
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]
    if len({n for n, _ in rows}) > 1:
        (few, one), *_, (most, other) = sorted(rows)
        raise ValueError(
            f"{one} has {few} rows, and {other} has {most}: rows are split over devices, and "
            "all leaves need the same examples. Pass what every device shares, such as a table, as "
            "a further argument after the batch; all other leaves have one row per example."
        )


def shares_of(batch: Any, world: int, axis_name: AxisName) -> Any:
    """The shapes of one device's share of a global batch."""

    def share(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        name = name_in_batch(path)
        if np.ndim(x) == 0:
            raise ValueError(
                f"{name} is a scalar and cannot be spread over {axis_name!r}; pass what every "
                "device shares as a further argument after the batch."
            )
        if x.shape[0] % world or x.shape[0] == 0:
            raise ValueError(
                f"{name} has {x.shape[0]} examples, which do not divide evenly over the {world} "
                f"devices of {axis_name!r}. If these are only this process's rows, join all rows "
                f"with jaxcomm.global_batch(batch, {axis_name!r}) first."
            )
        return jax.ShapeDtypeStruct((x.shape[0] // world, *x.shape[1:]), x.dtype)

    return jax.tree_util.tree_map_with_path(share, batch)


def refuse_unplaced(batch: Any, axis_name: AxisName) -> None:
    """Raises if a leaf was never on the mesh, so that other processes may hold other rows of it.

    Such a leaf would be mistaken for the whole batch, and each process would lose most of its rows.
    Only arrays that were placed, and what is computed from them, name a mesh in their type.
    """
    if jax.process_count() == 1:
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if jax.typeof(leaf).sharding.mesh.empty:
            raise ValueError(
                f"{name_in_batch(path)} is an array of process "
                f"{jax.process_index()} alone, not of all {jax.process_count()}. Join what the "
                f"processes read with jaxcomm.global_batch(batch, {axis_name!r}), or place rows "
                "that are the same in all of them with jaxcomm.replicate(batch)."
            )
