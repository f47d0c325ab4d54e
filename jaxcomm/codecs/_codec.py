"""What every wire format for floats offers."""

import dataclasses
from typing import ClassVar

import jax


@dataclasses.dataclass(frozen=True)
class Codec:
    """A wire format for float32 vectors.

    `encode` and `decode` work on the last axis; leading axes are independent messages, so that a
    block of a message can be sent, kept or decoded by itself. The payload is one array, and the
    payload of zeros decodes to zeros. Codecs know nothing of other devices.

    Attributes:
      name: the short form that factories accept as a string.
      largest: the largest finite magnitude the format holds, if sums of gradients may exceed it;
        None where the range is that of float32.
    """

    name: ClassVar[str]
    largest: ClassVar[float | None] = None

    def encode(self, x: jax.Array) -> jax.Array:
        """float32 `(..., n)` to a payload `(..., m)`, whose dtype and m the format names."""
        raise NotImplementedError

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """The float32 `(..., n)` that a payload `(..., m)` stands for."""
        raise NotImplementedError

    def native(self, x: jax.Array) -> jax.Array:
        """float32 to the dtype in which XLA itself can add these values."""
        raise NotImplementedError
