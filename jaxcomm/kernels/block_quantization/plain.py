"""Messages of integers in blocks: the plain version, which is the specification.

XLA on GPU reads x twice: the unit of a block is a reduction, which it does not fuse with the codes
that the unit is broadcast to.
"""

import functools

import jax
import jax.numpy as jnp

from jaxcomm.kernels import reductions
from jaxcomm.kernels.block_quantization import blocks
from jaxcomm.kernels.block_quantization.rounding import bytes_for, pack_levels, unpack_levels
from jaxcomm.kernels.random_bits import rounding_words


def message_bytes(n: int, levels: int, size: int) -> int:
    """The bytes of the payload of a message of n values."""
    whole, rest = divmod(n, size)
    packed = whole * bytes_for(size, levels) + bytes_for(rest, levels)
    return packed + 4 * -(-n // size)


def encode(x: jax.Array, levels: int, size: int, key: jax.Array | None) -> jax.Array:
    """Encodes checked arguments; see `integers.encode`."""
    return encode_with(x, rounding_words(key, x.shape), levels, size)


def encode_with(x: jax.Array, bits: jax.Array, levels: int, size: int) -> jax.Array:
    """`encode` with given rounding words: uint32 of the shape of x, or the scalar HALF."""

    def encode_blocks(x: jax.Array, bits: jax.Array) -> tuple[jax.Array, jax.Array]:
        top = reductions.largest(x)
        largest = jax.lax.bitcast_convert_type(top, jnp.float32)
        unit, factor = blocks.unit_and_factor(top, largest, levels)
        return pack_levels(x * factor[..., None], bits, levels), unit

    return blocks.encode(x, bits, size, encode_blocks)


def decode(payload: jax.Array, n: int, levels: int, size: int) -> jax.Array:
    """Decodes a checked payload; see `integers.decode`."""
    return blocks.decode(
        payload,
        n,
        size,
        functools.partial(bytes_for, levels=levels),
        functools.partial(unpack_levels, levels=levels),
    )


def decode_and_sum(payloads: jax.Array, n: int, levels: int, size: int) -> jax.Array:
    """Decodes and adds checked payloads; see `integers.decode_and_sum`."""
    return reductions.sum_in_order(decode(payloads, n, levels, size))
