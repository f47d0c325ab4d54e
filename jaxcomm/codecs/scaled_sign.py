"""Scaled signs: plus or minus the mean magnitude of a block."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxcomm.codecs._block_scaled import BlockScaled, in_units_of_largest
from jaxcomm.kernels import reductions


@dataclasses.dataclass(frozen=True)
class ScaledSign(BlockScaled):
    """1 bit per value, set if the value is not negative, and a scale per block: its mean magnitude.

    There is no code for zero. A zero among other values decodes to plus the scale, and padding with
    zeros makes the scale of its block smaller. A block loses at most the share 1 - |x|_1^2 / (d
    |x|_2^2) of its squared norm. This is less than 1, so errors stay bounded under error feedback.
    Without error feedback the mean would be biased, so it is refused.

    Attributes:
      block_size: the values that share a scale.

    References:
      S. P. Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression
      Schemes", ICML 2019, arXiv:1901.09847.
    """

    name = "scaled_sign"
    needs_error_feedback = True

    @property
    def most(self) -> float:
        """One."""
        return 1

    def scale(self, blocks: jax.Array, largest: jax.Array) -> jax.Array:
        """The mean magnitudes."""
        del largest
        parts, unit = in_units_of_largest(blocks)
        return unit * (reductions.total(jnp.abs(parts)) / blocks.shape[-1])

    @property
    def width(self) -> int:
        """One."""
        return 1

    def codes(self, numbers: jax.Array, bits: jax.Array) -> jax.Array:
        """1 for what is not negative; nothing is rounded."""
        del bits
        return (numbers >= 0).astype(jnp.uint8)

    def numbers(self, codes: jax.Array) -> jax.Array:
        """-1 or 1."""
        return jnp.where(codes != 0, jnp.float32(1), jnp.float32(-1))


def scaled_sign(block_size: int = 1024) -> ScaledSign:
    """Scaled signs, 1 bit per value; only with `error_feedback=True`.

    Args:
      block_size: the values that share a scale of 4 bytes.

    Returns:
      The codec. A message of n values is uint8 `(n / 8 + 4 n / block_size,)`, rounded up. A block
      of d values loses at most the share `1 - |x|_1^2 / (d |x|_2^2)` of its squared norm.

    Raises:
      TypeError, ValueError: for any other arguments.

    References:
      S. P. Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression
      Schemes", ICML 2019, arXiv:1901.09847.

    Differs from the paper: each block has a scale, instead of each layer.
    """
    return ScaledSign(block_size)
