"""The k-th largest magnitude."""

import math

import jax
import jax.numpy as jnp

from jaxcomm import _axes
from jaxcomm.kernels.select.compaction import compact_band
from jaxcomm.kernels.select.magnitudes import PAST_INFINITY, count_from, patterns_of
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
    pattern = _kth(patterns_of(x), k) if x.size < 4 * _SAMPLE else _kth_of_many(x, k)
    return jax.lax.bitcast_convert_type(jnp.maximum(pattern, 1), jnp.float32)


def _kth_of_many(x: jax.Array, k: int) -> jax.Array:
    """The result of `_kth`, for many entries."""
    sample = x[:: _stride(x.size)]
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
        lambda: _kth(patterns_of(x), k),
    )


def _stride(n: int) -> int:
    """Odd: gradients of a matrix differ by column, and often it has 2^m columns."""
    return (n // _SAMPLE - 1) | 1


def _between(patterns: jax.Array, rank: float, spread: float) -> tuple[jax.Array, jax.Array]:
    """The patterns `spread` ranks below and above a rank; at the ends 1 and infinity's pattern."""
    below, above = math.ceil(rank + spread), math.floor(rank - spread)
    # Both in one search, at ranks that there are; where there is none, its result is not used.
    low, high = _kths(patterns, jnp.asarray([min(below, patterns.size), max(above, 1)], jnp.int32))
    low = low if below <= patterns.size else jnp.uint32(1)
    high = high if above >= 1 else jnp.uint32(PAST_INFINITY - 1)
    return jnp.maximum(low, 1), jnp.maximum(high, 1)


def _kth(patterns: jax.Array, k: int | jax.Array) -> jax.Array:
    """The largest pattern that k patterns reach; 0 if fewer than k are positive."""
    return _kths(patterns, jnp.asarray(k, jnp.int32)[None])[0]


def _kths(patterns: jax.Array, ranks: jax.Array) -> jax.Array:
    """`_kth` of each rank, up to infinity's pattern, uint32 `(m,)`.

    They are found digit by digit from the highest: each is the largest that k patterns still reach.
    """
    digits = jnp.arange(1, 2**_DIGIT, dtype=jnp.uint32)

    def step(i: jax.Array, prefixes: jax.Array) -> jax.Array:
        shift = (32 - _DIGIT * (i + 1)).astype(jnp.uint32)
        lows = prefixes[:, None] + (digits << shift)[None]
        counts = count_from(patterns, jnp.minimum(lows, PAST_INFINITY).reshape(-1))
        enough = counts.reshape(lows.shape) >= ranks[:, None]
        return prefixes + (jnp.sum(enough, axis=1, dtype=jnp.uint32) << shift)

    zeros = _axes.as_varying(jnp.zeros(ranks.shape, jnp.uint32), _axes.varying_axes(patterns))
    return jax.lax.fori_loop(0, 32 // _DIGIT, step, zeros)
