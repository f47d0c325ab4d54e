"""Exchanges that are repeated to be timed."""

from typing import Any

import jax
import numpy as np
import pytest

import jaxcomm
from jaxcomm.plan.exchanges import Exchange, Repeated

SHAPES = [(40, 30), (7,), (20, 60)]  # the second is exempt
EVERY = 8  # steps


@pytest.fixture
def sparse(make_mesh: Any) -> Repeated:
    algorithm = jaxcomm.sparse.oktopk(recompute_every=EVERY)
    tx = jaxcomm.sparse_mean("data", 0.1, algorithm)
    made = Exchange(make_mesh(4), "data", tx, SHAPES)
    return made.run_by(made.lower().compile())


def thresholds(again: Repeated, steps: int, prepared: bool) -> set[float]:
    """The different ones, of all devices and steps."""
    found = []
    for _ in range(steps):
        if prepared:
            again.prepare()
        again()
        found.append(np.asarray(again.state.thresholds.values[0]))
    return set(np.concatenate(found).ravel().tolist())


def test_a_threshold_is_reused(sparse: Repeated) -> None:
    """As in most steps of training: each device keeps its own until a new one is due."""
    assert len(thresholds(sparse, EVERY - 1, prepared=True)) == 4


def test_of_the_same_gradients_none_is(sparse: Repeated) -> None:
    assert len(thresholds(sparse, EVERY - 1, prepared=False)) > 4 * (EVERY - 1) // 2


def test_gradients_and_residuals_have_the_sums_of_the_first_step(sparse: Repeated) -> None:
    first = [np.asarray(g) for g in sparse.gradients]
    for _ in range(3):
        sparse.prepare()
        sparse()
    sparse.prepare()
    residuals = map(np.asarray, sparse.state.residual.values)
    lacking = [np.asarray(sparse.gradients[i]) for i in (0, 2)]
    for x, gradient, residual in zip((first[0], first[2]), lacking, residuals, strict=True):
        assert np.any(residual != 0)
        np.testing.assert_allclose(gradient + residual, x, atol=1e-6)
    np.testing.assert_array_equal(sparse.gradients[1], first[1])


def test_other_methods_have_the_same_gradients(make_mesh: Any) -> None:
    tx = jaxcomm.mean("data", "int4", error_feedback=True)
    made = Exchange(make_mesh(4), "data", tx, SHAPES)
    again = made.run_by(made.lower().compile())
    before = again.gradients
    again()
    again.prepare()
    assert all(a is b for a, b in zip(before, again.gradients, strict=True))
    assert jax.tree.leaves(again.state)
