"""Messages of powers of two in 8 bits per value, for a window of exponents below the largest.

The first byte of a payload, uint8, is the exponent field t of the largest magnitude of the message,
rounded up to a power of two: 2^(t - 127). It is 0 if all values are zero, and 255 if a value is not
finite. Each other byte is a sign bit above 7 bits c, which are 0 for zero and otherwise stand for
2^(t - 127 + c - 127). Zero has no sign.
"""

import jax

from jaxcomm.kernels import _implementations
from jaxcomm.kernels._messages import require_messages
from jaxcomm.kernels.powers_of_two import plain_window
from jaxcomm.kernels.powers_of_two.plain_window import decode, message_bytes, signed

__all__ = ["decode", "encode", "message_bytes", "signed"]


def encode(
    x: jax.Array,
    key: jax.Array | None = None,
    *,
    implementation: _implementations.Option = None,
) -> jax.Array:
    """Encodes each value as one of its two nearest powers of two in the window, or as zero.

    Args:
      x: float32 array `(..., n)`; leading axes are independent messages.
      key: a PRNG key to round at random, with a word of `random_bits(key, x.shape)` for each value;
        None rounds to nearest.
      implementation: "xla", "mosaic" (on NVIDIA GPUs), or another option of `_implementations`;
        None means the fastest that was timed.

    Returns:
      uint8 array `(..., n + 1)`.

    Raises:
      TypeError: for another dtype.
      ValueError: for a scalar, or for more bytes than the implementation can index.
      NotImplementedError: for an implementation that does not exist here.
    """
    require_messages(x)

    def run(name: str, x: jax.Array, key: jax.Array | None) -> jax.Array:
        if name == "mosaic":
            from jaxcomm.kernels.powers_of_two import window_mosaic  # Pallas takes long to import

            return window_mosaic.encode(x, key)
        return plain_window.encode(x, key)

    elements = x.size // max(x.shape[-1], 1) * message_bytes(x.shape[-1])
    return _implementations.call("cnat.encode", implementation, run, (x, key), elements=elements)
