"""The mean over devices, with any codec on the wire."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._compat import AxisName
from jaxcomm.codecs import Codec
from jaxcomm.collectives._reduction import Lifted, Reduction


@dataclasses.dataclass(frozen=True)
class Mean(Reduction):
    """Partials are float32 sums; a hop decodes, adds in float32 and encodes again.

    For a codec of limited range, devices first agree on a power of two to scale by (a `pmax` of
    one int32), so that no partial sum of finite values overflows.

    Attributes:
      codec: the format of every message on its way to an owner.
      second_hop: the format of the mean on its way back.
      error_feedback: whether each device keeps what its messages do not say; with "first_hop",
        not those that bring the mean back.
      key: if a codec rounds at random: equal on all devices, until `on_this_device`.
    """

    codec: Codec
    second_hop: Codec
    error_feedback: bool | str = False
    key: jax.Array | None = None

    def on_this_device(self, axis_name: AxisName) -> "Mean":
        """See `Reduction.on_this_device`."""
        if self.key is None:
            return self
        own = jax.random.fold_in(self.key, jax.lax.axis_index(axis_name))
        return dataclasses.replace(self, key=own)

    @property
    def keeps_errors(self) -> bool:
        """See `Reduction.keeps_errors`."""
        return bool(self.error_feedback)

    @property
    def is_random(self) -> bool:
        """Whether a key is needed."""
        return self.codec.is_random or self.second_hop.is_random

    @property
    def is_shared(self) -> bool:
        """Whether the devices must have been given the same key."""
        return False

    def lift(self, x: jax.Array, axis_name: AxisName) -> Lifted:
        """Scales x so that its sum over all devices stays within the codecs' range."""
        limits = [c.largest for c in (self.codec, self.second_hop) if c.largest is not None]
        if not limits:
            return Lifted(x)
        world = jax.lax.axis_size(axis_name)
        _, above = jnp.frexp(jnp.max(jnp.abs(x)))
        above = jax.lax.pmax(above, axis_name)  # every |x| < 2^above on every device
        _, limit = jnp.frexp(jnp.float32(min(limits)))
        shift = limit - 1 - above - (world - 1).bit_length()
        return Lifted(_times_power_of_two(x, shift), agreed=-shift)

    def start(self, blocks: jax.Array, world: int) -> jax.Array:
        """The values themselves, float32[b, n]."""
        del world
        return blocks

    def merge(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """The sum."""
        return a + b

    def encode(self, partial: jax.Array, counts: tuple[int, ...], hop: int) -> jax.Array:
        """The codec's payload; the number of devices in a sum does not matter to it."""
        del counts
        return self._encoded(self.codec, partial, hop)

    def decode(self, message: jax.Array, counts: tuple[int, ...], like: jax.Array) -> jax.Array:
        """The codec's values."""
        del counts
        return self.codec.decode(message, like.shape[-1])

    def total(self, messages: jax.Array, counts: tuple[int, ...], like: jax.Array) -> jax.Array:
        """The codec's sum."""
        del counts
        return self.codec.decode_and_sum(messages, like.shape[-1])[None]

    def finish(self, partial: jax.Array, beside: None, world: int) -> jax.Array:
        """The encoded mean."""
        del beside
        return self._encoded(self.second_hop, partial * _reciprocal(world), 0)

    def unsaid(self, partial: jax.Array, message: jax.Array) -> jax.Array:
        """What was rounded off."""
        return partial - self.codec.decode(message, partial.shape[-1])

    def owed(self, partial: jax.Array, value: jax.Array, world: int) -> jax.Array:
        """What was rounded off the mean, N times: that much of the sum has arrived nowhere."""
        if self.error_feedback == "first_hop":
            return jnp.zeros_like(partial)
        return partial - world * self.second_hop.decode(value, partial.shape[-1])

    def errors(self, x: jax.Array, unsaid: jax.Array, agreed: Any) -> jax.Array:
        """Takes the scale back."""
        return self.lower(unsaid, agreed, x.size)

    def read(self, value: jax.Array, n: int) -> jax.Array:
        """The decoded mean."""
        return self.second_hop.decode(value, n)

    def lower(self, vector: jax.Array, agreed: Any, n: int) -> jax.Array:
        """Takes the scale back."""
        del n
        return vector if agreed is None else _times_power_of_two(vector, agreed)

    def native(self, lifted: Lifted, axis_name: AxisName) -> jax.Array:
        """XLA's `psum` in the codec's dtype, scaled in float32."""
        total = jax.lax.psum(self.codec.native(lifted.vector), axis_name)
        return total.astype(jnp.float32) * _reciprocal(jax.lax.axis_size(axis_name))

    def _encoded(self, codec: Codec, x: jax.Array, hop: int) -> jax.Array:
        if not codec.is_random:
            return codec.encode(x)
        if self.key is None:
            raise ValueError(
                f"{codec.name} rounds at random and needs a key; give one that is equal on all "
                "devices, another at every call: jax.random.fold_in(jax.random.key(0), step)."
            )
        return codec.encode(x, jax.random.fold_in(self.key, hop))


def _reciprocal(world: int) -> np.float32:
    """1/N in float32: XLA turns a division into this product on some backends, so say it."""
    return np.float32(1 / world)


def _times_power_of_two(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """Multiplies by 2^exponent in two steps, so that neither factor leaves float32's range."""
    half = exponent // 2
    return x * _power_of_two(half) * _power_of_two(exponent - half)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type((jnp.clip(exponent, -126, 127) + 127) << 23, jnp.float32)
