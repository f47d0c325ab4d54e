"""A gradient that is not finite on one device costs one step, whatever stands before the exchange.

After good, bad and good gradients, updates and state are those of the good gradients alone.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import sparse
from transforms.both_views import (
    SHAPES,
    VIEWS,
    Program,
    View,
    gradients,
    jit_update,
    nan_everywhere,
    place,
)

METHODS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "mean": lambda: jaxcomm.mean("data"),
    "bfloat16, errors fed back": lambda: jaxcomm.mean("data", "bfloat16", error_feedback=True),
    "vote": lambda: jaxcomm.majority_vote("data", "direct", ties="zero", zeros="abstain"),
    "TopkA": lambda: jaxcomm.sparse_mean("data", 0.2, "topk_allgather"),
    "PowerSGD": lambda: jaxcomm.low_rank_mean("data", 2),
}
LOCAL: dict[str, Callable[[], optax.GradientTransformation]] = {
    "momentum": lambda: optax.trace(0.9),
    "adam": lambda: optax.scale_by_adam(),
    "clipping, then momentum": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.trace(0.9)
    ),
    # Their updates are finite: a sign, and zero.
    "lion": lambda: optax.scale_by_lion(),
}
WORLD = 4
GLOBAL, _, CHECKED, _, MODEL, _ = VIEWS


def run(
    view: View, tx: optax.GradientTransformation, steps: list[Any]
) -> tuple[list[Any], list[Any]]:
    """The updates and the state of each step."""
    with jax.set_mesh(view.mesh(WORLD)):
        params = place(view, {name: jnp.zeros(shape) for name, shape in SHAPES.items()})
        state, update, found, states = tx.init(params), jit_update(view, tx, params), [], []
        for grads in steps:
            updates, state = update(place(view, grads, "data"), state)
            found.append(jax.tree.map(np.asarray, updates))
            states.append(jax.tree.map(np.asarray, state))
    return found, states


def bad(value: float) -> dict[str, np.ndarray]:
    """Gradients of which one value on one device is not finite."""
    grads = gradients(WORLD, seed=1)
    grads["kernel"][2, 1, 3] = value
    return grads


@pytest.mark.standard_promotion  # of optax, in adam
@pytest.mark.parametrize(
    ("view", "method", "inner", "value"),
    [
        (GLOBAL, "mean", "momentum", np.nan),
        (CHECKED, "mean", "adam", np.inf),
        (MODEL, "mean", "momentum", np.nan),
        (GLOBAL, "bfloat16, errors fed back", "clipping, then momentum", -np.inf),
        (CHECKED, "vote", "momentum", np.nan),
        (GLOBAL, "TopkA", "adam", np.nan),
        (MODEL, "PowerSGD", "momentum", np.inf),
        (GLOBAL, "vote", "lion", np.inf),
        (MODEL, "mean", "lion", -np.inf),
        (CHECKED, "mean", "adam", 1e30),
    ],
    ids=lambda value: value.name if isinstance(value, View) else str(value),
)
def test_a_bad_step_changes_nothing(view: View, method: str, inner: str, value: float) -> None:
    tx = optax.chain(jaxcomm.local("data", LOCAL[inner]()), METHODS[method]())
    good = [gradients(WORLD, seed) for seed in (0, 2)]
    (first, nothing, second), (*_, state) = run(view, tx, [good[0], bad(value), good[1]])
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(nothing) if leaf.size)
    (alone, then), (*_, expected) = run(view, tx, good)
    jax.tree.map(np.testing.assert_array_equal, first, alone)
    jax.tree.map(np.testing.assert_array_equal, second, then)
    (own, exchange), (own_expected, exchange_expected) = state, expected
    jax.tree.map(np.testing.assert_array_equal, own, own_expected)
    # A step is counted also if it is not taken, as keys and intervals follow from its number.
    assert exchange.step == exchange_expected.step + 1
    kept, wanted = exchange.residual, exchange_expected.residual
    jax.tree.map(np.testing.assert_array_equal, kept, wanted)


SPARSE = {name: sparse.BY_NAME[name]() for name in sparse.BY_NAME} | {
    f"{name} in 16 bits": dataclasses.replace(sparse.BY_NAME[name](), values="bfloat16")
    for name in ("oktopk", "topk_dsa")
}


BAD = (np.nan, np.inf, -np.inf)


def require_nothing_changes(tx: optax.GradientTransformation) -> None:
    """After each kind of a bad step the state is that before it, and the update is NaN."""
    updates, (before, *after) = run(GLOBAL, tx, [gradients(WORLD), *map(bad, BAD)])
    for nothing, then in zip(updates[1:], after, strict=True):
        assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(nothing) if leaf.size)
        jax.tree.map(np.testing.assert_array_equal, state_of(then), state_of(before))


@pytest.mark.parametrize("name", SPARSE)
def test_a_sparse_mean_sees_it_in_the_residual(name: str) -> None:
    """It is selected, or not; it is in the mean, or waits: the residual is not finite."""
    for options in ({}, {"momentum_correction": 0.9}, {"error_feedback": False}):
        require_nothing_changes(jaxcomm.sparse_mean("data", 0.1, SPARSE[name], **options))


def test_votes_with_scales_see_it_in_a_scale() -> None:
    require_nothing_changes(jaxcomm.majority_vote("data", error_feedback=True))


def test_a_transformation_that_mends_its_gradients_goes_on() -> None:
    tx = optax.chain(
        jaxcomm.local("data", optax.chain(optax.zero_nans(), optax.trace(0.9))),
        jaxcomm.mean("data"),
    )
    (first, second), _ = run(GLOBAL, tx, [gradients(WORLD), bad(np.nan)])
    mended = bad(np.nan)
    mended["kernel"][2, 1, 3] = 0
    expected = (gradients(WORLD)["kernel"] * 0.9 + mended["kernel"]).mean(0)
    np.testing.assert_allclose(second["kernel"], expected, rtol=1e-5, atol=1e-6)


OVERFLOW: dict[str, Callable[[], optax.GradientTransformation]] = {
    "float32": lambda: jaxcomm.mean("data"),
    "cnat": lambda: jaxcomm.mean("data", "cnat"),
    **{
        f"{codec}, errors fed back": lambda codec=codec: jaxcomm.mean(
            "data", codec, error_feedback=True
        )
        for codec in ("bfloat16", "int8", "int4", "cnat", "fp8_e4m3", "int2", "scaled_sign")
    },
    "bfloat16 on a ring": lambda: jaxcomm.mean("data", "bfloat16", "ring", error_feedback=True),
    "votes with scales": lambda: jaxcomm.majority_vote("data", error_feedback=True),
    "TopkA": lambda: jaxcomm.sparse_mean("data", 0.2, "topk_allgather"),
    "PowerSGD": lambda: jaxcomm.low_rank_mean("data", 1),
    "1-bit Adam": lambda: jaxcomm.one_bit_adam("data", 0.1, dense_steps=9),
    "factored Adam": lambda: jaxcomm.factored_adam(jaxcomm.mean("data"), 0.1),
}


def huge(value: float) -> dict[str, np.ndarray]:
    """Finite gradients whose sum over devices is not; in one weight and in one exempt value."""
    grads = gradients(WORLD, seed=1)
    grads["kernel"][:, 1, 3] = grads["bias"][:, 2] = value
    return grads


def state_of(state: Any) -> list[np.ndarray]:
    """The numbers that a method keeps, without counters and reports."""
    if hasattr(state, "report"):
        state = state._replace(report=())
    return [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]


@pytest.mark.parametrize(
    ("name", "value"), [*((name, 3e38) for name in OVERFLOW), ("1-bit Adam", 1e20)]
)
def test_finite_gradients_whose_sum_overflows_cost_one_step(name: str, value: float) -> None:
    """In 1-bit Adam the square too: a variance would be infinite for ever."""
    steps = [gradients(WORLD), huge(value), gradients(WORLD, seed=2)]
    (_, nothing, last), (before, after, state) = run(GLOBAL, OVERFLOW[name](), steps)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(nothing) if leaf.size)
    jax.tree.map(np.testing.assert_array_equal, state_of(after), state_of(before))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves([last, state_of(state)]))


CNAT = jaxcomm.codecs.cnat(rounding="nearest")  # 60000 becomes 65536
FLOAT16: dict[str, Callable[[], optax.GradientTransformation]] = {
    "cnat": lambda: jaxcomm.mean("data", CNAT, error_feedback=True),
    "random_k": lambda: jaxcomm.mean(
        "data", jaxcomm.codecs.random_k(0.1), error_feedback=True, exempt=()
    ),
    "Ok-Topk": lambda: jaxcomm.sparse_mean("data", 0.05),
    "PowerSGD": lambda: jaxcomm.low_rank_mean("data", 1),
    "votes": lambda: jaxcomm.majority_vote("data", error_feedback=True),
}


def float16_steps(
    tx: optax.GradientTransformation, values: list[np.ndarray]
) -> tuple[list[np.ndarray], Any]:
    """The updates of gradients that are equal on all devices, and the last residual."""
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:WORLD])):
        state = tx.init(jaxcomm.replicate(jnp.zeros((8, 8), jnp.float16)))
        update, found = jax.jit(tx.update), []
        for value in values:
            grads = np.broadcast_to(value.astype(np.float16), (WORLD, 8, 8))
            updates, state = update(jaxcomm.mark_local(jnp.array(grads)), state)
            found.append(np.asarray(updates, np.float64))
    return found, state


@pytest.mark.parametrize("name", FLOAT16)
def test_what_float16_cannot_hold_waits(name: str) -> None:
    """A value that waits in float32 outgrows float16, and would overflow in every later step."""
    tilted = 6000 * (1 + np.arange(64.0).reshape(8, 8) / 64)  # no rank 1
    found, state = float16_steps(FLOAT16[name](), [10000 + tilted] * 30)
    assert np.isfinite(found).all()
    assert np.max(np.abs(found)) == 65504.0 or name in ("cnat", "PowerSGD", "votes")
    left = np.asarray(state.residual.values[0], np.float64).mean(0)
    wanted = 30 * (10000 + tilted).astype(np.float16).astype(np.float64)
    # Updates are rounded to float16, and that is not fed back.
    np.testing.assert_allclose(sum(found) + left, wanted, rtol=1e-3)


def test_what_float16_cannot_hold_waits_with_its_owner() -> None:
    """Where parameters are split, the residual of what a shard lacks is its owner's."""
    value, steps = 65504.0, 6
    tx = jaxcomm.sharded(jaxcomm.mean("data", CNAT, error_feedback=True))
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:WORLD])):
        params = jaxcomm.shard({"w": jnp.zeros((8, 8), jnp.float16)}, "data")
        state, batch = tx.init(params), jnp.full((WORLD, 1), value)
        loss = lambda p, x: jnp.sum(jaxcomm.gather(p)["w"] * x[0, 0].astype(jnp.float16))  # noqa: E731
        gradient, found = jaxcomm.value_and_grad(loss, "data"), []
        update = jax.jit(
            lambda s: tx.update(gradient(jaxcomm.sharded_params(params, s), batch)[1], s)
        )
        for _ in range(steps):
            updates, state = update(state)
            found.append(np.asarray(updates["w"], np.float64))
    assert np.max(found) == 65504.0
    left = np.asarray(state.residual.values[0], np.float64).mean(0)
    np.testing.assert_allclose(sum(found) + left, steps * value, rtol=1e-3)


