"""The k largest entries."""

import functools

import jax
import jax.numpy as jnp

from jaxcomm.kernels import _implementations
from jaxcomm.kernels.select.compaction import Selected, compact_at_most, narrow
from jaxcomm.kernels.select.magnitudes import patterns_of
from jaxcomm.kernels.select.selection import require_vector
from jaxcomm.kernels.select.threshold import (
    candidates,
    counted,
    has_candidates,
    kth_of_list,
    threshold_for,
)


def largest(
    x: jax.Array,
    k: int,
    capacity: int,
    least: float,
    *,
    implementation: _implementations.Option = None,
) -> tuple[Selected, jax.Array]:
    """The k largest entries by magnitude, and the threshold that they reach.

    The threshold is `threshold_for(x, k)` or, if that is less, `least`. Of the entries that tie at
    it, the first that `compact` lists are taken. A GPU takes all from those that a sample lets
    through, which are compacted once; without a branch on ties, which would cost it more.

    Args:
      x: float32 array `(n,)`. NaN counts as zero.
      k: 1 to n.
      capacity: the number of slots, at least k.
      least: the smallest magnitude that is selected, positive.
      implementation: which implementation of `compact` takes entries out.

    Returns:
      `Selected` with arrays of `(capacity,)`, and a float32 scalar.

    Raises:
      TypeError, ValueError: as `threshold_for`; ValueError also for a capacity below k.
    """
    x = require_vector("largest", x)
    if not 1 <= k <= min(x.size, capacity):
        raise ValueError(f"k is 1 to n = {x.size} and the capacity {capacity}, got {k}.")
    options = {"k": k, "capacity": capacity, "least": least, "implementation": implementation}
    return jax.lax.platform_dependent(
        x,
        cpu=functools.partial(_by_threshold, **options),
        default=functools.partial(_among_candidates, **options),
    )


def _by_threshold(
    x: jax.Array, k: int, capacity: int, least: float, implementation: _implementations.Option
) -> tuple[Selected, jax.Array]:
    """The threshold first, and with it another pass over x."""
    exact = threshold_for(x, k, implementation=implementation)
    threshold = jnp.maximum(exact, least)
    return compact_at_most(x, threshold, capacity, k), threshold


def _among_candidates(
    x: jax.Array, k: int, capacity: int, least: float, implementation: _implementations.Option
) -> tuple[Selected, jax.Array]:
    """For GPUs, with one branch, for misleading samples."""
    if not has_candidates(x.size, k):
        return _by_threshold(x, k, capacity, least, implementation)

    def at_least(pattern: jax.Array) -> jax.Array:
        exact = jax.lax.bitcast_convert_type(jnp.maximum(pattern, 1), jnp.float32)
        return jnp.maximum(exact, least)

    def searched() -> tuple[Selected, jax.Array]:
        threshold = at_least(counted(patterns_of(x), k))
        return compact_at_most(x, threshold, capacity, k), threshold

    above, are_all = candidates(x, k, implementation)
    threshold = at_least(kth_of_list(above, k))
    found = _padded(narrow(above, threshold, k, x.size), capacity, x.size)
    return jax.lax.cond(are_all, lambda: (found, threshold), searched)


def _padded(found: Selected, capacity: int, n: int) -> Selected:
    """With empty slots up to the capacity."""
    more = capacity - found.values.size
    values, indices = jnp.pad(found.values, (0, more)), found.indices
    return Selected(values, jnp.pad(indices, (0, more), constant_values=n), found.count)
