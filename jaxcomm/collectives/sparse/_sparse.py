"""What every sparse all-reduce offers, and the helpers that they share.

Each of N devices holds x_r, float32[n], its gradient plus its residual. A sparse all-reduce selects
about k values of each, by a threshold on the magnitude, and sends them as entries (value, place) in
messages of a static size. It returns the mean m and each device's error e_r, with

    N m + sum of e_r = sum of x_r

so what is not selected, has no room in a message, or is rounded off stays in its device's error and
is added to its next gradient.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._axes import Axis
from jaxcomm._numbers import is_integer, is_real
from jaxcomm.codecs._rounding import require_choice
from jaxcomm.codecs.entries import VALUES
from jaxcomm.kernels import _implementations, select

# The least magnitude that counts as a value: XLA may treat smaller ones as zeros.
SMALLEST = float(np.finfo(np.float32).tiny)


class SparseResult(NamedTuple):
    """The result of a sparse all-reduce of n values.

    Attributes:
      mean: float32[n], equal on all devices.
      errors: float32[n], the part of this device's x that is not in the mean.
      taken: int32[m], the places at which this device's values are in the mean; n for none.
      selected: int32, the number of this device's values that were selected.
      delivered: int32, the number of selected values that had room in a message.
      applied: int32, the number of values in the mean; equal on all devices.
      witnesses: float32 vectors; if x and they are finite on all devices, the mean and the errors
        are too.
    """

    mean: jax.Array
    errors: jax.Array
    taken: jax.Array
    selected: jax.Array
    delivered: jax.Array
    applied: jax.Array
    witnesses: Sequence[jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseAllReduce:
    """A sparse all-reduce: which of its largest values each device sends, and to whom.

    Attributes:
      density: the share k/n of values to select, in (0, 1].
      values: "float32" or "bfloat16", the format of values on the wire.
      slack: the room in a message, as a multiple of the expected number of entries.
      recompute_every: steps between new thresholds; in between, the last one is reused. With 1
        the k largest values are selected in every step.
      scaling: what a reused threshold is multiplied or divided by after a step in which more than
        5/4 k or fewer than 2/3 k values were above it.
      tolerance: a new threshold is found if the number of values above the reused one is more
        than `tolerance` times k, or less than k over `tolerance`; with None, only if there are more
        than messages have room for.
      implementation: how kernels select, as in `jaxcomm.mean`.
      operations: the kernels' operations that have more than one implementation.
    """

    density: float = 0.01
    values: str
    slack: float
    recompute_every: int
    scaling: float
    tolerance: float | None
    implementation: _implementations.Option = None
    name: ClassVar[str]
    operations: ClassVar[tuple[str, ...]] = ("select.compact",)

    def __post_init__(self) -> None:
        require_choice("values", self.values, VALUES)
        if not is_real(self.density):
            raise TypeError(f"density must be a Python number, got {self.density!r}.")
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be in (0, 1], where 0.01 is 1 %, got {self.density!r}.")
        if is_integer(self.density):
            raise ValueError(
                "density=1 selects all values, and sends more than a float32 mean; write 0.01 for "
                "1 %, or 1.0 if all are meant."
            )
        for name, least in (("slack", self.slack), ("scaling", self.scaling)):
            if not (is_real(least) and 1 <= least < math.inf):
                raise ValueError(f"{name} must be at least 1, got {least!r}.")
        steps = self.recompute_every
        if not is_integer(steps) or steps < 1:
            raise ValueError(f"recompute_every must be a positive number of steps, got {steps!r}.")
        most = self.tolerance
        if most is not None and not (is_real(most) and 1 < most < math.inf):
            raise ValueError(f"tolerance must be more than 1, or None, got {most!r}.")

    def k(self, n: int) -> int:
        """The number of values to select from n: at least one."""
        return max(1, round(self.density * n))

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

    def exchange(
        self, x: jax.Array, threshold: jax.Array, step: jax.Array, axis: Axis
    ) -> tuple[SparseResult, jax.Array]:
        """Averages the largest values over a mesh axis, in the manual view.

        Args:
          x: float32[n], different on every device, in a region that is manual over every axis and
            where the checks of `jax.shard_map` are off.
          threshold: float32, that of the step before; 0 in the first step.
          step: int32, equal on all devices, counted from 0.
          axis: the mesh axis, axes, or part of them.

        Returns:
          The mean with its errors, and the threshold for the next step.
        """
        raise NotImplementedError


def add_lists(total: jax.Array, values: jax.Array, indices: jax.Array) -> jax.Array:
    """Adds entries to a vector, one device's list after another, so that all devices round alike.

    Args:
      total: float32[n].
      values: float32[N, c].
      indices: int32[N, c], without repetition in a list; an index of n or more stands for no place.
    """

    def add(total: jax.Array, entries: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        values, indices = entries
        return total.at[indices].add(values, mode="drop"), None

    return jax.lax.scan(add, total, (values, indices))[0]


def take_out(
    x: jax.Array, values: jax.Array, indices: jax.Array, taken: jax.Array | bool = True
) -> tuple[jax.Array, jax.Array]:
    """x minus the values at these places, where `taken` is true; and these places, n for others.

    A mask of what has changed would keep x beside the result, which XLA else writes over it.
    """
    left = x.at[indices.reshape(-1)].add(-jnp.where(taken, values, 0).reshape(-1), mode="drop")
    return left, jnp.where(taken & (values != 0), indices, x.size).reshape(-1)


def take(x: jax.Array, indices: jax.Array) -> jax.Array:
    """x at these places; 0 where the place is n or more."""
    return x.at[indices].get(mode="fill", fill_value=0)
