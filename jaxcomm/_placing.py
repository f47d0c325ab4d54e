"""Places values that every process has on a mesh of several processes.

`jax.device_put` compares them by gathering the arrays of all processes on every device, which would
have to hold one model per process. Here their checksums are compared.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from jaxcomm._numbers import are_keys


def place(
    names: Sequence[str], leaves: Sequence[Any], shardings: Sequence[NamedSharding]
) -> list[jax.Array]:
    """The leaves on the mesh, in new buffers.

    Args:
      names: the names of the leaves, for messages.
      leaves: arrays that each process has as a whole, equal in all of them, or global arrays.
      shardings: the shardings of the leaves, over one mesh.

    Returns:
      The arrays.

    Raises:
      ValueError: for leaves that differ between processes, if all have devices in the mesh.
    """
    leaves = [_strong(x) for x in leaves]
    keys = {i: jax.random.key_impl(x) for i, x in enumerate(leaves) if are_keys(x)}
    if keys:  # jax places keys on the devices of one process alone
        leaves = [jax.random.key_data(x) if i in keys else x for i, x in enumerate(leaves)]
        placed = place(names, leaves, shardings)
        for i, impl in keys.items():
            placed[i] = jax.random.wrap_key_data(placed[i], impl=impl)
        return placed
    several = [i for i, s in enumerate(shardings) if not s.is_fully_addressable]
    values = {i: _as_numpy(leaves[i]) for i in several if _is_whole(leaves[i])}
    # What `jnp` makes where a mesh is set is typed as equal everywhere, but nothing checked it.
    here = {i: np.asarray(leaves[i].addressable_data(0)) for i in several if _is_typed(leaves[i])}
    compared = dict(sorted((values | here).items()))
    if compared and _all_take_part(shardings[several[0]]):
        _require_equal([names[i] for i in compared], list(compared.values()))
    rest = [i for i in range(len(leaves)) if i not in values]
    own = [_without_buffers_of(leaves[i], shardings[i]) for i in rest]
    moved = jax.device_put(own, [shardings[i] for i in rest], may_alias=False)
    placed = dict(zip(rest, moved, strict=True))
    for i, x in values.items():
        make = jax.make_array_from_callback
        placed[i] = make(x.shape, shardings[i], x.__getitem__, dtype=x.dtype)
    return [placed[i] for i in range(len(leaves))]


def _strong(leaf: Any) -> Any:
    """The leaf with a strong dtype, as a step returns it: else the second step compiles again."""
    if isinstance(leaf, bool | int | float | complex):
        return np.asarray(leaf, jnp.result_type(leaf))
    if getattr(leaf, "weak_type", False):
        return jax.lax.convert_element_type(leaf, leaf.dtype)
    return leaf


def _without_buffers_of(leaf: Any, sharding: NamedSharding) -> Any:
    """The leaf; a copy, where `jax.device_put` would keep its buffer for one of several devices."""
    if isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array):
        return leaf
    moves = leaf.sharding != sharding and leaf.sharding.device_set & sharding.device_set
    stays_whole = sharding.shard_shape(leaf.shape) == leaf.shape
    if not moves or not stays_whole or not leaf.is_fully_addressable:
        return leaf
    return jax.device_put(leaf, leaf.sharding, may_alias=False)


def _is_whole(leaf: Any) -> bool:
    """Whether this process has all of an array of numbers."""
    if isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array | np.ndarray):
        return False
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return False
    return isinstance(leaf, np.ndarray) or leaf.is_fully_addressable


def _is_typed(leaf: Any) -> bool:
    """Whether this is an array of numbers that other processes have too, by its type."""
    if isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array):
        return False
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended) or leaf.is_fully_addressable:
        return False
    return leaf.is_fully_replicated and len(leaf.addressable_shards) > 0


def _as_numpy(leaf: Any) -> np.ndarray:
    """A copy, which XLA may use as its buffer, in the dtype that `jax.device_put` gives it."""
    return np.array(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))


def _all_take_part(sharding: NamedSharding) -> bool:
    """Whether the mesh has devices of every process: otherwise some do not call this."""
    return len({d.process_index for d in sharding.device_set}) == jax.process_count()


def _require_equal(names: Sequence[str], values: Sequence[np.ndarray]) -> None:
    kinds = [f"{name} {x.shape} {x.dtype}" for name, x in zip(names, values, strict=True)]
    # Names and shapes first: if they differ, the number of checksums may differ too.
    _require_same([zlib.crc32("; ".join(kinds).encode())], ["names, shapes or dtypes"])
    found = [f"values of {name or 'the array'}" for name in names]
    _require_same([zlib.crc32(x.tobytes()) for x in values], found)


def _require_same(sums: Sequence[int], what: Sequence[str]) -> None:
    own = np.asarray([jax.process_index(), *sums], np.uint32)
    rows = np.asarray(multihost_utils.process_allgather(own))
    rows = rows[np.argsort(rows[:, 0])]
    differs = rows[:, 1:] != rows[:1, 1:]
    if not differs.any():
        return
    other, which = np.argwhere(differs)[0]
    raise ValueError(
        f"process {other} has other {what[which]} than process 0, but all need the same; make "
        "them from the same seed, or read them from the same file."
    )
