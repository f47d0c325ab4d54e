"""Thresholds of samples, and counts in them, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.kernels import select
from jaxcomm.kernels.select import hashing, threshold

INFINITY = np.float32(np.inf)
NUMBER = jnp.int32(7)


def reached(x: np.ndarray, threshold: float) -> int:
    """How many magnitudes reach a threshold, without zeros and NaN."""
    return int(np.sum((np.abs(x) >= threshold) & (x != 0)))


def vectors(n: int) -> list[np.ndarray]:
    """Normal values, long tails, matrices whose columns or rows differ."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(n).astype(np.float32)
    columns = normal * np.exp(0.5 * rng.standard_normal(512).astype(np.float32)).repeat(n // 512)
    return [normal, normal**3, columns, columns.reshape(512, -1).T.reshape(-1)]


def test_a_threshold_near_the_kth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long vector that of a sample, and the same on GPUs; never too high for equal values."""
    n, k = 2**19, 2**19 // 20
    large = vectors(n)
    strange = np.where(np.arange(n) % 9 == 0, np.nan, large[0]).astype(np.float32)
    strange[5::1000] = INFINITY
    large += [np.full(n, 1.234, np.float32), np.where(large[0] > 2.5, large[0], 0), strange]
    found = [select.threshold_near(jnp.asarray(x), k, NUMBER) for x in large]
    counts = [reached(x, float(t)) for x, t in zip(large, found, strict=True)]
    assert all(0.9 * k < count < 1.15 * k for count in [*counts[:4], counts[6]])
    assert counts[4] == n  # all are equal
    assert found[5] == np.uint32(1).view(np.float32)  # fewer than k are not zero
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **_: default(*args))
    on_gpu = [select.threshold_near(jnp.asarray(x), k, NUMBER) for x in large]
    np.testing.assert_array_equal(on_gpu, found)
    short = large[0][:9000]
    exact = select.threshold_near(jnp.asarray(short), 90, NUMBER)
    assert exact == np.sort(np.abs(short))[-90]


def test_a_count_near_k() -> None:
    """Of a long vector in a sample; exactly of a short one."""
    n, k = 2**19, 2**19 // 100
    for x in vectors(n):
        exact = np.sort(np.abs(x))[-k]
        for factor in (0.5, 1, 1.3):
            threshold = np.float32(factor * exact)
            found, wanted = (
                int(select.count_near(jnp.asarray(x), threshold, k, NUMBER)),
                reached(x, threshold),
            )
            # Four deviations of the values in the sample, of which about 1000 reach the k-th.
            assert abs(found / wanted - 1) < 4 / (1000 * wanted / k) ** 0.5 + 0.02
            short = x[:9000]
            assert select.count_near(jnp.asarray(short), threshold, 90, NUMBER) == reached(
                short, threshold
            )
    everything = select.count_near(jnp.ones(n), jnp.float32(1), k, NUMBER)
    assert abs(int(everything) - n) <= 1
    assert select.count_near(jnp.full(n, jnp.nan), jnp.float32(1), k, NUMBER) == 0


def test_wrong_arguments() -> None:
    for call in (
        lambda x, k: select.threshold_near(x, k, NUMBER),
        lambda x, k: select.count_near(x, jnp.float32(1), k, NUMBER),
    ):
        with pytest.raises(ValueError, match="k is 1 to n = 600, got 601"):
            call(jnp.ones(600), 601)
        with pytest.raises(TypeError, match=r"got bfloat16; write x.astype\(jnp.float32\)"):
            call(jnp.ones(600, jnp.bfloat16), 1)


def test_every_step_has_a_sample_of_its_own() -> None:
    """So no place is left out for long."""
    n = 2**19
    x = jnp.asarray(vectors(n)[0])
    thresholds = [select.threshold_near(x, n // 100, jnp.int32(step)) for step in range(4)]
    counts = [select.count_near(x, jnp.float32(2.5), n // 100, jnp.int32(i)) for i in range(4)]
    assert len({float(t) for t in thresholds}) > 1 and len({int(c) for c in counts}) > 1


def test_no_stride_is_longer_than_what_is_hashed() -> None:
    assert threshold._stride(2**31 - 256, 1000) == hashing.MOST
