"""The k-th largest magnitude."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import _axes
from jaxcomm.kernels import _implementations
from jaxcomm.kernels.reductions import sums_of
from jaxcomm.kernels.select.compaction import Selected, compact_band
from jaxcomm.kernels.select.hashing import MOST, hashed
from jaxcomm.kernels.select.magnitudes import (
    PAST_INFINITY,
    TILE,
    count_from,
    lowest_for,
    patterns_of,
)
from jaxcomm.kernels.select.selection import compact, require_vector

_DIGIT = 4  # bits of the result that one pass over the data finds
_ROW = 128  # patterns whose digits a byte can count
# For exact thresholds: the values of a sample, and how far off a rank in it may be.
_SAMPLE = 2**17
_SIGMAS = 4
_SLACK = 8  # room for k/8 more: the threshold ignores the lower 16 bits of patterns
# For near thresholds: how many values of a sample should reach it, and the least number of values
# of x for each of the sample.
_RANK, _LEAST_STRIDE = 1000, 5
_RUN = 8  # neighbours in a sample: memory is read in sectors of this many values
# Entries that a GPU sorts at once: passes over fewer would each be shorter than their launch.
_SORTED = 2**20
_FEW = 8  # on a GPU, all candidates for the largest are sorted if they are 1/8 of x or less

Kths = Callable[[jax.Array, jax.Array], jax.Array]


def threshold_for(
    x: jax.Array, k: int, *, implementation: _implementations.Option = None
) -> jax.Array:
    """The exact k-th largest `|x|`; as a threshold it selects k entries and those that tie.

    If fewer than k entries are neither zero nor NaN, the result is the smallest positive float,
    2^-149, which selects all of them. Compare it as `compact` does: in arithmetic some backends
    treat denormals as zero.

    A sample gives two thresholds with the k-th magnitude almost surely between them. The entries of
    x between them are compacted, and the k-th magnitude is searched for among these alone. On GPUs
    all entries above the lower of the two are compacted, and sorted. The search uses all of x if
    the sample was misleading, or if too many entries are equal.

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
    x = _argument("threshold_for", x, k)
    on_gpu = functools.partial(_by_sorting, k=k, implementation=implementation)
    on_cpu = functools.partial(_by_digits, k=k)
    pattern = jax.lax.platform_dependent(x, cpu=on_cpu, default=on_gpu)
    return jax.lax.bitcast_convert_type(jnp.maximum(pattern, 1), jnp.float32)


def threshold_near(
    x: jax.Array, k: int, number: jax.Array, *, implementation: _implementations.Option = None
) -> jax.Array:
    """A threshold that about k of `|x|` reach; for a short x exactly that of `threshold_for`.

    For a long x a sample is searched by the first 16 bits of the patterns, for a threshold that
    about 1000 of the sample reach. For normal values, 1 to 3 % more than k reach it on average,
    give or take 3 %. All backends find the same threshold.

    Args:
      x: as in `threshold_for`, with its errors.
      k: likewise.
      number: int32 scalar, the number of the sample; with another in each step, no place is left
        out for long.
      implementation: as in `threshold_for`.

    Returns:
      float32 scalar, positive.
    """
    x = _argument("threshold_near", x, k)
    sample = _near(x, k, number)
    if sample is None:
        return threshold_for(x, k, implementation=implementation)
    rank = max(1, round(k * sample.size / x.size))
    pattern = jax.lax.platform_dependent(
        sample & ~jnp.uint32(2**16 - 1),
        cpu=lambda patterns: _kth(_digits, patterns, rank),
        default=lambda patterns: _counted_at_once(patterns, rank),
    )
    return jax.lax.bitcast_convert_type(jnp.maximum(pattern, 1), jnp.float32)


def count_near(x: jax.Array, threshold: jax.Array, k: int, number: jax.Array) -> jax.Array:
    """About how many of `|x|` reach a threshold that about k reach; exactly, for a short x.

    For a long x they are counted in the sample of `threshold_near`, and the result is off by 3 % at
    about k, give or take.

    Args:
      x: as in `threshold_near`, with its errors.
      threshold: float32 scalar.
      k: as in `threshold_near`.
      number: likewise.

    Returns:
      int32 scalar.
    """
    x = _argument("count_near", x, k)
    sample = _near(x, k, number)
    low = lowest_for(threshold)[None]
    if sample is None:
        return count_from(patterns_of(x), low)[0]
    count = count_from(sample, low)[0].astype(jnp.float32)
    return jnp.round(count * (x.size / sample.size)).astype(jnp.int32)


