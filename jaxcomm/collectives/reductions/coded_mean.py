"""The mean over devices, with any codec on the wire."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._axes import AxisName
from jaxcomm.codecs import Codec
from jaxcomm.collectives.reductions._reduction import Prepared, Reduction
from jaxcomm.kernels.random_bits import own_key
from jaxcomm.kernels.reductions import sum_in_order

_LARGEST = float(np.finfo(np.float32).max)
_LEAST_EXPONENT = -149  # of float32's subnormal numbers


@dataclasses.dataclass(frozen=True)
class CodedMean(Reduction):
    """Partials are float32 sums; each hop decodes, adds in float32 and encodes again.

    For a codec of limited range, all devices first scale by one power of two (a `pmax` of one
    int32), so that no partial sum of finite values overflows.

    Attributes:
      codec: the format of the messages of the reduce-scatter, the first hop.
      second_hop: the format of the mean in the all-gather, the second hop.
      error_feedback: True keeps the errors of both hops, "first_hop" only those of the first.
      key: for codecs that round at random: equal on all devices before `for_this_device`.
    """

    codec: Codec
    second_hop: Codec
    error_feedback: bool | str = False
    key: jax.Array | None = None

    def for_this_device(self, axis_name: AxisName) -> "CodedMean":
        """With this device's own rounding key: rounding must be independent between devices."""
        if self.key is None:
            return self
        own = own_key(self.key, jax.lax.axis_index(axis_name))
        return dataclasses.replace(self, key=own)

    @property
    def keeps_errors(self) -> bool:
        """With error feedback."""
        return bool(self.error_feedback)

    @property
    def is_random(self) -> bool:
        """Whether a key is needed."""
        return self.codec.is_random or self.second_hop.is_random

    @property
    def carries_nonfinite(self) -> bool:
        """Whether a value or residual that is not finite makes the result not finite everywhere."""
        return True

    @property
    def needs_equal_keys(self) -> bool:
        """Whether a result means nothing if the devices were given different keys."""
        return False

    def padded(self, n: int, blocks: int) -> int:
        """A multiple for which messages are fast, where it adds at most a 64th to them.

        Otherwise, if the padding is to be filled, a multiple for which messages are equally long.
        """
        even = math.lcm(self.codec.even, self.second_hop.even)
        multiple = blocks * even
        if even > 1 and n >= 64 * multiple:
            return -(-n // multiple) * multiple
        needs_filling = self.codec.needs_error_feedback or self.second_hop.needs_error_feedback
        return -(-n // blocks) * blocks if needs_filling else n

    def filled(self, x: jax.Array, n: int, blocks: int) -> jax.Array:
        """Repeats the values of the last block in the padding after them.

        Zeros would make the scale of that block too small, in a codec without a code for zero, and
        error feedback would take many steps to send what is missing.
        """
        used = [c for c in (self.codec, self.second_hop) if c.needs_error_feedback]
        if n == x.size or not used:
            return x
        size, message = max(getattr(c, "block_size", 1) for c in used), x.size // blocks
        start = (n - 1) // message * message  # of the message that the last value is in
        start += (n - 1 - start) // size * size
        repeated = jnp.resize(x[start:n], (x.size - n,))
        return jax.lax.dynamic_update_slice(x, repeated, (n,))

    def prepare(self, x: jax.Array, axis_name: AxisName) -> Prepared:
        """Scales x so that its sum over all devices stays within the codecs' range."""
        limits = [c.largest for c in (self.codec, self.second_hop) if c.largest is not None]
        if not limits:
            return Prepared(x)
        world = jax.lax.axis_size(axis_name)
        # Values that are not finite have no exponent, and must not hide those of the others.
        largest = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0.0))
        _, above = jnp.frexp(largest)
        above = jnp.where(largest == 0, _LEAST_EXPONENT, above)  # zeros need no range
        above = jax.lax.pmax(above, axis_name)  # every |x| < 2^above on every device
        _, limit = jnp.frexp(jnp.float32(min(limits)))
        shift = limit - 1 - above - (world - 1).bit_length()
        return Prepared(_times_power_of_two(x, shift), shared_scale=-shift)

    def start(self, blocks: jax.Array, world: int) -> jax.Array:
        """The values themselves, float32[b, n]."""
        del world
        return blocks

    def merge(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """The sum."""
        return a + b

    def merge_all(self, partials: jax.Array) -> jax.Array:
        """The sum, in a program that does not grow with the number of devices."""
        return sum_in_order(partials)[None]

    def encode(self, partial: jax.Array, counts: tuple[int, ...], message_id: int) -> jax.Array:
        """The codec's payload, whatever the number of devices in a sum."""
        del counts
        return self._encoded(self.codec, partial, message_id)

    def decode(self, message: jax.Array, counts: tuple[int, ...], like: jax.Array) -> jax.Array:
        """The codec's values."""
        del counts
        return self.codec.decode(message, like.shape[-1])

    def decode_and_merge(
        self, messages: jax.Array, counts: tuple[int, ...], like: jax.Array
    ) -> jax.Array:
        """The codec's sum, which a kernel may compute without storing the decoded values."""
        del counts
        return self.codec.decode_and_sum(messages, like.shape[-1])[None]

    def merge_with_own(self, messages: jax.Array, own: jax.Array, place: jax.Array) -> jax.Array:
        """The codec's sum, likewise."""
        return self.codec.sum_with_own(messages, own.reshape(-1), place)[None]

    def finish(self, partial: jax.Array, replicated: None, world: int) -> jax.Array:
        """The encoded mean."""
        del replicated
        return self._encoded(self.second_hop, partial * _reciprocal(world), 0)

    def decode_result(self, result: jax.Array, n: int) -> jax.Array:
        """The decoded mean; Adam uses an update twice."""
        return self.second_hop.once(functools.partial(self.second_hop.decode, n=n))(result)

    def restore(self, vector: jax.Array, shared_scale: Any, n: int) -> jax.Array:
        """Undoes the scaling of `prepare`."""
        del n
        return vector if shared_scale is None else _times_power_of_two(vector, shared_scale)

    def first_hop_error(self, partial: jax.Array, message: jax.Array) -> jax.Array:
        """What encoding took from a partial."""
        return self.codec.error(partial, message)

    def second_hop_error(self, partial: jax.Array, result: jax.Array, world: int) -> jax.Array:
        """N times what encoding took from the mean: the part of the sum that no result holds."""
        if self.error_feedback == "first_hop":
            return jnp.zeros_like(partial)
        decoded = world * self.second_hop.decode(result, partial.shape[-1])
        # N times a finite mean that was rounded up may be infinite; the error must not be.
        return partial - jnp.clip(decoded, -_LARGEST, _LARGEST)

    def residual(self, x: jax.Array, errors: jax.Array, shared_scale: Any) -> jax.Array:
        """The errors, in the scale of x."""
        return self.restore(errors, shared_scale, x.size)

    def native(self, prepared: Prepared, axis_name: AxisName) -> jax.Array:
        """XLA's `psum` in the codec's dtype, scaled in float32."""
        total = jax.lax.psum(self.codec.native(prepared.vector), axis_name)
        return total.astype(jnp.float32) * _reciprocal(jax.lax.axis_size(axis_name))

    def native_reduce_scatter(self, partial: jax.Array, axis_name: AxisName) -> jax.Array:
        """XLA's `psum_scatter` in the codec's dtype, converted to float32."""
        sent = self.codec.native(partial)
        return jax.lax.psum_scatter(sent, axis_name, tiled=True).astype(jnp.float32)

    def _encoded(self, codec: Codec, x: jax.Array, message_id: int) -> jax.Array:
        if not codec.is_random:
            return codec.encode(x)
        if self.key is None:
            raise ValueError(
                f"{codec.name} rounds at random and needs a key; give one that is equal on all "
                "devices and different in every call: jax.random.fold_in(jax.random.key(0), step)."
            )
        encoded = codec.encode(x, own_key(self.key, 0, message_id))
        # XLA would draw and encode again in the loop that computes the error.
        return jax.lax.optimization_barrier(encoded) if self.keeps_errors else encoded


def _reciprocal(world: int) -> np.float32:
    """1/N in float32: XLA turns a division by N into this product on some backends only."""
    return np.float32(1 / world)


def _times_power_of_two(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """x times 2^exponent, in two steps, so that neither factor leaves float32's range."""
    half = exponent // 2
    return x * _power_of_two(half) * _power_of_two(exponent - half)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type((jnp.clip(exponent, -126, 127) + 127) << 23, jnp.float32)
