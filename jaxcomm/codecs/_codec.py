"""The interface of all wire formats for floats."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax

from jaxcomm.kernels import _implementations, reductions
from jaxcomm.kernels._apart import once
from jaxcomm.kernels.block_quantization.rows import Rows

_LONG = 2**16
EVEN = 256  # values; XLA on CPU makes vector loops of this many


@dataclasses.dataclass(frozen=True)
class Codec:
    """A wire format for float32 vectors.

    `encode` and `decode` work on the last axis. Leading axes are independent messages, so a block
    of a message can be sent, kept or decoded separately. The payload is one array. Codecs know
    nothing of other devices. Your own codec needs `name`, `encode`, `decode` and `message_bytes`;
    everything else has a default.

    Zeros decode to zeros, and a payload of zero bytes decodes to zeros. Messages are padded with
    zeros at the end, which do not change the values before them. A value that is not finite decodes
    to one that is not finite, but for those that `random_k` does not draw. Codecs that need error
    feedback promise less: only a message of all zeros decodes to zeros.

    Attributes:
      implementation: which implementation of its operations runs, as in `jaxcomm.mean`. It changes
        no bit of a payload, so codecs that differ in it are equal.
      name: the short form that factories accept as a string.
      largest: the largest finite magnitude of the format, if sums of gradients may exceed it; None
        if the range is that of float32.
      has_fixed_range: whether larger magnitudes than a fixed one are clipped to it, so that a mean
        may not scale values for another codec.
      needs_error_feedback: whether a mean in this format is useless without error feedback.
    """

    implementation: _implementations.Option = dataclasses.field(
        default=None, kw_only=True, compare=False, repr=False
    )
    name: ClassVar[str]
    largest: ClassVar[float | None] = None
    has_fixed_range: ClassVar[bool] = False
    needs_error_feedback: ClassVar[bool] = False

    @property
    def operations(self) -> tuple[str, ...]:
        """The operations of the codec that have more than one implementation."""
        return ()

    @property
    def is_random(self) -> bool:
        """Whether `encode` rounds at random and needs a key."""
        return False

    @property
    def variance(self) -> float:
        """A bound of `E|C(x) - x|^2 / |x|^2`; 0 where it is less than 1 with any options.

        With error feedback, an error of 1 or more may grow from step to step. It is also 0 for
        clipped values, and for `random_k`, which does not multiply what it sends then.
        """
        return 0.0

    @property
    def even(self) -> int:
        """Messages whose length is a multiple of this are fast.

        XLA on CPU takes up to 5 times as long to encode and decode other lengths.
        """
        return 1

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """float32 `(..., n)` to a payload `(..., m)`; the format determines m and the dtype.

        Args:
          x: the messages.
          key: a PRNG key if `is_random`; ignored otherwise. Every value of every message is rounded
            with its own random bits.
        """
        raise NotImplementedError

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """The float32 `(..., n)` that a payload `(..., m)` stands for."""
        raise NotImplementedError

    def decode_and_sum(self, payloads: jax.Array, n: int) -> jax.Array:
        """The sum, float32 `(n,)`, of the values of N payloads `(N, m)`, added in order."""
        total = lambda payloads: reductions.sum_in_order(self.decode(payloads, n))  # noqa: E731
        return self.once(total)(payloads)

    def sum_with_own(self, payloads: jax.Array, own: jax.Array, place: jax.Array) -> jax.Array:
        """`decode_and_sum` with the values `own`, `(n,)`, for those of the payload at `place`."""
        values = self.decode(payloads, own.size)
        values = jax.lax.dynamic_update_index_in_dim(values, own, place, axis=0)
        return reductions.sum_in_order(values)

    def error(self, x: jax.Array, payload: jax.Array) -> jax.Array:
        """What encoding took from x, float32 `(..., n)`: x minus the values of its payload."""
        return x - self.decode(payload, x.shape[-1])

    def in_rows(self, n: int) -> bool:
        """Whether parts of n values can be decoded by themselves, as `rows`."""
        del n
        return False

    def rows(self, payloads: jax.Array, n: int) -> Rows:
        """The blocks of payloads `(N, m)` of n values each, where `in_rows`."""
        raise NotImplementedError

    def message_bytes(self, n: int) -> int:
        """The bytes of the payload of one message of n values, scales included."""
        raise NotImplementedError

    def once(self, f: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
        """f of payloads, such that XLA on CPU does not decode them again for each use of a result.

        That of 16 bits or more costs less than to store the values.
        """
        return f if self.bits_per_value >= 16 else once(f)

    @property
    def bits_per_value(self) -> float:
        """The bits of a value in a long message, scales included."""
        return 8 * self.message_bytes(_LONG) / _LONG

    def native(self, x: jax.Array) -> jax.Array:
        """Converts float32 to the dtype in which XLA itself can add these values.

        Raises:
          ValueError: if there is no such dtype.
        """
        raise ValueError(
            f"XLA cannot add {self.name} codes; choose an algorithm other than native, "
            'such as "direct".'
        )
