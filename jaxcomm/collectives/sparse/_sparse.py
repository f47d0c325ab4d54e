"""What every sparse all-reduce offers, and the helpers that they share.

Each of N devices holds x_r, float32[n], its gradient plus its residual. A sparse all-reduce selects
about k values of each by their magnitude, and sends them as entries (value, place) in
messages of a static size. It returns the mean m and each device's error e_r, with

    N m + sum of e_r = sum of x_r

so what is not selected, has no room in a message, or is rounded off stays in its device's error and
is added to its next gradient.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._axes import Axis
from jaxcomm._numbers import is_integer, is_real
from jaxcomm.kernels import _implementations

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
      implementation: how kernels select, as in `jaxcomm.mean`.
      operations: the kernels' operations that have more than one implementation.
    """

    density: float = 0.01
    implementation: _implementations.Option = None
    name: ClassVar[str]
    operations: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if not is_real(self.density):
            raise TypeError(f"density must be a Python number, got {self.density!r}.")
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be in (0, 1], where 0.01 is 1 %, got {self.density!r}.")
        if is_integer(self.density):
            raise ValueError(
                "density=1 selects all values; write 0.01 for 1 %, or 1.0 if all are meant."
            )

    def k(self, n: int) -> int:
        """The number of values to select from n: at least one."""
        return max(1, round(self.density * n))

    def padded(self, n: int) -> int:
        """The length to which a vector of n values is best padded with zeros, for `exchange`."""
        return n

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
      values: float32[N, ...].
      indices: int32 of the same shape, without repetition in a list; an index of n or more stands
        for no place.
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
    left = x.at[indices].add(-jnp.where(taken, values, 0), mode="drop")
    return left, jnp.where(taken & (values != 0), indices, x.size).reshape(-1)


def take(x: jax.Array, indices: jax.Array) -> jax.Array:
    """x at these places; 0 where the place is n or more."""
    return x.at[indices].get(mode="fill", fill_value=0)
