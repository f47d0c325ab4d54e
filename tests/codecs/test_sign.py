"""One bit a value and a scale: the scale, at the ends of float32's range."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.codecs import sign


@pytest.mark.parametrize("magnitude", [2.0**-120, 1.0, 1e30, 1e38, 2.0**127, 3.4e38])
def test_scale_keeps_the_norm_of_any_magnitude(magnitude: float) -> None:
    x = np.float32([1, -1, 0.5, 0, 0]) * np.float32(magnitude)
    counts = jnp.int32(4)
    out = jax.jit(lambda x: sign.decode(sign.encode(x, counts), 4))(x)
    scale = np.sqrt(np.mean((x[:4] / np.float64(magnitude)) ** 2)) * magnitude
    np.testing.assert_allclose(out, scale * np.array([1, -1, 1, -1]), rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nothing_non_finite_is_lost(bad: float) -> None:
    x = jnp.float32([1, bad, 3])
    assert not jnp.isfinite(sign.decode(sign.encode(x, jnp.int32(3)), 3)).any()


def test_zeros_have_no_scale() -> None:
    np.testing.assert_array_equal(sign.decode(sign.encode(jnp.zeros(5), jnp.int32(5)), 5), 0)
