"""Bands of magnitudes: the number of elements in a band, and a bit for each element in it.

Magnitudes are compared as bit patterns of float32 without the sign. As unsigned integers, these
have the order of the magnitudes. This includes denormals, which XLA's CPU backend treats as zero in
arithmetic, and the pattern of infinity is the largest except for those of NaN. A band holds the
patterns that are at least `low` and below `past`.
"""

import jax
import jax.numpy as jnp

from jaxcomm.kernels.bitplanes import packing

CHUNK = 256
LANES = packing.words_for(CHUNK)  # 8: a row of so many entries fills one vector register
PAST_INFINITY = 0x7F800001
_MAGNITUDE = 0x7FFFFFFF
# The tile of a count on CPU stays in the nearest cache. With 64 rows it is 6 times slower, because
# XLA then keeps a loop over the rows.
_ROWS, _COLUMNS = 32, 32
TILE = _ROWS * _COLUMNS


def patterns_of(x: jax.Array) -> jax.Array:
    """The bit patterns of the magnitudes, uint32 of the shape of x."""
    return jax.lax.bitcast_convert_type(x, jnp.uint32) & _MAGNITUDE


def lowest_for(threshold: jax.Array) -> jax.Array:
    """The first pattern that `|x| >= threshold` selects; never zero, and past all for NaN."""
    pattern = jax.lax.bitcast_convert_type(threshold, jnp.uint32)
    magnitude = pattern & _MAGNITUDE
    low = jnp.where(pattern == magnitude, jnp.maximum(magnitude, 1), jnp.uint32(1))
    return jnp.where(magnitude < PAST_INFINITY, low, jnp.uint32(PAST_INFINITY))


def words_in(x: jax.Array, low: jax.Array, past: jax.Array) -> jax.Array:
    """A bit per element: whether its magnitude is in the band.

    Args:
      x: float32 array `(n,)`.
      low: the first pattern of the band, uint32.
      past: the first pattern above the band, uint32.

    Returns:
      uint32 array `(ceil(n / CHUNK), LANES)`. Bit b of word j of chunk c belongs to element
      `c CHUNK + b LANES + j`, and is zero beyond the last element.
    """
    # Only the short last chunk is padded, because padding x would copy it.
    whole = x.size // CHUNK * CHUNK
    parts = [x[:whole], jnp.pad(x[whole:], (0, -x.size % CHUNK))]
    words = [
        packing.pack((patterns_of(part) - low < past - low).reshape(-1, CHUNK))
        for part in parts
        if part.size
    ]
    return words[0] if len(words) == 1 else jnp.concatenate(words)


def count_from(patterns: jax.Array, lows: jax.Array) -> jax.Array:
    """For each of several lowest patterns, the number of patterns from there to infinity's.

    Args:
      patterns: uint32 array `(n,)`.
      lows: uint32 array `(m,)`, from 1 to PAST_INFINITY.

    Returns:
      int32 array `(m,)`.
    """
    return jax.lax.platform_dependent(
        patterns, lows, cpu=_count_in_tiles, default=_count_one_by_one
    )


def bit_with_rank(word: jax.Array, rank: jax.Array) -> jax.Array:
    """The position, from 0 to 31, of the set bit with a rank, from 0, in its word."""
    place = jnp.zeros_like(rank)
    for half in (16, 8, 4, 2, 1):
        lower = (word >> place.astype(word.dtype)).astype(jnp.int32) & (2**half - 1)
        count = jax.lax.population_count(lower)
        place = jnp.where(rank < count, place, place + half)
        rank = jnp.where(rank < count, rank, rank - count)
    return place


def first_bits(words: jax.Array, room: jax.Array) -> jax.Array:
    """The words without the last of their bits.

    Args:
      words: uint32 array `(rows, w)`.
      room: how many bits of each row stay, at most, int32 `(rows,)`; none if it is negative.

    Returns:
      uint32 array `(rows, w)`.
    """
    counts = jax.lax.population_count(words).astype(jnp.int32)
    before = jnp.cumsum(counts, axis=1, dtype=jnp.int32) - counts
    left = room[:, None] - before
    first = (jnp.uint32(1) << bit_with_rank(words, jnp.clip(left, 0, 31)).astype(jnp.uint32)) - 1
    return jnp.where(left >= counts, words, jnp.where(left > 0, words & first, jnp.uint32(0)))


def _count_one_by_one(patterns: jax.Array, lows: jax.Array) -> jax.Array:
    return jnp.stack([jnp.sum(_above(patterns, low), dtype=jnp.int32) for low in lows])


def _count_in_tiles(patterns: jax.Array, lows: jax.Array) -> jax.Array:
    """The same for CPU: reads each tile from memory once, and never reduces the last axis."""
    whole = patterns.size // TILE * TILE
    parts = [patterns[:whole], jnp.pad(patterns[whole:], (0, -patterns.size % TILE))]
    # Without the barrier XLA merges both sums into one reduction, which is several times slower.
    columns = jax.lax.optimization_barrier([_in_columns(x, lows) for x in parts if x.size])
    columns = sum(jnp.sum(x, axis=0, dtype=jnp.int32) for x in columns)
    return jnp.sum(columns, axis=1, dtype=jnp.int32)


def _in_columns(patterns: jax.Array, lows: jax.Array) -> jax.Array:
    """The counts for each column of each tile, int32 `(tiles, m, _COLUMNS)`."""
    tiles = patterns.reshape(-1, 1, _ROWS, _COLUMNS)
    return jnp.sum(_above(tiles, lows[None, :, None, None]), axis=2, dtype=jnp.int32)


def _above(patterns: jax.Array, lows: jax.Array) -> jax.Array:
    return patterns - lows < PAST_INFINITY - lows
