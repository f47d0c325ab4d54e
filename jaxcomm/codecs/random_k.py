"""Random-k: a few values, at places that follow from a key and are not sent."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxcomm._numbers import is_real
from jaxcomm.codecs._codec import Codec
from jaxcomm.codecs._rounding import rounding_key
from jaxcomm.codecs.float32 import Float32


@dataclasses.dataclass(frozen=True)
class RandomK(Codec):
    """One value of every `stride` neighbours, drawn at random, times `stride`: unbiased.

    Format: the two uint32 words of the key, then ceil(n / stride) values as another codec encodes
    them, all as bytes. In an all-reduce, all devices draw the same places from a common key, so the
    sums have these places too, and only the values are sent, without the key.

    E|C(x)|^2 = stride * |x|^2, which `variance` does not say: with error feedback a mean sends the
    drawn values without the factor. A value that is not drawn becomes zero, even if not finite.

    Attributes:
      stride: the number of neighbours that one value is drawn from.
      values: the format of the values.

    References:
      J. Konecny et al., "Federated Learning: Strategies for Improving Communication Efficiency",
      2016, arXiv:1610.05492 (random masks given by a seed).
      S. U. Stich, J.-B. Cordonnier and M. Jaggi, "Sparsified SGD with Memory", NeurIPS 2018,
      arXiv:1809.07599 (random-k with error feedback).
    """

    stride: int
    values: Codec
    name = "random_k"

    @property
    def is_random(self) -> bool:
        """Always."""
        return True

    @property
    def operations(self) -> tuple[str, ...]:
        """Those of the codec of the values."""
        return self.values.operations

    def drawn(self, n: int) -> int:
        """The number of values that are drawn from n."""
        return -(-n // self.stride)

    def places(self, key: jax.Array, n: int) -> jax.Array:
        """int32[drawn(n)]: the index of the drawn value within each `stride` neighbours."""
        return jax.random.randint(key, (self.drawn(n),), 0, self.stride, jnp.int32)

    def select(self, x: jax.Array, places: jax.Array) -> jax.Array:
        """The drawn values of float32 `(..., n)`."""
        padding = [(0, 0)] * (x.ndim - 1) + [(0, places.size * self.stride - x.shape[-1])]
        stretches = jnp.pad(x, padding).reshape(*x.shape[:-1], places.size, self.stride)
        index = places.reshape(*[1] * (x.ndim - 1), places.size, 1)
        return jnp.take_along_axis(stretches, index, axis=-1)[..., 0]

    def spread(self, drawn: jax.Array, places: jax.Array, n: int) -> jax.Array:
        """float32 `(..., n)` with the drawn values at their places, and zeros elsewhere."""
        here = places[:, None] == jnp.arange(self.stride, dtype=jnp.int32)[None]
        here = here.reshape(*[1] * (drawn.ndim - 1), *here.shape)
        full = jnp.where(here, drawn[..., None], jnp.float32(0))
        return full.reshape(*drawn.shape[:-1], -1)[..., :n]

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """float32 `(..., n)` to uint8 `(..., 8 + bytes of the values)`."""
        key = rounding_key(self, key)
        assert key is not None
        drawing, rounding = jax.random.split(key)
        words = jax.random.bits(drawing, (2,), jnp.uint32)
        drawn = self.select(x, self.places(_key_of(words), x.shape[-1]))
        values = self.values.encode(drawn * jnp.float32(self.stride), rounding)
        words = jnp.broadcast_to(words, (*x.shape[:-1], 2))
        return jnp.concatenate([_as_bytes(words), _as_bytes(values)], axis=-1)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """The float32 `(..., n)`; the places are drawn again from the key in the payload."""
        one = jax.ShapeDtypeStruct((self.drawn(n),), jnp.float32)
        dtype = jax.eval_shape(self.values.encode, one, jax.random.key(0)).dtype

        def message(row: jax.Array) -> jax.Array:
            places = self.places(_key_of(_from_bytes(row[:8], jnp.uint32)), n)
            values = self.values.decode(_from_bytes(row[8:], dtype), places.size)
            return self.spread(values, places, n)

        rows = payload.reshape(math.prod(payload.shape[:-1]), payload.shape[-1])
        return jax.vmap(message)(rows).reshape(*payload.shape[:-1], n)

    def message_bytes(self, n: int) -> int:
        """8, and the bytes of ceil(n / stride) values."""
        return 8 + self.values.message_bytes(self.drawn(n))


def random_k(density: float = 0.1, values: Codec | None = None) -> RandomK:
    """Random-k: sends no indices; the error averages out only over many steps.

    Args:
      density: the share of values that are sent, from 2^-30 to 1; 1/density is rounded to a whole
        number.
      values: the codec of the values; None means float32.

    Returns:
      The codec. With d the whole number nearest to 1/density, `E|C(x)|^2` is `d |x|^2`. In an
      all-reduce only the ceil(n/d) values are sent; in a separate message, a key of 8 bytes
      precedes them.

    Raises:
      TypeError, ValueError: for any other arguments.

    References:
      J. Konecny et al., "Federated Learning: Strategies for Improving Communication Efficiency",
      2016, arXiv:1610.05492.
      S. U. Stich, J.-B. Cordonnier and M. Jaggi, "Sparsified SGD with Memory", NeurIPS 2018,
      arXiv:1809.07599.

    Differs from the paper: the places are stratified, one for every 1/density neighbours, whereas
    the papers draw k of n without replacement. Every value is still drawn with the same
    probability, and no sort is needed.
    """
    if not is_real(density):
        raise TypeError(f"density must be a Python number, got {density!r}.")
    if not 0 < density <= 1:
        raise ValueError(f"density must be in (0, 1], such as 0.01, got {density!r}.")
    if density < 2**-30:
        raise ValueError(f"density must be at least 2^-30, as indices are int32, got {density!r}.")
    values = Float32() if values is None else values
    if not isinstance(values, Codec) or isinstance(values, RandomK) or values.largest is not None:
        raise TypeError(
            f"values must be a codec of float32's range other than random_k, got {values!r}; "
            "such as jaxcomm.codecs.bfloat16()."
        )
    return RandomK(round(1 / density), values)


def _key_of(words: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def _as_bytes(x: jax.Array) -> jax.Array:
    """uint8 `(..., n * size)`, bit for bit."""
    if x.dtype.itemsize == 1:
        return jax.lax.bitcast_convert_type(x, jnp.uint8)
    size = x.shape[-1] * x.dtype.itemsize
    return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-1], size)


def _from_bytes(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Undoes `_as_bytes`, for one axis."""
    size = jnp.dtype(dtype).itemsize
    return jax.lax.bitcast_convert_type(x if size == 1 else x.reshape(-1, size), dtype)
