"""Corrected gradients: the same mean, and votes that find it where most devices are elsewhere."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from transforms.both_views import APART, VIEWS, Program, View, by_name, gradients, nan_everywhere

GLOBAL, WORLD, LARGE = VIEWS[0], 3, ("kernel", "head")


@functools.cache
def means(view: View) -> Program:
    """The mean of what is corrected every other step."""
    tx = jaxcomm.control_variates(jaxcomm.mean("data"), 2)
    return Program(view, optax.chain(tx, jaxcomm.mean("data")), gradients(WORLD))


def corrections(state: Any) -> list[np.ndarray]:
    """What each device adds to its gradients in the next step."""
    return [np.asarray(c) for c in state[0].correction.values]


def oracle(batches: list[Any], every: int) -> list[dict[str, np.ndarray]]:
    """SCAFFOLD's option II for steps that are taken together: c - c_i of the last round."""
    result = []
    for step, batch in enumerate(batches):
        round_ = [batches[i] for i in range(step // every * every - every, step // every * every)]
        result.append({})
        for name, g in batch.items():
            lack = np.zeros_like(g)
            if step >= every:
                average = np.mean([b[name] for b in round_], 0)
                lack = average.mean(0, keepdims=True) - average
            result[-1][name] = g + lack
    return result


@pytest.mark.parametrize(
    ("every", "view"),
    [(1, GLOBAL), *(pytest.param(3, v, marks=pytest.mark.newest) for v in APART), (3, VIEWS[4])],
    ids=by_name,
)
def test_votes_are_those_of_the_oracle(every: int, view: View) -> None:
    batches = [gradients(WORLD, seed) for seed in range(7)]
    tx = jaxcomm.control_variates(jaxcomm.mean("data"), every)
    tx = optax.chain(tx, jaxcomm.majority_vote("data", "direct"))
    steps = Program(view, tx, batches[0]).run(*batches)
    assert steps[-1][1][0].step == 7 % every
    for (votes, _), wanted in zip(steps, oracle(batches, every), strict=True):
        for name in LARGE:
            majority = np.sign(np.sign(wanted[name]).sum(0))
            sure = (np.abs(wanted[name]) > 1e-4).all(0)
            assert sure.sum() > 0.9 * sure.size
            np.testing.assert_array_equal(np.asarray(votes[name])[sure], majority[sure], name)


@pytest.mark.parametrize("view", APART, ids=by_name)
def test_the_mean_stays_what_it_is(view: View) -> None:
    batches = [gradients(WORLD, seed) for seed in range(5)]
    steps = means(view).run(*batches)
    assert max(np.abs(c).max() for c in corrections(steps[3][1])) > 0.1
    for batch, (updates, _) in zip(batches, steps, strict=True):
        for name, value in updates.items():
            np.testing.assert_allclose(value, batch[name].mean(0), atol=1e-5)


@pytest.mark.parametrize("view", APART, ids=by_name)
def test_what_is_not_finite_is_passed_on_once(view: View) -> None:
    """An average that lacks a step would correct devices that hold equal data."""
    batches = [gradients(WORLD, seed) for seed in range(6)]
    batches[3]["head"][2, 0] = np.nan
    steps = means(view).run(*batches)
    assert nan_everywhere(steps[3][0])
    for updates, _ in [*steps[:3], *steps[4:]]:
        assert all(np.isfinite(u).all() for u in updates.values())
    before, after, later = (corrections(steps[i][1]) for i in (1, 3, 5))
    for old, same, new in zip(before, after, later, strict=True):
        np.testing.assert_array_equal(old, same)
        assert np.abs(new - old).max() > 0.1


def descended(before: list[optax.GradientTransformation]) -> float:
    """Where votes lead three devices whose losses (x - a)^2 / 2 have their minima at 0, 0 and 3."""
    minima = jnp.array([0.0, 0.0, 3.0])[:, None, None]
    rate = optax.linear_schedule(0.1, 0.0, 200)
    tx = optax.chain(*before, jaxcomm.majority_vote("data"), optax.sgd(rate))
    with jax.set_mesh(GLOBAL.mesh(3)):
        params = jaxcomm.replicate(jnp.full((1, 1), 2.0))

        @jax.jit
        def step(params: Any, state: Any) -> Any:
            updates, state = tx.update(params[None] - minima, state, params)
            return optax.apply_updates(params, updates), state

        state = tx.init(params)
        for _ in range(200):
            params, state = step(params, state)
    return float(params[0, 0])


def test_votes_find_the_mean_where_most_are_elsewhere() -> None:
    assert abs(descended([])) < 0.05  # The control: the median.
    mean = jaxcomm.mean("data", "bfloat16")
    assert abs(descended([jaxcomm.control_variates(mean, 4)]) - 1) < 0.05


def test_bytes_are_those_of_the_mean_once_in_a_while() -> None:
    mean = jaxcomm.mean("data", "bfloat16")
    always, seldom = (
        Program(GLOBAL, tx, gradients(4)).report()
        for tx in (mean, jaxcomm.control_variates(mean, 5))
    )
    assert seldom.bytes_max == always.bytes_max > 0
    assert {c.branch[-1][1] for c in seldom.collectives} == {1}


@pytest.mark.parametrize("every", [0, 1.5, True])
def test_bad_numbers_of_steps(every: Any) -> None:
    with pytest.raises(ValueError, match="needs a positive number of steps"):
        jaxcomm.control_variates(jaxcomm.mean("data"), every)


def test_an_inner_transformation_that_exchanges_nothing() -> None:
    with (
        jax.set_mesh(GLOBAL.mesh(2)),
        pytest.raises(ValueError, match="control_variates needs inner"),
    ):
        jaxcomm.control_variates(optax.identity()).init(jnp.zeros((2, 2)))


def test_an_inner_transformation_that_takes_no_mean() -> None:
    adam = jaxcomm.factored_adam(jaxcomm.mean("data"), 0.1)
    with jax.set_mesh(GLOBAL.mesh(2)), pytest.raises(ValueError, match=", got an optimizer"):
        jaxcomm.control_variates(adam).init(jnp.zeros((2, 2)))


def test_averages_whose_sum_overflows_correct_nothing() -> None:
    batches = [gradients(WORLD, seed) for seed in range(4)]
    batches[1]["head"][:, 2, 0] = 3e38  # of which each device has half
    steps = means(GLOBAL).run(*batches)
    assert nan_everywhere(steps[1][0])
    for updates, _ in steps[2:]:
        assert all(np.isfinite(u).all() for u in updates.values())


def test_corrections_stay_within_float16() -> None:
    tx = optax.chain(
        jaxcomm.control_variates(jaxcomm.mean("data"), 2),
        jaxcomm.majority_vote("data", ties="zero"),
    )
    half = jnp.full((8, 8), 40000, jnp.float16)
    grads = jnp.stack([half, -half])
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        state, update = tx.init({"w": jnp.zeros((8, 8), jnp.float16)}), jax.jit(tx.update)
        for sign in (1, 1, -1, -1):
            updates, state = update({"w": sign * grads}, state)
            assert np.isfinite(updates["w"]).all()
