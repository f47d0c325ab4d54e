"""One bit a value and one scale: the wire format of 1-bit Adam.

These are functions rather than a `Codec`. A message may end in padding, which the scale must not
count, and nobody should average in this format without error feedback.
"""

import jax
import jax.numpy as jnp

from jaxcomm.kernels import _implementations, bitplanes, reductions
from jaxcomm.kernels.sign_feedback import sign_feedback

OPERATIONS = ("sign_feedback",)


def encode_with_feedback(
    x: jax.Array,
    residual: jax.Array,
    counts: jax.Array,
    *,
    implementation: _implementations.Option = None,
) -> tuple[jax.Array, jax.Array]:
    """The signs of `x + residual`, behind the scale that keeps its L2 norm; and the error.

    Args:
      x: float32 `(..., n)`; leading axes are independent messages, each ends in zeros of padding.
      residual: float32 of the same shape, with zeros in the padding.
      counts: int32 `(...)`, the number of values of each message without the padding.
      implementation: which implementation of OPERATIONS runs; None is "xla".

    Returns:
      The payload, uint32 `(..., 1 + ceil(n / 32))`: the bits of the scale, which is the L2 norm
      over sqrt(count), then one bit a value, 1 if it is positive. And the next residual, float32
      `(..., n)`: `x + residual` minus the decoded payload, and zero in the padding.
    """
    scale = _scale(x + residual, counts)
    words, residual = sign_feedback(x, residual, scale, implementation=implementation)
    place = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32)
    payload = jnp.concatenate([bits[..., None], words], axis=-1)
    return payload, jnp.where(place < counts[..., None], residual, jnp.float32(0))


def decode(payload: jax.Array, n: int) -> jax.Array:
    """Plus or minus the scale, as float32 `(..., n)`, in the padding too."""
    scale = jax.lax.bitcast_convert_type(payload[..., :1], jnp.float32)
    return bitplanes.signs(payload[..., 1:], n) * scale


def _scale(x: jax.Array, counts: jax.Array) -> jax.Array:
    """The root mean square of each message, float32 `(...)`."""
    # Values are divided by the largest magnitude first, because squares of large float32 values are
    # infinite. The divisor is at most 2^126: XLA multiplies with its reciprocal, and the reciprocal
    # of a larger number is zero on CPU.
    largest = jax.lax.bitcast_convert_type(reductions.largest(x), jnp.float32)
    unit = jnp.where(largest > 0, jnp.minimum(largest, jnp.float32(2.0**126)), jnp.float32(1))
    squares = reductions.total(jnp.square(x / unit[..., None]))
    return unit * jnp.sqrt(squares / jnp.maximum(counts, 1).astype(jnp.float32))
