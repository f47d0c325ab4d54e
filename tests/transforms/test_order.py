"""What users put before and after the exchange: clipping, accumulation, decay, skipping steps."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxcomm
from transforms.both_views import SHAPES, VIEWS, gradients, place

pytestmark = pytest.mark.standard_promotion  # optax promotes
GLOBAL, WORLD = VIEWS[0], 4
METHODS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "mean": lambda: jaxcomm.mean("data"),
    "bfloat16": lambda: jaxcomm.mean("data", "bfloat16"),
    "cnat": lambda: jaxcomm.mean("data", "cnat"),
    "int8, errors fed back": lambda: jaxcomm.mean("data", "int8", error_feedback=True),
    "votes": lambda: jaxcomm.majority_vote("data", "direct"),
    "votes with scales": lambda: jaxcomm.majority_vote("data", "direct", error_feedback=True),
    "TopkA": lambda: jaxcomm.sparse_mean("data", 0.2, "topk_allgather", momentum_correction=0.9),
    "PowerSGD": lambda: jaxcomm.low_rank_mean("data", 1),
    "warm-up": lambda: jaxcomm.dense_first(jaxcomm.mean("data", "bfloat16"), 1),
}
# Those whose states are of different kinds.
ACCUMULATED = ["mean", "int8, errors fed back", "votes with scales", "TopkA", "warm-up"]


class Training:
    """An exchange and an optimizer, in one program for all the tests of them."""

    def __init__(self, tx: optax.GradientTransformation) -> None:
        rng = np.random.default_rng(9)
        shapes = SHAPES.items()
        with jax.set_mesh(GLOBAL.mesh(WORLD)):
            self.params = place(
                GLOBAL, {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes}
            )
            self.start, self.update = tx.init(self.params), jax.jit(tx.update)

    def run(self, *steps: Any) -> tuple[Any, Any]:
        """The parameters after some steps, and the last state."""
        params, state = self.params, self.start
        with jax.set_mesh(GLOBAL.mesh(WORLD)):
            for grads in steps:
                updates, state = self.update(place(GLOBAL, grads, "data"), state, params)
                params = optax.apply_updates(params, updates)
        assert self.update._cache_size() == 1
        return jax.tree.map(np.asarray, params), state


@functools.cache
def method_and_optimizer(method: str) -> optax.GradientTransformation:
    optimizer = optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 5)
    return optax.chain(METHODS[method](), optimizer)


@functools.cache
def training(method: str) -> Training:
    return Training(method_and_optimizer(method))


def clipped(tree: Any, norm: float) -> Any:
    size = np.sqrt(sum(np.square(x).sum() for x in tree.values()))
    return {name: x * np.float32(min(1, norm / size)) for name, x in tree.items()}


def test_clip_locally_exchange_clip_the_mean_step_decay() -> None:
    chain = Training(
        optax.chain(
            jaxcomm.local("data", optax.clip_by_global_norm(3.0)),
            jaxcomm.mean("data"),
            optax.clip_by_global_norm(1.0),
            optax.adamw(0.1, weight_decay=0.01),
        )
    )
    steps = [gradients(WORLD, seed) for seed in range(3)]
    found, _ = chain.run(*steps)

    optimizer = optax.adamw(0.1, weight_decay=0.01)
    params = jax.tree.map(np.asarray, chain.params)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for grads in steps:
        each = [clipped({n: g[r] for n, g in grads.items()}, 3.0) for r in range(WORLD)]
        mean = {n: np.mean([e[n] for e in each], 0, np.float32) for n in SHAPES}
        updates, state = update(clipped(mean, 1.0), state, params)
        params = {name: p + np.asarray(updates[name]) for name, p in params.items()}
    for name in SHAPES:
        np.testing.assert_allclose(found[name], params[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("method", ACCUMULATED)
def test_accumulating_is_a_step_on_the_mean_of_the_gradients(method: str) -> None:
    one, two = gradients(WORLD, 0), gradients(WORLD, 1)
    both = {name: (one[name] + two[name]) / np.float32(2) for name in SHAPES}
    accumulating = Training(jaxcomm.multi_steps(method_and_optimizer(method), 2))
    accumulated, _ = accumulating.run(one, two)
    at_once, _ = training(method).run(both)
    for name in SHAPES:
        np.testing.assert_allclose(accumulated[name], at_once[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(m, marks=[pytest.mark.newest] if m in ("votes", "warm-up") else [])
        for m in METHODS
    ],
)
def test_a_step_that_is_not_finite_is_skipped_everywhere(method: str) -> None:
    good, bad = gradients(WORLD, 0), gradients(WORLD, 1)
    bad["kernel"][3, 0, 0] = np.inf
    before, state = training(method).run(good)
    skipped, after = training(method).run(good, bad)
    for name in SHAPES:
        np.testing.assert_array_equal(skipped[name], before[name])
    for one, other in zip(jax.tree.leaves(state[1][3]), jax.tree.leaves(after[1][3]), strict=True):
        np.testing.assert_array_equal(one, other)
    resumed, _ = training(method).run(good, bad, good)
    assert all(np.isfinite(x).all() for x in resumed.values())
    assert (resumed["kernel"] != skipped["kernel"]).any()
