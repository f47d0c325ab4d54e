"""Stages: which one runs, what it hands on, what it sends, and that there is one program."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from transforms.both_views import APART, SHAPES, VIEWS, Program, View, by_name, gradients

WORLD = 4


two_views = pytest.mark.parametrize("view", APART, ids=by_name)


def run(view: View, tx: Any, steps: int) -> tuple[list[Any], Any]:
    """The updates of some steps on the same gradients, and the last state."""
    done = Program(view, tx, gradients(WORLD)).run(*[gradients(WORLD)] * steps)
    return [{name: np.asarray(u) for name, u in updates.items()} for updates, _ in done], done[-1][
        1
    ]


@pytest.mark.newest
@two_views
def test_a_stage_begins_at_its_step(view: View) -> None:
    tx = jaxcomm.stages(
        (0, jaxcomm.mean("data")),
        (2, jaxcomm.mean("data", "bfloat16")),
        (3, jaxcomm.majority_vote("data", "direct", ties="positive", zeros="abstain")),
    )
    updates, state = run(view, tx, 5)
    mean = gradients(WORLD)["kernel"].mean(0)
    for exact in updates[:2]:
        np.testing.assert_allclose(exact["kernel"], mean, atol=1e-6)
    assert (updates[2]["kernel"].view(np.uint32) & 0xFFFF == 0).all()
    assert (np.abs(updates[3]["kernel"]) == 1).all()
    assert (np.abs(updates[4]["kernel"]) == 1).all()
    assert int(state.step) == 5


@two_views
def test_a_residual_is_handed_on(view: View) -> None:
    coarse, fine = jaxcomm.codecs.int4(), jaxcomm.codecs.int8()
    tx = jaxcomm.stages(
        (0, jaxcomm.mean("data", coarse, error_feedback=True)),
        (2, jaxcomm.mean("data", fine, error_feedback=True)),
        (3, jaxcomm.mean("data", error_feedback=True)),
    )
    updates, state = run(view, tx, 4)
    assert len(state.inner) == 1
    for name in ("kernel", "head"):
        total = sum(u[name].astype(np.float64) for u in updates)
        np.testing.assert_allclose(total, 4 * gradients(WORLD)[name].mean(0), atol=1e-5)


@two_views
def test_warmup_is_the_mean_at_first(view: View) -> None:
    vote = jaxcomm.majority_vote("data", "direct", ties="positive", error_feedback=True)
    tx = optax.chain(jaxcomm.dense_first(vote, 2), optax.scale(-1.0))
    updates, (state, _) = run(view, tx, 4)
    mean = gradients(WORLD)["kernel"].mean(0)
    for exact in updates[:2]:
        np.testing.assert_allclose(exact["kernel"], -mean, atol=1e-6)
    assert len(np.unique(np.abs(updates[2]["kernel"]))) == 1
    assert int(state.inner[1].step) == 2


def test_a_warmup_of_no_steps_is_none() -> None:
    inner = jaxcomm.mean("data", "int8")
    assert jaxcomm.dense_first(inner, 0) is inner


def test_each_stage_sends_its_own_bytes() -> None:
    tx, n = jaxcomm.dense_first(jaxcomm.mean("data", "bfloat16"), 10), 4096
    stages = Program(VIEWS[0], tx, {"w": np.zeros((WORLD, 64, 64), np.float32)})
    branches = stages.report().by_branch()
    assert sorted(r.bytes_max for r in branches.values()) == [4 * n * 3 / 4, 8 * n * 3 / 4]


@pytest.mark.parametrize(
    "tx",
    [
        lambda: jaxcomm.stages(
            (0, jaxcomm.mean("data", "int4", error_feedback=True)), (2, jaxcomm.mean("data"))
        ),
        lambda: jaxcomm.stages(
            (0, jaxcomm.mean("data", "int4", error_feedback=True)),
            (2, jaxcomm.mean("data", "int4", error_feedback=True, exempt=["head"])),
        ),
        lambda: jaxcomm.dense_first(
            jaxcomm.majority_vote("data"),
            3,
            dense=optax.chain(jaxcomm.local("data", optax.trace(0.9)), jaxcomm.mean("data")),
        ),
    ],
)
def test_a_residual_without_a_place_is_refused(tx: Any) -> None:
    with jax.set_mesh(VIEWS[0].mesh(WORLD)), pytest.raises(ValueError, match="error_feedback=True"):
        tx().init({name: jnp.zeros(shape) for name, shape in SHAPES.items()})


INT8, SGD = jaxcomm.mean("data", "int8"), optax.sgd(0.1)


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        # Its first steps would climb the gradient.
        (
            lambda: jaxcomm.dense_first(optax.chain(INT8, optax.sgd(0.1)), 3),
            "more than an exchange",
        ),
        (lambda: jaxcomm.dense_first(jaxcomm.factored_adam(INT8, 0.1), 3), "more than an exchange"),
        # The first steps would lack the momentum.
        (
            lambda: jaxcomm.dense_first(
                optax.chain(jaxcomm.local("data", optax.trace(0.9)), INT8), 3
            ),
            r"optax.chain\(jaxcomm.local\(\.\.\.\), jaxcomm.dense_first\(exchange, steps\)\)",
        ),
        (
            lambda: jaxcomm.dense_first(jaxcomm.multi_steps(INT8, 2), 3),
            r"optax.chain\(jaxcomm.dense_first\(exchange, steps\), optimizer\)",
        ),
        (
            lambda: jaxcomm.stages((0, INT8), (3, jaxcomm.in_backward(INT8, ("kernel",)))),
            r"jaxcomm.in_backward\(jaxcomm.stages\(\.\.\.\), layers\)",
        ),
        (
            lambda: jaxcomm.dense_first(jaxcomm.in_backward(INT8, ("kernel",)), 3),
            r"jaxcomm.in_backward\(jaxcomm.dense_first\(\.\.\.\), layers\)",
        ),
        # Its moments would begin anew.
        (
            lambda: jaxcomm.stages(
                (0, optax.chain(jaxcomm.mean("data"), optax.trace(0.9))),
                (2, optax.chain(jaxcomm.low_rank_mean("data", 1), optax.trace(0.9))),
            ),
            "Put the optimizer after the stages",
        ),
        (
            lambda: jaxcomm.stages(
                (0, jaxcomm.low_rank_mean("data", 2)), (2, jaxcomm.low_rank_mean("data", 1))
            ),
            "or the same rank",
        ),
    ],
)
def test_what_would_be_lost_or_climb_is_refused(tx: Any, message: str) -> None:
    with jax.set_mesh(VIEWS[0].mesh(WORLD)), pytest.raises(ValueError, match=message):
        tx().init({name: jnp.zeros(shape) for name, shape in SHAPES.items()})


@pytest.mark.parametrize(
    "stage", [(0.5, INT8), (0, "int8"), [(0, INT8), (1, INT8)], jaxcomm.mean("data")]
)
def test_what_is_no_stage_is_refused(stage: Any) -> None:
    with pytest.raises(TypeError, match="a pair of its first step and what it does"):
        jaxcomm.stages(stage)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jaxcomm.stages(), r"ascend from 0, got \[\]"),
        (lambda: jaxcomm.stages((1, jaxcomm.mean("data"))), r"ascend from 0, got \[1\]"),
        (
            lambda: jaxcomm.stages((0, jaxcomm.mean("data")), (0, jaxcomm.mean("data"))),
            r"ascend from 0, got \[0, 0\]",
        ),
        (lambda: jaxcomm.dense_first(jaxcomm.mean("data"), -1), "at least 0, got -1"),
        (lambda: jaxcomm.dense_first(jaxcomm.mean("data"), 1.5), "at least 0, got 1.5"),
        (
            lambda: jaxcomm.dense_first(optax.identity(), 1).init(jnp.zeros((2, 2))),
            "dense_first needs inner transformations that exchange, found none; put jaxcomm.mean",
        ),
    ],
)
def test_bad_plans_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_every_state_says_what_its_updates_are() -> None:
    """Else a refusal takes a method of jaxcomm for an optimizer."""
    states = [name for name in jaxcomm.__all__ if name.endswith("State")]
    assert len(states) > 10 and all(hasattr(getattr(jaxcomm, name), "roles") for name in states)


def test_a_wrapped_optimizer_would_be_lost_with_its_stage(mesh8: Any) -> None:
    int8, parts = jaxcomm.mean("data", "int8"), {"w": "x", "b": "y"}
    adam = optax.chain(jaxcomm.mean("data"), optax.adam(1e-3))
    first = optax.named_chain(("m", jaxcomm.mean("data")), ("o", optax.adam(1e-3)))
    split = optax.partition({"x": adam, "y": jaxcomm.mean("data")}, parts)
    params = {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}
    with jax.set_mesh(mesh8):
        for tx in (
            jaxcomm.stages((0, first), (2, int8)),
            jaxcomm.stages((0, split), (2, int8)),
            jaxcomm.dense_first(int8, 2, dense=first),
        ):
            with pytest.raises(ValueError, match="a stage would end with the state of an optimize"):
                tx.init(params)
