"""bfloat16 as 16-bit patterns: rounding float32 to them, and widening them again.

The patterns are uint16, because XLA's CPU backend promotes a bfloat16 collective to float32 and
sends 4 bytes an element; it does not change integers.

There are only plain versions: XLA fuses both directions with their neighbours, so neither costs an
additional pass over memory.
"""

import jax
import jax.numpy as jnp

_MAGNITUDE = 0x7FFFFFFF
_LARGEST = 0x7F7F0000  # as a pattern of float32


def round_to_bits(x: jax.Array) -> jax.Array:
    """Rounds to the nearest bfloat16, ties to even, and returns the bit patterns.

    Args:
      x: float array of any shape.

    Returns:
      uint16 array of the same shape. NaN stays NaN; values out of range become infinite.
    """
    return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)


def round_at_random(x: jax.Array, words: jax.Array) -> jax.Array:
    """Rounds to one of the two nearest bfloat16 numbers, so that the expected value is x.

    Args:
      x: float32 array of any shape. What is not finite stays so; magnitudes above the largest
        bfloat16 number are rounded towards zero.
      words: uint32 array of the same shape, 32 independent fair coins for every element.

    Returns:
      bfloat16 array of the same shape.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    is_between = bits & _MAGNITUDE < _LARGEST
    bits += jnp.where(is_between, words >> 16, jnp.uint32(0))
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


def widen_bits(bits: jax.Array) -> jax.Array:
    """The float32 values that the bfloat16 bit patterns stand for, exactly.

    Args:
      bits: uint16 array of any shape.

    Returns:
      float32 array of the same shape.
    """
    # XLA on GPUs may keep more precision than requested: it would drop a conversion to bfloat16 and
    # back, and an error x - widen_bits(round_to_bits(x)) would be zero.
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)
