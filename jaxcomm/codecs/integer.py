"""Integers of 8 and 4 bits, scaled by the largest magnitude of a block."""

import dataclasses
from typing import ClassVar

import jax

from jaxcomm.codecs._block_scaled import BlockScaled
from jaxcomm.codecs._rounding import ROUNDINGS, require_choice, rounding_key
from jaxcomm.kernels.block_quantization import integers
from jaxcomm.kernels.block_quantization.rounding import level_of, width_for


@dataclasses.dataclass(frozen=True)
class Integer(BlockScaled):
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

    rounding: str
    levels: ClassVar[int]

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        require_choice("rounding", self.rounding, ROUNDINGS)

    @property
    def is_random(self) -> bool:
        """If `rounding` is "random"."""
        return self.rounding == "random"

    @property
    def width(self) -> int:
        """8 or 4."""
        return width_for(self.levels)

    @property
    def operations(self) -> tuple[str, ...]:
        """The encoding of messages of integers."""
        return ("integers.encode",)

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """float32 `(..., n)` to uint8 `(..., m)`, codes before units."""
        key, option = rounding_key(self, key), self.implementation
        return integers.encode(x, self.levels, self.block_size, key, implementation=option)

    def numbers(self, codes: jax.Array) -> jax.Array:
        """Levels."""
        return level_of(codes, self.levels)


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