def test_without_feedback_an_update_that_float16_cannot_hold_costs_one_step() -> None:
    tx = jaxcomm.mean("data", CNAT)
    found, _ = float16_steps(tx, [np.full((8, 8), value) for value in (3.0, 6e4, 3.0)])
    assert [np.isfinite(u).all() for u in found] == [True, False, True]
    assert np.isnan(found[1]).all()


def test_an_update_that_float16_cannot_hold_in_one_shard_costs_the_step_of_all() -> None:
    grads = {name: g.astype(np.float16) for name, g in gradients(WORLD).items()}
    grads["head"][:, 1, 3] = 6e4
    ((updates, _),) = Program(MODEL, jaxcomm.mean("data", CNAT), grads).run(grads)
    assert nan_everywhere(updates)


def test_a_step_of_one_bit_adam_whose_update_is_not_finite_leaves_the_errors() -> None:
    """They say what was signed and is in no momentum: a rejected step has none of it."""
    warmup = 2

    def rate(count: jax.Array) -> jax.Array:
        return jnp.where(count == warmup + 1, jnp.inf, 0.1)

    tx = jaxcomm.one_bit_adam("data", rate, dense_steps=warmup)
    found, states = run(GLOBAL, tx, [gradients(WORLD, seed) for seed in range(warmup + 3)])
    before = states[warmup]
    assert any(np.any(x) for x in before.worker_error.values)
    for i in (-2, -1):  # the count stays, and so does the rate
        assert all(np.isnan(u).all() for u in jax.tree.leaves(found[i]) if u.size)
        jax.tree.map(np.testing.assert_array_equal, states[i], before)


