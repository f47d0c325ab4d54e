"""Rounding float32 to powers of two, on its bits: no logarithm, and denormals come out right.

A magnitude between the powers 2^e and 2^(e+1) has the exponent field e + 127, and its mantissa is
the 23-bit fraction of the way up. Adding a random 23-bit number therefore carries into the exponent
with just the probability of rounding up that makes the mean exact; adding a half rounds to nearest.
Denormals lie likewise between 0 and 2^-126.

The plain version below is the specification, and so far the only one: XLA fuses it with the random
bits before it and the packing after it.
"""

import jax
import jax.numpy as jnp

HALF = 2**31  # the random bits that round to nearest, ties up
NONFINITE = 255

_MANTISSA = 23


def exponents(
    x: jax.Array,
    bits: jax.Array,
    *,
    lowest: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """The exponent field of the power of two that each magnitude is rounded to.

    Args:
      x: float32 array.
      bits: uint32 random words of its shape, or the scalar HALF for the nearest power.
      lowest: exponent fields that broadcast to the shape of x, uint32 from 1 to 254: magnitudes
        below this power are rounded to it or to zero. None stands for 1, which is 2^-126.
      implementation: "xla", or None for the best on this device.

    Returns:
      uint32 array of the shape of x: 0 for zero, e + 127 for 2^e, 255 for infinities and NaN.
      What would be rounded up to 2^128 becomes 2^127.

    Raises:
      TypeError: if x is not float32.
      NotImplementedError: for an implementation that does not exist here.
    """
    _require_xla("exponents", implementation)
    if x.dtype != jnp.float32:
        raise TypeError(f"exponents takes float32, got {x.dtype}; write x.astype(float32).")
    magnitude = jax.lax.bitcast_convert_type(x, jnp.uint32) & 0x7FFFFFFF
    exponent = magnitude >> _MANTISSA
    up = (magnitude + (bits >> (32 - _MANTISSA))) >> _MANTISSA
    field = jnp.where(exponent == NONFINITE, exponent, jnp.minimum(up, jnp.uint32(NONFINITE - 1)))
    if lowest is None:
        return field
    # The magnitude over the lowest power, as a fraction of 2^32; XLA leaves open what a shift by
    # more than 31 does.
    leading = jnp.where(exponent > 0, jnp.uint32(1 << _MANTISSA), jnp.uint32(0))
    significand = (magnitude | leading) << (31 - _MANTISSA)
    below = lowest - 1 - jnp.maximum(exponent, jnp.uint32(1))
    share = jnp.where(
        below < 32, (significand >> jnp.minimum(below, jnp.uint32(31))), jnp.uint32(0)
    )
    reached = jnp.where(~bits < share, lowest, jnp.zeros_like(lowest))
    return jnp.where((exponent < lowest) & (lowest > 1), reached, field)


def ceiling(magnitude: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """The exponent field of the least power of two that is no smaller.

    Args:
      magnitude: uint32 array of bit patterns without their sign.
      implementation: "xla", or None for the best on this device.

    Returns:
      uint32 array, what `exponents` returns where it rounds everything up.

    Raises:
      NotImplementedError: for an implementation that does not exist here.
    """
    _require_xla("ceiling", implementation)
    field = jnp.minimum((magnitude + (2**_MANTISSA - 1)) >> _MANTISSA, jnp.uint32(NONFINITE - 1))
    return jnp.where(magnitude >> _MANTISSA == NONFINITE, jnp.uint32(NONFINITE), field)


def values(
    exponent: jax.Array, negative: jax.Array, *, implementation: str | None = None
) -> jax.Array:
    """Plus or minus the power of two with an exponent field; zero for 0, infinite for 255.

    Args:
      exponent: uint32 array of exponent fields.
      negative: uint32 array, 1 for negative values and 0 for others.
      implementation: "xla", or None for the best on this device.

    Returns:
      float32 array.

    Raises:
      NotImplementedError: for an implementation that does not exist here.
    """
    _require_xla("values", implementation)
    pattern = (negative << 31) | (exponent << _MANTISSA)
    return jax.lax.bitcast_convert_type(pattern, jnp.float32)


def _require_xla(name: str, implementation: str | None) -> None:
    if implementation not in (None, "xla"):
        raise NotImplementedError(
            f'{name} has no implementation {implementation!r}; use "xla" or None.'
        )
