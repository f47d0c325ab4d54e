"""`jaxcomm.sparse_mean`: its laws, in both views, for every algorithm."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
import sparse_oracles
from jaxcomm import sparse
from sparse_table import BY_THRESHOLD
from transforms.both_views import (
    SHAPES,
    VIEWS,
    Program,
    View,
    by_name,
    gradients,
    in_views,
    nan_everywhere,
    run,
    same_on_all_devices,
)

WORLD, GLOBAL = 4, VIEWS[0]
LARGE = ("head", "kernel")
FULL = tuple(name for name, shape in SHAPES.items() if 0 not in shape)
BAD = 2  # the step with a NaN


@functools.cache
def steps_of(algorithm: str, view: View) -> tuple[list[Any], list[Any]]:
    """The gradients of five steps, and what comes of them."""
    batches = [gradients(WORLD, seed) for seed in range(5)]
    batches[BAD]["head"][2, 0, 0] = np.nan
    return batches, run(view, jaxcomm.sparse_mean("data", 0.1, algorithm), batches)


def kept(part: Any, names: Sequence[str] = LARGE) -> dict[str, np.ndarray]:
    """A device's own, by leaf."""
    return dict(zip(names, map(np.asarray, part.values), strict=True))


@pytest.mark.parametrize(
    ("algorithm", "view"), in_views(sparse.BY_NAME, ["topk_allgather"]), ids=by_name
)
def test_updates_and_residuals_add_up_to_the_gradients(algorithm: str, view: View) -> None:
    batches, steps = steps_of(algorithm, view)
    applied: Any = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    wanted: Any = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for i, (grads, (updates, state)) in enumerate(zip(batches, steps, strict=True)):
        assert all(same_on_all_devices(u) for u in updates.values())
        if i == BAD:
            assert nan_everywhere(updates)
            for part in ("residual", "thresholds"):
                old = getattr(steps[BAD - 1][1], part).values
                jax.tree.map(np.testing.assert_array_equal, getattr(state, part).values, old)
            continue
        residual = kept(state.residual)
        for name in SHAPES:
            applied[name] += np.asarray(updates[name], np.float64)
            wanted[name] += grads[name].astype(np.float64).mean(0)
            owed = residual[name].astype(np.float64).mean(0) if name in LARGE else 0
            np.testing.assert_allclose(applied[name] + owed, wanted[name], atol=1e-5)
        assert 0 < (np.asarray(updates["head"]) != 0).mean() < 0.9


@pytest.mark.parametrize(
    ("name", "values"),
    [(name, "float32") for name in sparse.BY_NAME]
    + [(name, "bfloat16") for name in BY_THRESHOLD if name != "gtopk"],  # which refuses it
)
def test_what_overflows_does_not_stay(name: str, values: str) -> None:
    """Sums over devices, rounding to 16 bits, and residuals: the step is skipped, or all is finite.

    The largest float32 rounds to infinity in bfloat16, and two devices may send opposite ones.
    """
    rng = np.random.default_rng(0)
    most = np.finfo(np.float32).max
    batches = [gradients(WORLD, seed) for seed in range(8)]
    for batch, share in zip(batches, (1, 0.999, 0.6, 0.3, 1, 1, 1e-3, 0), strict=True):
        huge = rng.random(batch["head"].shape) < 0.05
        sign = np.sign(batch["head"])
        batch["head"] = np.where(huge, share * most * sign, batch["head"]).astype(np.float32)
    algorithm = sparse.BY_NAME[name]()
    if name in BY_THRESHOLD:
        algorithm = dataclasses.replace(algorithm, values=values)
    tx = jaxcomm.sparse_mean("data", 0.1, algorithm)
    before: Any = {leaf: np.zeros((WORLD, *SHAPES[leaf]), np.float32) for leaf in LARGE}
    skipped = 0
    for updates, state in run(GLOBAL, tx, batches):
        residual = kept(state.residual)
        if nan_everywhere(updates):
            skipped += 1
            jax.tree.map(np.testing.assert_array_equal, residual, before)
        else:
            assert all(np.isfinite(u).all() for u in updates.values())
            assert all(np.isfinite(r).all() for r in residual.values())
        before = residual
    assert 0 < skipped < len(batches)


def test_momentum_correction() -> None:
    """u = m u + g is added up, and both are cleared where they were sent (Lin et al., 3.1, 3.2)."""
    tx = jaxcomm.sparse_mean("data", 0.1, "topk_allgather", momentum_correction=0.5)
    steps = [gradients(WORLD, seed) for seed in range(4)]
    bad = {name: np.full_like(g, np.inf) for name, g in steps[0].items()}
    *good, (spoiled, last) = run(VIEWS[4], tx, [*steps, bad])
    u: Any = {name: np.zeros((WORLD, *SHAPES[name]), np.float32) for name in LARGE}
    v: Any = {name: np.zeros((WORLD, *SHAPES[name]), np.float32) for name in LARGE}
    for grads, (updates, state) in zip(steps, good, strict=True):
        left, moving = kept(state.residual), kept(state.velocity, FULL)
        for name in LARGE:
            u[name] = np.float32(0.5) * u[name] + grads[name]
            v[name] = v[name] + u[name]
            waits = left[name] != 0
            np.testing.assert_allclose(left[name], np.where(waits, v[name], 0), atol=1e-5)
            np.testing.assert_allclose(moving[name], np.where(waits, u[name], 0), atol=1e-5)
            np.testing.assert_allclose(updates[name], (v[name] - left[name]).mean(0), atol=1e-5)
            assert 0.5 < waits.mean() < 1
            u[name], v[name] = moving[name], left[name]
    assert nan_everywhere(spoiled)
    for part in ("residual", "velocity", "thresholds"):
        old, new = getattr(state, part).values, getattr(last, part).values
        jax.tree.map(np.testing.assert_array_equal, old, new)


