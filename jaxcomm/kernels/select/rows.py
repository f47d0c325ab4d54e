"""The largest entries of every row of a matrix, as many of each.

They are listed in the order of `packing.pack`, by the word of a row and then by the bit, as a CPU
finds them without sorting: place 32 w + b of a row of W words is column b W + w.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.kernels import reductions
from jaxcomm.kernels.bitplanes import packing
from jaxcomm.kernels.select.magnitudes import (
    PAST_INFINITY,
    bit_with_rank,
    first_bits,
    patterns_of,
)

# A sample has the first eighth of each stretch.
_STRETCH, _PART = 512, 8
# How often a guess is mended before bisection. It is supposed that half as many values reach a
# magnitude an eighth of an octave higher; at a few percent, between a sixth of it for gradients
# with residuals and a third for values with long tails.
_GUESSES, _HALVING = 6, 2**23 / 8


def largest_of_rows(x: jax.Array, k: int, least: float) -> jax.Array:
    """Where the k largest entries of every row are, by magnitude.

    Entries of less than `least` are not selected. Which of those are taken that tie for the last
    place, depends on the backend.

    Args:
      x: float32 array `(rows, n)`, without NaN.
      k: 1 to n.
      least: the smallest magnitude that is selected, a positive normal number.

    Returns:
      int32 array `(rows, k)` of places in ascending order, with `places_in(n)` in the last slots of
      a row that has fewer entries. `columns_of` turns them into columns.

    Raises:
      TypeError: for another dtype.
      ValueError: if x is not a matrix or k is not in its range.
    """
    if x.dtype != jnp.float32:
        raise TypeError(f"largest_of_rows takes float32, got {x.dtype}.")
    if x.ndim != 2 or not 1 <= k <= x.shape[1]:
        raise ValueError(f"largest_of_rows takes a matrix and 1 <= k <= n, got {x.shape}, k={k}.")
    first = int(np.float32(least).view(np.uint32))
    by_words = functools.partial(_by_words, k=k, first=first)
    by_bits = functools.partial(_by_bits, k=k, first=first)
    return jax.lax.platform_dependent(x, cpu=by_words, default=by_bits)


def places_in(n: int) -> int:
    """The places in a row of n columns, of which some may have none."""
    return packing.BITS * packing.words_for(n)


def columns_of(places: jax.Array, n: int) -> jax.Array:
    """The columns of places in rows of n, int32 of the same shape; n for `places_in(n)`."""
    word, bit = places >> 5, places & 31  # fewer operations than a division of signed numbers
    width = packing.words_for(n)
    return jnp.where(word < width, bit * width + word, n)


def words_of_rows(bits: jax.Array) -> jax.Array:
    """Neighbours in words, the first lowest: uint32 `(rows, w)` of bool or 0 and 1 `(rows, 32 w)`.

    `packing.pack` is several times as fast for large arrays; in its words neighbours are apart.
    """
    bits = bits.astype(jnp.uint32).reshape(len(bits), -1, packing.BITS)
    shift = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, 2)
    return jnp.sum(bits << shift, axis=2, dtype=jnp.uint32)


def bits_of_rows(words: jax.Array, slots: int) -> jax.Array:
    """Where the bits of every row are that are set.

    Args:
      words: uint32 array `(rows, w)`.
      slots: how many bits of a row are asked for.

    Returns:
      32 times the word and the place in it, from 0 to 31, of the first bits, ascending, int32
      `(rows, slots)`; 32 w in slots beyond the last bit.
    """
    counts = jax.lax.population_count(words).astype(jnp.int32)
    up_to = reductions.running_sum(counts, axis=1)
    slot = jax.lax.broadcasted_iota(jnp.int32, (len(words), slots), 1)
    word = reductions.count_up_to(up_to, slot)
    take = functools.partial(jnp.take_along_axis, axis=1, mode="clip")
    before = jnp.where(word > 0, take(up_to, jnp.maximum(word - 1, 0)), 0)
    bit = bit_with_rank(take(words, word), slot - before)
    return packing.BITS * word + jnp.where(word < words.shape[1], bit, 0)


def _by_words(x: jax.Array, k: int, first: int) -> jax.Array:
    """For CPUs: a few more than k candidates of each row, and among them the k largest.

    A pass over the matrix makes a bit of each entry, and counts them. XLA's `top_k` takes five
    times as long for 3 % of normal values.
    """
    most, n = places_in(k + k // 2), x.shape[1]
    words, count, low = _candidates(x, k, most, first)

    def without_surplus(x: jax.Array, words: jax.Array) -> jax.Array:
        above = _words(x, low + 1)
        return above | first_bits(words & ~above, k - _counts(above))

    keep = lambda x, words: words  # noqa: E731
    words = jax.lax.cond(jnp.any(count > most), without_surplus, keep, x, words)
    places = bits_of_rows(words, most)
    take = functools.partial(jnp.take_along_axis, axis=1, mode="fill")
    found = patterns_of(take(x, columns_of(places, n), fill_value=0))
    return take(places, bits_of_rows(_largest(found, k), k), fill_value=places_in(n))


def _candidates(
    x: jax.Array, k: int, most: int, first: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The k to `most` largest entries of each row, those whose pattern is at least its `low`.

    Where a row has fewer, these are all from `first` on. Where they are more, too many tie at
    `low`: fewer than k are larger.

    Returns:
      The words of `packing.pack`, the number of entries of each row, and `low`.
    """
    wanted = (k + most) / 2

    def goes_on(state: tuple[jax.Array, ...]) -> jax.Array:
        _, _, count, low, past, _ = state
        return jnp.any((count > most) & (past - low > 1))

    def tried(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        number, words, count, low, past, guess = state
        found = _words(x, guess)
        reached = _counts(found)
        is_open, is_low = count > most, reached >= k
        rises, falls = is_open & is_low, is_open & ~is_low
        words = jnp.where(rises[:, None], found, words)
        count, low = jnp.where(rises, reached, count), jnp.where(rises, guess, low)
        past = jnp.where(falls, guess, past)
        halvings = jnp.log2(jnp.maximum(reached, 1).astype(jnp.float32) / wanted)
        closer = guess + (halvings * _HALVING).astype(jnp.int32).astype(jnp.uint32)
        is_inside = (number < _GUESSES) & (low < closer) & (closer < past)
        guess = jnp.where(is_inside, closer, low + (past - low) // 2)
        return number + 1, words, count, low, past, guess

    low = jnp.full(len(x), first, jnp.uint32)
    past = jnp.full_like(low, PAST_INFINITY)
    words = _words(x, low)
    guess = jnp.clip(_guess(x, wanted), low + 1, past - 1)
    state = jnp.int32(0), words, _counts(words), low, past, guess
    _, words, count, low, *_ = jax.lax.while_loop(goes_on, tried, state)
    return words, count, low


def _guess(x: jax.Array, wanted: float) -> jax.Array:
    """A pattern that about as many entries of each row reach as are wanted, found in a sample."""
    rows, n = x.shape
    length = min(n, _STRETCH)
    stretches = x[:, : n // length * length].reshape(rows, -1, length)
    sample = patterns_of(stretches[:, :, : -(-length // _PART)].reshape(rows, -1))
    rank = max(1, round(wanted * sample.shape[1] / n))
    return _kth(lambda tried: _counts(packing.pack(sample >= tried)), sample, rank)[:, 0]


def _words(x: jax.Array, low: jax.Array) -> jax.Array:
    """A bit for each entry, whether its magnitude is at least its row's `low`, a pattern."""
    least = jax.lax.bitcast_convert_type(low, jnp.float32)[:, None]
    # Of `abs` XLA would keep a copy for the loop, which takes as long as three passes.
    return packing.pack((x >= least) | (x <= -least))


def _counts(words: jax.Array) -> jax.Array:
    return jnp.sum(jax.lax.population_count(words), axis=1, dtype=jnp.int32)


def _largest(patterns: jax.Array, k: int) -> jax.Array:
    """The words, as of `words_of_rows`, of what `_is_largest` is true for."""
    kth = _kth(lambda tried: _counts(packing.pack(patterns >= tried)), patterns, k)
    above, ties = words_of_rows(patterns > kth), words_of_rows((patterns == kth) & (kth > 0))
    return above | first_bits(ties, k - _counts(above))


def _kth(count: Callable[[jax.Array], jax.Array], patterns: jax.Array, k: int) -> jax.Array:
    """The k-th largest pattern of every row, `(rows, 1)`, bit by bit; `count` those from one on."""

    def with_bit(number: jax.Array, kth: jax.Array) -> jax.Array:
        tried = kth | (jnp.uint32(1 << 30) >> number.astype(jnp.uint32))
        return jnp.where(count(tried)[:, None] >= k, tried, kth)

    return jax.lax.fori_loop(0, 31, with_bit, jnp.zeros((len(patterns), 1), jnp.uint32))


def _is_largest(patterns: jax.Array, k: int) -> jax.Array:
    """Whether an entry is one of its row's k largest, of those that tie the first; no zeros."""
    kth = _kth(lambda tried: jnp.sum(patterns >= tried, axis=1, dtype=jnp.int32), patterns, k)
    above, ties = patterns > kth, (patterns == kth) & (kth > 0)
    room = k - jnp.sum(above, axis=1, keepdims=True, dtype=jnp.int32)
    return above | (ties & (reductions.running_sum(ties.astype(jnp.int32), axis=1) <= room))


def _by_bits(x: jax.Array, k: int, first: int) -> jax.Array:
    """For others: the bits of the k-th magnitude of every row, from the highest to the lowest."""
    (rows, n), patterns = x.shape, patterns_of(x)
    patterns = jnp.where(patterns >= first, patterns, 0)
    patterns = jnp.pad(patterns, ((0, 0), (0, places_in(n) - n)))
    patterns = patterns.reshape(rows, packing.BITS, -1).swapaxes(1, 2).reshape(rows, -1)
    chosen = _is_largest(patterns, k)
    slot = jnp.where(chosen, reductions.running_sum(chosen.astype(jnp.int32), axis=1) - 1, k)
    row, place = (jax.lax.broadcasted_iota(jnp.int32, chosen.shape, axis) for axis in (0, 1))
    return jnp.full((rows, k), places_in(n), jnp.int32).at[row, slot].set(place, mode="drop")
