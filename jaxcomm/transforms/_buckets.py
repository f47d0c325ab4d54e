"""Which leaves travel together, and in which order."""

import math
from collections.abc import Sequence

from jaxcomm.transforms._layout import Layout, names_in

Bucket = tuple[int, ...]


def split_off_exempt(layout: Layout) -> tuple[Bucket, Bucket]:
    """The leaves to compress and those that are exempt; empty ones always are."""
    exempt = tuple(i for i, leaf in enumerate(layout.leaves) if leaf.exempt or 0 in leaf.shape)
    return tuple(i for i in range(len(layout.leaves)) if i not in set(exempt)), exempt


def buckets_of(
    layout: Layout, chosen: Bucket, order: Sequence[str] | None, limit: int
) -> tuple[Bucket, ...]:
    """Groups leaves in the order in which their gradients appear.

    A bucket is closed before it would exceed the limit, so a larger leaf travels by itself. Every
    bucket is a concatenation of whole leaves of its own: slices of one concatenation of all would
    make the first bucket wait for the last gradient.

    Leaves that are sharded over a further axis never share a bucket with others: what is equal
    along that axis must be rounded alike along it.

    Args:
      layout: the leaves.
      chosen: the leaves to group, as indices.
      order: paths of leaves, first gradient first; leaves it does not name come last. None is the
        tree's order reversed.
      limit: float32 bytes that a bucket holds.

    Returns:
      The buckets, each a tuple of indices.
    """
    rank = {path: i for i, path in enumerate(order or ())}
    queue = sorted(reversed(chosen), key=lambda i: rank.get(layout.leaves[i].path, len(rank)))
    buckets: list[list[int]] = []
    current: dict[frozenset[str], list[int]] = {}
    room: dict[frozenset[str], int] = {}
    for i in queue:
        leaf = layout.leaves[i]
        size, axes = 4 * math.prod(leaf.shape), names_in(leaf.spec)
        if size > room.get(axes, 0):
            current[axes], room[axes] = [], limit
            buckets.append(current[axes])
        current[axes].append(i)
        room[axes] -= size
    return tuple(map(tuple, buckets))
