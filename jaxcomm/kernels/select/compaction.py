"""The plain version of compaction, which is the specification.

A pass over x makes a bit for each entry. Everything after it works on these words, and on as many
slots as there is space for entries.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm.kernels.select.magnitudes import (
    CHUNK,
    LANES,
    PAST_INFINITY,
    bit_with_rank,
    lowest_for,
    words_in,
)


class Selected(NamedTuple):
    """The selected entries, in order, and their number.

    Attributes:
      values: float32 array `(capacity,)`: the entries, then zeros.
      indices: int32 array `(capacity,)`: their indices in x, and n where there is no entry.
      count: int32 scalar: the number of selected entries, also of those beyond the capacity.
    """

    values: jax.Array
    indices: jax.Array
    count: jax.Array


def compact(x: jax.Array, threshold: jax.Array, capacity: int) -> Selected:
    """Compacts checked arguments; see `selection.compact`."""
    return compact_band(x, lowest_for(threshold), jnp.uint32(PAST_INFINITY), capacity)


def compact_band(x: jax.Array, low: jax.Array, past: jax.Array, capacity: int) -> Selected:
    """Compacts the entries whose bit patterns are at least `low` and below `past`."""
    # Without the barriers XLA repeats some passes over the words for each of their uses.
    words = jax.lax.optimization_barrier(words_in(x, low, past))
    before = jax.lax.optimization_barrier(_count_before(words))
    slot = jnp.arange(capacity, dtype=jnp.int32)
    chunk = _chunk_of_slots(before, capacity)
    place = _place(words, chunk, slot - before.at[chunk].get(mode="clip"))
    filled = slot < before[-1]
    values = jnp.where(filled, x.at[place].get(mode="clip"), jnp.float32(0))
    return Selected(values, jnp.where(filled, place, x.size), before[-1])


def _count_before(words: jax.Array) -> jax.Array:
    """The number of bits set before each chunk, and after the last, `(C + 1,)`."""
    counts = jnp.sum(jax.lax.population_count(words).astype(jnp.int32), axis=1)
    return jnp.concatenate([jnp.zeros_like(counts, shape=(1,)), jnp.cumsum(counts)])


def _chunk_of_slots(before: jax.Array, capacity: int) -> jax.Array:
    """The chunk of the s-th entry, `(capacity,)`; arbitrary beyond the last entry.

    Every chunk marks the slot of its first entry, and an empty chunk marks the slot of the next
    entry. So the number of marks up to and at a slot is the number of chunks that begin there or
    before, and the last of these chunks holds the entry.
    """
    marks = jnp.zeros_like(before, shape=(capacity,)).at[before[:-1]].add(1, mode="drop")
    return jax.lax.optimization_barrier(jnp.cumsum(marks) - 1)


def _place(words: jax.Array, chunk: jax.Array, rank: jax.Array) -> jax.Array:
    """The index in x of the set bit with a rank, from 0, in its chunk."""
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