def _near(x: jax.Array, k: int, number: jax.Array) -> jax.Array | None:
    """The patterns of a sample of which about _RANK are among the k largest; None for a short x."""
    stride = _stride(x.size, math.ceil(_RANK * x.size / k))
    if stride < _LEAST_STRIDE:
        return None
    return patterns_of(jax.lax.optimization_barrier(_one_in(stride, _RUN, x, number)))


def _argument(name: str, x: jax.Array, k: int) -> jax.Array:
    x = require_vector(name, x)
    if not 1 <= k <= x.size:
        raise ValueError(f"k is 1 to n = {x.size}, got {k}.")
    return x


def _by_digits(x: jax.Array, k: int) -> jax.Array:
    """For CPUs: counting, in few passes over few entries."""
    all_of = functools.partial(_kth, _digits)
    if x.size < 4 * _SAMPLE:
        return all_of(patterns_of(x), k)
    return _kth_in_band(_digits, all_of, x, k)


def _by_sorting(x: jax.Array, k: int, implementation: _implementations.Option) -> jax.Array:
    """For GPUs, where many short passes take longer than sorting."""
    if x.size <= _SORTED:
        return _kth(_sorted, patterns_of(x), k)
    if not has_candidates(x.size, k):
        return _kth_in_band(_sorted, counted, x, k)
    above, found = candidates(x, k, implementation)
    among = kth_of_list(above, k)
    return jax.lax.cond(found, lambda: among, lambda: counted(patterns_of(x), k))


def has_candidates(n: int, k: int) -> bool:
    """Whether a GPU finds the k largest of n entries among `candidates`."""
    return _SORTED < n and k <= n // _FEW


