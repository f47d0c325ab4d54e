"""The mean of a few values, at random places that are the same on all devices."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm._axes import AxisName
from jaxcomm.codecs.random_k import RandomK
from jaxcomm.collectives.reductions._reduction import Prepared
from jaxcomm.collectives.reductions.coded_mean import CodedMean
from jaxcomm.kernels.random_bits import own_key


@dataclasses.dataclass(frozen=True)
class RandomKMean(CodedMean):
    """The mean of the drawn values, in the codec in which they are sent; zeros elsewhere.

    All devices draw the same places from a common key, so the drawn values form a vector that
    every algorithm can reduce, `native` included, and nothing else travels. Without error feedback
    the result is multiplied by the stride, which makes it unbiased. With error feedback a value
    that is not drawn stays in the residual.

    `shared_scale` of a prepared vector is (places, the scale of `CodedMean`).

    Attributes:
      selection: which values are drawn.
      places_key: the key of the places; equal on all devices, also after `for_this_device`.
    """

    selection: RandomK = dataclasses.field(kw_only=True)
    places_key: jax.Array | None = None

    def for_this_device(self, axis_name: AxisName) -> CodedMean:
        """With a common key for the places and a rounding key of this device."""
        if self.key is None:
            raise ValueError("random_k draws at random and needs a key, equal on all devices.")
        common, own = (own_key(self.key, 0, purpose) for purpose in (1, 2))
        drawing = dataclasses.replace(self, key=own, places_key=common)
        return super(RandomKMean, drawing).for_this_device(axis_name)

    @property
    def is_random(self) -> bool:
        """Always."""
        return True

    @property
    def carries_nonfinite(self) -> bool:
        """Never: most values are not drawn."""
        return False

    @property
    def needs_equal_keys(self) -> bool:
        """Always: a sum of values from different places means nothing."""
        return True

    def padded(self, n: int, blocks: int) -> int:
        """Not padded: which places are drawn depends on the length."""
        del blocks
        return n

    def prepare(self, x: jax.Array, axis_name: AxisName) -> Prepared:
        """Draws the values."""
        assert self.places_key is not None  # `for_this_device` makes it.
        places = self.selection.places(self.places_key, x.size)
        drawn = super().prepare(self.selection.select(x, places), axis_name)
        return drawn._replace(shared_scale=(places, drawn.shared_scale))

    def restore(self, vector: jax.Array, shared_scale: Any, n: int) -> jax.Array:
        """The means at their places, and zeros elsewhere."""
        places, scale = shared_scale
        means = super().restore(vector, scale, places.size)
        if not self.keeps_errors:
            means = means * jnp.float32(self.selection.stride)
        return self.selection.spread(means, places, n)

    def residual(self, x: jax.Array, errors: jax.Array, shared_scale: Any) -> jax.Array:
        """The rounding errors of drawn values; all of x elsewhere."""
        places, scale = shared_scale
        rounding = super().restore(errors, scale, places.size)
        drawn = self.selection.spread(jnp.ones(places.shape, jnp.float32), places, x.size)
        return jnp.where(drawn == 1, self.selection.spread(rounding, places, x.size), x)
