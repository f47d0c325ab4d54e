"""The plain version of compaction, which is the specification.

A pass over x makes a bit for each entry. Everything after it works on these words, and on as many
slots as there is room for entries. A second pass finds the entries that tie at the threshold, where
some of them must be left out.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm.kernels import reductions
from jaxcomm.kernels._apart import apart
from jaxcomm.kernels.select.magnitudes import (
    CHUNK,
    LANES,
    PAST_INFINITY,
    bit_with_rank,
    first_bits,
    lowest_for,
    patterns_of,
    words_in,
)


class Selected(NamedTuple):
    """The selected entries, in order, and their number.

    Attributes:
      values: float32 array `(capacity,)`: the entries, then zeros.
      indices: int32 array `(capacity,)`: their indices in x, and n where there is no entry.
      count: int32 scalar: the number of selected entries, including those beyond the capacity.
    """

    values: jax.Array
    indices: jax.Array
    count: jax.Array


def compact(x: jax.Array, threshold: jax.Array, capacity: int) -> Selected:
    """Compacts checked arguments; see `selection.compact`."""
    return compact_band(x, lowest_for(threshold), jnp.uint32(PAST_INFINITY), capacity)


def compact_at_most(
    x: jax.Array, threshold: jax.Array, capacity: int, at_most: jax.Array | int
) -> Selected:
    """The entries that `compact` takes, but at most so many.

    Args:
      x: as for `selection.compact`, as are the threshold and the capacity.
      threshold: likewise.
      capacity: likewise.
      at_most: not fewer than are above the threshold. Surplus entries that tie at it are dropped
        from the end, in the order of `selection.compact`.
    """
    low = lowest_for(threshold)
    words = _words_in(x, low, jnp.uint32(PAST_INFINITY))
    before = _count_before(words)

    def without_surplus(words: jax.Array, before: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _without_surplus(words, before[-1], _words_in(x, low, low + 1), at_most)

    def in_branch(words: jax.Array, before: jax.Array) -> tuple[jax.Array, jax.Array]:
        keep = lambda words, before: (words, before)  # noqa: E731
        return jax.lax.cond(before[-1] > at_most, without_surplus, keep, words, before)

    # On GPUs a branch takes longer than this pass over x, also if it is not taken.
    choose = functools.partial(jax.lax.platform_dependent, words, before)
    words, before = choose(cpu=in_branch, default=without_surplus)
    return _compact_words(x, words, before, capacity)


def compact_band(x: jax.Array, low: jax.Array, past: jax.Array, capacity: int) -> Selected:
    """Compacts the entries whose bit patterns are at least `low` and below `past`."""
    words = _words_in(x, low, past)
    return _compact_words(x, words, _count_before(words), capacity)


def narrow(found: Selected, threshold: jax.Array, most: int, n: int) -> Selected:
    """From all nonzero entries of a vector, the ones that `compact` would take.

    Args:
      found: every entry of the vector that is not zero, as returned by `compact`.
      threshold: float32 scalar, positive.
      most: how many entries are selected at most, not fewer than are above the threshold; surplus
        entries that tie at it are dropped from the end.
      n: the length of the vector.

    Returns:
      `Selected` with arrays of `(most,)`, in the order of `found`.
    """
    low, patterns = lowest_for(threshold), patterns_of(found.values)
    above, tie = patterns > low, patterns == low
    up_to = reductions.running_sum(jnp.stack([above, tie]).astype(jnp.int32), axis=1)
    room = most - up_to[0, -1]
    last = up_to[0] + jnp.minimum(up_to[1], room)
    kept = above | (tie & (up_to[1] <= room))
    slot = jnp.where(kept, last - 1, most)
    values = jnp.zeros(most, jnp.float32).at[slot].set(found.values, mode="drop")
    indices = jnp.full(most, n, jnp.int32).at[slot].set(found.indices, mode="drop")
    return Selected(values, indices, last[-1])


def _words_in(x: jax.Array, low: jax.Array, past: jax.Array) -> jax.Array:
    # Without this barrier and the next, XLA repeats some passes over the words for each use.
    return jax.lax.optimization_barrier(words_in(x, low, past))


def _compact_words(x: jax.Array, words: jax.Array, before: jax.Array, capacity: int) -> Selected:
    """The entries of x that have a bit in `words`; `before` counts them before each chunk."""
    by_marks = apart(functools.partial(_places_by_marks, capacity=capacity))
    by_search = functools.partial(_places_by_search, capacity=capacity)
    place = jax.lax.platform_dependent(words, before, cpu=by_marks, default=by_search)
    filled = jnp.arange(capacity, dtype=jnp.int32) < before[-1]
    values = jnp.where(filled, x.at[place].get(mode="clip"), jnp.float32(0))
    return Selected(values, jnp.where(filled, place, x.size), before[-1])


def _without_surplus(
    words: jax.Array, total: jax.Array, ties: jax.Array, at_most: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """The words, of `total` bits, without the last of the ties, so that `at_most` bits are left.

    Returns:
      The words, and `_count_before` of them.
    """
    ties_before = _count_before(ties)
    kept = at_most - (total - ties_before[-1])
    words = (words & ~ties) | first_bits(ties, kept - ties_before[:-1])
    return words, _count_before(words)


def _count_before(words: jax.Array) -> jax.Array:
    """The number of bits set before each chunk, and after the last, `(C + 1,)`."""
    counts = jnp.sum(jax.lax.population_count(words), axis=1, dtype=jnp.int32)
    before = jnp.concatenate([jnp.zeros_like(counts, shape=(1,)), reductions.running_sum(counts)])
    return jax.lax.optimization_barrier(before)


def _places_by_marks(words: jax.Array, before: jax.Array, capacity: int) -> jax.Array:
    """The place in x of the s-th entry, for each slot s; arbitrary beyond the last entry.

    Every chunk marks the slot of its first entry, and an empty chunk marks the slot of the next
    entry. So the number of marks at or before a slot is the number of chunks that begin there or
    earlier, and the last of these chunks holds the entry.
    """
    slot = jnp.arange(capacity, dtype=jnp.int32)
    marks = jnp.zeros_like(slot).at[before].add(1, mode="drop")
    chunk = jax.lax.optimization_barrier(reductions.running_sum(marks) - 1)
    lanes = [words.at[chunk, j].get(mode="clip") for j in range(LANES)]
    left = slot - before.at[chunk].get(mode="clip")
    return _places_in_chunks(lanes, chunk, left)


def _places_by_search(words: jax.Array, before: jax.Array, capacity: int) -> jax.Array:
    """The same for GPUs: each slot finds its chunk independently, in a few short kernels."""
    slot = jnp.arange(capacity, dtype=jnp.int32)
    chunk = reductions.count_up_to(before[:-1], slot) - 1
    lanes = [words.at[chunk, j].get(mode="clip") for j in range(LANES)]
    return _places_in_chunks(lanes, chunk, slot - before.at[chunk].get(mode="clip"))


def _places_in_chunks(lanes: list[jax.Array], chunk: jax.Array, left: jax.Array) -> jax.Array:
    """The places in x of the entries with the ranks `left` in chunks, of which these are words."""
    word, lane, done = jnp.zeros_like(left, jnp.uint32), jnp.zeros_like(left), left < 0
    for j, mine in enumerate(lanes):
        count = jax.lax.population_count(mine).astype(jnp.int32)
        here = ~done & (left < count)
        word, lane = jnp.where(here, mine, word), jnp.where(here, j, lane)
        done |= here
        left = jnp.where(done, left, left - count)
    return chunk * CHUNK + bit_with_rank(word, left) * LANES + lane
