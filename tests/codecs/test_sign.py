"""One bit a value and a scale a block: the scale, and what error feedback keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.codecs import sign

BLOCK = sign.BLOCK


def there_and_back(values: np.ndarray) -> np.ndarray:
    """What becomes of values that fill the beginning of a block."""
    x = np.pad(values, (0, BLOCK - values.size))
    payload, _ = jax.jit(sign.encode_with_feedback)(x, np.zeros_like(x), np.int32([values.size]))
    assert payload.dtype == jnp.uint32 and payload.shape == (1 + BLOCK // 32,)
    return np.asarray(sign.decode(payload))[: values.size]


@pytest.mark.parametrize("magnitude", [2.0**-120, 1.0, 1e30, 1e38, 2.0**127, 3.4e38])
def test_scale_keeps_the_norm_of_any_magnitude(magnitude: float) -> None:
    x = np.float32([1, -1, 0.5, 0]) * np.float32(magnitude)
    scale = np.sqrt(np.mean((x / np.float64(magnitude)) ** 2)) * magnitude
    np.testing.assert_allclose(there_and_back(x), scale * np.array([1, -1, 1, -1]), rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nothing_non_finite_is_lost(bad: float) -> None:
    assert not np.isfinite(there_and_back(np.float32([1, bad, 3]))).any()


def test_zeros_have_no_scale() -> None:
    np.testing.assert_array_equal(there_and_back(np.zeros(5, np.float32)), 0)


@pytest.mark.newest
def test_sent_and_kept_add_up_and_padding_keeps_nothing() -> None:
    """Small integers, of equal magnitude in each block: no sum is rounded."""
    rng = np.random.default_rng(0)
    counts = np.int32([[BLOCK, 41], [0, BLOCK], [7, 0]])
    values = np.arange(BLOCK) < counts[..., None]
    sizes = np.float32([[3, 5], [7, 11], [13, 17]])[..., None]
    total = rng.choice(np.float32([-1, 1]), (3, 2, BLOCK)) * sizes * values
    residual = rng.integers(-4, 5, total.shape) * np.float32(1) * values
    x = total - residual
    total[0, 0, :6], x[0, 0, :6], residual[0, 0, :6] = 0, -2, 2  # zeros that are no padding
    rows = [a.reshape(3, -1) for a in (x, residual, total)]
    payload, kept = jax.jit(sign.encode_with_feedback)(*rows[:2], counts)
    alone, _ = jax.jit(sign.encode_with_feedback)(rows[2], np.zeros_like(rows[2]), counts)
    np.testing.assert_array_equal(payload, alone)
    kept = np.asarray(kept).reshape(total.shape)
    sent = np.where(values, np.asarray(sign.decode(payload)).reshape(total.shape), 0)
    np.testing.assert_array_equal(sent[1:], total[1:])
    np.testing.assert_array_equal(sent + kept, total)
    assert (sent[0, 0, :6] < 0).all() and (kept[~values] == 0).all()
