"""Corrected gradients: the same mean, and votes that find it where most devices are elsewhere."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from transforms.both_views import VIEWS, gradients, jit_update, place

GLOBAL, WORLD, LARGE = VIEWS[0], 3, ("kernel", "head")
each_view = pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)


def trained(
    tx: optax.GradientTransformation, view: Any, batches: list[Any]
) -> tuple[list[dict[str, np.ndarray]], list[list[np.ndarray]], Any]:
    """The updates of each step, the corrections in each, and the last state."""
    updates, corrections = [], []
    with jax.set_mesh(view.mesh(WORLD)):
        params = place(view, {name: jnp.zeros(g.shape[1:]) for name, g in batches[0].items()})
        step, state = jit_update(view, tx, params), tx.init(params)
        for batch in batches:
            corrections.append([np.asarray(c) for c in state[0].correction.values])
            update, state = step(place(view, batch, "data"), state)
            updates.append({name: np.asarray(u) for name, u in update.items()})
        assert step._cache_size() == 1
    return updates, corrections, state[0]


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


@each_view
@pytest.mark.parametrize("every", [1, 3])
def test_votes_are_those_of_the_oracle(view: Any, every: int) -> None:
    batches = [gradients(WORLD, seed) for seed in range(7)]
    tx = jaxcomm.control_variates(jaxcomm.mean("data"), every)
    votes, _, state = trained(optax.chain(tx, jaxcomm.majority_vote("data")), view, batches)
    assert state.step == 7 % every
    for step, wanted in enumerate(oracle(batches, every)):
        for name in LARGE:
            majority = np.sign(np.sign(wanted[name]).sum(0))
            sure = (np.abs(wanted[name]) > 1e-4).all(0)
            assert sure.sum() > 0.9 * sure.size
            np.testing.assert_array_equal(votes[step][name][sure], majority[sure], name)


@each_view
def test_the_mean_stays_what_it_is(view: Any) -> None:
    batches = [gradients(WORLD, seed) for seed in range(5)]
    tx = jaxcomm.control_variates(jaxcomm.mean("data"), 2)
    means, corrections, _ = trained(optax.chain(tx, jaxcomm.mean("data")), view, batches)
    assert max(np.abs(c).max() for c in corrections[4]) > 0.1
    for batch, update in zip(batches, means, strict=True):
        for name, value in update.items():
            np.testing.assert_allclose(value, batch[name].mean(0), atol=1e-5)


def descended(before: list[optax.GradientTransformation]) -> float:
    """Where votes lead three devices whose losses (x - a)^2 / 2 have their minima at 0, 0 and 3."""
    minima = jnp.array([0.0, 0.0, 3.0])[:, None, None]
    rate = optax.linear_schedule(0.1, 0.0, 400)
    tx = optax.chain(*before, jaxcomm.majority_vote("data"), optax.sgd(rate))
    with jax.set_mesh(GLOBAL.mesh(3)):
        params = jaxcomm.replicate(jnp.full((1, 1), 2.0))

        @jax.jit
        def step(params: Any, state: Any) -> Any:
            updates, state = tx.update(params[None] - minima, state, params)
            return optax.apply_updates(params, updates), state

        state = tx.init(params)
        for _ in range(400):
            params, state = step(params, state)
    return float(params[0, 0])


def test_votes_find_the_mean_where_most_are_elsewhere() -> None:
    assert abs(descended([])) < 0.05  # The control: the median.
    mean = jaxcomm.mean("data", "bfloat16")
    assert abs(descended([jaxcomm.control_variates(mean, 4)]) - 1) < 0.05


@pytest.mark.newest
def test_bytes_are_those_of_the_mean_once_in_a_while() -> None:
    mean = jaxcomm.mean("data", "bfloat16")
    with jax.set_mesh(GLOBAL.mesh(4)):
        grads = place(GLOBAL, gradients(4), "data")
        params = place(GLOBAL, {name: jnp.zeros(g.shape[1:]) for name, g in grads.items()})

        def report(tx: Any) -> jaxcomm.WireReport:
            return jaxcomm.wire_report(jax.jit(tx.update).lower(grads, tx.init(params)).compile())

        always, seldom = report(mean), report(jaxcomm.control_variates(mean, 5))
    assert seldom.bytes_max == always.bytes_max > 0
    assert {c.branch[-1][1] for c in seldom.collectives} == {1}


@pytest.mark.parametrize("view", [GLOBAL, VIEWS[2]], ids=lambda view: view.name)
def test_what_is_not_finite_is_passed_on_once(view: Any) -> None:
    batches = [gradients(WORLD, seed) for seed in range(4)]
    batches[1]["head"][2, 0] = np.nan
    tx = jaxcomm.control_variates(jaxcomm.mean("data"), 2)
    means, corrections, _ = trained(optax.chain(tx, jaxcomm.mean("data")), view, batches)
    assert [np.isnan(update["head"]).any() for update in means] == [False, True, False, False]
    assert min(np.abs(c).max() for c in corrections[2]) > 0.1  # of what was finite


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
