"""What selection should give, by numpy, which sorts; and vectors to select from."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.kernels import select
from jaxcomm.kernels.select.magnitudes import CHUNK

INFINITY = 0x7F800000
TINY = np.uint32(1).view(np.float32)


def magnitudes(x: np.ndarray) -> np.ndarray:
    """Integers in the order of `|x|`, with NaN as zero."""
    patterns = x.view(np.uint32).astype(np.int64) % 2**31
    return np.where(patterns > INFINITY, 0, patterns)


def selected(x: np.ndarray, threshold: float) -> np.ndarray:
    """The places of `0 < |x| >= threshold`, by chunk, then i mod 8, then i."""
    found = magnitudes(x)
    if np.isnan(threshold):
        return np.zeros(0, int)
    limit = magnitudes(np.float32([threshold]))[0] if threshold > 0 else 1
    i = np.flatnonzero((found >= limit) & (found > 0))
    return i[np.lexsort((i, i % 8, i // CHUNK))]


def kth(x: np.ndarray, k: int) -> np.float32:
    """The k-th largest magnitude, or the smallest that is positive."""
    pattern = max(np.partition(magnitudes(x), len(x) - k)[len(x) - k], 1)
    return np.uint32(pattern).view(np.float32)


def assert_selected(got: select.Selected, x: np.ndarray, places: np.ndarray, capacity: int) -> None:
    kept = places[:capacity]
    space = capacity - len(kept)
    assert got.values.dtype == jnp.float32
    assert got.indices.dtype == got.count.dtype == jnp.int32
    assert got.count == len(places)
    np.testing.assert_array_equal(got.indices, np.pad(kept, (0, space), constant_values=len(x)))
    patterns = np.asarray(got.values).view(np.uint32)
    np.testing.assert_array_equal(patterns, np.pad(x[kept].view(np.uint32), (0, space)))


def bits_of(x: jax.Array | np.ndarray) -> int:
    return int(np.asarray(x).view(np.uint32))


def samples(n: int, seed: int) -> list[np.ndarray]:
    """Vectors that are hard in one way or another."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(n).astype(np.float32)
    sparse = np.where(rng.random(n) < 0.02, normal, 0).astype(np.float32)
    one = np.zeros(n, np.float32)
    one[rng.integers(n)] = -3
    denormal = rng.integers(0, 20, n, dtype=np.uint32).view(np.float32)
    anything = rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32)
    infinite = np.where(rng.random(n) < 0.3, np.float32(-np.inf), normal)
    ties = rng.integers(-2, 3, n).astype(np.float32)
    fixed = [np.full(n, value, np.float32) for value in (0.0, -0.0, 1.5, -TINY, np.nan)]
    return [normal, sparse, one, denormal, anything, infinite, ties, *fixed]
