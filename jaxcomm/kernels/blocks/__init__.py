"""Messages cut into blocks: where they lie in a payload, and the unit that each counts in.

A payload is uint8: the codes of every block in order, each beginning at a byte, then the units,
float32 and so 4 bytes a block. The last block is short where the size does not divide n.

The plain versions below are the specification, and so far the only ones; kernels that encode whole
messages keep to them.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

LEAST_NORMAL = 0x00800000  # bit patterns: 2^-126,
INFINITY = 0x7F800000
_MAX = 0x7F7FFFFF  # and the largest finite float32
# XLA makes a product with the reciprocal of a division by what is broadcast, so that is what stands
# here; the reciprocals of larger numbers are denormal, zero on CPU.
LARGEST_DIVISOR = np.float32(2.0**126)
_CUT = 8  # the bits of mantissa that a unit does not have


def pieces(n: int, size: int) -> list[tuple[int, int, int]]:
    """(size, start, stop) of the whole blocks, and of the short one; no block is padded."""
    whole = n // size * size
    found = [(size, 0, whole), (n - whole, whole, n)]
    return [piece for piece in found if piece[0] and piece[1] < piece[2]] or found[:1]


def cut(x: jax.Array, start: int, stop: int, size: int) -> jax.Array:
    """`(..., n)` from start to stop, as `(..., blocks, size)`."""
    return x[..., start:stop].reshape(*x.shape[:-1], (stop - start) // size, size)


def joined(blocks: jax.Array) -> jax.Array:
    """`(..., blocks, size)` as `(..., blocks * size)`."""
    return blocks.reshape(*blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1])


def encode(
    x: jax.Array,
    bits: jax.Array,
    size: int,
    encode_blocks: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
) -> jax.Array:
    """The payloads of messages.

    Args:
      x: float32 array `(..., n)`.
      bits: an array of that shape, cut into blocks as x is; or a scalar.
      size: of a block.
      encode_blocks: from blocks `(..., b, s)` and their bits to codes, uint8 `(..., b, c)`, and
        units, float32 `(..., b)`.

    Returns:
      uint8 array `(..., m)`.
    """
    codes, units = [], []
    for length, start, stop in pieces(x.shape[-1], size):
        own = cut(bits, start, stop, length) if bits.ndim else bits
        code, unit = encode_blocks(cut(x, start, stop, length), own)
        codes.append(joined(code))
        units.append(joined(jax.lax.bitcast_convert_type(unit, jnp.uint8)))
    return jnp.concatenate([*codes, *units], axis=-1)


def decode(
    payload: jax.Array,
    n: int,
    size: int,
    code_bytes: Callable[[int], int],
    numbers: Callable[[jax.Array, int], jax.Array],
) -> jax.Array:
    """The values of messages, numbers times units.

    Args:
      payload: uint8 array `(..., m)`.
      n: the values of a message.
      size: of a block.
      code_bytes: the bytes of the codes of a block, by the values that it has.
      numbers: from codes, uint8 `(..., b, c)`, and the size s to numbers, float32 `(..., b, s)`.

    Returns:
      float32 array `(..., n)`.
    """
    units = cut(payload, payload.shape[-1] - 4 * -(-n // size), payload.shape[-1], 4)
    units = jax.lax.bitcast_convert_type(units, jnp.float32)
    values, byte, block = [], 0, 0
    for length, start, stop in pieces(n, size):
        count, width = (stop - start) // length, code_bytes(length)
        codes = cut(payload, byte, byte + count * width, width)
        unit = units[..., block : block + count, None]
        values.append(joined(numbers(codes, length) * unit))
        byte, block = byte + count * width, block + count
    return values[0] if len(values) == 1 else jnp.concatenate(values, axis=-1)


def unit_and_factor(top: jax.Array, scale: jax.Array, most: float) -> tuple[jax.Array, jax.Array]:
    """The unit of which `most` make up the scale of a block, and what to multiply with for numbers.

    The mantissa of a unit is rounded up to 16 bits, so that products with numbers of 8 bits are
    exact: however the compiler orders or contracts what is decoded and added up, every device gets
    the same, and encoding what was decoded gives the same unit.

    Args:
      top: uint32 array, the bit patterns of the largest magnitudes, as `reductions.largest`.
      scale: float32 array of that shape; anything where the largest magnitude is not finite.
      most: the units that make up the scale.

    Returns:
      The units, float32: 0 where 2^-126 is more than them, and NaN where a block is not finite. The
      factors: reciprocals of the units, 0 for 0.
    """
    quotient = jax.lax.bitcast_convert_type(scale * np.float32(1 / most), jnp.uint32)
    # Up, unless it is by a rounding error that the quotient is above a number of 16 bits.
    pattern = (quotient + (2**_CUT - 3)) >> _CUT << _CUT
    pattern = jnp.minimum(pattern, jnp.uint32(_largest_unit(most)))
    unit = jax.lax.bitcast_convert_type(pattern, jnp.float32)
    zero = (top < LEAST_NORMAL) | (pattern < LEAST_NORMAL)
    factor = jnp.where(zero, jnp.float32(0), 1 / unit)
    unit = jnp.where(zero, jnp.float32(0), unit)
    return jnp.where(top < INFINITY, unit, jnp.float32(jnp.nan)), factor


def _largest_unit(most: float) -> int:
    """The pattern of the largest unit whose reciprocal is normal, and `most` of it finite."""
    largest = float(np.uint32(_MAX).view(np.float32)) * (1 - 2.0**-24) / most
    return int(np.float32(min(largest, LARGEST_DIVISOR)).view(np.uint32)) >> _CUT << _CUT
