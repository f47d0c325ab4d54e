"""Integers from -levels to levels: numbers rounded to them, to nearest or at random, and packed.

The plain versions below are the specification, and so far the only ones: XLA fuses them with what
makes the numbers, and kernels call them for what they hold in registers.
"""

import jax
import jax.numpy as jnp

from jaxcomm.kernels import codes


def width_for(levels: int) -> int:
    """The bits of a code that counts from -levels to levels: ceil(log2(2 levels + 1))."""
    return (2 * levels).bit_length()


def bytes_for(n: int, levels: int) -> int:
    """The bytes of n packed codes."""
    return codes.bytes_for(n, width_for(levels))


def pack_levels(numbers: jax.Array, bits: jax.Array, levels: int) -> jax.Array:
    """`round_to_levels`, in two's complement and packed: uint8 `(..., bytes_for(n, levels))`."""
    return codes.pack(round_to_levels(numbers, bits, levels).astype(jnp.uint8), width_for(levels))


def unpack_levels(packed: jax.Array, n: int, levels: int) -> jax.Array:
    """The integers, as float32 `(..., n)`."""
    width = width_for(levels)
    code = codes.unpack(packed, n, width)
    high = jax.lax.bitcast_convert_type(code << (8 - width), jnp.int8)
    return (high >> (8 - width)).astype(jnp.float32)


def round_to_levels(
    numbers: jax.Array, bits: jax.Array, levels: int, *, implementation: str | None = None
) -> jax.Array:
    """The nearest or a random integer.

    Args:
      numbers: float32 array; beyond -levels and levels they are cut to these.
      bits: uint32 words that round up by the fraction that is left: random ones for each number,
        or 2^31 for the nearest integer, ties away from zero.
      levels: 1 to 127.
      implementation: "xla", or None for the best on this device.

    Returns:
      int32 array of the shape of the numbers; 0 for NaN.

    Raises:
      NotImplementedError: for an implementation that does not exist here.
    """
    if implementation not in (None, "xla"):
        raise NotImplementedError(
            f'round_to_levels has no implementation {implementation!r}; use "xla" or None.'
        )
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
    return (level ^ sign) - sign
