"""Floats of 8 bits, scaled by the largest magnitude of a block."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxcomm.codecs._block_scaled import BlockScaled
from jaxcomm.kernels import float8
from jaxcomm.kernels.block_quantization import fp8


@dataclasses.dataclass(frozen=True)
class Fp8(BlockScaled):
    """8-bit floats; the largest finite one stands for the largest magnitude of the block.

    No finite value overflows. Unlike in `int8`, values much smaller than the largest in their block
    keep their relative precision. Rounding is to nearest, ties to even.

    Attributes:
      block_size: the values that share a scale.

    References:
      P. Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv:2209.05433.
    """

    dtype: ClassVar[Any]

    @property
    def width(self) -> int:
        """Eight."""
        return 8

    @property
    def operations(self) -> tuple[str, ...]:
        """The encoding of messages of 8-bit floats."""
        return ("fp8.encode",)

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """float32 `(..., n)` to uint8 `(..., m)`, codes before units."""
        del key
        option = self.implementation
        return fp8.encode(x, self.dtype, self.block_size, implementation=option)

    def numbers(self, codes: jax.Array) -> jax.Array:
        """The patterns' values."""
        return float8.widen_bits(codes, self.dtype)


@dataclasses.dataclass(frozen=True)
class Fp8E4M3(Fp8):
    """8 bits per value, sign, 4 of exponent and 3 of mantissa, and a scale per block; see `Fp8`.

    The relative error is at most 2^-4 down to 2^-6 / 448 of the largest magnitude. Below that the
    absolute error is at most 2^-10 / 448 of it.
    """

    name = "fp8_e4m3"
    dtype = jnp.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Fp8E5M2(Fp8):
    """8 bits per value, sign, 5 of exponent and 2 of mantissa, and a scale per block; see `Fp8`.

    The relative error is at most 2^-3 down to 2^-14 / 57344 of the largest magnitude. Below that
    the absolute error is at most 2^-17 / 57344 of it.
    """

    name = "fp8_e5m2"
    dtype = jnp.float8_e5m2


def fp8_e4m3(block_size: int = 256) -> Fp8E4M3:
    """8-bit floats with 3 bits of mantissa.

    Args:
      block_size: the values that share a scale of 4 bytes.

    Returns:
      The codec. A message of n values is uint8 `(n + 4 n / block_size,)`, rounded up. The relative
      error is at most 2^-4 down to 2^-6 / 448 of the largest magnitude of the block.

    Raises:
      TypeError, ValueError: for any other arguments.

    References:
      P. Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv:2209.05433.

    Differs from the paper: each block has its own scale, which need not be a power of two.
    """
    return Fp8E4M3(block_size)


def fp8_e5m2(block_size: int = 256) -> Fp8E5M2:
    """8-bit floats with 2 bits of mantissa and a wider range.

    Args:
      block_size: the values that share a scale of 4 bytes.

    Returns:
      The codec. A message of n values is uint8 `(n + 4 n / block_size,)`, rounded up. The relative
      error is at most 2^-3 down to 2^-14 / 57344 of the largest magnitude of the block.

    Raises:
      TypeError, ValueError: for any other arguments.

    References:
      P. Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv:2209.05433.

    Differs from the paper: each block has its own scale, which need not be a power of two.
    """
    return Fp8E5M2(block_size)
