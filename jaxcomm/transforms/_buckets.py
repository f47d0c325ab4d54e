"""Which leaves travel together, in which order, and as which vector."""

import contextvars
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._numbers import is_real
from jaxcomm.transforms._layout import Layout, names_in

Bucket = tuple[int, ...]

# Set where a layer is exchanged by itself, inside of the backward pass: the layer's number, from
# which keys follow; 0 in `init`.
LAYER: contextvars.ContextVar[jax.Array | int | None]
LAYER = contextvars.ContextVar("layer", default=None)


def split_off_exempt(layout: Layout) -> tuple[Bucket, Bucket]:
    """The leaves to compress and those that are exempt; empty ones always are."""
    exempt = tuple(i for i, leaf in enumerate(layout.leaves) if leaf.exempt or 0 in leaf.shape)
    return tuple(i for i in range(len(layout.leaves)) if i not in set(exempt)), exempt


def by_appearance(layout: Layout, chosen: Bucket, order: Sequence[str] | None) -> Bucket:
    """The leaves in the order in which their gradients appear.

    Args:
      layout: the leaves.
      chosen: the leaves to sort, as indices.
      order: paths of leaves, first gradient first; leaves it does not name come last. None is the
        tree's order reversed.
    """
    rank = {path: i for i, path in enumerate(order or ())}
    return tuple(sorted(reversed(chosen), key=lambda i: rank.get(layout.leaves[i].path, len(rank))))


def buckets_of(
    layout: Layout, chosen: Bucket, order: Sequence[str] | None, limit: int
) -> tuple[Bucket, ...]:
    """Groups leaves in the order in which their gradients appear.

    A bucket is closed before it would exceed the limit, so a larger leaf travels by itself. Every
    bucket is a concatenation of whole leaves of its own: slices of one concatenation of all would
    make the first bucket wait for the last gradient.

    Inside of the backward pass of a loop, the buckets of a layer are filled from its last gradient
    on, and the last holds two thirds of the limit: few products are left for it to travel behind.

    Leaves that are sharded over a further axis never share a bucket with others: what is equal
    along that axis must be rounded alike along it.

    Args:
      layout: the leaves.
      chosen: the leaves to group, as indices.
      order: as in `by_appearance`.
      limit: float32 bytes that a bucket holds.

    Returns:
      The buckets, each a tuple of indices.
    """
    queue = by_appearance(layout, chosen, order)
    buckets: list[list[int]] = []
    current: dict[frozenset[str], list[int]] = {}
    room: dict[frozenset[str], int] = {}
    last_first = LAYER.get() is not None
    for i in reversed(queue) if last_first else queue:
        leaf = layout.leaves[i]
        size, axes = 4 * math.prod(leaf.shape), names_in(leaf.spec)
        if size > room.get(axes, 0):
            current[axes], room[axes] = [], 2 * limit // 3 if last_first and not buckets else limit
            buckets.append(current[axes])
        current[axes].append(i)
        room[axes] -= size
    if last_first:
        buckets = [bucket[::-1] for bucket in buckets[::-1]]
    return tuple(map(tuple, buckets))


def key_of(key: jax.Array, layout: Layout, leaves: Bucket) -> jax.Array:
    """A key of its own for a bucket, or a leaf: no two of them round alike.

    It follows from the paths of the leaves, so it differs between the transformations of an
    `optax.partition` too; from the layer, inside of the backward pass; and from the shard, where
    the leaves are sharded over a further axis. It is equal on all devices of the exchange's axis.
    """
    paths = "\n".join(layout.leaves[i].path for i in leaves)
    key = jax.random.fold_in(key, zlib.crc32(paths.encode()))
    if (layer := LAYER.get()) is not None:
        key = jax.random.fold_in(key, layer)
    for axis in sorted(names_in(layout.leaves[leaves[0]].spec)):
        key = jax.random.fold_in(key, jax.lax.axis_index(axis))
    return key


def joined(parts: Mapping[Any, jax.Array]) -> jax.Array:
    """The arrays as one float32 vector."""
    return jnp.concatenate([part.reshape(-1).astype(jnp.float32) for part in parts.values()])


def split(vector: jax.Array, parts: Mapping[Any, jax.Array]) -> dict[Any, jax.Array]:
    """The reverse of `joined`, in the shapes of `parts`."""
    ends = np.cumsum([part.size for part in parts.values()])
    pieces = jnp.split(vector, ends[:-1])
    return {
        key: piece.reshape(part.shape)
        for (key, part), piece in zip(parts.items(), pieces, strict=True)
    }


def bytes_of(bucket_mib: Any) -> int:
    """The size of a bucket in bytes, from MiB.

    Raises:
      TypeError, ValueError: for anything but a positive Python number.
    """
    if isinstance(bucket_mib, jax.Array):
        raise TypeError(
            "bucket_mib decides shapes and must be a Python number; under "
            'optax.inject_hyperparams pass static_args=("bucket_mib",).'
        )
    if not (is_real(bucket_mib) and 0 < bucket_mib < math.inf):
        raise ValueError(f"bucket_mib must be a positive number, got {bucket_mib!r}.")
    return max(int(bucket_mib * 2**20), 1)
