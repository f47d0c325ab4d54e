"""float16: more mantissa than bfloat16, much less range."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxcomm.codecs._codec import Codec


@dataclasses.dataclass(frozen=True)
class Float16(Codec):
    """16 bits per value: sign, 5 bits of exponent, 10 of mantissa, rounded to nearest even.

    The relative error is at most 2^-11 between 2^-14 and 65504; below 2^-14 the absolute error is
    at most 2^-25. Larger magnitudes become infinite, so `largest` is set and a mean scales its sums
    first.
    """

    name = "float16"
    largest = 65504.0

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """float32 `(..., n)` to uint16 `(..., n)`."""
        del key
        bits = jax.lax.bitcast_convert_type(x.astype(jnp.float16), jnp.uint16)
        # XLA on GPUs may keep more precision than requested. It would drop this conversion where
        # `decode` follows, and an error x - decode(encode(x)) would be zero.
        return jax.lax.optimization_barrier(bits)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """uint16 `(..., n)` to float32 `(..., n)`."""
        del n
        return jax.lax.bitcast_convert_type(payload, jnp.float16).astype(jnp.float32)

    def message_bytes(self, n: int) -> int:
        """2n."""
        return 2 * n

    def native(self, x: jax.Array) -> jax.Array:
        """float16."""
        return x.astype(jnp.float16)


def float16() -> Float16:
    """float16: sign, 5 bits of exponent, 10 of mantissa, rounded to nearest even.

    A mean first scales its values by a power of two that all devices agree on, so that no sum
    overflows. This takes one more all-reduce, of an int32.

    Returns:
      The codec. A message of n values is uint16 `(n,)`, the bit patterns: 2n bytes. The relative
      error is at most 2^-11; below 2^-14 the absolute error is at most 2^-25.
    """
    return Float16()
