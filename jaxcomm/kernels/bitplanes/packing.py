"""One bit per element: packed into words, and unpacked."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.kernels._apart import apart

BITS = 32
# Streams that are reduced at once. XLA on GPU turns this many into a plain loop, as fast as a copy,
# and 32 into a reduction, which takes twice as long.
HALF = BITS // 2
_MINUS_ONE = np.uint32(0xBF800000)  # the pattern of -1.0; that of 1.0 differs in its top bit

# The float dtypes that `pack` takes: the unsigned integer of the same size, and the bit pattern of
# infinity.
_PATTERNS = {"float32": (jnp.uint32, 0x7F800000), "bfloat16": (jnp.uint16, 0x7F80)}


def words_for(n: int) -> int:
    """The number of words that hold n bits, ceil(n / 32)."""
    return -(-n // BITS)


def places_of_short_words(n: int) -> np.ndarray:
    """The coordinates in the last words, which have 31 bits if n is not a multiple of 32.

    There are `32 * words_for(n) - n` such words. Below n = 961 some words have even fewer bits, and
    this function does not apply.

    Returns:
      int32 array `(31, words)`. The values at these coordinates, flat, are packed into exactly
      these words.
    """
    width = words_for(n)
    columns = np.arange(n - (BITS - 1) * width, width, dtype=np.int32)
    return np.arange(BITS - 1, dtype=np.int32)[:, None] * np.int32(width) + columns


def pack(x: jax.Array) -> jax.Array:
    """Packs one bit per element: the element itself if bool, else whether it is positive.

    Zero of either sign and NaN give 0, +inf and positive denormals give 1, on every backend.

    Args:
      x: bool, float32 or bfloat16 array `(..., n)`, for any n; leading axes are independent.

    Returns:
      uint32 array `(..., ceil(n / 32))`.

    Raises:
      TypeError: for another dtype.
      ValueError: for a scalar.
    """
    bits = votes(x)
    *lead, n = bits.shape
    width = words_for(n)
    whole = n // max(width, 1)
    if whole == BITS:
        streams = bits.reshape(*lead, BITS, width)
        return jax.lax.platform_dependent(streams, cpu=_joined, default=_joined_by_halves)
    # Complete streams are reduced without a copy, and the short one is added by an or. Padding x to
    # 32 complete streams costs 3 times as much on CPU, because every element is tested for padding.
    words = _padded(bits[..., whole * width :].astype(jnp.uint32), width) << whole
    for start in range(0, whole, HALF):
        words |= _reduced(bits, start, min(start + HALF, whole), width) << start
    return words


def _joined(streams: jax.Array) -> jax.Array:
    """The words of bits `(..., streams, W)`, the first stream lowest."""
    streams = streams.astype(jnp.uint32)
    return jax.lax.reduce_or(streams << _stream(streams.shape), axes=(streams.ndim - 2,))


def _joined_by_halves(streams: jax.Array) -> jax.Array:
    """The same for all BITS streams, for GPUs; on CPU it takes 5 times as long as at once."""
    *lead, _, width = streams.shape
    halves = _joined(streams.reshape(*lead, 2, HALF, width))
    # A sum of words without common bits: XLA would join two reductions by "or" into one.
    return jnp.sum(halves << HALF * _stream(halves.shape), axis=-2, dtype=jnp.uint32)


def _reduced(bits: jax.Array, start: int, stop: int, width: int) -> jax.Array:
    """The words of the streams from `start` to `stop`."""
    *lead, _ = bits.shape
    return _joined(bits[..., start * width : stop * width].reshape(*lead, stop - start, width))


def pack_both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`pack(x)` and `pack(negatives(x))`, reading every value once.

    Takes float32 and bfloat16, and raises the errors of both.
    """
    both = votes(x).astype(jnp.uint32) | negatives(x).astype(jnp.uint32) << HALF
    *lead, n = both.shape
    width = words_for(n)
    whole = n // max(width, 1)

    first = _reduced(both, 0, min(whole, HALF), width)
    second = _reduced(both, HALF, max(whole, HALF), width)
    rest = _padded(both[..., whole * width :], width)
    if whole < HALF:
        first |= rest << whole
    elif n > whole * width:
        second |= rest << whole - HALF
    low = jnp.uint32(2**HALF - 1)
    return (first & low) | (second << HALF), (first >> HALF) | (second & ~low)


def unpack(words: jax.Array, n: int) -> jax.Array:
    """Undoes `pack`.

    Args:
      words: uint32 array `(..., ceil(n / 32))`.
      n: the number of bits along the last axis.

    Returns:
      The bits, bool array `(..., n)`.

    Raises:
      TypeError: if the words are not uint32.
      ValueError: if their number is not the one that n bits need.
    """
    _check_words(words, n)
    *lead, width = words.shape
    bits = _streams(words) & 1
    return (bits == 1).reshape(*lead, BITS * width)[..., :n]


