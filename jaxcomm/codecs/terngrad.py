"""TernGrad: minus one, zero or one, times the largest magnitude of a block."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxcomm._numbers import is_real
from jaxcomm.codecs._block_scaled import BlockScaled, norm_and_unit
from jaxcomm.kernels import reductions
from jaxcomm.kernels.block_quantization.rounding import level_of, round_to_levels, width_for


@dataclasses.dataclass(frozen=True)
class TernGrad(BlockScaled):
    """2 bits per value and a scale per block: two's complement of -1, 0 and 1, times the scale.

    The scale is the largest magnitude of the block. A value becomes plus or minus the scale with
    probability |value| / scale, and zero otherwise. Without clipping this is unbiased up to
    float32's own rounding.

    Attributes:
      block_size: the values that share a scale.
      clip: None, or a number of standard deviations of the block. Values beyond it are clipped
        first, which adds bias and reduces noise.

    References:
      W. Wen, C. Xu, F. Yan, C. Wu, Y. Wang, Y. Chen and H. Li, "TernGrad: Ternary Gradients to
      Reduce Communication in Distributed Deep Learning", NeurIPS 2017, arXiv:1705.07878.
    """

    clip: float | None
    name = "terngrad"

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        if self.clip is None:
            return
        if not is_real(self.clip):
            raise TypeError(f"clip must be a number or None, got {self.clip!r}.")
        if not 0 < self.clip < float("inf"):
            raise ValueError(f"clip must be positive and finite, such as 2.5, got {self.clip!r}.")

    @property
    def is_random(self) -> bool:
        """Always."""
        return True

    @property
    def variance(self) -> float:
        """(sqrt(d) - 1) / 2 for blocks of d values; clipping makes it biased, so 0 then."""
        return (self.block_size**0.5 - 1) / 2 if self.clip is None else 0.0

    def clipped(self, blocks: jax.Array) -> jax.Array:
        """Values within `clip` standard deviations; all NaN if one is NaN.

        If one is infinite, they stay as they are, and the unit becomes NaN.
        """
        if self.clip is None:
            return blocks
        norm, unit = norm_and_unit(blocks)
        present = reductions.total((blocks != 0).astype(jnp.float32))
        deviation = norm / jnp.sqrt(jnp.maximum(present, 1))
        bound = (unit * (jnp.float32(self.clip) * deviation))[..., None]  # infinity clips nothing
        return jnp.clip(blocks, -bound, bound)

    @property
    def most(self) -> float:
        """One."""
        return 1

    @property
    def width(self) -> int:
        """Two."""
        return width_for(1)

    def codes(self, numbers: jax.Array, bits: jax.Array) -> jax.Array:
        """-1, 0 or 1, at random."""
        return round_to_levels(numbers, bits, 1).astype(jnp.uint8)

    def numbers(self, codes: jax.Array) -> jax.Array:
        """-1, 0 or 1."""
        return level_of(codes, 1)


def terngrad(block_size: int = 512, clip: float | None = None) -> TernGrad:
    """TernGrad: 2 bits per value, unbiased without clipping.

    Args:
      block_size: the values that share a scale of 4 bytes.
      clip: None, or the number of standard deviations to clip at; the paper uses 2.5.

    Returns:
      The codec. A message of n values is uint8 `(n / 4 + 4 n / block_size,)`, rounded up. For
      blocks of d values, `E|Q(v) - v|^2 <= (sqrt(d) - 1) / 2 |v|^2` without clipping.

    Raises:
      TypeError, ValueError: for any other arguments.

    References:
      W. Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep
      Learning", NeurIPS 2017, arXiv:1705.07878.

    Differs from the paper: each block has a scale, instead of each layer. The standard deviation is
    the root mean square of the nonzero values, because messages are padded with zeros. Each device
    has its own scales; the paper's scale sharing, a maximum over the devices, is left out.
    """
    return TernGrad(block_size, clip)
