"""What every wire format for floats offers."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Codec:
    """A wire format for float32 vectors.

    `encode` and `decode` work on the last axis; leading axes are independent messages, so that a
    block of a message can be sent, kept or decoded by itself. The payload is one array, and the
    payload of zeros decodes to zeros. Codecs know nothing of other devices.

    Zeros decode to zeros, and zeros at the end of a message change nothing before them: messages
    are padded with them. A value that is not finite makes at least itself not finite. Where errors
    must be fed back, only messages of nothing but zeros decode to zeros.

    Attributes:
      name: the short form that factories accept as a string.
      largest: the largest finite magnitude the format holds, if sums of gradients may exceed it;
        None where the range is that of float32.
      needs_error_feedback: whether a mean in this format is of no use where errors are lost.
    """

    name: ClassVar[str]
    largest: ClassVar[float | None] = None
    needs_error_feedback: ClassVar[bool] = False

    @property
    def is_random(self) -> bool:
        """Whether `encode` rounds at random, and so needs a key."""
        return False

    @property
    def variance(self) -> float:
        """A bound of E|C(x) - x|^2 / |x|^2 where it can be 1 or more; else 0.

        Fed back, such an error may grow from step to step.
        """
        return 0.0

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """float32 `(..., n)` to a payload `(..., m)`, whose dtype and m the format names.

        Args:
          x: the messages.
          key: a PRNG key where `is_random`, and not looked at elsewhere; every value of every
            message is rounded by bits of its own.
        """
        raise NotImplementedError

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """The float32 `(..., n)` that a payload `(..., m)` stands for."""
        raise NotImplementedError

    def decode_and_sum(self, payloads: jax.Array, n: int) -> jax.Array:
        """The sum, float32 `(n,)`, of what N payloads `(N, m)` stand for, added in their order."""
        values = self.decode(payloads, n)
        return functools.reduce(jnp.add, [values[r] for r in range(len(payloads))])

    def message_bytes(self, n: int) -> int:
        """The bytes of the payload of one message of n values, scales included."""
        raise NotImplementedError

    def native(self, x: jax.Array) -> jax.Array:
        """float32 to the dtype in which XLA itself can add these values.

        Raises:
          ValueError: if there is none.
        """
        raise ValueError(
            f"XLA cannot add {self.name} codes by itself; choose another algorithm than native, "
            'such as "direct".'
        )
