"""bfloat16: the upper half of float32."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxcomm.codecs._codec import Codec
from jaxcomm.kernels import bfloat16 as kernel


@dataclasses.dataclass(frozen=True)
class BFloat16(Codec):
    """16 bits per value: sign, 8 bits of exponent, 7 of mantissa, rounded to nearest even.

    The relative error is at most 2^-8, and the range is float32's up to 3.39e38.
    `kernels.bfloat16` explains why the payload is uint16.
    """

    name = "bfloat16"

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """float32 `(..., n)` to uint16 `(..., n)`."""
        del key
        return kernel.round_to_bits(x)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """uint16 `(..., n)` to float32 `(..., n)`."""
        del n
        return kernel.widen_bits(payload)

    def message_bytes(self, n: int) -> int:
        """2n."""
        return 2 * n

    def native(self, x: jax.Array) -> jax.Array:
        """bfloat16; XLA's CPU backend sends such sums as float32, 4 bytes per value."""
        return x.astype(jnp.bfloat16)


def bfloat16() -> BFloat16:
    """bfloat16: sign, 8 bits of exponent, 7 of mantissa, rounded to nearest even.

    Returns:
      The codec. A message of n values is uint16 `(n,)`, the bit patterns: 2n bytes. It has the
      range of float32 up to 3.39e38; the relative error is at most 2^-8.
    """
    return BFloat16()
