"""The k-th largest magnitude, and which of those that tie with it are beyond k."""

import math

import jax
import jax.numpy as jnp

from jaxcomm import _axes
from jaxcomm.kernels.select.compaction import compact_band
from jaxcomm.kernels.select.magnitudes import (
    CHUNK,
    LANES,
    PAST_INFINITY,
    count_from,
    lowest_for,
    patterns_of,
)
from jaxcomm.kernels.select.selection import require_vector

_DIGIT = 4  # bits of the result that one pass over the data finds
_SAMPLE = 2**17
_SIGMAS = 4


def threshold_for(x: jax.Array, k: int) -> jax.Array:
    """The k-th largest `|x|`, exactly; as a threshold it selects k entries and those that tie.

    If fewer than k entries are neither zero nor NaN, the result is the smallest positive float,
    2^-149, which selects all of them. Compare it as `compact` does: in arithmetic some backends
    take denormals for zero.

    A sample gives two thresholds with the k-th magnitude almost surely between them. The entries of
    x between them are compacted, and the k-th magnitude is searched for among these alone. The
    search takes all of x where the sample was misleading, or too many entries are equal.

    Args:
      x: float32 array `(n,)`. NaN counts as zero.
      k: 1 to n.

    Returns:
      float32 scalar, positive.

    Raises:
      TypeError: for another dtype.
      ValueError: if x is not a vector, or has no k-th largest entry.
    """
    x = require_vector("threshold_for", x)
    if not 1 <= k <= x.size:
        raise ValueError(f"k is 1 to n = {x.size}, got {k}.")
    pattern = _kth(patterns_of(x), jnp.int32(k)) if x.size < 4 * _SAMPLE else _kth_of_many(x, k)
    return jax.lax.bitcast_convert_type(jnp.maximum(pattern, 1), jnp.float32)


def without_surplus(x: jax.Array, threshold: jax.Array, k: int) -> jax.Array:
    """x with zeros for the entries that tie at a threshold and come after the k-th above it.

    Args:
      x: float32 array `(n,)`.
      threshold: `threshold_for(x, k)`.
      k: 1 to n.

    Returns:
      float32 array `(n,)`, of which the threshold selects k entries, or all that are neither zero
      nor NaN. Among those that tie, the first ones in the order of `compact` stay.
    """
    low, patterns = lowest_for(threshold), patterns_of(x)
    left = k - count_from(patterns, low[None] + 1)[0]
    ties = compact_band(x, low, low + 1, k)
    place = jnp.arange(x.size, dtype=jnp.int32)
    last = _order(ties.indices[jnp.clip(left - 1, 0, k - 1)])
    is_surplus = (patterns == low) & (_order(place) > last) & (ties.count > left)
    return jnp.where(is_surplus, 0.0, x)


def _order(place: jax.Array) -> jax.Array:
    """The number of a place in the order of `compact`, if all places were selected."""
    row = place // LANES % (CHUNK // LANES)
    return place // CHUNK * CHUNK + place % LANES * (CHUNK // LANES) + row


def _kth_of_many(x: jax.Array, k: int) -> jax.Array:
    """The result of `_kth`, for many entries."""
    sample = x[:: x.size // _SAMPLE]
    share = k / x.size
    spread = _SIGMAS * math.sqrt(sample.size * share * (1 - share)) + 2
    low, high = _between(patterns_of(sample), share * sample.size, spread)
    capacity = math.ceil(3 * spread / sample.size * x.size)
    inside = compact_band(x, low, high + 1, capacity)
    above = count_from(patterns_of(x), high[None] + 1)[0]
    # Below the pattern 1 there are only zeros, so with `low` at 1 fewer than k entries will do.
    found = (above < k) & ((above + inside.count >= k) | (low == 1)) & (inside.count <= capacity)
    return jax.lax.cond(
        found,
        lambda: _kth(patterns_of(inside.values), k - above),
        lambda: _kth(patterns_of(x), jnp.int32(k)),
    )


def _between(patterns: jax.Array, rank: float, spread: float) -> tuple[jax.Array, jax.Array]:
    """The patterns `spread` ranks below and above a rank; at the ends 1 and infinity's pattern."""
    below, above = math.ceil(rank + spread), math.floor(rank - spread)
    lowest, highest = jnp.uint32(1), jnp.uint32(PAST_INFINITY - 1)
    low = _kth(patterns, jnp.int32(below)) if below <= patterns.size else lowest
    high = _kth(patterns, jnp.int32(above)) if above >= 1 else highest
    return jnp.maximum(low, 1), jnp.maximum(high, 1)


def _kth(patterns: jax.Array, k: jax.Array) -> jax.Array:
    """The largest pattern, up to infinity's, that k patterns reach; 0 if fewer than k are positive.

    It is found digit by digit from the highest: each is the largest that k patterns still reach.
    """

    def step(i: jax.Array, prefix: jax.Array) -> jax.Array:
        shift = (32 - _DIGIT * (i + 1)).astype(jnp.uint32)
        lows = prefix + (jnp.arange(1, 2**_DIGIT, dtype=jnp.uint32) << shift)
        enough = count_from(patterns, jnp.minimum(lows, PAST_INFINITY)) >= k
        return prefix + (jnp.sum(enough, dtype=jnp.uint32) << shift)

    zero = _axes.as_varying(jnp.uint32(0), _axes.varying_axes(patterns))
    return jax.lax.fori_loop(0, 32 // _DIGIT, step, zero)
