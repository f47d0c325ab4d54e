"""Messages of powers of two in 9 bits per value: every exponent of float32, and a plane of signs.

A payload is uint8. First comes the exponent field of every value, 255 for infinity. Then come the
sign bits, packed by `bitplanes.pack`, 4 bytes per word. The sign bit is 1 for negative values; NaN
has the exponent 0 and the sign bit 1.
"""

import jax

from jaxcomm.kernels import _implementations, bitplanes
from jaxcomm.kernels._messages import require_messages, require_payload
from jaxcomm.kernels.powers_of_two import plain
from jaxcomm.kernels.powers_of_two.plain import message_bytes

__all__ = ["decode", "decode_and_sum", "encode", "message_bytes"]


def encode(
    x: jax.Array,
    key: jax.Array | None = None,
    *,
    implementation: _implementations.Option = None,
) -> jax.Array:
    """Encodes each value as one of its two nearest powers of two.

    Args:
      x: float32 array `(..., n)`; leading axes are independent messages.
      key: a PRNG key to round at random, with a word of `random_bits(key, x.shape)` for each value;
        None rounds to nearest.
      implementation: "xla", "mosaic" (on NVIDIA GPUs), or another option of `_implementations`;
        None means the fastest that was timed.

    Returns:
      uint8 array `(..., message_bytes(n))`.

    Raises:
      TypeError: for another dtype.
      ValueError: for a scalar, or for more bytes than the implementation can index.
      NotImplementedError: for an implementation that does not exist here.
    """
    require_messages(x)

    def run(name: str, x: jax.Array, key: jax.Array | None) -> jax.Array:
        if name == "mosaic":
            from jaxcomm.kernels.powers_of_two import mosaic  # Pallas takes long to import

            return mosaic.encode(x, key)
        return plain.encode(x, key)

    elements = x.size // max(x.shape[-1], 1) * message_bytes(x.shape[-1])
    return _implementations.call(
        "nine_bits.encode", implementation, run, (x, key), elements=elements
    )


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
    require_payload(payload, n, message_bytes(n))
    return plain.decode(payload, n)


def decode_and_sum(
    payloads: jax.Array, n: int, *, implementation: _implementations.Option = None
) -> jax.Array:
    """The sum of the values of several messages, added in their order.

    Args:
      payloads: uint8 array `(N, message_bytes(n))`, N at least 1.
      n: the number of values.
      implementation: as for `encode`.

    Returns:
      float32 array `(n,)`.

    Raises:
      TypeError: for another dtype.
      ValueError: for another shape, or for more bytes than the implementation can index.
      NotImplementedError: for an implementation that does not exist here.
    """
    require_payload(payloads, n, message_bytes(n))
    if payloads.ndim != 2 or payloads.shape[0] == 0:
        raise ValueError(f"decode_and_sum takes messages (N, m), got shape {payloads.shape}.")

    def run(name: str, payloads: jax.Array) -> jax.Array:
        if name == "mosaic":
            from jaxcomm.kernels.powers_of_two import mosaic

            return mosaic.decode_and_sum(payloads, n)
        return plain.decode_and_sum(payloads, n)

    elements = max(payloads.size, bitplanes.BITS * bitplanes.words_for(n))
    return _implementations.call(
        "nine_bits.decode_and_sum", implementation, run, (payloads,), elements=elements
    )
