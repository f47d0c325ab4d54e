"""Floats of 8 bits: rounding float32 to their bit patterns, and widening them again.

XLA on CPU converts through other formats, one element after another. The plain versions below work
on float32's bits instead and give the same patterns. There are no other versions; the Mosaic kernel
of blocks rounds values in its registers with `round_to_bits`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

NAN = 0x7F


def round_to_bits(x: jax.Array, dtype: Any) -> jax.Array:
    """Rounds to the nearest 8-bit float, ties to even, and returns the bit patterns.

    Args:
      x: float32 array of any shape.
      dtype: jnp.float8_e4m3fn or jnp.float8_e5m2.

    Returns:
      uint8 array of the same shape. NaN stays NaN. Values out of range become infinite, or
      NaN where the format has no infinity.

    Raises:
      TypeError: if x is not float32.
    """
    if x.dtype != jnp.float32:
        raise TypeError(f"round_to_bits takes float32, got {x.dtype}; write x.astype(float32).")
    mantissa, lowest, beyond = _format(dtype)
    pattern = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign, magnitude = pattern >> 31 << 7, pattern & 0x7FFFFFFF
    # Ties go to even: just under half a unit is added, and one bit more if the last bit is odd. A
    # carry goes into the exponent, whose bias is adjusted afterwards.
    cut = 23 - mantissa
    rounded = (magnitude + (2 ** (cut - 1) - 1) + (magnitude >> cut & 1)) >> cut
    normal = rounded - ((126 + lowest) << mantissa)
    # In a float32 around 2^23 least denormals, the last bit is worth one of them: the addition
    # itself counts them and rounds to even.
    counter = np.float32(2.0 ** (23 + lowest - mantissa))
    counted = jax.lax.bitcast_convert_type(jnp.abs(x) + counter, jnp.uint32)
    denormal = counted - counter.view(np.uint32)
    code = jnp.where(magnitude < (127 + lowest) << 23, denormal, normal)
    code = jnp.where(magnitude > 0x7F800000, jnp.uint32(NAN), jnp.minimum(code, jnp.uint32(beyond)))
    return (sign | code).astype(jnp.uint8)


def widen_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """The float32 values that the bit patterns stand for, exactly.

    Args:
      bits: uint8 array of any shape.
      dtype: jnp.float8_e4m3fn or jnp.float8_e5m2.

    Returns:
      float32 array of the same shape.

    Raises:
      TypeError: if the bits are not uint8.
    """
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
    """Mantissa bits, lowest normal exponent, and the pattern after the largest finite one."""
    info = jnp.finfo(dtype)
    beyond = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7C}
    if info.dtype.name not in beyond:
        raise ValueError(f"dtype must be one of {', '.join(beyond)}, got {info.dtype.name}.")
    lowest = round(math.log2(float(info.smallest_normal)))
    return info.nmant, lowest, beyond[info.dtype.name]
