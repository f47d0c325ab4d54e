"""Messages in blocks, each with its own scale."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from jaxcomm.codecs._codec import EVEN, Codec
from jaxcomm.codecs._rounding import require_integer, rounding_key
from jaxcomm.kernels import reductions
from jaxcomm.kernels.block_quantization import blocks as layout
from jaxcomm.kernels.block_quantization.rows import Rows, are_rows, rows_of
from jaxcomm.kernels.random_bits import rounding_words


@dataclasses.dataclass(frozen=True)
class BlockScaled(Codec):
    """A block is a float32 unit and, for each value, a number of these units.

    Subclasses differ in how they write numbers from -`most` to `most`. The unit is the scale of the
    block over `most`, with its mantissa rounded up to 16 bits; `kernels.block_quantization.blocks`
    gives the reason and the layout of the payload: codes, then 4 bytes per block for the units.

    A block with a value that is not finite gets the unit NaN and decodes to NaN. A block whose unit
    would be below 2^-126, which XLA on CPU treats as zero, decodes to zeros. Larger magnitudes than
    2^126 * `most`, which float32 can hold, become 2^126 * `most`.

    Attributes:
      block_size: the values that share a unit.
    """

    block_size: int

    def __post_init__(self) -> None:
        """Checks the block size."""
        require_integer("block_size", self.block_size, 1)

    @property
    def most(self) -> float:
        """The number of units in a scale."""
        raise NotImplementedError

    @property
    def even(self) -> int:
        """Whole blocks."""
        return math.lcm(EVEN, self.block_size)

    def clipped(self, blocks: jax.Array) -> jax.Array:
        """The float32 `(..., blocks, size)` to encode in place of the given ones."""
        return blocks

    def scale(self, blocks: jax.Array, largest: jax.Array) -> jax.Array:
        """The scales `(..., blocks)` of finite values, given their largest magnitudes."""
        del blocks
        return largest

    @property
    def width(self) -> int:
        """The bits of a code, 1 to 8."""
        raise NotImplementedError

    def codes(self, numbers: jax.Array, bits: jax.Array) -> jax.Array:
        """Numbers, rounded with the words `bits`, to codes, uint8 of the same shape.

        A rounding error may make a number exceed `most`.
        """
        raise NotImplementedError

    def numbers(self, codes: jax.Array) -> jax.Array:
        """The numbers that codes of any shape stand for, float32; zero stands for zero."""
        raise NotImplementedError

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """float32 `(..., n)` to uint8 `(..., m)`, codes before units."""
        words = functools.partial(rounding_words, rounding_key(self, key), x.shape)
        return layout.encode(x, words, self.block_size, self.width, self._encode_blocks)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """uint8 `(..., m)` to float32 `(..., n)`."""
        return layout.decode(payload, n, self._format)

    def decode_and_sum(self, payloads: jax.Array, n: int) -> jax.Array:
        """uint8 `(N, m)` to float32 `(n,)`."""
        return layout.decode_and_sum(payloads, n, self._format)

    def sum_with_own(self, payloads: jax.Array, own: jax.Array, place: jax.Array) -> jax.Array:
        """uint8 `(N, m)` and float32 `(n,)` to float32 `(n,)`."""
        return layout.sum_with_own(payloads, own, place, self._format)

    def error(self, x: jax.Array, payload: jax.Array) -> jax.Array:
        """float32 `(..., n)` and its payload to float32 `(..., n)`."""
        return layout.error(x, payload, self._format)

    def in_rows(self, n: int) -> bool:
        """See `Codec.in_rows`: whole blocks, and codes that fill whole bytes.

        Never for a class that decodes in its own way.
        """
        decoding = ("decode", "decode_and_sum", "sum_with_own", "error")
        is_usual = all(getattr(type(self), f) is getattr(BlockScaled, f) for f in decoding)
        return is_usual and are_rows(n, self._format)

    def rows(self, payloads: jax.Array, n: int) -> Rows:
        """See `Codec.rows`."""
        return rows_of(payloads, n, self._format)

    def message_bytes(self, n: int) -> int:
        """The bytes of the codes, and 4 ceil(n / block_size) of units."""
        return layout.message_bytes(n, self.block_size, self.width)

    @property
    def _format(self) -> layout.Format:
        return layout.Format(self.block_size, self.width, self.numbers)

    def _encode_blocks(self, blocks: jax.Array, bits: jax.Array) -> tuple[jax.Array, jax.Array]:
        blocks = self.clipped(blocks)
        top = reductions.largest(blocks)
        scale = self.scale(blocks, jax.lax.bitcast_convert_type(top, jnp.float32))
        unit, factor = layout.unit_and_factor(top, scale, self.most)
        return self.codes(blocks * factor[..., None], bits), unit


def norm_and_unit(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The L2 norms of blocks, each as a number and its unit."""
    parts, unit = in_units_of_largest(blocks)
    return jnp.sqrt(reductions.total(jnp.square(parts))), unit


def in_units_of_largest(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Blocks divided by their largest magnitudes, whose squares stay finite; and the magnitudes."""
    top = reductions.largest(blocks)
    largest = jax.lax.bitcast_convert_type(top, jnp.float32)
    unit = jnp.where(
        top < layout.LEAST_NORMAL, jnp.float32(1), jnp.minimum(largest, layout.LARGEST_DIVISOR)
    )
    return blocks * (1 / unit)[..., None], unit