@pytest.mark.parametrize(
    "tx",
    [
        jaxcomm.factored_adam(jaxcomm.mean("data"), 1e6),
        jaxcomm.one_bit_adam("data", 1e6, dense_steps=2),
    ],
    ids=["factored Adam", "1-bit Adam"],
)
def test_a_step_of_adam_that_16_bits_cannot_hold_costs_one_step(tx: Any) -> None:
    """Moments are float32, and finite: it is the update that overflows."""
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        params = {"b": jnp.zeros(3), "w": jnp.zeros((4, 3), jnp.float16)}
        state = tx.init(params)
        grads = jax.tree.map(lambda p: jnp.ones((2, *p.shape), p.dtype), params)
        updates, after = jax.jit(tx.update)(grads, state)
    assert nan_everywhere(updates) and after.count == 0
    jax.tree.map(np.testing.assert_array_equal, state_of(after), state_of(state))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", [*METHODS, "1-bit Adam"])
def test_one_flag_along_the_other_axis(method: str, dtype: str) -> None:
    make = METHODS.get(method, lambda: jaxcomm.one_bit_adam("data", 1e-3, dense_steps=2))
    grads = {name: g.astype(jnp.dtype(dtype)) for name, g in gradients(2).items()}
    report = Program(VIEWS[3], make(), grads).report().by_axes(VIEWS[3].mesh(2))["model",]
    flags = [c for c in report.collectives if c.dtypes == ("s32",)]
    assert [(c.op, c.shapes) for c in flags] == [("all-reduce", ((),))]
