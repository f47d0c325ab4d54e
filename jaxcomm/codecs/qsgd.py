"""QSGD: levels of the L2 norm of a block."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxcomm.codecs._block_scaled import BlockScaled, norm_and_unit
from jaxcomm.codecs._rounding import require_integer
from jaxcomm.kernels.block_quantization.rounding import level_of, round_to_levels, width_for


@dataclasses.dataclass(frozen=True)
class Qsgd(BlockScaled):
    """ceil(log2(2s + 1)) bits per value and a scale per block: -s to s, in s-ths of the norm.

    For block v, value i decodes to ||v|| sgn(v_i) xi_i / s, where s |v_i| / ||v|| is rounded at
    random to the integer xi_i below or above it. This is unbiased up to float32's own rounding, and
    E|Q(v) - v|^2 <= min(d / s^2, sqrt(d) / s) |v|^2 for blocks of d values.

    Attributes:
      block_size: the values that share a norm, d (the paper's bucket size).
      levels: s.

    References:
      D. Alistarh, D. Grubic, J. Li, R. Tomioka and M. Vojnovic, "QSGD: Communication-Efficient SGD
      via Gradient Quantization and Encoding", NeurIPS 2017, arXiv:1610.02132.
    """

    levels: int
    name = "qsgd"

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        require_integer("levels", self.levels, 1, 127)

    @property
    def is_random(self) -> bool:
        """Always."""
        return True

    @property
    def variance(self) -> float:
        """min(d / s^2, sqrt(d) / s)."""
        return min(self.block_size / self.levels**2, self.block_size**0.5 / self.levels)

    def scale(self, blocks: jax.Array, largest: jax.Array) -> jax.Array:
        """The L2 norms."""
        norm, unit = norm_and_unit(blocks)
        return jnp.maximum(norm * unit, largest)

    @property
    def most(self) -> float:
        """The levels."""
        return self.levels

    @property
    def width(self) -> int:
        """ceil(log2(2s + 1))."""
        return width_for(self.levels)

    def codes(self, numbers: jax.Array, bits: jax.Array) -> jax.Array:
        """Levels, rounded at random."""
        return round_to_levels(numbers, bits, self.levels).astype(jnp.uint8)

    def numbers(self, codes: jax.Array) -> jax.Array:
        """Levels."""
        return level_of(codes, self.levels)


def qsgd(levels: int = 7, block_size: int = 512) -> Qsgd:
    """QSGD: unbiased, 4 bits per value by default.

    Args:
      levels: s, from 1 to 127: s = 1 takes 2 bits per value, 3 takes 3, 7 takes 4, and 127 takes 8.
      block_size: the values that share a norm; the error grows with its square root.

    Returns:
      The codec. A message of n values is uint8: ceil(log2(2 levels + 1)) bits per value, and 4
      bytes for each block. For blocks of d values and s levels,
      `E|Q(v) - v|^2 <= min(d / s^2, sqrt(d) / s) |v|^2`.

    Raises:
      TypeError, ValueError: for any other arguments.

    References:
      D. Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and
      Encoding", NeurIPS 2017, arXiv:1610.02132.

    Differs from the paper: all codes have the same width. The paper uses Elias codes, which are
    shorter for runs of zeros.
    """
    return Qsgd(block_size, levels)
