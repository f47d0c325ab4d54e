"""The k largest entries against numpy, which sorts."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.kernels import select
from jaxcomm.kernels.select import compaction
from jaxcomm.kernels.select import threshold as search
from selecting import assert_selected, bits_of, kth, magnitudes, samples, selected

LARGE = 2**19 + 17  # enough for a sample to be taken


@pytest.fixture(params=["cpu", "gpu"])
def formulation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both formulations run on CPU; GPUs take a sample of vectors as short as those here."""
    if request.param == "gpu":
        default = lambda *args, default, **_: default(*args)  # noqa: E731
        monkeypatch.setattr(jax.lax, "platform_dependent", default)
        monkeypatch.setattr(search, "_SORTED", LARGE - 1)
    return request.param


def largest_places(x: np.ndarray, k: int, threshold: np.float32) -> np.ndarray:
    """The places of those that reach a threshold, of ties the first, so at most k."""
    places = selected(x, threshold)
    is_tie = magnitudes(x)[places] == magnitudes(threshold[None])
    surplus = places[is_tie][max(k - np.sum(~is_tie), 0) :]
    return places[~np.isin(places, surplus)]


@pytest.mark.parametrize(("n", "k"), [(1, 1), (300, 7), (2000, 500), (LARGE, 1), (LARGE, 5243)])
@pytest.mark.parametrize("least", [1e-30, 0.7])
@pytest.mark.usefixtures("formulation")
def test_exactly_k_or_all_that_reach_the_least(n: int, k: int, least: float) -> None:
    find = jax.jit(partial(select.largest, k=k, capacity=k + 3, least=least))
    for x in samples(n, n)[:: 3 if n == LARGE else 1]:
        found, threshold = find(x)
        wanted = np.maximum(kth(x, k), np.float32(least))
        assert bits_of(threshold) == bits_of(wanted)
        assert_selected(found, x, largest_places(x, k, wanted), k + 3)


@pytest.mark.usefixtures("formulation")
def test_samples_that_mislead() -> None:
    """They see nothing of what is large, or nothing of what is small, or all are equal."""
    k = LARGE // 100
    rng = np.random.default_rng(0)
    low, high = rng.standard_normal((2, LARGE)).astype(np.float32)
    sample = np.asarray(search._one_in(search._stride(LARGE), 1, jnp.arange(LARGE), jnp.int32(0)))
    low[sample] = 1e-6 * rng.random(len(sample))
    high[sample] = 10 + rng.random(len(sample))
    find = jax.jit(partial(select.largest, k=k, capacity=k, least=1e-30))
    for x in (low, high, np.full(LARGE, -1.5, np.float32)):
        found, threshold = find(x)
        assert bits_of(threshold) == bits_of(kth(x, k))
        assert_selected(found, x, largest_places(x, k, kth(x, k)), k)


def test_gpus_compact_once_and_branch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compactions: list[Any] = []
    monkeypatch.setattr(search, "_SORTED", LARGE - 1)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **_: default(*args))
    monkeypatch.setattr(search, "compact", _noting(compactions, search.compact))
    f = partial(select.largest, k=5243, capacity=6000, least=1e-30)
    text = str(jax.make_jaxpr(f)(jnp.zeros(LARGE)))
    assert len(compactions) == 1 and text.count(" cond[") == 1


def _noting(calls: list[Any], f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **options: calls.append(args) or f(*args, **options)


@pytest.mark.usefixtures("formulation")
def test_one_too_many_goes() -> None:
    compact = jax.jit(compaction.compact_at_most, static_argnums=2)
    for places in ([0, 1, 2], [7, 300, 1000], [255, 256, 999]):
        x = np.zeros(1001, np.float32)
        x[places] = -2
        assert_selected(compact(x, np.float32(2), 3, 2), x, np.asarray(places[:2]), 3)
        assert_selected(compact(x, np.float32(2), 3, 3), x, np.asarray(places), 3)


def test_wrong_arguments() -> None:
    x = jnp.ones(9)
    for k, capacity in ((0, 4), (10, 12), (5, 4)):
        with pytest.raises(ValueError, match="k is 1 to n = 9 and the capacity"):
            select.largest(x, k, capacity, 1e-30)
    with pytest.raises(TypeError, match="largest takes float32"):
        select.largest(jnp.ones(9, jnp.int32), 1, 1, 1e-30)
