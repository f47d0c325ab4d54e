"""Integers from -levels to levels: rounding numbers to them, and their codes.

There are only plain versions: XLA fuses them with the operation that makes the numbers, and the
Mosaic kernel rounds values in its registers with `round_to_levels`.
"""

import jax
import jax.numpy as jnp


def width_for(levels: int) -> int:
    """The bits of a code that counts from -levels to levels: ceil(log2(2 levels + 1))."""
    return (2 * levels).bit_length()


def level_of(codes: jax.Array, levels: int) -> jax.Array:
    """The integers of codes in two's complement, uint8 of any shape, as float32."""
    unused = 8 - width_for(levels)
    high = jax.lax.bitcast_convert_type(codes << unused, jnp.int8)
    return (high >> unused).astype(jnp.float32)


def round_to_levels(numbers: jax.Array, bits: jax.Array, levels: int) -> jax.Array:
    """Rounds to the nearest integer or to a random neighbour.

    Args:
      numbers: float32 array; numbers beyond -levels and levels are clipped.
      bits: uint32 words, random ones of the shape of the numbers or `random_bits.HALF`. A number
        is rounded up if its fraction plus `bits / 2^32` reaches one; HALF rounds to nearest, ties
        away from zero.
      levels: 1 to 127.

    Returns:
      int32 array of the shape of the numbers; 0 for NaN.
    """
    # Fixed point with F fractional bits, because float32 would round the sum of a number and a
    # random fraction once more. F is the largest for which `levels` + 1 fits into 31 bits.
    F = 31 - levels.bit_length()
    magnitude = jnp.minimum(jnp.abs(numbers), jnp.float32(levels))
    fixed = (magnitude * jnp.float32(2.0**F)).astype(jnp.int32)
    fraction = (bits >> (32 - F)).astype(jnp.int32)
    level = (fixed + fraction) >> F
    # Negation by arithmetic with 0 or -1 uses `level` once. XLA on GPU computes a value with two
    # uses, such as the branches of a select, in a separate pass.
    sign = jax.lax.bitcast_convert_type(numbers, jnp.int32) >> 31
    return (level ^ sign) - sign
