"""bfloat16 bit patterns against rounding done on the bits in numpy."""

import jax
import jax.numpy as jnp
import numpy as np

import oracles
from jaxcomm.kernels import bfloat16
from jaxcomm.kernels.random_bits import random_bits, seeded_key


def bits_of(x: np.ndarray) -> np.ndarray:
    return (oracles.round_bfloat16(x).view(np.uint32) >> 16).astype(np.uint16)


def test_rounds_every_kind_of_float() -> None:
    patterns = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    x = patterns.view(np.float32)
    x = np.concatenate([x[np.isfinite(x)], np.float32([0.0, -0.0, np.inf, -np.inf, 3.4e38])])
    x = x[(np.abs(x) >= 2.0**-126) | (x == 0)]  # XLA may flush denormals, on CPU too
    np.testing.assert_array_equal(jax.jit(bfloat16.round_to_bits)(x), bits_of(x))


def test_ties_go_to_even() -> None:
    x = np.array([0x3F808000, 0x3F818000], np.uint32).view(np.float32)
    np.testing.assert_array_equal(bfloat16.round_to_bits(x), np.uint16([0x3F80, 0x3F82]))


def test_nan_stays_nan() -> None:
    assert jnp.isnan(bfloat16.widen_bits(bfloat16.round_to_bits(jnp.float32([jnp.nan])))).all()


def test_widening_is_exact() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    wide = (bits.astype(np.uint32) << 16).view(np.float32)
    normal = (np.isfinite(wide) & (np.abs(wide) >= 2.0**-126)) | (wide == 0)
    np.testing.assert_array_equal(bfloat16.widen_bits(bits)[normal], wide[normal])


def at_random(x: np.ndarray, words: np.ndarray) -> np.ndarray:
    """The patterns of `round_at_random`."""
    rounded = jax.jit(bfloat16.round_at_random)(jnp.float32(x), jnp.uint32(words))
    assert rounded.dtype == jnp.bfloat16
    return np.asarray(rounded).view(np.uint16)


def test_rounding_at_random_takes_a_neighbour_by_its_distance() -> None:
    """The upper 16 bits of a word decide: as many of them round up as x is beyond the lower one."""
    bits = np.uint32([0x3F801234, 0xBF801234, 0x00800001, 0x3F80FFFF, 0x3F800000])
    for value, up in zip(bits, [0x1234, 0x1234, 1, 0xFFFF, 0], strict=True):
        words = np.arange(2**16, dtype=np.uint32) << 16 | 0xFFFF
        found = at_random(np.full(2**16, value).view(np.float32), words)
        low = value >> 16
        assert set(found) <= {low, low + 1} and np.sum(found == low + 1) == up


def test_what_bfloat16_has_and_what_is_not_finite_stays() -> None:
    exact = np.arange(2**16, dtype=np.uint32) << 16
    most = np.full(exact.shape, 0xFFFFFFFF)
    np.testing.assert_array_equal(at_random(exact.view(np.float32), most), exact >> 16)
    largest = np.finfo(np.float32).max
    found = at_random(np.float32([largest, -largest, np.inf, np.nan]), most[:4])
    np.testing.assert_array_equal(found, np.uint16([0x7F7F, 0xFF7F, 0x7F80, 0x7FC0]))


def test_sums_of_what_is_rounded_at_random_are_kept() -> None:
    """A step of 1/1000 of a number, a thousand times; rounded to nearest it would stay."""
    total, nearest = jnp.ones(4096, jnp.bfloat16), jnp.ones(4096, jnp.bfloat16)
    for i in range(1000):
        words = random_bits(jax.random.fold_in(seeded_key(0), i), (4096,))
        total = bfloat16.round_at_random(total.astype(jnp.float32) + np.float32(1e-3), words)
        nearest = (nearest.astype(jnp.float32) + np.float32(1e-3)).astype(jnp.bfloat16)
    assert np.all(nearest == 1)
    assert abs(np.mean(total.astype(np.float32)) - 2) < 0.005