def signs(
    words: jax.Array,
    n: int,
    voted: jax.Array | None = None,
    unit: jax.Array | None = None,
    dtype: Any = jnp.float32,
) -> jax.Array:
    """`unit` for every bit that is one and minus it for every other, as an array `(..., n)`.

    Args:
      words: as for `unpack`.
      n: likewise.
      voted: words of the same shape; where their bits are zero, the result is 0. None is all ones.
      unit: float32 scalar, not negative; NaN makes all results NaN. None is 1.
      dtype: of the result, a float.

    Raises:
      TypeError, ValueError: as `unpack` does.
    """
    _check_words(words, n)
    made = functools.partial(_signs, dtype=dtype)
    on_cpu = functools.partial(_signs_apart, dtype=np.dtype(dtype))
    streams = jax.lax.platform_dependent(words, voted, unit, cpu=on_cpu, default=made)
    return streams.reshape(*words.shape[:-1], BITS * words.shape[-1])[..., :n]


def _signs(
    words: jax.Array, voted: jax.Array | None, unit: jax.Array | None, dtype: Any
) -> jax.Array:
    """The signs of all bits, `(..., 32, W)`.

    Compiled separately on CPU, this becomes loops over the streams, which read and write in order.
    Fused with an operation that uses part of the result, it divides by W to find each bit, and is 6
    times as slow.
    """
    minus = _MINUS_ONE
    if unit is not None:
        minus = jax.lax.bitcast_convert_type(unit, jnp.uint32) ^ np.uint32(1 << (BITS - 1))
    signed = jax.lax.bitcast_convert_type((_streams(words) << (BITS - 1)) ^ minus, jnp.float32)
    if voted is not None:
        nothing = jnp.float32(0) if unit is None else unit * 0
        signed = jnp.where(_streams(voted) & 1 == 1, signed, nothing)
    return signed.astype(dtype)


_signs_apart = apart(_signs, static_argnames="dtype")


def _streams(words: jax.Array) -> jax.Array:
    """uint32 `(..., 32, W)`: the words, with the bit of each stream lowest."""
    streams = jnp.broadcast_to(words[..., None, :], (*words.shape[:-1], BITS, words.shape[-1]))
    return streams >> _stream(streams.shape)


def votes(x: jax.Array) -> jax.Array:
    """The bits that `pack` packs: bool of the shape of x, whether it is positive; a bool itself.

    Takes the arguments of `pack` and raises its errors.
    """
    if x.dtype != bool and x.dtype.name not in _PATTERNS:
        raise TypeError(
            f"pack takes bool, float32 or bfloat16, got {x.dtype}; for the signs of other numbers "
            "write pack(x > 0)."
        )
    if x.ndim == 0:
        raise ValueError("pack packs the last axis and got a scalar; write pack(x.reshape(1)).")
    if x.dtype == bool:
        return x
    # A comparison of bit patterns: those of positive numbers are 1 to infinity's, and those of NaN
    # are above. XLA's CPU backend treats denormals as zero when it compares floats; others do not.
    unsigned, infinity = _PATTERNS[x.dtype.name]
    return jax.lax.bitcast_convert_type(x, unsigned) - 1 < unsigned(infinity)


def negatives(x: jax.Array) -> jax.Array:
    """Whether each element is negative: bool of the shape of x, which `pack` packs.

    Zero of either sign and NaN give False. XLA on CPU packs these 6 times as fast as `-x`, because
    it does not vectorize the negation of floats beside operations on their bit patterns.

    Args:
      x: float32 or bfloat16 array.

    Raises:
      TypeError: for another dtype.
    """
    if x.dtype.name not in _PATTERNS:
        raise TypeError(f"negatives takes float32 or bfloat16, got {x.dtype}.")
    unsigned, infinity = _PATTERNS[x.dtype.name]
    below = unsigned(1 << (8 * x.dtype.itemsize - 1))  # the pattern of -0
    return jax.lax.bitcast_convert_type(x, unsigned) - below - 1 < unsigned(infinity)


def require_words(words: jax.Array) -> None:
    """Raises a TypeError for anything but uint32."""
    if words.dtype != jnp.uint32:
        raise TypeError(f"words are uint32, got {words.dtype}; pack makes them.")


def _padded(bits: jax.Array, width: int) -> jax.Array:
    """The bits of a short stream, followed by zeros."""
    padding = [(0, 0)] * (bits.ndim - 1) + [(0, width - bits.shape[-1])]
    return jnp.pad(bits, padding)


def _check_words(words: jax.Array, n: int) -> None:
    """Raises for anything but the words of n bits."""
    require_words(words)
    if n < 0 or words.ndim == 0 or words.shape[-1] != words_for(n):
        raise ValueError(
            f"{n} bits are ceil(n / 32) words along the last axis, got words of shape "
            f"{words.shape}; pass the n that they were packed from."
        )


def _stream(shape: tuple[int, ...]) -> jax.Array:
    """The index along the last axis but one, for every element of `(..., streams, W)`."""
    return jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 2)
