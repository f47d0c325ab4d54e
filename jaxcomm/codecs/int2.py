"""Two bits per value: four levels around zero, fitted to each block."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.codecs._block_scaled import BlockScaled, in_units_of_largest
from jaxcomm.kernels import reductions
from jaxcomm.kernels.block_quantization import blocks as layout


@dataclasses.dataclass(frozen=True)
class Int2(BlockScaled):
    """2 bits per value, for -3, -1, 1 or 3 units, and the unit of each block.

    A value has magnitude 3 if it is at least the block's root mean square, else 1. The unit is
    fitted by least squares, so a block x with numbers c loses the share 1 - <x, c>^2 / (|x|^2
    |c|^2) of its squared norm. This is 0.12 for normally distributed values and always less than 1,
    so errors stay bounded under error feedback. As in scaled signs, there is no code for zero.
    Without error feedback the mean would be biased, so it is refused.

    Attributes:
      block_size: the values that share a unit.

    References:
      J. Max, "Quantizing for minimum distortion", IRE Transactions on Information Theory, 1960
      (four levels for a normal distribution; the best uniform ones have their step at 0.996
      standard deviations).
    """

    name = "int2"
    needs_error_feedback = True

    @property
    def most(self) -> float:
        """Three."""
        return 3

    @property
    def width(self) -> int:
        """Two."""
        return 2

    def numbers(self, codes: jax.Array) -> jax.Array:
        """-3, -1, 1 or 3."""
        return 2 * codes.astype(jnp.float32) - 3

    def _encode_blocks(self, blocks: jax.Array, bits: jax.Array) -> tuple[jax.Array, jax.Array]:
        del bits
        parts, largest = in_units_of_largest(blocks)
        magnitudes = jnp.abs(parts)
        size = blocks.shape[-1]
        middle = jnp.sqrt(reductions.total(jnp.square(parts)) / size)
        is_far = magnitudes >= middle[..., None]
        fitted = reductions.total(jnp.where(is_far, 3 * magnitudes, magnitudes))
        far = reductions.total(is_far.astype(jnp.float32))
        # Units are rounded up to 16 bits of mantissa. A decoded block's unit has 16 bits already;
        # this makes it a little smaller, so that rounding errors of the sums do not push it up to
        # the next.
        scale = 3 * largest * (fitted / (size + 8 * far)) * np.float32(1 - 2.0**-20)
        unit, _ = layout.unit_and_factor(reductions.largest(blocks), scale, self.most)
        # 0, 1, 2, 3 for -3, -1, 1, 3.
        codes = jnp.where(parts >= 0, 2 + is_far.astype(jnp.uint8), 1 - is_far.astype(jnp.uint8))
        return codes.astype(jnp.uint8), unit


def int2(block_size: int = 256) -> Int2:
    """Four levels, 2 bits per value; only with `error_feedback=True`.

    Args:
      block_size: the values that share a unit of 4 bytes.

    Returns:
      The codec. A message of n values is uint8 `(n / 4 + 4 n / block_size,)`, rounded up. For
      normally distributed values, 0.12 of the squared norm is lost.

    Raises:
      TypeError, ValueError: for any other arguments.

    References:
      J. Max, "Quantizing for minimum distortion", IRE Transactions on Information Theory, 1960.
    """
    return Int2(block_size)
