"""One bit a value and one scale: the wire format of 1-bit Adam.

Functions rather than a `Codec`: a message may end in padding, which the scale must not see, and
without error feedback nobody should average in this format.
"""

import jax
import jax.numpy as jnp

from jaxcomm.kernels import bitplanes


def encode(x: jax.Array, counts: jax.Array) -> jax.Array:
    """The signs of each message, behind the scale that keeps its L2 norm.

    Args:
      x: float32 `(..., n)`; leading axes are independent messages, each ends in zeros of padding.
      counts: int32 `(...)`, how many values of each message are not padding.

    Returns:
      uint32 `(..., 1 + ceil(n / 32))`: the bits of the scale ||x|| / sqrt(count), then one bit a
      value, 1 if it is positive.
    """
    # In units of the largest magnitude, as squares of large float32 values are infinite; but not
    # beyond 2^126, as XLA divides by multiplying with the reciprocal, which is zero there on CPU.
    largest = jnp.max(jnp.abs(x), axis=-1)
    unit = jnp.where(largest > 0, jnp.minimum(largest, jnp.float32(2.0**126)), jnp.float32(1))
    squares = jnp.sum(jnp.square(x / unit[..., None]), axis=-1)
    scale = unit * jnp.sqrt(squares / jnp.maximum(counts, 1).astype(jnp.float32))
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32)
    return jnp.concatenate([bits[..., None], bitplanes.pack(x)], axis=-1)


def decode(payload: jax.Array, n: int) -> jax.Array:
    """Plus or minus the scale, as float32 `(..., n)`; padding too is one of these."""
    scale = jax.lax.bitcast_convert_type(payload[..., :1], jnp.float32)
    return bitplanes.signs(payload[..., 1:], n) * scale
