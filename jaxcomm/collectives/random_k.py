"""The mean at a few places, which all devices draw alike."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm._compat import AxisName
from jaxcomm.codecs import RandomK
from jaxcomm.collectives._reduction import Lifted
from jaxcomm.collectives.mean import Mean


@dataclasses.dataclass(frozen=True)
class RandomKMean(Mean):
    """The mean of the drawn values, in the codec that they are sent in; zeros elsewhere.

    The drawn values of all devices are a vector like any other, so every algorithm reduces them,
    `native` included, and nothing but them is on the wire. Without error feedback the result is
    multiplied by the stride, which makes it unbiased; with it, what is not drawn is kept.

    Attributes:
      selection: which values are drawn.
      places_key: of the places; like `key`, but it stays equal on all devices.
    """

    selection: RandomK = dataclasses.field(kw_only=True)
    places_key: jax.Array | None = None

    def on_this_device(self, axis_name: AxisName) -> Mean:
        """See `Reduction.on_this_device`."""
        if self.key is None:
            raise ValueError("random_k draws at random and needs a key, equal on all devices.")
        common, own = jax.random.split(self.key)
        drawing = dataclasses.replace(self, key=own, places_key=common)
        return super(RandomKMean, drawing).on_this_device(axis_name)

    @property
    def is_random(self) -> bool:
        """Always."""
        return True

    @property
    def is_shared(self) -> bool:
        """Sums of values from different places would mean nothing."""
        return True

    def lift(self, x: jax.Array, axis_name: AxisName) -> Lifted:
        """Draws."""
        assert self.places_key is not None  # It is made by `on_this_device`.
        places = self.selection.places(self.places_key, x.size)
        drawn = super().lift(self.selection.select(x, places), axis_name)
        return drawn._replace(agreed=(places, drawn.agreed))

    def lower(self, vector: jax.Array, agreed: Any, n: int) -> jax.Array:
        """Spreads the means."""
        places, inner = agreed
        means = super().lower(vector, inner, places.size)
        if not self.keeps_errors:
            means = means * jnp.float32(self.selection.stride)
        return self.selection.spread(means, places, n)

    def errors(self, x: jax.Array, unsaid: jax.Array, agreed: Any) -> jax.Array:
        """What was not drawn, and what was rounded off of what was."""
        places, inner = agreed
        rounded = super().lower(unsaid, inner, places.size)
        kept = self.selection.spread(jnp.ones(places.shape, jnp.float32), places, x.size)
        return jnp.where(kept == 1, self.selection.spread(rounded, places, x.size), x)
