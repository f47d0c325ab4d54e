"""Messages of numbers in blocks: the plain version, which is the specification.

XLA on GPU reads x twice: the unit of a block is a reduction, which it does not fuse with the codes
that the unit is broadcast to.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm.kernels import reductions
from jaxcomm.kernels.block_quantization import blocks
from jaxcomm.kernels.random_bits import rounding_words


class Writing(NamedTuple):
    """How values become codes, where the scale of a block is its largest magnitude.

    Attributes:
      operation: the name of the operation, for messages.
      size: the values of a block.
      width: the bits of a code, 1 to 8.
      most: the number of units in a scale.
      codes: rounds numbers of units with rounding words, as for `random_bits.rounding_words`, to
        integers whose low `width` bits are the codes. The Mosaic kernel calls it on registers.
    """

    operation: str
    size: int
    width: int
    most: float
    codes: Callable[[jax.Array, jax.Array], jax.Array]

    def message_bytes(self, n: int) -> int:
        """The bytes of the payload of a message of n values."""
        return blocks.message_bytes(n, self.size, self.width)

    def elements(self, x: jax.Array) -> int:
        """How many elements the longer of the messages and their payloads has."""
        n = max(x.shape[-1], 1)
        return x.size // n * max(n, self.message_bytes(n))


def encode(x: jax.Array, writing: Writing, key: jax.Array | None) -> jax.Array:
    """Encodes checked arguments; see `encoding.encode`."""
    return encode_with(x, functools.partial(rounding_words, key, x.shape), writing)


def encode_with(x: jax.Array, words: Callable[[], jax.Array], writing: Writing) -> jax.Array:
    """`encode` with given rounding words: uint32 of the shape of x, or the scalar HALF."""

    def encode_blocks(x: jax.Array, bits: jax.Array) -> tuple[jax.Array, jax.Array]:
        top = reductions.largest(x)
        largest = jax.lax.bitcast_convert_type(top, jnp.float32)
        unit, factor = blocks.unit_and_factor(top, largest, writing.most)
        return writing.codes(x * factor[..., None], bits).astype(jnp.uint8), unit

    return blocks.encode(x, words, writing.size, writing.width, encode_blocks)
