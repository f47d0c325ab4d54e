"""`jaxcomm.sparse_mean`: its laws, in both views, for every algorithm."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
import sparse_oracles
from jaxcomm import sparse
from transforms.both_views import SHAPES, VIEWS, View, gradients, jit_update, place

WORLD = 4
LARGE = ("head", "kernel")
ALGORITHMS = list(sparse.BY_NAME)


def ids(view: View) -> str:
    return view.name


def run(view: View, tx: Any, steps: list[Any]) -> tuple[list[Any], list[Any], Any]:
    """The updates and states of some steps, and the jitted update."""
    with jax.set_mesh(view.mesh(WORLD)):
        params = place(view, {name: jnp.zeros(shape) for name, shape in SHAPES.items()})
        state, update = tx.init(params), jit_update(view, tx, params)
        all_updates, states = [], []
        for grads in steps:
            updates, state = update(place(view, grads, "data"), state)
            all_updates.append({name: np.asarray(u) for name, u in updates.items()})
            states.append(jax.tree.map(np.asarray, state))
    return all_updates, states, update


@pytest.mark.newest
@pytest.mark.parametrize("view", VIEWS, ids=ids)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_updates_and_residuals_add_up_to_the_gradients(view: View, algorithm: str) -> None:
    tx = jaxcomm.sparse_mean("data", 0.1, algorithm, bucket_mib=1e-4)
    steps = [gradients(WORLD, seed) for seed in range(5)]
    all_updates, states, update = run(view, tx, steps)
    assert update._cache_size() == 1
    applied: Any = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    wanted: Any = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for grads, updates, state in zip(steps, all_updates, states, strict=True):
        residual = dict(zip(LARGE, state.residual.values, strict=True))
        for name in SHAPES:
            applied[name] += updates[name].astype(np.float64)
            wanted[name] += grads[name].astype(np.float64).mean(0)
            owed = residual[name].astype(np.float64).mean(0) if name in LARGE else 0
            np.testing.assert_allclose(applied[name] + owed, wanted[name], atol=1e-5)
    assert all(0 < (u["head"] != 0).mean() < 0.9 for u in all_updates)


@pytest.mark.parametrize("view", [VIEWS[0], VIEWS[4]], ids=ids)
def test_momentum_correction(view: View) -> None:
    """u = m u + g is added up, and both are cleared where they were sent (Lin et al., 3.1, 3.2)."""
    tx = jaxcomm.sparse_mean("data", 0.1, "topk_allgather", momentum_correction=0.5)
    steps = [gradients(WORLD, seed) for seed in range(4)]
    all_updates, states, _ = run(view, tx, steps)
    u: Any = {name: np.zeros((WORLD, *SHAPES[name]), np.float32) for name in LARGE}
    v: Any = {name: np.zeros((WORLD, *SHAPES[name]), np.float32) for name in LARGE}
    for grads, updates, state in zip(steps, all_updates, states, strict=True):
        left = dict(zip(LARGE, state.residual.values, strict=True))
        moving = dict(zip(LARGE, state.velocity.values, strict=True))
        for name in LARGE:
            u[name] = np.float32(0.5) * u[name] + grads[name]
            v[name] = v[name] + u[name]
            kept = left[name] != 0
            np.testing.assert_allclose(left[name], np.where(kept, v[name], 0), atol=1e-5)
            np.testing.assert_allclose(moving[name], np.where(kept, u[name], 0), atol=1e-5)
            np.testing.assert_allclose(updates[name], (v[name] - left[name]).mean(0), atol=1e-5)
            assert 0.5 < kept.mean() < 1
            u[name], v[name] = moving[name], left[name]


@pytest.mark.parametrize("algorithm", ["oktopk", "gtopk"])
def test_what_is_not_finite_leaves_the_state_alone(algorithm: str) -> None:
    view, bad = VIEWS[0], gradients(WORLD, 1)
    bad["head"][2, 0, 0] = np.nan
    tx = jaxcomm.sparse_mean("data", 0.1, algorithm, momentum_correction=0.9)
    all_updates, states, _ = run(view, tx, [gradients(WORLD), bad])
    assert all(np.isnan(u).all() for u in all_updates[1].values())
    for part in ("residual", "velocity", "carried"):
        before, after = (getattr(state, part).values for state in states)
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(one, other)


def test_without_error_feedback_nothing_is_kept() -> None:
    tx = jaxcomm.sparse_mean("data", 0.1, "topk_allgather", error_feedback=False)
    all_updates, states, _ = run(VIEWS[0], tx, [gradients(WORLD)] * 2)
    assert all((r == 0).all() for r in states[-1].residual.values)
    for name in SHAPES:
        np.testing.assert_array_equal(all_updates[0][name], all_updates[1][name])


def test_the_report_and_the_distance_to_the_true_top_k() -> None:
    grads = [gradients(WORLD)]
    exact = jaxcomm.sparse.oktopk(slack=9.0, common_slack=9.0, recompute_every=1)
    tx = jaxcomm.sparse_mean("data", 1.0, exact, measure_xi=True)
    _, (state,), _ = run(VIEWS[0], tx, grads)
    n = sum(int(np.prod(SHAPES[name])) for name in LARGE)
    assert state.report == (n, n, n, n, n, pytest.approx(0, abs=1e-6))
    tx = jaxcomm.sparse_mean("data", 0.1, exact, measure_xi=True)
    _, (state,), _ = run(VIEWS[0], tx, grads)
    report = state.report
    assert report.k == round(0.1 * n) == report.selected == report.delivered == report.applied
    flat = np.concatenate([grads[0][name].reshape(WORLD, -1) for name in LARGE[::-1]], 1)
    local = np.array([sparse_oracles.largest(row, round(0.1 * n)) for row in flat])
    best = sparse_oracles.largest(flat.mean(0), round(0.1 * n))
    chosen = sparse_oracles.largest(local.mean(0), round(0.1 * n))
    xi = np.linalg.norm(best - chosen) / np.linalg.norm(flat.mean(0))
    assert report.xi == pytest.approx(xi, rel=1e-4) and xi > 0.1


def test_a_dense_warmup_first() -> None:
    tx = jaxcomm.sparse_mean("data", 0.1, dense_steps=1)
    (first, second), _, _ = run(VIEWS[0], tx, [gradients(WORLD)] * 2)
    np.testing.assert_allclose(first["head"], gradients(WORLD)["head"].mean(0), atol=1e-6)
    assert (second["head"] == 0).mean() > 0.5


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"density": 0.0}, ValueError, r"density must be in \(0, 1\], such as 0.01, got 0.0"),
        ({"density": 1.5}, ValueError, "got 1.5"),
        ({"density": "1%"}, TypeError, "density must be a Python number, got '1%'"),
        ({"algorithm": "topk"}, ValueError, "choose one of oktopk, topk_allgather"),
        ({"error_feedback": "first_hop"}, ValueError, "True or False"),
        ({"momentum_correction": 1.0}, ValueError, r"a number in \[0, 1\), got 1.0"),
        ({"dense_steps": -1}, ValueError, "at least 0, got -1"),
    ],
)
def test_bad_arguments_are_refused(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        jaxcomm.sparse_mean("data", **options)
