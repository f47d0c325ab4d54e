"""Integers of 8 and 4 bits, scaled by the largest magnitude of a block."""

import dataclasses
import math
from typing import ClassVar

import jax

from jaxcomm.codecs._codec import EVEN, Codec
from jaxcomm.codecs._rounding import ROUNDINGS, require_choice, require_integer, rounding_key
from jaxcomm.kernels.block_quantization import integers


@dataclasses.dataclass(frozen=True)
class Integer(Codec):
    """Two's complement from -levels to levels; the block's largest magnitude becomes `levels`.

    The range is symmetric: its lowest code is not used. Rounding to nearest, ties away from zero,
    has an error of at most half a level. Random rounding has an error of less than a level, and is
    unbiased up to float32's own rounding. The layout of the payload, and the treatment of blocks
    that are not finite, tiny or huge, are those of `BlockScaled`.

    Attributes:
      block_size: the values that share a scale.
      rounding: "nearest" or "random".

    References:
      T. Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", ICLR 2016,
      arXiv:1511.04561 (8 bits on the wire; its data types are others).
    """

    block_size: int
    rounding: str
    levels: ClassVar[int]

    def __post_init__(self) -> None:
        """Checks the arguments."""
        require_integer("block_size", self.block_size, 1)
        require_choice("rounding", self.rounding, ROUNDINGS)

    @property
    def even(self) -> int:
        """Whole blocks."""
        return math.lcm(EVEN, self.block_size)

    @property
    def is_random(self) -> bool:
        """If `rounding` is "random"."""
        return self.rounding == "random"

    @property
    def operations(self) -> tuple[str, ...]:
        """The encoding of messages of integers."""
        return ("integers.encode",)

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """float32 `(..., n)` to uint8 `(..., m)`, codes before units."""
        key, option = rounding_key(self, key), self.implementation
        return integers.encode(x, self.levels, self.block_size, key, implementation=option)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """uint8 `(..., m)` to float32 `(..., n)`."""
        return integers.decode(payload, n, self.levels, self.block_size)

    def decode_and_sum(self, payloads: jax.Array, n: int) -> jax.Array:
        """uint8 `(N, m)` to float32 `(n,)`."""
        return integers.decode_and_sum(payloads, n, self.levels, self.block_size)

    def sum_with_own(self, payloads: jax.Array, own: jax.Array, place: jax.Array) -> jax.Array:
        """uint8 `(N, m)` and float32 `(n,)` to float32 `(n,)`."""
        return integers.sum_with_own(payloads, own, place, self.levels, self.block_size)

    def error(self, x: jax.Array, payload: jax.Array) -> jax.Array:
        """float32 `(..., n)` and its payload to float32 `(..., n)`."""
        return integers.error(x, payload, self.levels, self.block_size)

    def message_bytes(self, n: int) -> int:
        """The bytes of 8 or 4 bits per value, and 4 ceil(n / block_size) of units."""
        return integers.message_bytes(n, self.levels, self.block_size)


@dataclasses.dataclass(frozen=True)
class Int8(Integer):
    """8 bits per value, -127 to 127, and a float32 scale per block; see `Integer`."""

    name = "int8"
    levels = 127


@dataclasses.dataclass(frozen=True)
class Int4(Integer):
    """4 bits per value, -7 to 7, and a float32 scale per block; see `Integer`."""

    name = "int4"
    levels = 7


def int8(block_size: int = 256, rounding: str = "nearest") -> Int8:
    """8-bit integers, scaled by the largest magnitude of each block.

    Args:
      block_size: the values that share a scale of 4 bytes.
      rounding: "nearest", or "random", which is unbiased.

    Returns:
      The codec. A message of n values is uint8 `(n + 4 n / block_size,)`, rounded up. The error of
      a value is at most 1/254 of the largest magnitude in its block, or below 1/127 if rounded at
      random; times 1 + 2^-15, because scales are rounded up.

    Raises:
      TypeError, ValueError: for any other arguments.

    References:
      T. Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", ICLR 2016,
      arXiv:1511.04561 (8 bits on the wire; its data types are others).
    """
    return Int8(block_size, rounding)


def int4(block_size: int = 64, rounding: str = "nearest") -> Int4:
    """4-bit integers, scaled by the largest magnitude of each block.

    Args:
      block_size: the values that share a scale of 4 bytes.
      rounding: "nearest", or "random", which is unbiased.

    Returns:
      The codec. A message of n values is uint8 `(n / 2 + 4 n / block_size,)`, rounded up. The error
      of a value is at most 1/14 of the largest magnitude in its block, or below 1/7 if rounded at
      random; times 1 + 2^-15, because scales are rounded up.

    Raises:
      TypeError, ValueError: for any other arguments.

    References:
      T. Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", ICLR 2016,
      arXiv:1511.04561 (8 bits on the wire; its data types are others).
    """
    return Int4(block_size, rounding)
