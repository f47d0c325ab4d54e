"""Messages to integers of 8 or fewer bits in blocks, with the largest magnitude as the scale.

The plain version below is the specification. XLA on GPU reads x twice: the unit of a block, a
reduction, and the codes that it is broadcast to do not share a kernel.
"""

import jax
import jax.numpy as jnp

from jaxcomm.kernels import _device, blocks, codes, reductions
from jaxcomm.kernels.levels import round_to_levels, width_for
from jaxcomm.kernels.random_bits import random_bits

HALF = 2**31  # the bits that round to nearest


def encode(
    x: jax.Array,
    levels: int,
    size: int,
    key: jax.Array | None = None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Integers from -levels to levels, packed, and behind them the units of the blocks.

    Args:
      x: float32 array `(..., n)`; leading axes are independent messages.
      levels: how many units the largest magnitude of a block is, 1 to 127.
      size: the values of a block.
      key: a PRNG key to round at random, with a word of `random_bits(key, x.shape)` for each value;
        None rounds to nearest, ties away from zero.
      implementation: "xla", "mosaic" (on NVIDIA GPUs, for widths of 4 and 8 bits), or None, which
        is "xla".

    Returns:
      uint8 array `(..., m)`: `codes.pack` of each block in two's complement, then the units of
      `blocks.unit_and_factor`.

    Raises:
      TypeError: for another dtype.
      ValueError: for a scalar, or for more elements than the implementation counts.
      NotImplementedError: for an implementation that does not exist here, or not for this size.
    """
    if x.dtype != jnp.float32:
        raise TypeError(f"encode takes float32, got {x.dtype}; write x.astype(jnp.float32).")
    if x.ndim == 0:
        raise ValueError("encode takes messages (..., n), got a scalar; write x.reshape(1).")
    name, elements = "integer_blocks.encode", x.size + x.size // size * 4  # also of the payload
    chosen = _device.choose(name, implementation, ("xla", "mosaic"), elements)
    if chosen == "mosaic":
        from jaxcomm.kernels.integer_blocks import mosaic  # Pallas takes long to import

        return mosaic.encode(x, levels, size, key)
    bits = jnp.uint32(HALF) if key is None else random_bits(key, x.shape)
    return plain(x, bits, levels, size)


def plain(x: jax.Array, bits: jax.Array, levels: int, size: int) -> jax.Array:
    """`encode` with the words that it rounds by, uint32 of the shape of x or the scalar HALF."""

    def encode_blocks(x: jax.Array, bits: jax.Array) -> tuple[jax.Array, jax.Array]:
        top = reductions.largest(x)
        largest = jax.lax.bitcast_convert_type(top, jnp.float32)
        unit, factor = blocks.unit_and_factor(top, largest, levels)
        level = round_to_levels(x * factor[..., None], bits, levels)
        return codes.pack(level.astype(jnp.uint8), width_for(levels)), unit

    return blocks.encode(x, bits, size, encode_blocks)


def message_bytes(n: int, levels: int, size: int) -> int:
    """The bytes of the payload of a message of n values."""
    whole, rest = divmod(n, size)
    width = width_for(levels)
    packed = whole * codes.bytes_for(size, width) + codes.bytes_for(rest, width)
    return packed + 4 * -(-n // size)
