"""Powers of two in 9 bits, each of those that float32 has: exponents, and a plane of signs.

A payload is uint8: the exponent field of every value, 255 for infinity, then the signs packed as by
`bitplanes.pack`, 4 bytes a word: 1 for negative values and for NaN, whose exponent is 0.

The plain versions below are the specification. XLA on GPU moves 4.2 times the bytes to encode and
2.4 times to decode, as what is packed behind something else goes through memory first.
"""

import functools

import jax
import jax.numpy as jnp

from jaxcomm.kernels import _device, bitplanes, powers_of_two
from jaxcomm.kernels.random_bits import random_bits

_IMPLEMENTATIONS = ("xla", "mosaic")
_MAGNITUDE, _INFINITY = 0x7FFFFFFF, 0x7F800000


def message_bytes(n: int) -> int:
    """The bytes of the payload of a message of n values, n + 4 ceil(n / 32)."""
    return n + 4 * bitplanes.words_for(n)


def encode(
    x: jax.Array, key: jax.Array | None = None, *, implementation: str | None = None
) -> jax.Array:
    """Each value as one of the powers of two around it.

    Args:
      x: float32 array `(..., n)`; leading axes are independent messages.
      key: a PRNG key to round at random, with a word of `random_bits(key, x.shape)` for each value;
        None rounds to nearest.
      implementation: "xla", "mosaic" (on NVIDIA GPUs), or None, which is "xla".

    Returns:
      uint8 array `(..., message_bytes(n))`.

    Raises:
      TypeError: for another dtype.
      ValueError: for a scalar, or for more bytes than the implementation counts.
      NotImplementedError: for an implementation that does not exist here.
    """
    if x.dtype != jnp.float32:
        raise TypeError(f"encode takes float32, got {x.dtype}; write x.astype(jnp.float32).")
    if x.ndim == 0:
        raise ValueError("encode takes messages (..., n), got a scalar; write x.reshape(1).")
    elements = x.size // max(x.shape[-1], 1) * message_bytes(x.shape[-1])
    chosen = _device.choose("cnat_all.encode", implementation, _IMPLEMENTATIONS, elements)
    if chosen == "mosaic" and x.size:
        from jaxcomm.kernels.cnat_all import mosaic  # Pallas takes long to import

        return mosaic.encode(x, key)
    bits = jnp.uint32(powers_of_two.HALF) if key is None else random_bits(key, x.shape)
    exponent, sign = fields(x, bits)
    words = bitplanes.pack(sign)
    signs = jax.lax.bitcast_convert_type(words, jnp.uint8)
    signs = signs.reshape(*x.shape[:-1], 4 * words.shape[-1])
    return jnp.concatenate([exponent.astype(jnp.uint8), signs], axis=-1)


def decode(payload: jax.Array, n: int) -> jax.Array:
    """The values of messages.

    Args:
      payload: uint8 array `(..., message_bytes(n))`.
      n: the number of values.

    Returns:
      float32 array `(..., n)`.

    Raises:
      TypeError: for another dtype.
      ValueError: for another number of bytes.
    """
    _check(payload, n)
    words = payload[..., n:].reshape(*payload.shape[:-1], bitplanes.words_for(n), 4)
    words = jax.lax.bitcast_convert_type(words, jnp.uint32)
    return value(payload[..., :n], bitplanes.unpack(words, n))


def decode_and_sum(payloads: jax.Array, n: int, *, implementation: str | None = None) -> jax.Array:
    """The sum of the values of several messages, added in their order.

    Args:
      payloads: uint8 array `(N, message_bytes(n))`, N at least 1.
      n: the number of values.
      implementation: as for `encode`.

    Returns:
      float32 array `(n,)`.

    Raises:
      TypeError: for another dtype.
      ValueError: for another shape, or for more bytes than the implementation counts.
      NotImplementedError: for an implementation that does not exist here.
    """
    _check(payloads, n)
    if payloads.ndim != 2 or payloads.shape[0] == 0:
        raise ValueError(f"decode_and_sum takes messages (N, m), got shape {payloads.shape}.")
    elements = max(payloads.size, 32 * bitplanes.words_for(n))
    chosen = _device.choose("cnat_all.decode_and_sum", implementation, _IMPLEMENTATIONS, elements)
    if chosen == "mosaic" and n:
        from jaxcomm.kernels.cnat_all import mosaic

        return mosaic.decode_and_sum(payloads, n)
    values = decode(payloads, n)
    return functools.reduce(jnp.add, [values[r] for r in range(len(payloads))])


def fields(x: jax.Array, bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Exponent fields, uint32, and signs, bool, of float32 values and the words they round by."""
    pattern = jax.lax.bitcast_convert_type(x, jnp.uint32)
    isnan = (pattern & _MAGNITUDE) > _INFINITY
    exponent = jnp.where(isnan, jnp.uint32(0), powers_of_two.exponents(x, bits))
    return exponent, isnan | ((pattern > _MAGNITUDE) & (exponent > 0))


def value(exponent: jax.Array, sign: jax.Array) -> jax.Array:
    """The float32 values of exponent fields, uint8, and signs, bool."""
    exponent = exponent.astype(jnp.uint32)
    power = powers_of_two.values(exponent, sign.astype(jnp.uint32))
    return jnp.where(sign & (exponent == 0), jnp.float32(jnp.nan), power)


def _check(payload: jax.Array, n: int) -> None:
    if payload.dtype != jnp.uint8:
        raise TypeError(f"a payload is uint8, got {payload.dtype}; encode makes them.")
    if n < 0 or payload.ndim == 0 or payload.shape[-1] != message_bytes(n):
        raise ValueError(
            f"{n} values are n + 4 ceil(n / 32) bytes along the last axis, got a payload of shape "
            f"{payload.shape}; pass the n that was encoded."
        )
