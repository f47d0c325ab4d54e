"""One bit a value and a scale: the scale, and what error feedback keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.codecs import sign


def there_and_back(x: jax.Array, count: int, n: int) -> jax.Array:
    payload, _ = sign.encode_with_feedback(x, jnp.zeros_like(x), jnp.int32(count))
    return sign.decode(payload, n)


@pytest.mark.parametrize("magnitude", [2.0**-120, 1.0, 1e30, 1e38, 2.0**127, 3.4e38])
def test_scale_keeps_the_norm_of_any_magnitude(magnitude: float) -> None:
    x = np.float32([1, -1, 0.5, 0, 0]) * np.float32(magnitude)
    out = jax.jit(lambda x: there_and_back(x, 4, 4))(x)
    scale = np.sqrt(np.mean((x[:4] / np.float64(magnitude)) ** 2)) * magnitude
    np.testing.assert_allclose(out, scale * np.array([1, -1, 1, -1]), rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nothing_non_finite_is_lost(bad: float) -> None:
    x = np.float32([1, bad, 3])
    out = jax.jit(lambda x: there_and_back(x, 3, 3))(x)
    assert not np.isfinite(out).any()


def test_zeros_have_no_scale() -> None:
    np.testing.assert_array_equal(there_and_back(jnp.zeros(5), 5, 5), 0)


@pytest.mark.newest
def test_sent_and_kept_add_up_and_padding_keeps_nothing() -> None:
    """Small integers, of equal magnitude in each message: no sum is rounded."""
    rng = np.random.default_rng(0)
    counts = np.int32([70, 41, 0])
    total = rng.choice(np.float32([-1, 1]), (3, 70)) * np.float32([[3], [5], [7]])
    total[np.arange(70) >= counts[:, None]] = 0
    residual = np.where(total == 0, 0, rng.integers(-4, 5, total.shape)).astype(np.float32)
    x = total - residual
    total[0, :6], x[0, :6], residual[0, :6] = 0, -2, 2  # zeros that are no padding have the sign -1
    payload, kept = jax.jit(sign.encode_with_feedback)(x, residual, counts)
    alone, _ = jax.jit(sign.encode_with_feedback)(total, np.zeros_like(total), counts)
    np.testing.assert_array_equal(payload, alone)
    values = np.arange(70) < counts[:, None]
    sent = np.where(values, sign.decode(payload, 70), 0)
    np.testing.assert_array_equal(sent[1:], total[1:])
    np.testing.assert_array_equal(sent + np.asarray(kept), total)
    assert (sent[0, :6] < 0).all() and (np.asarray(kept)[~values] == 0).all()


def test_a_named_implementation_reaches_the_kernel() -> None:
    x = jnp.zeros((2, 5))
    with pytest.raises(NotImplementedError, match="sign_feedback: .* there is no NVIDIA GPU"):
        sign.encode_with_feedback(x, x, jnp.int32([5, 5]), implementation="mosaic")
