"""Messages cut into blocks, each with a unit of its own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.codecs._codec import Codec
from jaxcomm.codecs._rounding import require_integer, rounding_bits
from jaxcomm.kernels import reductions

_LEAST_NORMAL = 0x00800000  # bit patterns: 2^-126,
_INFINITY = 0x7F800000
_MAX = 0x7F7FFFFF  # and the largest finite float32
# XLA makes a product with the reciprocal of a division by what is broadcast, so that is what stands
# here; the reciprocals of larger numbers are denormal, zero on CPU.
_LARGEST_DIVISOR = np.float32(2.0**126)
_CUT = 8  # the bits of mantissa that a unit does not have


@dataclasses.dataclass(frozen=True)
class BlockScaled(Codec):
    """A block of values is a float32 unit, and for each value a number of these units.

    How numbers from -`most` to `most` are written is what the subclasses differ in. The unit is
    the scale of the block over `most`, with the mantissa rounded up to 16 bits, so that products
    with numbers of 8 bits are exact: however the compiler orders or contracts what is decoded and
    added up, every device gets the same, and encoding what was decoded gives the same unit.

    The payload is uint8: the codes of every block in order, each beginning at a byte, then the
    units, 4 bytes a block. The last block is short where block_size does not divide n.

    A block that holds anything but finite values becomes NaN, by its unit. One whose unit would be
    below 2^-126, which XLA on CPU takes for zero, becomes zero. Magnitudes beyond 2^126 * `most`
    become that, where this is less than float32 holds.

    Attributes:
      block_size: the values that share a unit.
    """

    block_size: int

    def __post_init__(self) -> None:
        """Checks the block size."""
        require_integer("block_size", self.block_size, 1)

    @property
    def most(self) -> float:
        """The units that make up the scale."""
        raise NotImplementedError

    def clipped(self, blocks: jax.Array) -> jax.Array:
        """The float32 `(..., blocks, size)` that are sent instead of these."""
        return blocks

    def scale(self, blocks: jax.Array, largest: jax.Array) -> jax.Array:
        """The scales `(..., blocks)` of finite values, given their largest magnitudes."""
        del blocks
        return largest

    def codes(self, numbers: jax.Array, bits: jax.Array) -> jax.Array:
        """Numbers `(..., size)` to uint8 `(..., code_bytes(size))`, rounded by random bits.

        Numbers exceed `most` by rounding errors at times.
        """
        raise NotImplementedError

    def numbers(self, codes: jax.Array, size: int) -> jax.Array:
        """The numbers `(..., size)` that codes stand for; of zeros, zeros."""
        raise NotImplementedError

    def code_bytes(self, size: int) -> int:
        """The bytes of the codes of a block."""
        raise NotImplementedError

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """float32 `(..., n)` to uint8 `(..., m)`, codes before units."""
        bits = rounding_bits(self, key, x.shape)
        codes, units = [], []
        for size, start, stop in self._pieces(x.shape[-1]):
            blocks = self.clipped(_cut(x, start, stop, size))
            unit, factor = self._units(blocks)
            own = _cut(bits, start, stop, size) if bits.ndim else bits
            codes.append(_joined(self.codes(blocks * factor[..., None], own)))
            units.append(_joined(jax.lax.bitcast_convert_type(unit, jnp.uint8)))
        return jnp.concatenate([*codes, *units], axis=-1)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """uint8 `(..., m)` to float32 `(..., n)`."""
        pieces = self._pieces(n)
        first_unit = self.message_bytes(n) - 4 * -(-n // self.block_size)
        units = _cut(payload, first_unit, payload.shape[-1], 4)
        units = jax.lax.bitcast_convert_type(units, jnp.float32)
        values, byte, block = [], 0, 0
        for size, start, stop in pieces:
            count, width = (stop - start) // size, self.code_bytes(size)
            codes = _cut(payload, byte, byte + count * width, width)
            unit = units[..., block : block + count, None]
            values.append(_joined(self.numbers(codes, size) * unit))
            byte, block = byte + count * width, block + count
        return values[0] if len(values) == 1 else jnp.concatenate(values, axis=-1)

    def message_bytes(self, n: int) -> int:
        """Those of the codes, and 4 ceil(n / block_size) of units."""
        whole, rest = divmod(n, self.block_size)
        codes = whole * self.code_bytes(self.block_size) + self.code_bytes(rest)
        return codes + 4 * -(-n // self.block_size)

    def _pieces(self, n: int) -> list[tuple[int, int, int]]:
        """(size, start, stop) of the whole blocks, and of the short one; no block is padded."""
        whole = n // self.block_size * self.block_size
        pieces = [(self.block_size, 0, whole), (n - whole, whole, n)]
        return [piece for piece in pieces if piece[0] and piece[1] < piece[2]] or pieces[:1]

    def _units(self, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What is sent, 0 and NaN where that is all there is to say, and what to multiply with."""
        top = reductions.largest(blocks)
        scale = self.scale(blocks, jax.lax.bitcast_convert_type(top, jnp.float32))
        quotient = jax.lax.bitcast_convert_type(scale * np.float32(1 / self.most), jnp.uint32)
        # Up, unless it is by a rounding error that the quotient is above a number of 16 bits.
        pattern = (quotient + (2**_CUT - 3)) >> _CUT << _CUT
        pattern = jnp.minimum(pattern, jnp.uint32(self._largest_unit()))
        unit = jax.lax.bitcast_convert_type(pattern, jnp.float32)
        zero = (top < _LEAST_NORMAL) | (pattern < _LEAST_NORMAL)
        factor = jnp.where(zero, jnp.float32(0), 1 / unit)
        unit = jnp.where(zero, jnp.float32(0), unit)
        return jnp.where(top < _INFINITY, unit, jnp.float32(jnp.nan)), factor

    def _largest_unit(self) -> int:
        """The pattern of the largest unit whose reciprocal is normal, and `most` of it finite."""
        most = float(np.uint32(_MAX).view(np.float32)) * (1 - 2.0**-24) / self.most
        return int(np.float32(min(most, _LARGEST_DIVISOR)).view(np.uint32)) >> _CUT << _CUT


def norm_and_unit(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The L2 norms of blocks, as a factor and the unit that it is in."""
    parts, unit = in_units_of_largest(blocks)
    return jnp.sqrt(reductions.sum_of_squares(parts)), unit


def in_units_of_largest(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Blocks over their largest magnitudes, and these: sums of large values are infinite."""
    top = reductions.largest(blocks)
    largest = jax.lax.bitcast_convert_type(top, jnp.float32)
    unit = jnp.where(top < _LEAST_NORMAL, jnp.float32(1), jnp.minimum(largest, _LARGEST_DIVISOR))
    return blocks * (1 / unit)[..., None], unit


def _cut(x: jax.Array, start: int, stop: int, size: int) -> jax.Array:
    """`(..., n)` from start to stop, as `(..., blocks, size)`."""
    return x[..., start:stop].reshape(*x.shape[:-1], (stop - start) // size, size)


def _joined(blocks: jax.Array) -> jax.Array:
    """`(..., blocks, size)` as `(..., blocks * size)`."""
    return blocks.reshape(*blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1])
