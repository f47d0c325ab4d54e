"""Messages of a window of exponents: the plain version, which is the specification.

XLA on GPU writes one byte after another, because the codes begin at an odd byte.
"""

import jax
import jax.numpy as jnp

from jaxcomm.kernels import reductions
from jaxcomm.kernels.powers_of_two import rounding
from jaxcomm.kernels.random_bits import rounding_words

WINDOW = 127  # the number of exponents that 7 bits hold, besides zero


def message_bytes(n: int) -> int:
    """The bytes of the payload of a message of n values, n + 1."""
    return n + 1


def encode(x: jax.Array, key: jax.Array | None) -> jax.Array:
    """Encodes checked arguments; see `window.encode`."""
    bits = rounding_words(key, x.shape)
    top = largest(x)[..., None]
    return jnp.concatenate([top.astype(jnp.uint8), codes(x, bits, top)], axis=-1)


def decode(payload: jax.Array) -> jax.Array:
    """The values of messages, float32 `(..., n)`: NaN where the first byte is 255."""
    top, code = payload[..., :1].astype(jnp.uint32), payload[..., 1:].astype(jnp.uint32)
    c = code & 0x7F
    exponent = jnp.where(c > 0, top + c - WINDOW, jnp.uint32(0))
    value = rounding.values(exponent, code >> 7)
    return jnp.where(top == rounding.NONFINITE, jnp.float32(jnp.nan), value)


def largest(x: jax.Array) -> jax.Array:
    """The first byte of each message, as uint32 `(...)`."""
    return rounding.ceiling(reductions.largest(x))


def codes(x: jax.Array, bits: jax.Array, top: jax.Array, *, is_far: bool = True) -> jax.Array:
    """The other bytes, uint8.

    Args:
      x: float32 array.
      bits: the rounding words, as for `rounding.exponents`.
      top: the first byte of the payload, uint32 that broadcasts to the shape of x.
      is_far: False if `top` is known to be at most WINDOW. Then no value is below the window.
    """
    lowest = jnp.maximum(top, jnp.uint32(WINDOW)) - (WINDOW - 1) if is_far else None
    exponent = rounding.exponents(x, bits, lowest=lowest)
    c = jnp.where(exponent > 0, exponent + WINDOW - top, jnp.uint32(0))
    return signed(x, c, c > 0)


def signed(x: jax.Array, code: jax.Array, present: jax.Array) -> jax.Array:
    """uint8: the sign of x above the seven bits of a code; zero has no sign."""
    sign = jax.lax.bitcast_convert_type(x, jnp.uint32) >> 31 << 7
    return jnp.where(present, sign | code, code).astype(jnp.uint8)
