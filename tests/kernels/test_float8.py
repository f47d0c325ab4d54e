"""8-bit floats against the nearest of all their values, found by search."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import codec_oracles as expected
from jaxcomm.kernels import float8

FORMATS = [(jnp.float8_e4m3fn, 4, 448.0, np.nan), (jnp.float8_e5m2, 5, 57344.0, np.inf)]


def nearest(x: np.ndarray, exponent_bits: int, largest: float, beyond: float) -> np.ndarray:
    grid = expected.float8_values(exponent_bits, 7 - exponent_bits, largest)
    grid = np.append(grid, 2 * grid[-1] - grid[-2])  # what follows the largest
    with np.errstate(invalid="ignore"):  # of NaN that signal
        x = x.astype(np.float64)
    y = np.where(np.isnan(x), 0, np.abs(x))
    high = np.clip(np.searchsorted(grid, y), 1, len(grid) - 1)
    down, rise = y - grid[high - 1], grid[high] - y
    code = np.where((rise < down) | ((rise == down) & (high % 2 == 0)), high, high - 1)
    values = np.append(grid[:-1], beyond)[code]
    return np.where(np.isnan(x), np.nan, np.copysign(values, x))


@pytest.mark.newest
@pytest.mark.parametrize(("dtype", "exponent_bits", "largest", "beyond"), FORMATS)
def test_rounds_every_kind_of_float(
    dtype: Any, exponent_bits: int, largest: float, beyond: float
) -> None:
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    grid = expected.float8_values(exponent_bits, 7 - exponent_bits, largest)
    ties = ((grid[1:] + grid[:-1]) / 2).astype(np.float32)
    around = np.concatenate([ties, np.nextafter(ties, 0), np.nextafter(ties, np.float32(np.inf))])
    patterns = np.random.default_rng(0).integers(0, 2**32, 50_000, dtype=np.uint32)
    x = np.concatenate([halves, around, -around, patterns.view(np.float32)])
    codes = jax.jit(lambda x: float8.round_to_bits(x, dtype))(x)
    found = float8.widen_bits(codes, dtype)
    np.testing.assert_array_equal(found, nearest(x, exponent_bits, largest, beyond))
    finite = ~np.isnan(x)
    np.testing.assert_array_equal(np.asarray(codes)[finite] >> 7, np.signbit(x)[finite])


@pytest.mark.parametrize(("dtype", "exponent_bits", "largest", "beyond"), FORMATS)
def test_widens_every_pattern(
    dtype: Any, exponent_bits: int, largest: float, beyond: float
) -> None:
    grid = expected.float8_values(exponent_bits, 7 - exponent_bits, largest)
    special = [np.nan] if np.isnan(beyond) else [np.inf, np.nan, np.nan, np.nan]
    positive = np.concatenate([grid, special]).astype(np.float32)
    assert len(positive) == 128
    found = jax.jit(lambda bits: float8.widen_bits(bits, dtype))(np.arange(256, dtype=np.uint8))
    np.testing.assert_array_equal(found, np.concatenate([positive, -positive]))
    jax_says = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), dtype)
    np.testing.assert_array_equal(found, jax_says.astype(jnp.float32))


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match="takes float32, got bfloat16"):
        float8.round_to_bits(jnp.zeros(3, jnp.bfloat16), jnp.float8_e5m2)
    with pytest.raises(TypeError, match="uint8, got int8"):
        float8.widen_bits(jnp.zeros(3, jnp.int8), jnp.float8_e5m2)
    with pytest.raises(ValueError, match="one of float8_e4m3fn, float8_e5m2, got float16"):
        float8.round_to_bits(jnp.zeros(3), jnp.float16)