def candidates(
    x: jax.Array, k: int, implementation: _implementations.Option
) -> tuple[Selected, jax.Array]:
    """The entries above a threshold, found in a sample, that a little more than k should reach.

    Returns:
      The entries, and whether the k largest are all among them; where fewer than k are neither zero
      nor NaN, whether these are.
    """
    sample, rank, spread = _sample_of(x, k, _SAMPLE // 2)
    below = math.ceil(rank + spread)
    low = _kth_of_halves(sample, below) if below <= sample.size else jnp.uint32(0)
    low = jnp.maximum(low, 1)
    capacity = k + k // _SLACK + math.ceil(2 * spread / sample.size * x.size)
    least = jax.lax.bitcast_convert_type(low, jnp.float32)
    above = compact(x, least, capacity, implementation=implementation)
    # Below the pattern 1 there are only zeros, so with `low` at 1 fewer than k entries are enough.
    return above, ((above.count >= k) | (low == 1)) & (above.count <= capacity)


def kth_of_list(entries: Selected, k: int) -> jax.Array:
    """The pattern of the k-th largest magnitude of a list, 0 if there are fewer."""
    return _kth(_sorted, patterns_of(entries.values), k)


def _kth_in_band(
    kths: Kths, all_of: Callable[[jax.Array, int], jax.Array], x: jax.Array, k: int
) -> jax.Array:
    """The result of `_kth`, for many entries: those between two thresholds are searched.

    `all_of` searches all of them if the sample was misleading.
    """
    sample, rank, spread = _sample_of(x, k)
    low, high = _between(kths, sample, rank, spread)
    capacity = math.ceil(3 * spread / sample.size * x.size)
    inside = compact_band(x, low, high + 1, capacity)
    above = count_from(patterns_of(x), high[None] + 1)[0]
    # As in `candidates`.
    found = (above < k) & ((above + inside.count >= k) | (low == 1)) & (inside.count <= capacity)
    among = _kth(kths, patterns_of(inside.values), k - above)
    return jax.lax.cond(found, lambda: among, lambda: all_of(patterns_of(x), k))


def _sample_of(x: jax.Array, k: int, size: int = _SAMPLE) -> tuple[jax.Array, float, float]:
    """The patterns of a sample, the rank in it of the k-th, and how far off that may be."""
    sample, share = _one_in(_stride(x.size, size), 1, x, jnp.int32(0)), k / x.size
    spread = _SIGMAS * math.sqrt(sample.size * share * (1 - share)) + 2
    return patterns_of(sample), share * sample.size, spread


def _stride(n: int, size: int = _SAMPLE) -> int:
    return min(max(n // size, 1), MOST)


def _one_in(stride: int, length: int, x: jax.Array, number: jax.Array) -> jax.Array:
    """A sample of a vector: a run of some length of each `stride` in a row, at a hashed place.

    Gradients of a matrix differ by column. At equal distances a sample would see few columns where
    distance and width have a common divisor.
    """
    runs = x[: x.size // (stride * length) * stride * length].reshape(-1, length)
    stretch = jnp.arange(runs.shape[0] // stride, dtype=jnp.int32)
    chosen = stretch * stride + hashed(stretch, number, stride)
    sample = runs.at[chosen].get(mode="promise_in_bounds", indices_are_sorted=True)
    return sample.reshape(-1)


def _between(
    kths: Kths, patterns: jax.Array, rank: float, spread: float
) -> tuple[jax.Array, jax.Array]:
    """The patterns `spread` ranks below and above a rank; at the ends 1 and infinity's pattern."""
    below, above = math.ceil(rank + spread), math.floor(rank - spread)
    # Both in one search, at ranks that exist; where a rank does not exist, its result is not used.
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


def _kth_of_halves(patterns: jax.Array, k: int) -> jax.Array:
    """`_kth` of patterns without their lower halves, for GPUs, which sort 16 bits twice as fast."""
    halves = (jnp.where(patterns < PAST_INFINITY, patterns, 0) >> 16).astype(jnp.uint16)
    return jax.lax.sort(halves)[patterns.size - k].astype(jnp.uint32) << 16


def _digits(patterns: jax.Array, ranks: jax.Array) -> jax.Array:
    """The same, found digit by digit from the highest: each is the largest that k still reach."""
    digits = np.arange(1, 2**_DIGIT, dtype=np.uint32)
    patterns = jnp.pad(patterns, (0, -patterns.size % TILE))  # counted in whole tiles

    def step(i: jax.Array, prefixes: jax.Array) -> jax.Array:
        shift = (32 - _DIGIT * (i + 1)).astype(jnp.uint32)
        lows = prefixes[:, None] + (digits << shift)[None]
        counts = count_from(patterns, jnp.minimum(lows, PAST_INFINITY).reshape(-1))
        enough = counts.reshape(lows.shape) >= ranks[:, None]
        return prefixes + (jnp.sum(enough, axis=1, dtype=jnp.uint32) << shift)

    zeros = _axes.as_varying(jnp.zeros(ranks.shape, jnp.uint32), _axes.varying_axes(patterns))
    return jax.lax.fori_loop(0, 32 // _DIGIT, step, zeros)


def _counted_at_once(patterns: jax.Array, k: int) -> jax.Array:
    """`_kth` for GPUs, of few patterns without their lower halves: three digits of 5 bits."""
    prefix, real = jnp.uint32(0), patterns < PAST_INFINITY
    for shift in (26, 21, 16):
        lows = prefix + (jnp.arange(1, 32, dtype=jnp.uint32) << shift)
        reached = (patterns[None] >= lows[:, None]) & real[None]
        enough = jnp.sum(reached, axis=1, dtype=jnp.int32) >= k
        prefix += jnp.sum(enough, dtype=jnp.uint32) << shift
    return prefix


def counted(patterns: jax.Array, k: int) -> jax.Array:
    """`_kth` for GPUs, digit by digit too, in few kernels a digit and without a loop.

    It is for a branch that is not taken. All of it can be part of a CUDA graph, and then the branch
    takes 0.1 to 0.2 ms. What cannot, such as sorting, makes the host wait in every step to learn
    which branch it is.
    """
    prefix = jnp.uint32(0)
    for shift in range(32 - _DIGIT, -1, -_DIGIT):
        counts = _counts_of_digits(patterns, prefix, shift)
        reached, digit = jnp.int32(0), jnp.uint32(0)
        for count in counts[:0:-1]:
            reached += count
            digit += (reached >= k).astype(jnp.uint32)
        prefix += digit << shift
    return prefix


def _counts_of_digits(patterns: jax.Array, prefix: jax.Array, shift: int) -> list[jax.Array]:
    """How many patterns there are with each next digit after a prefix, int32 scalars.

    The last also counts all larger ones, up to infinity's; smaller ones are in none.
    """
    inside = (patterns >= prefix) & (patterns < PAST_INFINITY)
    digit = jnp.minimum((patterns - prefix) >> shift, 2**_DIGIT - 1)
    # Four counts are the bytes of a word, in rows that are too short for one to overflow.
    one = jnp.where(inside, jnp.uint32(1) << 8 * (digit % 4), 0)
    words = [jnp.where(digit // 4 == i, one, 0) for i in range(2**_DIGIT // 4)]
    rows = [jnp.pad(word, (0, -word.size % _ROW)).reshape(-1, _ROW) for word in words]
    sums = sums_of(rows, axis=1)
    bins = [(s >> 8 * j & 0xFF).astype(jnp.int32) for s in sums for j in range(4)]
    return sums_of(bins, axis=0)
