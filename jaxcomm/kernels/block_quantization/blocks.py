"""The layout of a payload in blocks, and the unit that each block counts in.

A payload is uint8. First come the codes of every block in order; each block's codes begin at a
whole byte. Then come the units, float32 and thus 4 bytes per block. The last block is short if the
block size does not divide n.

There are only plain versions; the Mosaic kernel for whole messages writes the same layout.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.kernels.reductions import INFINITY

# Bit patterns of 2^-126 and of the largest finite float32.
LEAST_NORMAL = 0x00800000
_MAX = 0x7F7FFFFF
# XLA replaces a division by a broadcast scalar with a product with its reciprocal, so this code
# itself multiplies. The reciprocal of a larger number is denormal, and so zero on CPU.
LARGEST_DIVISOR = np.float32(2.0**126)
_CUT = 8  # bits of float32's mantissa that a unit drops


def pieces(n: int, size: int) -> list[tuple[int, int, int]]:
    """(size, start, stop) of all complete blocks together, and of a short last block."""
    whole = n // size * size
    found = [(size, 0, whole), (n - whole, whole, n)]
    return [piece for piece in found if piece[0] and piece[1] < piece[2]] or found[:1]


def cut(x: jax.Array, start: int, stop: int, size: int) -> jax.Array:
    """Elements start to stop of `(..., n)`, as `(..., blocks, size)`."""
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
    """Encodes messages block by block.

    Args:
      x: float32 array `(..., n)`.
      bits: rounding words of the same shape, or a scalar.
      size: the values of a block.
      encode_blocks: maps blocks `(..., b, s)` and their rounding words to codes, uint8
        `(..., b, c)`, and units, float32 `(..., b)`.

    Returns:
      The payloads, uint8 array `(..., m)`.
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
    """Decodes messages: each value is its number times the unit of its block.

    Args:
      payload: uint8 array `(..., m)`.
      n: the values of a message.
      size: the values of a block.
      code_bytes: maps the values of a block to the bytes of its codes.
      numbers: maps codes, uint8 `(..., b, c)`, and the block size s to numbers, float32
        `(..., b, s)`.

    Returns:
      The values, float32 array `(..., n)`.
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
    if len(values) == 1:
        return values[0]
    return jax.lax.platform_dependent(*values, cpu=_put_behind, default=_concatenated)


def _concatenated(whole: jax.Array, rest: jax.Array) -> jax.Array:
    return jnp.concatenate([whole, rest], axis=-1)


def _put_behind(whole: jax.Array, rest: jax.Array) -> jax.Array:
    """The same for CPU, where XLA would fuse padding into the decoding, but not a concatenation."""
    room = jnp.pad(whole, [(0, 0)] * (whole.ndim - 1) + [(0, rest.shape[-1])])
    return jax.lax.dynamic_update_slice_in_dim(room, rest, whole.shape[-1], axis=-1)


def unit_and_factor(top: jax.Array, scale: jax.Array, most: float) -> tuple[jax.Array, jax.Array]:
    """The unit of each block, its scale over `most`, and the factor from values to numbers.

    The mantissa of a unit is rounded up to 16 bits, so products with numbers of 8 bits are exact.
    Hence every device decodes and adds the same values, however the compiler orders or contracts
    the operations, and encoding a decoded block gives the same unit again.

    Args:
      top: uint32 array, the bit pattern of the largest magnitude of each block, from
        `reductions.largest`.
      scale: float32 array of that shape. Its value is ignored where the block is not finite.
      most: the number of units in a scale.

    Returns:
      The units, float32: zero if the unit would be below 2^-126, NaN if the block is not finite.
      The factors: the reciprocals of the units, and zero for a zero unit.
    """
    quotient = jax.lax.bitcast_convert_type(scale * np.float32(1 / most), jnp.uint32)
    # Rounds up, except from at most 2 of 256 parts above a 16-bit mantissa: such an excess is a
    # rounding error of the quotient.
    pattern = (quotient + (2**_CUT - 3)) >> _CUT << _CUT
    pattern = jnp.minimum(pattern, jnp.uint32(_largest_unit(most)))
    unit = jax.lax.bitcast_convert_type(pattern, jnp.float32)
    zero = (top < LEAST_NORMAL) | (pattern < LEAST_NORMAL)
    factor = jnp.where(zero, jnp.float32(0), 1 / unit)
    unit = jnp.where(zero, jnp.float32(0), unit)
    return jnp.where(top < INFINITY, unit, jnp.float32(jnp.nan)), factor


def _largest_unit(most: float) -> int:
    """The bit pattern of the largest unit with a normal reciprocal and a finite `most`-fold."""
    largest = float(np.uint32(_MAX).view(np.float32)) * (1 - 2.0**-24) / most
    return int(np.float32(min(largest, LARGEST_DIVISOR)).view(np.uint32)) >> _CUT << _CUT
