"""What users put before and after the exchange: clipping, accumulation, decay, skipping steps."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxcomm
from transforms.both_views import SHAPES, VIEWS, View, gradients, place

pytestmark = pytest.mark.standard_promotion  # optax promotes
WORLD = 4
METHODS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "mean": lambda: jaxcomm.mean("data"),
    "bfloat16": lambda: jaxcomm.mean("data", "bfloat16"),
    "cnat": lambda: jaxcomm.mean("data", "cnat"),
    "int8, errors fed back": lambda: jaxcomm.mean("data", "int8", error_feedback=True),
    "majority vote": lambda: jaxcomm.majority_vote("data", error_feedback=True),
    "Ok-Topk": lambda: jaxcomm.sparse_mean("data", 0.2, momentum_correction=0.9),
    "warm-up": lambda: jaxcomm.dense_first(jaxcomm.mean("data", "cnat"), 1),
}


def initial(view: View) -> Any:
    rng = np.random.default_rng(9)
    return place(view, {n: rng.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()})


def run(view: View, tx: Any, steps: list[Any]) -> tuple[Any, Any]:
    """The parameters after some steps, and the last state."""
    with jax.set_mesh(view.mesh(WORLD)):
        params = initial(view)
        state = tx.init(params)
        update = jax.jit(tx.update)
        for grads in steps:
            updates, state = update(place(view, grads, "data"), state, params)
            params = optax.apply_updates(params, updates)
        return jax.tree.map(np.asarray, params), state


def clipped(tree: Any, norm: float) -> Any:
    size = np.sqrt(sum(np.square(x).sum() for x in tree.values()))
    return {name: x * np.float32(min(1, norm / size)) for name, x in tree.items()}


def test_clip_locally_exchange_clip_the_mean_step_decay() -> None:
    tx = optax.chain(
        jaxcomm.local("data", optax.clip_by_global_norm(3.0)),
        jaxcomm.mean("data"),
        optax.clip_by_global_norm(1.0),
        optax.adamw(0.1, weight_decay=0.01),
    )
    steps = [gradients(WORLD, seed) for seed in range(3)]
    found, _ = run(VIEWS[0], tx, steps)

    optimizer = optax.adamw(0.1, weight_decay=0.01)
    with jax.set_mesh(VIEWS[0].mesh(WORLD)):
        params = jax.tree.map(np.asarray, initial(VIEWS[0]))
    state = optimizer.init(params)
    for grads in steps:
        each = [clipped({n: g[r] for n, g in grads.items()}, 3.0) for r in range(WORLD)]
        mean = {n: np.mean([e[n] for e in each], 0, np.float32) for n in SHAPES}
        updates, state = optimizer.update(clipped(mean, 1.0), state, params)
        params = optax.apply_updates(params, updates)
    for name in SHAPES:
        np.testing.assert_allclose(found[name], params[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("method", METHODS)
def test_accumulating_is_a_step_on_the_mean_of_the_gradients(method: str) -> None:
    tx = lambda: optax.chain(METHODS[method](), optax.sgd(0.1))  # noqa: E731
    one, two = gradients(WORLD, 0), gradients(WORLD, 1)
    both = {name: (one[name] + two[name]) / np.float32(2) for name in SHAPES}
    accumulated, _ = run(VIEWS[0], jaxcomm.multi_steps(tx(), 2), [one, two])
    at_once, _ = run(VIEWS[0], tx(), [both])
    for name in SHAPES:
        np.testing.assert_allclose(accumulated[name], at_once[name], atol=1e-5, err_msg=name)


@pytest.mark.newest
@pytest.mark.parametrize("method", METHODS)
def test_a_step_that_is_not_finite_is_skipped_everywhere(method: str) -> None:
    tx = optax.chain(METHODS[method](), optax.apply_if_finite(optax.adam(0.1), 5))
    good, bad = gradients(WORLD, 0), gradients(WORLD, 1)
    bad["kernel"][3, 0, 0] = np.inf
    before, state = run(VIEWS[0], tx, [good])
    skipped, after = run(VIEWS[0], tx, [good, bad])
    for name in SHAPES:
        np.testing.assert_array_equal(skipped[name], before[name])
    for one, other in zip(jax.tree.leaves(state[1][3]), jax.tree.leaves(after[1][3]), strict=True):
        np.testing.assert_array_equal(one, other)
    resumed, _ = run(VIEWS[0], tx, [good, bad, good])
    assert all(np.isfinite(x).all() for x in resumed.values())
    assert (resumed["kernel"] != skipped["kernel"]).any()
