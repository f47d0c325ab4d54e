"""Unchanged float32."""

import dataclasses

import jax

from jaxcomm.codecs._codec import Codec


@dataclasses.dataclass(frozen=True)
class Float32(Codec):
    """32 bits per value: the value itself. The baseline of every comparison."""

    name = "float32"

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """float32 `(..., n)` to itself."""
        del key
        return x

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """float32 `(..., n)` to itself."""
        del n
        return payload

    def message_bytes(self, n: int) -> int:
        """4n."""
        return 4 * n

    def native(self, x: jax.Array) -> jax.Array:
        """float32, unchanged."""
        return x


def float32() -> Float32:
    """Unchanged float32, the baseline that other codecs are compared with.

    Returns:
      The codec. A message of n values is float32 `(n,)`: 4n bytes. Nothing is rounded.
    """
    return Float32()
