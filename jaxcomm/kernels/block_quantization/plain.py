"""Messages of integers in blocks: the plain version, which is the specification.

XLA on GPU reads x twice: the unit of a block is a reduction, which it does not fuse with the codes
that the unit is broadcast to.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxcomm.kernels import reductions
from jaxcomm.kernels.block_quantization import blocks
from jaxcomm.kernels.block_quantization.rounding import level_of, round_to_levels, width_for
from jaxcomm.kernels.random_bits import rounding_words


def message_bytes(n: int, levels: int, size: int) -> int:
    """The bytes of the payload of a message of n values."""
    return blocks.message_bytes(n, size, width_for(levels))


def format_of(levels: int, size: int) -> blocks.Format:
    """How integers are written: in two's complement."""
    return blocks.Format(size, width_for(levels), lambda codes: level_of(codes, levels))


def encode(x: jax.Array, levels: int, size: int, key: jax.Array | None) -> jax.Array:
    """Encodes checked arguments; see `integers.encode`."""
    return encode_with(x, functools.partial(rounding_words, key, x.shape), levels, size)


def encode_with(x: jax.Array, words: Callable[[], jax.Array], levels: int, size: int) -> jax.Array:
    """`encode` with given rounding words: uint32 of the shape of x, or the scalar HALF."""

    def encode_blocks(x: jax.Array, bits: jax.Array) -> tuple[jax.Array, jax.Array]:
        top = reductions.largest(x)
        largest = jax.lax.bitcast_convert_type(top, jnp.float32)
        unit, factor = blocks.unit_and_factor(top, largest, levels)
        return round_to_levels(x * factor[..., None], bits, levels).astype(jnp.uint8), unit

    return blocks.encode(x, words, size, width_for(levels), encode_blocks)
