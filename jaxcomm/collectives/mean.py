"""The mean over devices, with any codec on the wire."""

import dataclasses

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
      codec: the format of every message.
    """

    codec: Codec

    def lift(self, x: jax.Array, axis_name: AxisName) -> Lifted:
        """Scales x so that its sum over all devices stays within the codec's range."""
        if self.codec.largest is None:
            return Lifted(x)
        world = jax.lax.axis_size(axis_name)
        _, above = jnp.frexp(jnp.max(jnp.abs(x)))
        above = jax.lax.pmax(above, axis_name)  # every |x| < 2^above on every device
        _, limit = jnp.frexp(jnp.float32(self.codec.largest))
        shift = limit - 1 - above - (world - 1).bit_length()
        return Lifted(_times_power_of_two(x, shift), agreed=-shift)

    def start(self, blocks: jax.Array, world: int) -> jax.Array:
        """The values themselves, float32[b, n]."""
        del world
        return blocks

    def merge(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """The sum."""
        return a + b

    def encode(self, partial: jax.Array, counts: tuple[int, ...]) -> jax.Array:
        """The codec's payload; the number of devices in a sum does not matter to it."""
        del counts
        return self.codec.encode(partial)

    def decode(self, message: jax.Array, counts: tuple[int, ...], like: jax.Array) -> jax.Array:
        """The codec's values."""
        del counts
        return self.codec.decode(message, like.shape[-1])

    def finish(self, partial: jax.Array, beside: None, world: int) -> jax.Array:
        """The encoded mean."""
        del beside
        return self.codec.encode(partial * _reciprocal(world))

    def read(self, value: jax.Array, n: int) -> jax.Array:
        """The decoded mean."""
        return self.codec.decode(value, n)

    def lower(self, vector: jax.Array, agreed: jax.Array | None, n: int) -> jax.Array:
        """Takes the scale back."""
        del n
        return vector if agreed is None else _times_power_of_two(vector, agreed)

    def native(self, lifted: Lifted, axis_name: AxisName) -> jax.Array:
        """XLA's `psum` in the codec's dtype, scaled in float32."""
        total = jax.lax.psum(self.codec.native(lifted.vector), axis_name)
        return total.astype(jnp.float32) * _reciprocal(jax.lax.axis_size(axis_name))


def _reciprocal(world: int) -> np.float32:
    """1/N in float32: XLA turns a division into this product on some backends, so say it."""
    return np.float32(1 / world)


def _times_power_of_two(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """Multiplies by 2^exponent in two steps, so that neither factor leaves float32's range."""
    half = exponent // 2
    return x * _power_of_two(half) * _power_of_two(exponent - half)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type((jnp.clip(exponent, -126, 127) + 127) << 23, jnp.float32)
