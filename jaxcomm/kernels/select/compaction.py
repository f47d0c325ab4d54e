"""The entries at or above a threshold, side by side, and regions that hold equally many of them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.kernels import _device
from jaxcomm.kernels.select.words import (
    CHUNK,
    LANES,
    PAST_INFINITY,
    bit_with_rank,
    count_from,
    lowest_for,
    patterns_of,
    words_in,
)


class Selected(NamedTuple):
    """What was selected, in order, and how much of it there was.

    Attributes:
      values: float32 array `(..., capacity)`: the entries, then zeros.
      indices: int32 array `(..., capacity)`: their places in x, and n where there is no entry.
      count: int32 array `(...)`: how many there were, also those beyond the capacity.
    """

    values: jax.Array
    indices: jax.Array
    count: jax.Array


def count_at_least(
    x: jax.Array, threshold: jax.Array, *, implementation: str | None = None
) -> jax.Array:
    """How many entries have `|x| >= threshold`, without zeros and NaN; int32 scalar.

    Takes and raises what `compact` does. The implementation is "xla", "mosaic" (on NVIDIA GPUs), or
    None, which is "xla"; one that does not exist here raises a NotImplementedError.
    """
    x, low = _arguments("count_at_least", x, threshold)
    chosen = _device.choose("count_at_least", implementation, ("xla", "mosaic"), x.size)
    if chosen == "mosaic":
        from jaxcomm.kernels.select import mosaic  # Pallas takes long to import

        return mosaic.count_at_least(x, threshold)
    return count_from(patterns_of(x), low[None])[0]


def compact(
    x: jax.Array, threshold: jax.Array, capacity: int, *, implementation: str | None = None
) -> Selected:
    """The entries with `|x| >= threshold`.

    They are in the order of the chunks of CHUNK entries; within a chunk in the order of i mod 8,
    and of i where this is equal. If there are more than the capacity, the first ones are kept.

    Args:
      x: float32 array `(n,)`, n >= 1.
      threshold: float32 scalar. One that is not positive selects all but zeros and NaN, which no
        threshold selects; NaN selects nothing.
      capacity: the number of entries that there is space for, at least 1; also more than n.
      implementation: "xla", "triton" (on NVIDIA GPUs), or None, which is "xla".

    Returns:
      `Selected` with arrays of `(capacity,)`.

    Raises:
      TypeError: for another dtype.
      ValueError: if x is not a vector, the threshold no scalar, or the capacity not positive.
      NotImplementedError: for an implementation that does not exist here.
    """
    x, low = _arguments("compact", x, threshold)
    _require_capacity(capacity)
    if _device.choose("compact", implementation, ("xla", "triton"), x.size) == "triton":
        from jaxcomm.kernels.select import triton  # Pallas takes long to import

        return triton.compact(x, threshold, capacity)
    return compact_band(x, low, jnp.uint32(PAST_INFINITY), capacity)


def compact_regions(
    x: jax.Array,
    threshold: jax.Array,
    boundaries: jax.Array,
    capacity: int,
    *,
    implementation: str | None = None,
) -> Selected:
    """For each region of x, its entries with `|x| >= threshold`; the indices are places in x.

    Args:
      x: as for `compact`, which also says in which order the entries of a region are.
      threshold: as for `compact`.
      boundaries: int32 array `(R + 1,)`, ascending from 0 to n, multiples of CHUNK or n: region r
        is `x[boundaries[r]:boundaries[r + 1]]`, and may be empty. A numpy array is checked.
        Others may not be known yet; there, what is no multiple is rounded up to the next.
      capacity: the number of entries that each region has space for.
      implementation: as for `compact`.

    Returns:
      `Selected` with arrays of `(R, capacity)`, and R counts.

    Raises:
      TypeError: for another dtype.
      ValueError: as `compact`, and for boundaries that are wrong.
      NotImplementedError: as `compact`.
    """
    x, low = _arguments("compact_regions", x, threshold)
    boundaries = _require_boundaries(boundaries, x.size)
    _require_capacity(capacity)
    if _device.choose("compact_regions", implementation, ("xla", "triton"), x.size) == "triton":
        from jaxcomm.kernels.select import triton

        return triton.compact_regions(x, threshold, boundaries, capacity)
    return _compact_band(x, low, jnp.uint32(PAST_INFINITY), boundaries, capacity)


def boundaries_for(x: jax.Array, threshold: jax.Array, regions: int) -> jax.Array:
    """Boundaries of regions that hold about equally many entries with `|x| >= threshold`.

    Each is the multiple of CHUNK, or n, at which the entries before it are nearest to their share
    of all. Where nothing is selected, the regions are about equally long.

    Args:
      x: as for `compact`.
      threshold: as for `compact`.
      regions: their number R, at least 1.

    Returns:
      int32 array `(R + 1,)`, ascending from 0 to n; regions may be empty.

    Raises:
      TypeError: for another dtype.
      ValueError: as `compact`, and if there is to be no region.
    """
    x, low = _arguments("boundaries_for", x, threshold)
    if regions < 1:
        raise ValueError(f"x is split into at least 1 region, got regions={regions}.")
    before = _starts(words_in(x, low, jnp.uint32(PAST_INFINITY)))
    chunks, total = before.size - 1, before[-1]
    r = np.arange(1, regions, dtype=np.int32)
    wanted = total // regions * r + total % regions * r // regions  # total * r may overflow
    after = jnp.searchsorted(before, wanted, method="scan_unrolled").astype(jnp.int32)
    ahead = jnp.maximum(after - 1, 0)
    nearest = jnp.where(wanted - before[ahead] < before[after] - wanted, ahead, after)
    even = jnp.asarray(chunks * r.astype(np.int64) // regions, jnp.int32)
    inner = jnp.minimum(jnp.where(total > 0, nearest, even) * CHUNK, x.size)
    zero = jnp.zeros_like(inner, shape=(1,))
    return jnp.concatenate([zero, inner, zero + x.size])


def compact_band(x: jax.Array, low: jax.Array, past: jax.Array, capacity: int) -> Selected:
    """`compact` for the entries whose bit patterns are from `low` up to, and without, `past`."""
    one = _compact_band(x, low, past, np.asarray([0, x.size], np.int32), capacity)
    return Selected(*(leaf[0] for leaf in one))


def _compact_band(
    x: jax.Array, low: jax.Array, past: jax.Array, boundaries: jax.Array | np.ndarray, capacity: int
) -> Selected:
    # Without the barriers XLA repeats some of the passes over words in what uses them.
    words = jax.lax.optimization_barrier(words_in(x, low, past))
    before = jax.lax.optimization_barrier(_starts(words))
    bounds = jnp.minimum(-(-boundaries // CHUNK), words.shape[0])
    base = before[bounds]
    count = base[1:] - base[:-1]
    slot = jax.lax.broadcasted_iota(jnp.int32, (count.size, capacity), 1)
    chunk = _chunk_of_slots(before, bounds, base, capacity)
    rank = base[:-1, None] + slot - before.at[chunk].get(mode="clip")
    place = _place(words, chunk, rank)
    filled = slot < count[:, None]
    values = jnp.where(filled, x.at[place].get(mode="clip"), jnp.float32(0))
    return Selected(values, jnp.where(filled, place, x.size), count)


def _starts(words: jax.Array) -> jax.Array:
    """The number of bits set before each chunk, and after the last `(C + 1,)`."""
    counts = jnp.sum(jax.lax.population_count(words).astype(jnp.int32), axis=1)
    return jnp.concatenate([jnp.zeros_like(counts, shape=(1,)), jnp.cumsum(counts)])


def _chunk_of_slots(
    before: jax.Array, bounds: jax.Array, base: jax.Array, capacity: int
) -> jax.Array:
    """The chunk of the s-th entry of each region, `(R, capacity)`; anything where there is none.

    Every chunk marks the slot of its first entry. As many marks as a slot has up to itself, so many
    chunks of the region begin up to there, and the last of them is the one; those that are empty
    mark the slot of the next that is not.
    """
    regions, chunks = bounds.size - 1, before.size - 1
    region = jnp.zeros_like(before, shape=(chunks,))
    if regions > 1:  # the XLA of jax 0.10.0 takes minutes to sum up millions of constants
        begun = jnp.zeros_like(before, shape=(chunks + 1,)).at[bounds[1:-1]].add(1)
        region = jnp.cumsum(begun)[:-1]
    first = before[:-1] - base[region]
    mark = jnp.where(first < capacity, region * capacity + first, regions * capacity)
    marks = jnp.zeros_like(before, shape=(regions * capacity,)).at[mark].add(1, mode="drop")
    begun = jnp.cumsum(marks.reshape(regions, capacity), axis=1)
    return jax.lax.optimization_barrier(bounds[:-1, None] + begun - 1)


def _place(words: jax.Array, chunk: jax.Array, rank: jax.Array) -> jax.Array:
    """The index in x of the bit with this rank, from 0, among those set in its chunk."""
    lane, left = jnp.zeros_like(rank), rank
    word = jnp.zeros_like(rank, dtype=jnp.uint32)
    for j in range(LANES):
        candidate = words.at[chunk, j].get(mode="clip")
        count = jax.lax.population_count(candidate).astype(jnp.int32)
        here = (rank >= 0) & (rank < count)
        lane, left = jnp.where(here, j, lane), jnp.where(here, rank, left)
        word = jnp.where(here, candidate, word)
        rank = rank - count
    return chunk * CHUNK + bit_with_rank(word, left) * LANES + lane


def _arguments(name: str, x: jax.Array, threshold: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = require_vector(name, x)
    threshold = jnp.asarray(threshold)
    if threshold.dtype != jnp.float32:
        raise TypeError(
            f"{name} takes a float32 threshold, got {threshold.dtype}; "
            "write jnp.float32(threshold)."
        )
    if threshold.ndim:
        raise ValueError(f"{name} takes one threshold, got shape {threshold.shape}.")
    return x, lowest_for(threshold)


def require_vector(name: str, x: jax.Array) -> jax.Array:
    """`x` as a jax array; raises for anything but float32 `(n,)` with an n that int32 can count."""
    x = jnp.asarray(x)
    if x.dtype != jnp.float32:
        raise TypeError(f"{name} takes float32, got {x.dtype}; write x.astype(jnp.float32).")
    if x.ndim != 1 or not 1 <= x.size <= 2**31 - CHUNK:
        raise ValueError(
            f"{name} takes a vector of 1 to 2^31 - {CHUNK} elements, got shape {x.shape}; "
            "write x.reshape(-1)."
        )
    return x


def _require_capacity(capacity: int) -> None:
    if capacity < 1:
        raise ValueError(f"the capacity is at least 1, got {capacity}.")


def _require_boundaries(boundaries: jax.Array | np.ndarray, n: int) -> jax.Array:
    if boundaries.dtype != np.int32:
        raise TypeError(f"boundaries are int32, got {boundaries.dtype}; boundaries_for makes them.")
    if boundaries.ndim != 1 or boundaries.size < 2:
        raise ValueError(f"R regions have R + 1 boundaries, got shape {boundaries.shape}.")
    if isinstance(boundaries, np.ndarray):
        ends = boundaries[0] == 0 and boundaries[-1] == n
        whole = np.all((boundaries % CHUNK == 0) | (boundaries == n))
        if not (ends and whole and np.all(np.diff(boundaries) >= 0)):
            raise ValueError(
                f"boundaries ascend from 0 to {n}, the length of x, in multiples of {CHUNK}, "
                f"got {boundaries.tolist()}; boundaries_for makes them."
            )
    return jnp.asarray(boundaries)
