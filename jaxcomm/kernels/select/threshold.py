"""The k-th largest magnitude."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxcomm import _axes
from jaxcomm.kernels import _implementations
from jaxcomm.kernels.select.compaction import compact_band
from jaxcomm.kernels.select.magnitudes import PAST_INFINITY, count_from, patterns_of
from jaxcomm.kernels.select.selection import compact, require_vector

_DIGIT = 4  # bits of the result that one pass over the data finds
_SAMPLE = 2**17
_SIGMAS = 4
# Entries that a GPU sorts at once: passes over fewer would each be shorter than their launch.
_SORTED = 2**20
_FEW = 8  # on a GPU, all that may be among the largest are sorted if they are 1/8 of x or less

Kths = Callable[[jax.Array, jax.Array], jax.Array]


def threshold_for(
    x: jax.Array, k: int, *, implementation: _implementations.Option = None
) -> jax.Array:
    """The k-th largest `|x|`, exactly; as a threshold it selects k entries and those that tie.

    If fewer than k entries are neither zero nor NaN, the result is the smallest positive float,
    2^-149, which selects all of them. Compare it as `compact` does: in arithmetic some backends
    take denormals for zero.

    A sample gives two thresholds with the k-th magnitude almost surely between them. The entries of
    x between them are compacted, and the k-th magnitude is searched for among these alone. On GPUs
    all entries above the lower of the two are compacted, and sorted. The search takes all of x
    where the sample was misleading, or too many entries are equal.

    Args:
      x: float32 array `(n,)`. NaN counts as zero.
      k: 1 to n.
      implementation: which implementation of `compact` takes entries out, on GPUs.

    Returns:
      float32 scalar, positive.

    Raises:
      TypeError: for another dtype.
      ValueError: if x is not a vector, or has no k-th largest entry.
    """
    x = require_vector("threshold_for", x)
    if not 1 <= k <= x.size:
        raise ValueError(f"k is 1 to n = {x.size}, got {k}.")
    on_gpu = functools.partial(_by_sorting, k=k, implementation=implementation)
    on_cpu = functools.partial(_by_digits, k=k)
    pattern = jax.lax.platform_dependent(x, cpu=on_cpu, default=on_gpu)
    return jax.lax.bitcast_convert_type(jnp.maximum(pattern, 1), jnp.float32)


def _by_digits(x: jax.Array, k: int) -> jax.Array:
    """For CPUs: counting, in few passes over few entries."""
    if x.size < 4 * _SAMPLE:
        return _kth(_digits, patterns_of(x), k)
    return _kth_in_band(_digits, x, k)


def _by_sorting(x: jax.Array, k: int, implementation: _implementations.Option) -> jax.Array:
    """For GPUs, where many short passes take longer than sorting."""
    if x.size <= _SORTED:
        return _kth(_sorted, patterns_of(x), k)
    if k > x.size // _FEW:
        return _kth_in_band(_sorted, x, k)
    sample, rank, spread = _sample_of(x, k)
    low, _ = _between(_sorted, sample, rank, spread)
    capacity = k + math.ceil(2 * spread / sample.size * x.size)
    least = jax.lax.bitcast_convert_type(low, jnp.float32)
    above = compact(x, least, capacity, implementation=implementation)
    # Below the pattern 1 there are only zeros, so with `low` at 1 fewer than k entries will do.
    found = ((above.count >= k) | (low == 1)) & (above.count <= capacity)
    return jax.lax.cond(
        found,
        lambda: _kth(_sorted, patterns_of(above.values), k),
        lambda: _kth(_digits, patterns_of(x), k),
    )


def _kth_in_band(kths: Kths, x: jax.Array, k: int) -> jax.Array:
    """The result of `_kth`, for many entries: those between two thresholds are searched."""
    sample, rank, spread = _sample_of(x, k)
    low, high = _between(kths, sample, rank, spread)
    capacity = math.ceil(3 * spread / sample.size * x.size)
    inside = compact_band(x, low, high + 1, capacity)
    above = count_from(patterns_of(x), high[None] + 1)[0]
    # As in `_by_sorting`.
    found = (above < k) & ((above + inside.count >= k) | (low == 1)) & (inside.count <= capacity)
    return jax.lax.cond(
        found,
        lambda: _kth(kths, patterns_of(inside.values), k - above),
        lambda: _kth(_digits, patterns_of(x), k),
    )


def _sample_of(x: jax.Array, k: int) -> tuple[jax.Array, float, float]:
    """The patterns of a sample, the rank in it of the k-th, and how far off that may be."""
    sample, share = x[:: _stride(x.size)], k / x.size
    spread = _SIGMAS * math.sqrt(sample.size * share * (1 - share)) + 2
    return patterns_of(sample), share * sample.size, spread


def _stride(n: int) -> int:
    """Odd: gradients of a matrix differ by column, and often it has 2^m columns."""
    return (n // _SAMPLE - 1) | 1


def _between(
    kths: Kths, patterns: jax.Array, rank: float, spread: float
) -> tuple[jax.Array, jax.Array]:
    """The patterns `spread` ranks below and above a rank; at the ends 1 and infinity's pattern."""
    below, above = math.ceil(rank + spread), math.floor(rank - spread)
    # Both in one search, at ranks that there are; where there is none, its result is not used.
    low, high = kths(patterns, jnp.asarray([min(below, patterns.size), max(above, 1)], jnp.int32))
    low = low if below <= patterns.size else jnp.uint32(1)
    high = high if above >= 1 else jnp.uint32(PAST_INFINITY - 1)
    return jnp.maximum(low, 1), jnp.maximum(high, 1)


def _kth(kths: Kths, patterns: jax.Array, k: int | jax.Array) -> jax.Array:
    """The largest pattern that k patterns reach; 0 if fewer than k are positive."""
    return kths(patterns, jnp.asarray(k, jnp.int32)[None])[0]


def _sorted(patterns: jax.Array, ranks: jax.Array) -> jax.Array:
    """`_kth` of each rank, up to infinity's pattern, uint32 `(m,)`: all patterns are sorted."""
    in_order = jax.lax.sort(jnp.where(patterns < PAST_INFINITY, patterns, jnp.uint32(0)))
    return in_order.at[patterns.size - ranks].get(mode="clip")


def _digits(patterns: jax.Array, ranks: jax.Array) -> jax.Array:
    """The same, found digit by digit from the highest: each is the largest that k still reach."""
    digits = jnp.arange(1, 2**_DIGIT, dtype=jnp.uint32)

    def step(i: jax.Array, prefixes: jax.Array) -> jax.Array:
        shift = (32 - _DIGIT * (i + 1)).astype(jnp.uint32)
        lows = prefixes[:, None] + (digits << shift)[None]
        counts = count_from(patterns, jnp.minimum(lows, PAST_INFINITY).reshape(-1))
        enough = counts.reshape(lows.shape) >= ranks[:, None]
        return prefixes + (jnp.sum(enough, axis=1, dtype=jnp.uint32) << shift)

    zeros = _axes.as_varying(jnp.zeros(ranks.shape, jnp.uint32), _axes.varying_axes(patterns))
    return jax.lax.fori_loop(0, 32 // _DIGIT, step, zeros)