@pytest.mark.parametrize(
    ("algorithm", "view"), in_views(sparse.BY_NAME, ["topk_allgather"]), ids=by_name
)
def test_a_residual_that_decays_is_a_momentum(algorithm: str, view: View) -> None:
    """m = decay * m + g, from which what is sent is taken; a skipped step leaves it as it was."""
    decay = 0.5
    batches, _ = steps_of(algorithm, view)
    tx = jaxcomm.sparse_mean("data", 0.1, algorithm, residual_decay=decay)
    m: Any = {name: np.zeros((WORLD, *SHAPES[name]), np.float32) for name in LARGE}
    for i, (grads, (updates, state)) in enumerate(
        zip(batches, run(view, tx, batches), strict=True)
    ):
        left = kept(state.residual)
        if i == BAD:
            assert nan_everywhere(updates)
            jax.tree.map(np.testing.assert_array_equal, left, m)
            continue
        for name in LARGE:
            moved = np.float32(decay) * m[name] + grads[name]
            np.testing.assert_allclose(updates[name] + left[name].mean(0), moved.mean(0), atol=1e-5)
            if algorithm == "topk_allgather":  # each device's is what it did not send
                waits = left[name] != 0
                np.testing.assert_allclose(left[name], np.where(waits, moved, 0), atol=1e-6)
                assert 0.5 < waits.mean() < 1
        m = left


@pytest.mark.parametrize("view", [GLOBAL, VIEWS[4]], ids=by_name)
def test_momentum_is_that_of_the_optimizer_in_exempt_leaves_and_dense_steps(view: View) -> None:
    """Nothing of these waits, so momentum before the mean is momentum behind it."""
    decay, dense = 0.5, 3
    tx = jaxcomm.sparse_mean("data", 0.1, momentum_correction=decay, dense_steps=dense)
    steps = [gradients(WORLD, seed) for seed in range(5)]
    spoiled = {name: np.full_like(g, np.inf) for name, g in steps[0].items()}
    steps.insert(1, spoiled)
    moving = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    for i, (grads, (updates, _)) in enumerate(zip(steps, run(view, tx, steps), strict=True)):
        if i == 1:
            assert nan_everywhere(updates)
            continue
        for name in SHAPES:
            moving[name] = decay * moving[name] + grads[name].mean(0, dtype=np.float32)
            if name not in LARGE or i < dense:
                np.testing.assert_allclose(updates[name], moving[name], atol=1e-5)
            else:
                assert (np.asarray(updates[name]) == 0).mean() > 0.5


def test_a_mean_without_momentum_does_not_stand_in_for_one_with(make_mesh: Any) -> None:
    tx = jaxcomm.dense_first(jaxcomm.sparse_mean("data", 0.1, momentum_correction=0.9), steps=3)
    with jax.set_mesh(make_mesh(WORLD)), pytest.raises(ValueError, match="dense_steps=[.]{3}[)]"):
        tx.init({"w": np.zeros((8, 8), np.float32)})


def test_without_error_feedback_nothing_is_kept() -> None:
    tx = jaxcomm.sparse_mean("data", 0.1, "topk_allgather", error_feedback=False)
    (first, _), (second, state) = run(GLOBAL, tx, [gradients(WORLD)] * 2)
    assert state.residual.values == []
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_the_report_and_the_distance_to_the_true_top_k() -> None:
    grads = [gradients(WORLD)]
    n = sum(int(np.prod(SHAPES[name])) for name in LARGE)
    everything = jaxcomm.sparse.topk_allgather(slack=2.0)
    ((_, state),) = run(
        GLOBAL, jaxcomm.sparse_mean("data", 1.0, everything, measure_xi=True), grads
    )
    assert state.report == (n, n, n, n, pytest.approx(0, abs=1e-6))
    exact = jaxcomm.sparse.oktopk(slack=9.0, recompute_every=1)
    ((_, state),) = run(GLOBAL, jaxcomm.sparse_mean("data", 0.1, exact, measure_xi=True), grads)
    report = state.report
    k = round(0.1 * n)
    flat = np.concatenate([grads[0][name].reshape(WORLD, -1) for name in LARGE[::-1]], 1)
    best = sparse_oracles.largest(flat.mean(0), k)
    chosen, _ = sparse_oracles.oktopk(flat, np.full(WORLD, k))
    assert report[:4] == (k, k, k, int(np.count_nonzero(chosen)))
    xi = np.linalg.norm(best - chosen / np.float32(WORLD)) / np.linalg.norm(flat.mean(0))
    assert report.xi == pytest.approx(xi, rel=1e-4) and xi > 0.1


