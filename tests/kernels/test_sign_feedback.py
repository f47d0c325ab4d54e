"""Signs with error feedback against numpy: what is sent and what is kept add up."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.kernels import bitplanes
from jaxcomm.kernels.sign_feedback import sign_feedback


def case(n: int) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Small integers and a scale of 2: no sum of them is rounded."""
    rng = np.random.default_rng(n)
    x, residual = rng.integers(-8, 9, (2, n)).astype(np.float32)
    return x, residual, np.float32(2)


@pytest.mark.newest
@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 1000, 4096])
def test_sent_and_kept_are_what_was_owed(n: int) -> None:
    x, residual, scale = case(n)
    words, kept = sign_feedback(jnp.asarray(x), jnp.asarray(residual), jnp.asarray(scale))
    np.testing.assert_array_equal(words, bitplanes.pack(jnp.asarray(x + residual > 0)))
    sent = scale * np.where(x + residual > 0, 1, -1).astype(np.float32)
    np.testing.assert_array_equal(sent + np.asarray(kept), x + residual)


def test_special_values() -> None:
    x = np.float32([np.nan, np.inf, -np.inf, 0.0, -0.0, 2.0**-126, -(2.0**-126)])
    words, kept = sign_feedback(jnp.asarray(x), jnp.zeros(7), jnp.float32(1))
    np.testing.assert_array_equal(bitplanes.unpack(words, 7), [0, 1, 0, 0, 0, 1, 0])
    np.testing.assert_array_equal(kept, np.float32([np.nan, np.inf, -np.inf, 1, 1, -1, 1]))


def test_bad_arguments() -> None:
    x, scale = jnp.zeros(4), jnp.float32(1)
    with pytest.raises(TypeError, match="float32, got bfloat16 for residual"):
        sign_feedback(x, x.astype(jnp.bfloat16), scale)
    with pytest.raises(ValueError, match="of one shape"):
        sign_feedback(x, jnp.zeros(5), scale)
    with pytest.raises(ValueError, match="a scalar"):
        sign_feedback(x, x, jnp.zeros(4))
    with pytest.raises(NotImplementedError, match="no implementation 'cuda'"):
        sign_feedback(x, x, scale, implementation="cuda")
