"""Messages cut into blocks, each with a scale of its own."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxcomm.codecs._codec import Codec
from jaxcomm.codecs._rounding import require_integer, rounding_bits
from jaxcomm.kernels import reductions

_LEAST_NORMAL = 0x00800000  # bit patterns: 2^-126,
_INFINITY = 0x7F800000
_MAX = 3.4028234663852886e38  # and the largest finite float32


@dataclasses.dataclass(frozen=True)
class BlockScaled(Codec):
    """A block of values is a float32 scale, and for each value its share of the scale.

    Shares are in [-1, 1], and how they are written is what the subclasses differ in. The payload
    is uint8: the codes of every block in order, each beginning at a byte, then the scales, 4 bytes
    a block. The last block is short where block_size does not divide n.

    A block that holds anything but finite values becomes NaN, by its scale. One whose values are
    all below 2^-126, which XLA on CPU takes for zero, becomes zero.

    Attributes:
      block_size: the values that share a scale.
    """

    block_size: int

    def __post_init__(self) -> None:
        """Checks the block size."""
        require_integer("block_size", self.block_size, 1)

    def clipped(self, blocks: jax.Array) -> jax.Array:
        """The float32 `(..., blocks, size)` that are sent instead of these."""
        return blocks

    def scale(self, blocks: jax.Array, largest: jax.Array) -> jax.Array:
        """The scales `(..., blocks)` of finite values, none below their largest magnitudes."""
        del blocks
        return largest

    def codes(self, shares: jax.Array, bits: jax.Array) -> jax.Array:
        """Shares `(..., size)` to uint8 `(..., code_bytes(size))`, rounded by random bits."""
        raise NotImplementedError

    def shares(self, codes: jax.Array, size: int) -> jax.Array:
        """The shares `(..., size)` that codes stand for; of zeros, zeros."""
        raise NotImplementedError

    def code_bytes(self, size: int) -> int:
        """The bytes of the codes of a block."""
        raise NotImplementedError

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """float32 `(..., n)` to uint8 `(..., m)`, codes before scales."""
        bits = rounding_bits(self, key, x.shape)
        codes, scales = [], []
        for size, start, stop in self._pieces(x.shape[-1]):
            blocks = self.clipped(_cut(x, start, stop, size))
            scale, unit = self._scale_and_unit(blocks)
            own = _cut(bits, start, stop, size) if bits.ndim else bits
            codes.append(_joined(self.codes(blocks / unit[..., None], own)))
            scales.append(_joined(jax.lax.bitcast_convert_type(scale, jnp.uint8)))
        return jnp.concatenate([*codes, *scales], axis=-1)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """uint8 `(..., m)` to float32 `(..., n)`."""
        pieces = self._pieces(n)
        first_scale = self.message_bytes(n) - 4 * -(-n // self.block_size)
        scales = _cut(payload, first_scale, payload.shape[-1], 4)
        scales = jax.lax.bitcast_convert_type(scales, jnp.float32)
        values, byte, block = [], 0, 0
        for size, start, stop in pieces:
            count, width = (stop - start) // size, self.code_bytes(size)
            codes = _cut(payload, byte, byte + count * width, width)
            scale = scales[..., block : block + count, None]
            values.append(_joined(self.shares(codes, size) * scale))
            byte, block = byte + count * width, block + count
        return values[0] if len(values) == 1 else jnp.concatenate(values, axis=-1)

    def message_bytes(self, n: int) -> int:
        """Those of the codes, and 4 ceil(n / block_size) of scales."""
        whole, rest = divmod(n, self.block_size)
        codes = whole * self.code_bytes(self.block_size) + self.code_bytes(rest)
        return codes + 4 * -(-n // self.block_size)

    def _pieces(self, n: int) -> list[tuple[int, int, int]]:
        """(size, start, stop) of the whole blocks, and of the short one; no block is padded."""
        whole = n // self.block_size * self.block_size
        pieces = [(self.block_size, 0, whole), (n - whole, whole, n)]
        return [piece for piece in pieces if piece[0] and piece[1] < piece[2]] or pieces[:1]

    def _scale_and_unit(self, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What is sent, 0 and NaN where that is all there is to say, and what to divide by."""
        top = reductions.largest(blocks)
        largest = largest_of(blocks)
        unit = jnp.clip(self.scale(blocks, largest), largest, jnp.float32(_MAX))
        scale = jnp.where(top < _LEAST_NORMAL, jnp.float32(0), unit)
        return jnp.where(top < _INFINITY, scale, jnp.float32(jnp.nan)), unit


def largest_of(blocks: jax.Array) -> jax.Array:
    """The largest magnitudes `(...)` of blocks `(..., size)`, 1 where they are below 2^-126."""
    top = reductions.largest(blocks)
    largest = jax.lax.bitcast_convert_type(top, jnp.float32)
    return jnp.where(top < _LEAST_NORMAL, jnp.float32(1), largest)


def root_of_squares(blocks: jax.Array, largest: jax.Array) -> jax.Array:
    """The L2 norms in units of the largest magnitudes: squares of large values are infinite."""
    return jnp.sqrt(reductions.sum_of_squares(blocks / largest[..., None]))


def _cut(x: jax.Array, start: int, stop: int, size: int) -> jax.Array:
    """`(..., n)` from start to stop, as `(..., blocks, size)`."""
    return x[..., start:stop].reshape(*x.shape[:-1], (stop - start) // size, size)


def _joined(blocks: jax.Array) -> jax.Array:
    """`(..., blocks, size)` as `(..., blocks * size)`."""
    return blocks.reshape(*blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1])
