"""Integers from -levels to levels, rounded and packed."""

import jax
import jax.numpy as jnp

from jaxcomm.kernels import codes


def width_for(levels: int) -> int:
    """The bits of a code that counts from -levels to levels: ceil(log2(2 levels + 1))."""
    return (2 * levels).bit_length()


def code_bytes(size: int, levels: int) -> int:
    """The bytes of the packed codes of `size` values."""
    return codes.bytes_for(size, width_for(levels))


def encode(numbers: jax.Array, bits: jax.Array, levels: int) -> jax.Array:
    """The nearest or a random integer, in two's complement and packed.

    Args:
      numbers: float32 `(..., n)`; beyond -levels and levels they are cut to these.
      bits: uint32 words that round up by the fraction that is left: random ones for each number,
        or 2^31 for the nearest integer, ties away from zero.
      levels: 1 to 127.

    Returns:
      uint8 `(..., code_bytes(n, levels))`.
    """
    # In fixed point, as the sum of a float and a random fraction would be rounded once more. With
    # F bits below the point, `levels` + 1 just fits into 31 bits.
    F = 31 - levels.bit_length()
    magnitude = jnp.minimum(jnp.abs(numbers), jnp.float32(levels))
    fixed = (magnitude * jnp.float32(2.0**F)).astype(jnp.int32)
    fraction = (bits >> (32 - F)).astype(jnp.int32)
    level = (fixed + fraction) >> F
    # Negated by arithmetic with 0 or -1, as XLA on GPU makes a pass of its own of what is used
    # twice, such as by a choice between it and its negative.
    sign = jax.lax.bitcast_convert_type(numbers, jnp.int32) >> 31
    return codes.pack(((level ^ sign) - sign).astype(jnp.uint8), width_for(levels))


def decode(packed: jax.Array, n: int, levels: int) -> jax.Array:
    """The integers, as float32 `(..., n)`."""
    width = width_for(levels)
    code = codes.unpack(packed, n, width)
    high = jax.lax.bitcast_convert_type(code << (8 - width), jnp.int8)
    return (high >> (8 - width)).astype(jnp.float32)
