"""Rounding to powers of two against numpy, which does it in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import codec_oracles as expected
from jaxcomm.kernels.powers_of_two import rounding
from jaxcomm.kernels.random_bits import HALF


def any_floats(n: int = 20_000) -> np.ndarray:
    x = np.random.default_rng(0).integers(0, 2**32, n, dtype=np.uint32).view(np.float32)
    edges = [0.0, -0.0, 2.0**-149, 2.0**-126, 2.0**-127, 2.0**127, 3.4e38, 1.0, 1.5, 0.75]
    return np.concatenate([x[np.isfinite(x)], np.float32(edges)])


def rounded(x: np.ndarray, bits: np.ndarray, lowest: int) -> np.ndarray:
    """The exponent field, by way of the value."""
    power = np.abs(expected.power_of_two(x, bits, lowest)).astype(np.float64)
    return np.where(power > 0, np.frexp(power)[1] - 1 + 127, 0)


@pytest.mark.newest
@pytest.mark.parametrize("lowest", [-126, -125, -120, -50, 0, 100, 127])
@pytest.mark.parametrize("random", [True, False])
def test_equals_the_oracle(lowest: int, random: bool) -> None:
    x = any_floats()
    x = np.concatenate([x, x[:2000] / np.abs(x[:2000]) * np.float32(2.0**lowest) / 3])
    bits = np.random.default_rng(1).integers(0, 2**32, len(x), dtype=np.uint32)
    words = bits if random else np.uint32(HALF)
    found = jax.jit(rounding.exponents)(x, words, lowest=jnp.uint32(lowest + 127))
    np.testing.assert_array_equal(found, rounded(x, words, lowest))
    if lowest == -126:
        np.testing.assert_array_equal(jax.jit(rounding.exponents)(x, words), found)


def test_the_extreme_words_round_down_and_up() -> None:
    x = np.float32([1.0, 1.0000001, 1.9999999, 2.0**-149, 1.9999999 * 2.0**127])
    down = rounding.exponents(jnp.asarray(x), jnp.uint32(0))
    up = rounding.exponents(jnp.asarray(x), jnp.uint32(2**32 - 1))
    np.testing.assert_array_equal(down, [127, 127, 127, 0, 254])
    np.testing.assert_array_equal(up, [127, 128, 128, 1, 254])
    nothing = jnp.float32([0.0, -0.0, 2.0**-149])
    up = rounding.exponents(nothing, jnp.uint32(2**32 - 1), lowest=jnp.uint32(100))
    np.testing.assert_array_equal(up, 0)


def test_what_is_not_finite_stays_so() -> None:
    x = jnp.float32([jnp.inf, -jnp.inf, jnp.nan])
    for lowest in (None, jnp.uint32(100)):
        for word in (0, HALF, 2**32 - 1):
            found = rounding.exponents(x, jnp.uint32(word), lowest=lowest)
            np.testing.assert_array_equal(found, 255)
    patterns = jnp.uint32([0x7F800000, 0x7FC00000, 0x7F800001])
    np.testing.assert_array_equal(rounding.ceiling(patterns), 255)


def test_ceiling_is_the_power_above() -> None:
    x = np.abs(any_floats())
    words = np.full(x.shape, 2**32 - 1, np.uint32)
    found = jax.jit(rounding.ceiling)(x.view(np.uint32))
    np.testing.assert_array_equal(found, rounded(x, words, -126))


def test_values_of_all_fields() -> None:
    fields = np.arange(1, 255, dtype=np.uint32)
    for negative, sign in ((0, 1), (1, -1)):
        found = rounding.values(jnp.asarray(fields), jnp.uint32(negative))
        np.testing.assert_array_equal(found, np.float32(sign * 2.0 ** (fields.astype(float) - 127)))
    ends = rounding.values(jnp.uint32([0, 255]), jnp.uint32(1))
    np.testing.assert_array_equal(ends, [0, -np.inf])


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match="takes float32, got bfloat16"):
        rounding.exponents(jnp.zeros(3, jnp.bfloat16), jnp.uint32(0))
