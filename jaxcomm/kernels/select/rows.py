"""The largest entries of every row of a matrix, as many of each."""

import functools

import jax
import jax.numpy as jnp

from jaxcomm.kernels import reductions
from jaxcomm.kernels.bitplanes import packing
from jaxcomm.kernels.select.magnitudes import PAST_INFINITY, bit_with_rank, patterns_of


def largest_of_rows(x: jax.Array, k: int, least: float) -> jax.Array:
    """Where the k largest entries of every row are, by magnitude.

    Entries of less than `least` are not selected. Which of those are taken that tie for the last
    place, depends on the backend.

    Args:
      x: float32 array `(rows, n)`, without NaN.
      k: 1 to n.
      least: the smallest magnitude that is selected, positive.

    Returns:
      int32 array `(rows, k)` of columns in ascending order, with n in the last slots of a row that
      has fewer entries.

    Raises:
      TypeError: for another dtype.
      ValueError: if x is not a matrix or k is not in its range.
    """
    if x.dtype != jnp.float32:
        raise TypeError(f"largest_of_rows takes float32, got {x.dtype}.")
    if x.ndim != 2 or not 1 <= k <= x.shape[1]:
        raise ValueError(f"largest_of_rows takes a matrix and 1 <= k <= n, got {x.shape}, k={k}.")
    patterns = patterns_of(jnp.where(jnp.abs(x) >= least, x, 0))
    return jax.lax.platform_dependent(
        patterns, cpu=functools.partial(_by_words, k=k), default=functools.partial(_by_bits, k=k)
    )


def _by_words(patterns: jax.Array, k: int) -> jax.Array:
    """For CPUs: a few more than k candidates of each row, and among them the k largest.

    A pass over the matrix makes a bit of each entry, and counts them. XLA's `top_k` takes twice as
    long; here it is for rows in which more entries tie than there are slots for candidates.
    """
    most, n = k + max(k // 2, 1), patterns.shape[1]
    low, count = _lows(patterns, k, most)

    def narrowed(patterns: jax.Array, low: jax.Array) -> jax.Array:
        columns = _places(_words(patterns, low), min(most, n), n)
        found = jnp.take_along_axis(patterns, columns, axis=1, mode="fill", fill_value=0)
        kept = _is_largest(found, k)
        return jnp.sort(jnp.where(kept, columns, n), axis=1)[:, :k]

    def sorted_out(patterns: jax.Array, low: jax.Array) -> jax.Array:
        del low
        found, columns = jax.lax.top_k(patterns.astype(jnp.int32), k)
        return jnp.sort(jnp.where(found > 0, columns, n), axis=1)

    return jax.lax.cond(jnp.all(count <= most), narrowed, sorted_out, patterns, low)


def _words(patterns: jax.Array, low: jax.Array) -> jax.Array:
    """A bit for each entry, whether it is at least its row's `low`."""
    return packing.pack(patterns >= low[:, None])


def _counts(words: jax.Array) -> jax.Array:
    return jnp.sum(jax.lax.population_count(words), axis=1, dtype=jnp.int32)


def _lows(patterns: jax.Array, k: int, most: int) -> tuple[jax.Array, jax.Array]:
    """Patterns that k to `most` entries of their row reach, by bisection, and how many do.

    Where a row has fewer entries, all reach the least; where too many tie, more than `most` do.
    """

    def goes_on(state: tuple[jax.Array, ...]) -> jax.Array:
        low, count, past = state
        return jnp.any((count > most) & (past - low > 1))

    def halved(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        low, count, past = state
        middle = low + (past - low) // 2
        found = _counts(_words(patterns, middle))
        is_done, is_low = count <= most, found >= k
        rises = is_low & ~is_done
        low, count = jnp.where(rises, middle, low), jnp.where(rises, found, count)
        return low, count, jnp.where(is_low | is_done, past, middle)

    low = jnp.ones(len(patterns), jnp.uint32)
    past = jnp.full_like(low, PAST_INFINITY)
    count = _counts(_words(patterns, low))
    low, count, _ = jax.lax.while_loop(goes_on, halved, (low, count, past))
    return low, count


def _places(words: jax.Array, slots: int, n: int) -> jax.Array:
    """The columns of a row's bits, `(rows, slots)`, in some order; n where there are no more."""
    word, bit = bits_of_rows(words, slots)
    there = _numbered(word.shape, 1) < _counts(words)[:, None]
    return jnp.where(there, bit * words.shape[1] + word, n)


def bits_of_rows(words: jax.Array, slots: int) -> tuple[jax.Array, jax.Array]:
    """Where the bits of every row are that are set.

    Args:
      words: uint32 array `(rows, w)`.
      slots: how many bits of a row are asked for.

    Returns:
      The word and the place in it, from 0 to 31, of the first bits, int32 arrays `(rows, slots)`,
      the words in ascending order; anything in slots beyond the last bit.
    """
    up_to = jnp.cumsum(jax.lax.population_count(words).astype(jnp.int32), axis=1)
    slot = _numbered((len(words), slots), 1)
    word = reductions.count_up_to(up_to, slot)
    take = functools.partial(jnp.take_along_axis, axis=1, mode="clip")
    before = jnp.where(word > 0, take(up_to, jnp.maximum(word - 1, 0)), 0)
    return word, bit_with_rank(take(words, word), slot - before)


def _numbered(shape: tuple[int, ...], axis: int) -> jax.Array:
    """The number of each row or column, int32."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _is_largest(patterns: jax.Array, k: int) -> jax.Array:
    """Whether an entry is one of its row's k largest, of those that tie the first; no zeros."""

    def with_bit(number: jax.Array, kth: jax.Array) -> jax.Array:
        tried = kth | (jnp.uint32(1 << 30) >> number.astype(jnp.uint32))
        count = jnp.sum(patterns >= tried[:, None], axis=1, dtype=jnp.int32)
        return jnp.where(count >= k, tried, kth)

    start = jnp.zeros(len(patterns), jnp.uint32)
    kth = jax.lax.fori_loop(0, 31, with_bit, start)[:, None]
    above, ties = patterns > kth, (patterns == kth) & (kth > 0)
    room = k - jnp.sum(above, axis=1, keepdims=True, dtype=jnp.int32)
    return above | (ties & (reductions.running_sum(ties.astype(jnp.int32), axis=1) <= room))


def _by_bits(patterns: jax.Array, k: int) -> jax.Array:
    """For others: the bits of the k-th magnitude of every row, from the highest to the lowest."""
    rows, n = patterns.shape
    chosen = _is_largest(patterns, k)
    slot = jnp.where(chosen, reductions.running_sum(chosen.astype(jnp.int32), axis=1) - 1, k)
    row, columns = _numbered((rows, n), 0), _numbered((rows, n), 1)
    return jnp.full((rows, k), n, jnp.int32).at[row, slot].set(columns, mode="drop")
