"""What each sparse all-reduce must compute, in numpy: functions see the vectors of all devices."""

import jax.numpy as jnp
import numpy as np

from jaxcomm.collectives.sparse._owners import Owners


def largest(x: np.ndarray, k: int) -> np.ndarray:
    """x where its magnitude is among the k largest, and 0 elsewhere; for x without ties."""
    kept = np.zeros_like(x)
    places = np.argsort(-np.abs(x), kind="stable")[:k]
    kept[places] = x[places]
    return kept


def topk(x: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """TopkA: the sum of every device's k largest values, one device after the other.

    Returns:
        float32[n], and bool[N, n]: what leaves the residual of each device.
    """
    total, taken = np.zeros(x.shape[1], np.float32), np.zeros(x.shape, bool)
    for r, row in enumerate(x):
        total = total + largest(row, k[r])
        taken[r] = largest(row, k[r]) != 0
    return total, taken


def topk_chunks(x: np.ndarray, ks: np.ndarray, chunk: int = 4096) -> tuple[np.ndarray, np.ndarray]:
    """The sum of the k largest values of each chunk and device, in two magnitudes of a chunk.

    Returns:
        float32[n], and float32[N, n]: what leaves the residual of each device.
    """
    sent = np.zeros_like(x)
    for row, out, k in zip(x, sent, ks, strict=True):
        for first in range(0, len(row), chunk):
            part = largest(row[first : first + chunk], k)
            size = np.abs(part[part != 0])
            for mine in (size > size.mean(), size <= size.mean()) if size.size else ():
                if mine.any():
                    among = np.isin(np.abs(part), size[mine])
                    level = np.float32(jnp.bfloat16(size[mine].mean()))
                    out[first : first + chunk][among] = level * np.sign(part[among])
    return sent.sum(0), sent


def gtopk(x: np.ndarray, ks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shi et al. 2019, algorithm 2, as a tree; whose places survived leaves the residual.

    Below the tree, device 2e joins 2e + 1 where N is not a power of two.
    """
    world, k = len(x), ks[0]
    q = world.bit_length() - 1
    extra = world - 2**q
    groups = [({2 * e, 2 * e + 1}) for e in range(extra)]
    groups += [{r} for r in range(2 * extra, world)]
    lists = []
    alive = np.array([largest(row, k) != 0 for row in x])
    for group in groups:
        total = largest(np.sum([largest(x[r], k) for r in sorted(group)], 0, np.float32), k)
        for r in group:
            alive[r] &= total != 0
        lists.append(total)
    while len(lists) > 1:
        pairs = range(0, len(lists), 2)
        lists, groups = (
            [largest(lists[i] + lists[i + 1], k) for i in pairs],
            [groups[i] | groups[i + 1] for i in pairs],
        )
        for total, group in zip(lists, groups, strict=True):
            for r in group:
                alive[r] &= total != 0
    return lists[0], alive


def oktopk(x: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the sum of local selections, the k/N largest of each owner's places, in step 0."""
    world, n = x.shape
    owner = np.asarray(Owners(n, world, jnp.int32(0)).of(jnp.arange(n, dtype=jnp.int32)))
    sums, sent = topk(x, k)
    share = -(-k[0] // world)
    total = sum(largest(np.where(owner == r, sums, 0), share) for r in range(world))
    return total, sent & (total != 0)
