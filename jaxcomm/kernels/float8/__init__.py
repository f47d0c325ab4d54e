"""Floats of 8 bits: rounding float32 to their bit patterns, and widening them again.

XLA on CPU converts through other formats, one element after the other; the plain version below
works on float32's bits instead, and gives the same patterns.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

NAN = 0x7F


def round_to_bits(x: jax.Array, dtype: Any, *, implementation: str | None = None) -> jax.Array:
    """Rounds to the nearest 8-bit float, ties to even, and returns the bit patterns.

    Args:
      x: float32 array of any shape.
      dtype: jnp.float8_e4m3fn or jnp.float8_e5m2.
      implementation: "xla", or None for the best on this device.

    Returns:
      uint8 array of the same shape. NaN stays NaN; what is too large becomes infinite, or NaN
      where the format has no infinity.

    Raises:
      TypeError: if x is not float32.
      NotImplementedError: for an implementation that does not exist here.
    """
    _require_xla("round_to_bits", implementation)
    if x.dtype != jnp.float32:
        raise TypeError(f"round_to_bits takes float32, got {x.dtype}; write x.astype(float32).")
    mantissa, lowest, beyond = _format(dtype)
    pattern = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign, magnitude = pattern >> 31 << 7, pattern & 0x7FFFFFFF
    # Half a unit less one bit if even carries into the exponent, whose bias then changes.
    cut = 23 - mantissa
    rounded = (magnitude + (2 ** (cut - 1) - 1) + (magnitude >> cut & 1)) >> cut
    normal = rounded - ((126 + lowest) << mantissa)
    # A sum whose last bit is worth the least denormal counts these, and rounds to even.
    counter = jnp.float32(2.0 ** (23 + lowest - mantissa))
    counted = jax.lax.bitcast_convert_type(jnp.abs(x) + counter, jnp.uint32)
    denormal = counted - jax.lax.bitcast_convert_type(counter, jnp.uint32)
    code = jnp.where(magnitude < (127 + lowest) << 23, denormal, normal)
    code = jnp.where(magnitude > 0x7F800000, jnp.uint32(NAN), jnp.minimum(code, jnp.uint32(beyond)))
    return (sign | code).astype(jnp.uint8)


def widen_bits(bits: jax.Array, dtype: Any, *, implementation: str | None = None) -> jax.Array:
    """The float32 values that the bit patterns stand for, exactly.

    Args:
      bits: uint8 array of any shape.
      dtype: jnp.float8_e4m3fn or jnp.float8_e5m2.
      implementation: "xla", or None for the best on this device.

    Returns:
      float32 array of the same shape.

    Raises:
      TypeError: if the bits are not uint8.
      NotImplementedError: for an implementation that does not exist here.
    """
    _require_xla("widen_bits", implementation)
    if bits.dtype != jnp.uint8:
        raise TypeError(f"bit patterns are uint8, got {bits.dtype}; round_to_bits makes them.")
    mantissa, lowest, beyond = _format(dtype)
    code = bits.astype(jnp.uint32)
    magnitude = code & 0x7F
    normal = (magnitude << (23 - mantissa)) + ((126 + lowest) << 23)
    special = jnp.where(magnitude == beyond, jnp.uint32(0x7F800000), jnp.uint32(0x7FC00000))
    special = special if beyond < NAN else jnp.uint32(0x7FC00000)
    normal = jnp.where(magnitude < beyond, normal, special)
    denormal = magnitude.astype(jnp.float32) * jnp.float32(2.0 ** (lowest - mantissa))
    denormal = jax.lax.bitcast_convert_type(denormal, jnp.uint32)
    pattern = jnp.where(magnitude < 2**mantissa, denormal, normal)
    return jax.lax.bitcast_convert_type(code >> 7 << 31 | pattern, jnp.float32)


def _format(dtype: Any) -> tuple[int, int, int]:
    """Bits of mantissa, least normal exponent, and the pattern after the largest finite one."""
    info = jnp.finfo(dtype)
    beyond = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7C}
    if info.dtype.name not in beyond:
        raise ValueError(f"dtype must be one of {', '.join(beyond)}, got {info.dtype.name}.")
    lowest = round(math.log2(float(info.smallest_normal)))
    return info.nmant, lowest, beyond[info.dtype.name]


def _require_xla(name: str, implementation: str | None) -> None:
    if implementation not in (None, "xla"):
        raise NotImplementedError(
            f'{name} has no implementation {implementation!r}; use "xla" or None.'
        )
