"""Sparse all-reduces that select what reaches a threshold, which may be reused for many steps."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxcomm._numbers import is_integer, is_real
from jaxcomm.codecs._rounding import require_choice
from jaxcomm.codecs.entries import VALUES
from jaxcomm.collectives.sparse._sparse import SMALLEST, SparseAllReduce
from jaxcomm.kernels import select


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByThreshold(SparseAllReduce):
    """A sparse all-reduce of what reaches a threshold, in messages with some spare room.

    Attributes:
      values: "float32" or "bfloat16", the format of values on the wire.
      slack: the room in a message, as a multiple of the expected number of entries.
      recompute_every: steps between new thresholds; in between, the last one is reused. With 1
        the k largest values are selected in every step.
      scaling: what a reused threshold is multiplied or divided by after a step in which more than
        5/4 k or fewer than 2/3 k values were above it.
      tolerance: a new threshold is found if the number of values above the reused one is more
        than `tolerance` times k, or less than k over `tolerance`; with None, only if there are more
        than messages have room for.
    """

    values: str
    slack: float
    recompute_every: int
    scaling: float
    tolerance: float | None
    operations: ClassVar[tuple[str, ...]] = ("select.compact",)

    def __post_init__(self) -> None:
        require_choice("values", self.values, VALUES)
        super().__post_init__()
        for name, least in (("slack", self.slack), ("scaling", self.scaling)):
            if not (is_real(least) and 1 <= least < math.inf):
                raise ValueError(f"{name} must be at least 1, got {least!r}.")
        steps = self.recompute_every
        if not is_integer(steps) or steps < 1:
            raise ValueError(f"recompute_every must be a positive number of steps, got {steps!r}.")
        most = self.tolerance
        if most is not None and not (is_real(most) and 1 < most < math.inf):
            raise ValueError(f"tolerance must be more than 1, or None, got {most!r}.")

    def room(self, n: int, parts: int = 1) -> int:
        """How many entries a message that carries one of `parts` equal parts of k has room for."""
        return min(n, max(1, -int(-self.slack * self.k(n) // parts)))

    def compact(self, x: jax.Array, threshold: jax.Array, capacity: int) -> select.Selected:
        """`select.compact` in the chosen implementation."""
        return select.compact(x, threshold, capacity, implementation=self.implementation)

    def about_k(
        self, x: jax.Array, last: jax.Array, step: jax.Array, capacity: int
    ) -> tuple[select.Selected, jax.Array]:
        """About k of the largest values, and the threshold that they reach.

        These are the values above the last threshold. A new threshold is found if it is due, or if
        the last is off or lets more values pass than there is room for. Were the surplus cut by
        place, values at the end of x would never be sent where there are always too many. In a long
        x the values are counted in a sample.
        """
        k = self.k(x.size)
        if self.recompute_every == 1:
            return self.largest(x, k, capacity)
        is_due = step % self.recompute_every == 0
        count = select.count_near(x, last, k, step)
        is_bad = is_due | self.is_off(count, k) | (count > capacity)
        threshold = self.replaced_if(is_bad, x, k, last, step)
        return self.compact(x, threshold, capacity), threshold

    def replaced_if(
        self, is_bad: jax.Array, x: jax.Array, k: int, last: jax.Array, step: jax.Array
    ) -> jax.Array:
        """The last threshold or, if it is bad, one that about k values reach."""

        def anew(x: jax.Array) -> jax.Array:
            near = select.threshold_near(x, k, step, implementation=self.implementation)
            return jnp.maximum(near, SMALLEST)

        # On GPUs a branch takes longer than the search, also if it is not taken.
        return jax.lax.platform_dependent(
            x,
            cpu=lambda x: jax.lax.cond(is_bad, anew, lambda _: last, x),
            default=lambda x: jnp.where(is_bad, anew(x), last),
        )

    def largest(self, x: jax.Array, k: int, capacity: int) -> tuple[select.Selected, jax.Array]:
        """The k largest values, among equals the first that `compact` lists; their threshold."""
        return select.largest(x, k, capacity, SMALLEST, implementation=self.implementation)

    def threshold_for(self, x: jax.Array, k: int) -> jax.Array:
        """The k-th largest magnitude, but never one that XLA may treat as zero."""
        exact = select.threshold_for(x, k, implementation=self.implementation)
        return jnp.maximum(exact, SMALLEST)

    def is_off(self, count: jax.Array, k: int) -> jax.Array:
        """Whether a threshold with `count` values above it is beyond the tolerance."""
        if self.tolerance is None:
            return jnp.bool_(False)
        return (count > int(self.tolerance * k)) | (count < math.ceil(k / self.tolerance))

    def scaled(self, threshold: jax.Array, count: jax.Array, k: int) -> jax.Array:
        """The threshold to keep after a step with `count` values above it."""
        scale = jnp.float32(self.scaling)
        few, many = count < math.ceil(2 * k / 3), count > 5 * k // 4  # avoids an int32 product
        return threshold * jnp.where(few, 1 / scale, jnp.where(many, scale, jnp.float32(1)))
