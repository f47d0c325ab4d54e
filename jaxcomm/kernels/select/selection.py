"""The entries at or above a threshold: counted, and compacted."""

import statistics

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.kernels import _implementations
from jaxcomm.kernels.select import compaction
from jaxcomm.kernels.select.compaction import Selected
from jaxcomm.kernels.select.magnitudes import (
    CHUNK,
    count_from,
    lowest_for,
    patterns_of,
)

MOST = 2**31 - CHUNK  # entries of a vector, which int32 can count


def count_at_least(x: jax.Array, threshold: jax.Array) -> jax.Array:
    """The number of entries with `|x| >= threshold`, without zeros and NaN; int32 scalar.

    Takes the arguments of `compact` and raises its errors.
    """
    x, threshold = _arguments("count_at_least", x, threshold)
    return count_from(patterns_of(x), lowest_for(threshold)[None])[0]


def compact(
    x: jax.Array,
    threshold: jax.Array,
    capacity: int,
    *,
    implementation: _implementations.Option = None,
) -> Selected:
    """The entries with `|x| >= threshold`.

    The order is that of the chunks of CHUNK entries; within a chunk, entries are ordered by i mod
    8, then by i. If there are more entries than the capacity, the first ones are kept.

    Args:
      x: float32 array `(n,)`, n >= 1.
      threshold: float32 scalar. One that is not positive selects everything but zeros and NaN,
        which no threshold selects. NaN selects nothing.
      capacity: the number of slots for entries, at least 1; it may exceed n.
      implementation: "xla", "triton" (on NVIDIA GPUs), or another option of `_implementations`;
        None means the fastest that was timed.

    Returns:
      `Selected` with arrays of `(capacity,)`.

    Raises:
      TypeError: for another dtype.
      ValueError: if x is not a vector, the threshold is not a scalar, or the capacity is not
        positive.
      NotImplementedError: for an implementation that does not exist here.
    """
    x, threshold = _arguments("compact", x, threshold)
    if capacity < 1:
        raise ValueError(f"the capacity is at least 1, got {capacity}.")

    def run(name: str, x: jax.Array, threshold: jax.Array) -> Selected:
        if name == "triton":
            from jaxcomm.kernels.select import triton  # Pallas takes long to import

            return triton.compact(x, threshold, capacity)
        return compaction.compact(x, threshold, capacity)

    return _implementations.call(
        "select.compact",
        implementation,
        run,
        (x, threshold),
        elements=x.size,
        static=(capacity.bit_length(),),
        sample=lambda rng: _sample(rng, x.size, capacity),
    )


def require_vector(name: str, x: jax.Array) -> jax.Array:
    """`x` as a jax array; raises for anything but float32 `(n,)` with an n that int32 can count."""
    x = jnp.asarray(x)
    if x.dtype != jnp.float32:
        raise TypeError(f"{name} takes float32, got {x.dtype}; write x.astype(jnp.float32).")
    if x.ndim != 1 or not 1 <= x.size <= MOST:
        raise ValueError(
            f"{name} takes a vector of 1 to 2^31 - {CHUNK} elements, got shape {x.shape}; "
            "write x.reshape(-1)."
        )
    return x


def _arguments(name: str, x: jax.Array, threshold: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = require_vector(name, x)
    threshold = jnp.asarray(threshold)
    if threshold.dtype != jnp.float32:
        raise TypeError(
            f"{name} takes a float32 threshold, got {threshold.dtype}; "
            "write jnp.float32(threshold)."
        )
    if threshold.ndim:
        raise ValueError(f"{name} takes one threshold, got shape {threshold.shape}.")
    return x, threshold


def _sample(rng: np.random.Generator, n: int, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Normal entries, and the threshold that selects about as many of them as the capacity."""
    threshold = statistics.NormalDist().inv_cdf(1 - min(capacity / n, 1) / 2)
    return jnp.asarray(rng.standard_normal(n, np.float32)), jnp.float32(threshold)
