"""Rounding float32 to powers of two on its bits, without logarithms, and exact for denormals.

A magnitude between 2^e and 2^(e+1) has the exponent field e + 127, and its 23 bits of mantissa are
the fraction of the way up. The sum with a random 23-bit number therefore carries into the exponent
with the probability that makes the mean exact; the sum with one half rounds to nearest. The same
holds for denormals, between 0 and 2^-126.

There are only plain versions: XLA fuses them with the random bits before them and the packing after
them.
"""

import jax
import jax.numpy as jnp

NONFINITE = 255

_MANTISSA = 23


def exponents(x: jax.Array, bits: jax.Array, *, lowest: jax.Array | None = None) -> jax.Array:
    """The exponent field of the power of two that each magnitude is rounded to.

    Args:
      x: float32 array.
      bits: uint32 random words of its shape, or the scalar `random_bits.HALF`, which rounds to the
        nearest power, ties up.
      lowest: exponent fields that broadcast to the shape of x, uint32 from 1 to 254. A magnitude
        below this power is rounded to the power or to zero. None means 1, the field of 2^-126.

    Returns:
      uint32 array of the shape of x: 0 for zero, e + 127 for 2^e, 255 for infinities and NaN.
      A magnitude that would be rounded up to 2^128 becomes 2^127.

    Raises:
      TypeError: if x is not float32.
    """
    if x.dtype != jnp.float32:
        raise TypeError(f"exponents takes float32, got {x.dtype}; write x.astype(float32).")
    magnitude = jax.lax.bitcast_convert_type(x, jnp.uint32) & 0x7FFFFFFF
    exponent = magnitude >> _MANTISSA
    up = (magnitude + (bits >> (32 - _MANTISSA))) >> _MANTISSA
    field = jnp.where(exponent == NONFINITE, exponent, jnp.minimum(up, jnp.uint32(NONFINITE - 1)))
    if lowest is None:
        return field
    # The magnitude as a fraction of the lowest power, in units of 2^-32. XLA leaves shifts by more
    # than 31 undefined.
    leading = jnp.where(exponent > 0, jnp.uint32(1 << _MANTISSA), jnp.uint32(0))
    significand = (magnitude | leading) << (31 - _MANTISSA)
    below = lowest - 1 - jnp.maximum(exponent, jnp.uint32(1))
    share = jnp.where(
        below < 32, (significand >> jnp.minimum(below, jnp.uint32(31))), jnp.uint32(0)
    )
    reached = jnp.where(~bits < share, lowest, jnp.zeros_like(lowest))
    return jnp.where((exponent < lowest) & (lowest > 1), reached, field)


def ceiling(magnitude: jax.Array) -> jax.Array:
    """The exponent field of the least power of two that is not below the magnitude.

    Args:
      magnitude: uint32 array of bit patterns without their sign.

    Returns:
      uint32 array: the result of `exponents` if it always rounded up.
    """
    field = jnp.minimum((magnitude + (2**_MANTISSA - 1)) >> _MANTISSA, jnp.uint32(NONFINITE - 1))
    return jnp.where(magnitude >> _MANTISSA == NONFINITE, jnp.uint32(NONFINITE), field)


def values(exponent: jax.Array, negative: jax.Array) -> jax.Array:
    """Plus or minus the power of two with an exponent field; zero for 0, infinite for 255.

    Args:
      exponent: uint32 array of exponent fields.
      negative: uint32 array, 1 for negative values and 0 for others.

    Returns:
      float32 array.
    """
    pattern = (negative << 31) | (exponent << _MANTISSA)
    return jax.lax.bitcast_convert_type(pattern, jnp.float32)
