"""The entries at or above a threshold: counted, compacted, and compacted region by region."""

import statistics

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.kernels import _implementations
from jaxcomm.kernels.select import compaction
from jaxcomm.kernels.select.compaction import Selected
from jaxcomm.kernels.select.magnitudes import (
    CHUNK,
    PAST_INFINITY,
    count_from,
    lowest_for,
    patterns_of,
    words_in,
)


def count_at_least(
    x: jax.Array, threshold: jax.Array, *, implementation: _implementations.Option = None
) -> jax.Array:
    """The number of entries with `|x| >= threshold`, without zeros and NaN; int32 scalar.

    Takes the arguments of `compact` and raises its errors. The implementation is "xla", "mosaic"
    (on NVIDIA GPUs), or another option of `_implementations`; None is "xla".
    """
    x, threshold = _arguments("count_at_least", x, threshold)
    return _implementations.call(
        "select.count_at_least", implementation, _count, (x, threshold), elements=x.size
    )


def _count(name: str, x: jax.Array, threshold: jax.Array) -> jax.Array:
    if name == "mosaic":
        from jaxcomm.kernels.select import mosaic  # Pallas takes long to import

        return mosaic.count_at_least(x, threshold)
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
        None is "xla".

    Returns:
      `Selected` with arrays of `(capacity,)`.

    Raises:
      TypeError: for another dtype.
      ValueError: if x is not a vector, the threshold no scalar, or the capacity not positive.
      NotImplementedError: for an implementation that does not exist here.
    """
    x, threshold = _arguments("compact", x, threshold)
    _require_capacity(capacity)

    def run(name: str, x: jax.Array, threshold: jax.Array) -> Selected:
        if name == "triton":
            from jaxcomm.kernels.select import triton

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


def compact_regions(
    x: jax.Array,
    threshold: jax.Array,
    boundaries: jax.Array,
    capacity: int,
    *,
    implementation: _implementations.Option = None,
) -> Selected:
    """For each region of x, its entries with `|x| >= threshold`; the indices are indices in x.

    Args:
      x: as for `compact`, whose docstring has the order of the entries of a region.
      threshold: as for `compact`.
      boundaries: int32 array `(R + 1,)`, ascending from 0 to n, multiples of CHUNK or n. Region r
        is `x[boundaries[r]:boundaries[r + 1]]`, and may be empty. A numpy array is checked. Values
        of other arrays may be unknown; a boundary that is no multiple is rounded up to the next.
      capacity: the number of slots for the entries of each region.
      implementation: as for `compact`.

    Returns:
      `Selected` with arrays of `(R, capacity)`, and R counts.

    Raises:
      TypeError: for another dtype.
      ValueError: as `compact`, and for wrong boundaries.
      NotImplementedError: as `compact`.
    """
    x, threshold = _arguments("compact_regions", x, threshold)
    boundaries = _require_boundaries(boundaries, x.size)
    _require_capacity(capacity)
    regions = boundaries.size - 1

    def run(name: str, x: jax.Array, threshold: jax.Array, boundaries: jax.Array) -> Selected:
        if name == "triton":
            from jaxcomm.kernels.select import triton

            return triton.compact_regions(x, threshold, boundaries, capacity)
        return compaction.compact_regions(x, threshold, boundaries, capacity)

    def sample(rng: np.random.Generator) -> tuple[jax.Array, ...]:
        ends = np.arange(regions + 1) * x.size // regions // CHUNK * CHUNK
        ends[-1] = x.size
        return *_sample(rng, x.size, regions * capacity), jnp.asarray(ends, jnp.int32)

    return _implementations.call(
        "select.compact_regions",
        implementation,
        run,
        (x, threshold, boundaries),
        elements=x.size,
        static=(regions, capacity.bit_length()),
        sample=sample,
    )


def boundaries_for(x: jax.Array, threshold: jax.Array, regions: int) -> jax.Array:
    """Boundaries of regions with about equally many entries with `|x| >= threshold`.

    Each boundary is the multiple of CHUNK, or n, for which the number of entries before it is
    nearest to its share of all. Where nothing is selected, the regions are about equally long.

    Args:
      x: as for `compact`.
      threshold: as for `compact`.
      regions: their number R, at least 1.

    Returns:
      int32 array `(R + 1,)`, ascending from 0 to n; regions may be empty.

    Raises:
      TypeError: for another dtype.
      ValueError: as `compact`, and for less than one region.
    """
    x, threshold = _arguments("boundaries_for", x, threshold)
    if regions < 1:
        raise ValueError(f"x is split into at least 1 region, got regions={regions}.")
    words = words_in(x, lowest_for(threshold), jnp.uint32(PAST_INFINITY))
    before = compaction.count_before(words)
    chunks, total = before.size - 1, before[-1]
    r = np.arange(1, regions, dtype=np.int32)
    wanted = total // regions * r + total % regions * r // regions  # total * r may overflow
    after = jnp.searchsorted(before, wanted, method="scan_unrolled").astype(jnp.int32)
    ahead = jnp.maximum(after - 1, 0)
    nearest = jnp.where(wanted - before[ahead] < before[after] - wanted, ahead, after)
    even = jnp.asarray(chunks * r.astype(np.int64) // regions, jnp.int32)
    inner = jnp.minimum(jnp.where(total > 0, nearest, even) * CHUNK, x.size)
    zero = jnp.zeros_like(inner, shape=(1,))
    return jnp.concatenate([zero, inner, zero + x.size])


def require_vector(name: str, x: jax.Array) -> jax.Array:
    """`x` as a jax array; raises for anything but float32 `(n,)` with an n that int32 can count."""
    x = jnp.asarray(x)
    if x.dtype != jnp.float32:
        raise TypeError(f"{name} takes float32, got {x.dtype}; write x.astype(jnp.float32).")
    if x.ndim != 1 or not 1 <= x.size <= 2**31 - CHUNK:
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


def _require_capacity(capacity: int) -> None:
    if capacity < 1:
        raise ValueError(f"the capacity is at least 1, got {capacity}.")


def _require_boundaries(boundaries: jax.Array | np.ndarray, n: int) -> jax.Array:
    if boundaries.dtype != np.int32:
        raise TypeError(f"boundaries are int32, got {boundaries.dtype}; boundaries_for makes them.")
    if boundaries.ndim != 1 or boundaries.size < 2:
        raise ValueError(f"R regions have R + 1 boundaries, got shape {boundaries.shape}.")
    if isinstance(boundaries, np.ndarray):
        ends = boundaries[0] == 0 and boundaries[-1] == n
        whole = np.all((boundaries % CHUNK == 0) | (boundaries == n))
        if not (ends and whole and np.all(np.diff(boundaries) >= 0)):
            raise ValueError(
                f"boundaries ascend from 0 to {n}, the length of x, in multiples of {CHUNK}, "
                f"got {boundaries.tolist()}; boundaries_for makes them."
            )
    return jnp.asarray(boundaries)


def _sample(rng: np.random.Generator, n: int, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Normal entries, and the threshold that selects about as many of them as the capacity."""
    threshold = statistics.NormalDist().inv_cdf(1 - min(capacity / n, 1) / 2)
    return jnp.asarray(rng.standard_normal(n, np.float32)), jnp.float32(threshold)
