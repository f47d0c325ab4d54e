"""What every sparse all-reduce offers, and the helpers that they share.

Each of N devices holds x_r, float32[n], its gradient plus its residual. A sparse all-reduce selects
about k values of each, by a threshold on the magnitude, and sends them as entries (value, place) in
messages of a static size. It returns the mean m and each device's error e_r, with

    N m + sum of e_r = sum of x_r

so a value that is not selected, has no room in a message, or is rounded stays in its device's error
and is added to its next gradient.
"""

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._axes import AxisName
from jaxcomm.codecs.entries import check_values
from jaxcomm.kernels import _implementations, select

# The least magnitude that counts as a value: XLA may treat smaller ones as zeros.
SMALLEST = float(np.finfo(np.float32).tiny)


class Carried(NamedTuple):
    """The state of a sparse all-reduce between two steps.

    Attributes:
      local: float32, the magnitude above which this device's values are selected.
      common: float32, the magnitude above which sums are selected; equal on all devices.
      boundaries: int32[N + 1], the regions of the devices; equal on all devices.
    """

    local: jax.Array
    common: jax.Array
    boundaries: jax.Array

    def packed(self) -> jax.Array:
        """float32[N + 3]; boundaries in chunks, which float32 holds exactly."""
        chunks = -(-self.boundaries // select.CHUNK)
        return jnp.concatenate([jnp.stack([self.local, self.common]), chunks.astype(jnp.float32)])

    @classmethod
    def unpacked(cls, x: jax.Array, n: int) -> "Carried":
        """The reverse, for vectors of n values; all zeros stand for the first step."""
        chunks = x[2:].astype(jnp.int32)
        return cls(x[0], x[1], jnp.minimum(chunks * select.CHUNK, n))


class SparseResult(NamedTuple):
    """The result of a sparse all-reduce of n values.

    Attributes:
      mean: float32[n], equal on all devices.
      errors: float32[n], the part of this device's x that is not in the mean.
      selected: int32, the number of this device's values above the threshold.
      delivered: int32, the number of selected values that had room in a message.
      wanted: int32, the number of sums above the common threshold; equal on all devices.
      applied: int32, the number of values in the mean; equal on all devices.
    """

    mean: jax.Array
    errors: jax.Array
    selected: jax.Array
    delivered: jax.Array
    wanted: jax.Array
    applied: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseAllReduce:
    """A sparse all-reduce: who sends which of its largest values to whom.

    Attributes:
      density: the share k/n of values to select, in (0, 1].
      values: "float32" or "bfloat16", the format of values on the wire.
      slack: the room of a message, as a multiple of the expected number of entries.
      recompute_every: steps between exact thresholds; in between, the last one is re-used.
      scaling: what a re-used threshold is multiplied or divided by after a step in which more than
        5/4 k or fewer than 2/3 k values were above it.
      tolerance: a re-used threshold is computed anew if the number of values above it is more than
        `tolerance` times k, or less than k over `tolerance`; None waits for `recompute_every`.
      implementation: how kernels select, see `kernels._implementations`.
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
    operations: ClassVar[tuple[str, ...]] = ("select.compact", "select.count_at_least")

    def __post_init__(self) -> None:
        check_values(self.values)
        if isinstance(self.density, bool) or not isinstance(self.density, int | float):
            raise TypeError(f"density must be a Python number, got {self.density!r}.")
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be in (0, 1], such as 0.01, got {self.density!r}.")
        if not self.slack >= 1:
            raise ValueError(f"slack must be at least 1, got {self.slack!r}.")
        check_interval("recompute_every", self.recompute_every)
        if not self.scaling >= 1:
            raise ValueError(f"scaling must be at least 1, got {self.scaling!r}.")
        if self.tolerance is not None and not self.tolerance > 1:
            raise ValueError(f"tolerance must be more than 1, or None, got {self.tolerance!r}.")

    def k(self, n: int) -> int:
        """The number of values to select of n: at least one."""
        return max(1, round(self.density * n))

    def room(self, n: int, parts: int = 1) -> int:
        """The entries that a message has room for if it carries one of `parts` equal parts of k."""
        return min(n, max(1, -int(-self.slack * self.k(n) // parts)))

    def local_threshold(self, x: jax.Array, step: jax.Array, last: jax.Array) -> jax.Array:
        """A magnitude above which x has about k values: the last one, or the exact one if due."""
        k = self.k(x.size)
        due = step % self.recompute_every == 0
        if self.tolerance is not None:
            due |= self.is_off(self.count_at_least(x, last), k)
        return jax.lax.cond(due, lambda: select.threshold_for(x, k), lambda: last)

    def count_at_least(self, x: jax.Array, threshold: jax.Array) -> jax.Array:
        """`select.count_at_least` in the chosen implementation."""
        return select.count_at_least(x, threshold, implementation=self.implementation)

    def compact(self, x: jax.Array, threshold: jax.Array, capacity: int) -> select.Selected:
        """`select.compact` in the chosen implementation."""
        return select.compact(x, threshold, capacity, implementation=self.implementation)

    def compact_regions(
        self, x: jax.Array, threshold: jax.Array, boundaries: jax.Array, capacity: int
    ) -> select.Selected:
        """`select.compact_regions` in the chosen implementation."""
        return select.compact_regions(
            x, threshold, boundaries, capacity, implementation=self.implementation
        )

    def largest(self, x: jax.Array, threshold: jax.Array, capacity: int) -> select.Selected:
        """What is above a threshold: if a message has no room for all of it, the largest.

        Chosen by place, what lies at the end would wait for ever where there is always too much.
        """
        found = self.compact(x, threshold, capacity)
        return jax.lax.cond(
            found.count <= capacity,
            lambda: found,
            lambda: self.compact(x, select.threshold_for(x, capacity), capacity)._replace(
                count=found.count
            ),
        )

    def largest_in_regions(
        self, x: jax.Array, threshold: jax.Array, boundaries: jax.Array, capacity: int
    ) -> select.Selected:
        """As `largest`, for a message of each region."""
        found = self.compact_regions(x, threshold, boundaries, capacity)

        def the_largest() -> select.Selected:
            every = self.compact(x, threshold, min(x.size, 2 * found.values.size))
            least = _thresholds_of_regions(every, boundaries, capacity)
            place = jnp.arange(x.size, dtype=jnp.int32)
            region = jnp.searchsorted(boundaries[1:-1], place, side="right")
            largest = jnp.where(jnp.abs(x) >= least[region], x, 0)
            fitting = self.compact_regions(largest, threshold, boundaries, capacity)
            return fitting._replace(count=found.count)

        return jax.lax.cond(jnp.all(found.count <= capacity), lambda: found, the_largest)

    def is_off(self, count: jax.Array, k: int) -> jax.Array:
        """Whether a threshold with `count` values above it is beyond the tolerance."""
        if self.tolerance is None:
            return jnp.bool_(False)
        return (count > int(self.tolerance * k)) | (count < math.ceil(k / self.tolerance))

    def scaled(self, threshold: jax.Array, count: jax.Array, k: int) -> jax.Array:
        """What to carry on after a step with `count` values above the threshold."""
        scale = jnp.float32(self.scaling)
        few, many = 3 * count < 2 * k, 4 * count > 5 * k
        return threshold * jnp.where(few, 1 / scale, jnp.where(many, scale, jnp.float32(1)))

    def exchange(
        self, x: jax.Array, carried: Carried, step: jax.Array, axis_name: AxisName
    ) -> tuple[SparseResult, Carried]:
        """Averages the largest values over a mesh axis, in the manual view.

        Args:
          x: float32[n], another on every device, in a region that is manual over every axis and
            where the checks of `jax.shard_map` are off.
          carried: from the step before.
          step: int32, equal on all devices, from 0.
          axis_name: the mesh axis.

        Returns:
          The mean with what it lacks, and what is carried on.
        """
        raise NotImplementedError


def check_interval(name: str, steps: Any) -> None:
    """Raises a ValueError for anything but a positive number of steps."""
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"{name} must be a positive number of steps, got {steps!r}.")


def _thresholds_of_regions(
    every: select.Selected, boundaries: jax.Array, capacity: int
) -> jax.Array:
    """The magnitude of the `capacity`-th largest entry of each region; 0 where there are fewer.

    It is found four bits at a time, by counts: a sort would cost more than all else of a step.
    """
    regions = boundaries.size - 1
    region = jnp.searchsorted(boundaries[1:-1], every.indices, side="right").astype(jnp.int32)
    region = jnp.where(every.indices < boundaries[-1], region, regions)  # slots without an entry
    # Magnitudes are ordered as their bit patterns are.
    patterns = jax.lax.bitcast_convert_type(jnp.abs(every.values), jnp.int32)
    found = jnp.zeros(regions + 1, jnp.int32)
    wanted = jnp.full((regions + 1, 1), capacity, jnp.int32)
    for shift in range(28, -1, -4):
        # Alike in the bits that are found, those from shift + 4, which are none in the first round.
        alike = (patterns ^ found[region]) >> (shift + 3) <= 1
        row = jnp.where(alike, region, regions)
        counts = jnp.zeros((regions + 1, 16), jnp.int32).at[row, (patterns >> shift) & 15].add(1)
        at_least = jnp.cumsum(counts[:, ::-1], axis=1)[:, ::-1]
        digit = jnp.sum(at_least[:, 1:] >= wanted, axis=1, keepdims=True, dtype=jnp.int32)
        beyond = jnp.pad(at_least, ((0, 0), (0, 1)))[:, 1:]
        wanted -= jnp.take_along_axis(beyond, digit, axis=1)
        found += digit[:, 0] << shift
    return jax.lax.bitcast_convert_type(found[:-1], jnp.float32)


def add_lists(total: jax.Array, values: jax.Array, indices: jax.Array) -> jax.Array:
    """Adds entries to a vector, one device's list after the other, so all devices round alike.

    Args:
      total: float32[n].
      values: float32[N, c].
      indices: int32[N, c], without repetition in a list; n and more stand for no place.
    """

    def add(total: jax.Array, entries: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        values, indices = entries
        return total.at[indices].add(values, mode="drop"), None

    return jax.lax.scan(add, total, (values, indices))[0]


def take_out(x: jax.Array, values: jax.Array, indices: jax.Array, taken: jax.Array) -> jax.Array:
    """x minus the values at these places, where `taken` is true."""
    return x.at[indices.reshape(-1)].add(-jnp.where(taken, values, 0).reshape(-1), mode="drop")


def take(x: jax.Array, indices: jax.Array) -> jax.Array:
    """x at these places; 0 for those of n and more."""
    return x.at[indices].get(mode="fill", fill_value=0)