def test_zeros_behind_a_bucket_are_not_counted() -> None:
    """The last chunk of a bucket has ten values, and as many are selected."""
    w = np.random.default_rng(0).standard_normal((WORLD, 2, 2053), np.float32)
    tx = jaxcomm.sparse_mean("data", 0.1, "topk_chunks", momentum_correction=0.9, measure_xi=True)
    for updates, state in run(GLOBAL, tx, [{"w": w}] * 2):
        assert state.report[:3] == (420, 420, 420)
        assert 0.1 < state.report.xi < 1
        assert np.count_nonzero(np.asarray(updates["w"]).reshape(-1)[-10:]) == 10


def test_a_dense_warmup_first() -> None:
    tx = jaxcomm.sparse_mean("data", 0.1, "topk_allgather", dense_steps=1)
    (first, _), (second, _) = run(GLOBAL, tx, [gradients(WORLD)] * 2)
    np.testing.assert_allclose(first["head"], gradients(WORLD)["head"].mean(0), atol=1e-6)
    assert (np.asarray(second["head"]) == 0).mean() > 0.5


def test_what_is_exact_the_flag_and_the_report_travel_together() -> None:
    """Each all-reduce of a few bytes takes as many trips as one of many."""
    grads = gradients(WORLD)
    report = Program(GLOBAL, jaxcomm.sparse_mean("data", 0.1), grads).report()
    exempt = sum(g[0].size for name, g in grads.items() if name not in LARGE)
    reduced = report.only("all-reduce").collectives
    assert [(c.shapes, c.dtypes) for c in reduced] == [(((exempt + 4,),), ("f32",))]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"density": 0.0}, ValueError, r"density must be in \(0, 1\], where 0.01 is 1 %, got 0.0"),
        ({"density": 1}, ValueError, "density=1 selects all values; write 0.01 for 1 %"),
        ({"density": 1.5}, ValueError, "got 1.5"),
        ({"density": "1%"}, TypeError, "density must be a Python number, got '1%'"),
        ({"algorithm": "topk"}, ValueError, "choose one of oktopk, topk_allgather"),
        ({"error_feedback": "first_hop"}, ValueError, "True or False"),
        ({"measure_xi": "no"}, ValueError, "measure_xi must be True or False, got 'no'"),
        ({"momentum_correction": 1.0}, ValueError, r"a number in \[0, 1\), got 1.0"),
        ({"dense_steps": -1}, ValueError, "at least 0, got -1"),
        ({"residual_decay": 0}, ValueError, r"residual_decay must be a number in \(0, 1\], got 0"),
        ({"residual_decay": 1.1}, ValueError, r"in \(0, 1\], got 1.1"),
        (
            {"residual_decay": 0.9, "momentum_correction": 0.9},
            ValueError,
            "a momentum of the residual: leave out momentum_correction",
        ),
        (
            {"residual_decay": 0.9, "error_feedback": False},
            ValueError,
            "leave out error_feedback=False",
        ),
    ],
)
def test_bad_arguments_are_refused(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        jaxcomm.sparse_mean("data", **options)


def test_more_values_than_can_be_counted_are_refused_by_init() -> None:
    params = {"embed": jax.ShapeDtypeStruct((2**18, 2**13), "float32")}
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:WORLD])):
        with pytest.raises(ValueError, match=r"embed has 2147483648 on a device; shard it"):
            jax.eval_shape(jaxcomm.sparse_mean("data", 0.01).init, params)


def test_a_momentum_that_outgrows_float16_is_cut() -> None:
    """Of an exempt leaf: its update stays finite in every step, and so do all others."""
    tx = jaxcomm.sparse_mean("data", 0.5, momentum_correction=0.9)
    params = {"w": jnp.zeros((8, 8), jnp.float16), "b": jnp.zeros(4, jnp.float16)}
    grads = {"w": jnp.ones((2, 8, 8), jnp.float16), "b": jnp.full((2, 4), 9000, jnp.float16)}
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        state, update = tx.init(params), jax.jit(tx.update)
        for _ in range(20):  # towards 90000
            updates, state = update(grads, state)
            assert all(np.isfinite(u).all() for u in updates.values())
    assert (updates["b"] == np.finfo(np.float16).max).all()


def test_a_bucket_that_is_too_long_when_filled_up_is_named(mesh8: Any) -> None:
    long = {"emb": jax.ShapeDtypeStruct((2**30 - 150, 2), jnp.float32)}
    with jax.set_mesh(mesh8):
        jax.eval_shape(jaxcomm.sparse_mean("data", 0.01).init, long)
        with pytest.raises(ValueError, match="at most 2.31 - 256 values, and emb has 2147483348"):
            jax.eval_shape(jaxcomm.sparse_mean("data", 0.01, "topk_chunks").init, long)
