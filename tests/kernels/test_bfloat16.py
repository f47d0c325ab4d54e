"""bfloat16 bit patterns against rounding done on the bits in numpy."""

import jax
import jax.numpy as jnp
import numpy as np

import oracles
from jaxcomm.kernels import bfloat16


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
