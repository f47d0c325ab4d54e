"""Local SGD and DiLoCo: numpy's parameters, bytes, and who may take whose parameters."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomm
from transforms.both_views import (
    SHAPES,
    VIEWS,
    Program,
    View,
    by_name,
    gradients,
    place,
    same_on_all_devices,
    types_of,
)

GLOBAL, MANUAL, CHECKED, MODEL, _, CHECKED_MODEL = VIEWS
WORLD, RATE, DECAY, OUTER_RATE, OUTER_DECAY = 4, 0.1, 0.5, 0.7, 0.9
MEAN = jaxcomm.mean("data")
DILOCO = optax.sgd(OUTER_RATE, momentum=OUTER_DECAY, nesterov=True)
Tree = dict[str, np.ndarray]


def loss_fn(params: Any, batch: Any, copies: int = 1) -> jax.Array:
    """Its gradient is the difference between a parameter and what the device's batch has.

    With its checks, shard_map adds up the gradients of what has copies over a further axis.
    """
    weight = {name: 1 if name == "head" else copies for name in params}
    parts = [jnp.sum((params[n] - batch[n][0]) ** 2) / (2 * weight[n]) for n in params]
    return functools.reduce(jnp.add, parts)


@dataclasses.dataclass(frozen=True)
class Plan:
    every: int
    fragments: int = 1
    delay: int = 0

    def tx(self, exchange: Any = MEAN, outer: Any = DILOCO) -> Any:
        inner = optax.sgd(RATE, momentum=DECAY)
        options = {"fragments": self.fragments, "delay": self.delay}
        return jaxcomm.local_steps(inner, self.every, outer, exchange, **options)


class Training:
    """A training loop as a user writes it, in a view."""

    def __init__(self, view: View, tx: Any, world: int = WORLD) -> None:
        self.view, self.tx, self.mesh = view, tx, view.mesh(world)
        with jax.set_mesh(self.mesh):
            zeros = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
            self.params = place(view, zeros)
            self.state = tx.init(self.params)
            self.step = jax.jit(self._in_view(self._step))

    def _step(self, params: Any, state: Any, batch: Any) -> Any:
        own = jaxcomm.local_params(state)
        copies = self.view.model if self.view.checks else 1
        loss = functools.partial(loss_fn, copies=copies)
        loss, grads = jaxcomm.value_and_grad(loss, "data")(own, batch)
        updates, state = self.tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def _in_view(self, step: Any) -> Any:
        if not self.view.manual:
            return step
        spec = jaxcomm.state_spec(self.tx, self.params, self.mesh)
        equal = {name: self.view.spec(name) for name in SHAPES}
        local = {name: P("data", *self.view.spec(name)) for name in SHAPES}
        # The loss of shards is no loss; it is not looked at.
        return jax.shard_map(
            lambda *args: step(*args)[:2],
            in_specs=(equal, spec, local),
            out_specs=(equal, spec),
            check_vma=self.view.checks,
        )

    def run(self, *batches: Tree) -> list[tuple[Any, Any]]:
        """The shared parameters and the state after each step."""
        found, types = [], types_of(self.state)
        with jax.set_mesh(self.mesh):
            for batch in batches:
                done = self.step(self.params, self.state, place(self.view, batch, "data"))
                self.params, self.state = done[:2]
                found.append((self.params, self.state))
        assert self.step._cache_size() == 1
        assert types_of(self.state) == types
        return found

    def own(self) -> Tree:
        """Each device's own parameters, with a leading device axis."""
        return jax.tree.map(np.asarray, jaxcomm.unmark_local(jaxcomm.local_params(self.state)))


class Oracle:
    """The algorithm for one leaf of all devices, in float64."""

    def __init__(self, shape: tuple[int, ...], plan: Plan, fragment: int) -> None:
        self.shared, self.outer = np.zeros(shape), np.zeros(shape)
        self.own, self.momentum, self.taken = (np.zeros((WORLD, *shape)) for _ in range(3))
        self.plan, self.count = plan, 0
        self.offset = (fragment + 1) * plan.every // plan.fragments

    def step(self, batch: np.ndarray) -> np.ndarray:
        self.count += 1
        self.momentum = DECAY * self.momentum + (self.own - batch)
        self.own = self.own - RATE * self.momentum
        if (self.count - self.offset) % self.plan.every == 0:
            self.taken = self.own
        late = self.count - self.offset - self.plan.delay
        if late >= 0 and late % self.plan.every == 0:
            d = np.mean(self.shared - self.taken, 0)
            self.outer = OUTER_DECAY * self.outer + d
            self.shared = self.shared - OUTER_RATE * (d + OUTER_DECAY * self.outer)
            self.own = self.shared + self.own - self.taken
        return self.shared


PLANS = [Plan(3), Plan(4, fragments=2), Plan(4, fragments=4, delay=2), Plan(2, delay=1)]


@pytest.mark.parametrize(
    ("plan", "view"),
    [
        *((plan, GLOBAL) for plan in PLANS),
        pytest.param(PLANS[0], MANUAL, marks=pytest.mark.slow),
        pytest.param(PLANS[2], CHECKED, marks=pytest.mark.newest),
        (PLANS[2], MODEL),
        pytest.param(PLANS[2], CHECKED_MODEL, marks=pytest.mark.slow),
    ],
    ids=lambda x: x.name if isinstance(x, View) else f"{x.every}-{x.fragments}-{x.delay}",
)
def test_parameters_are_those_of_the_oracle(plan: Plan, view: View) -> None:
    training = Training(view, plan.tx())
    batches = [gradients(WORLD, seed) for seed in range(11)]
    steps = training.run(*batches)
    names = sorted(SHAPES)  # the order of the tree
    of = dict(zip(names, training.state.fragments.of, strict=True))
    assert set(of.values()) == set(range(plan.fragments))
    for name, shape in SHAPES.items():
        oracle = Oracle(shape, plan, of[name])
        moved = set()
        for batch, (params, _) in zip(batches, steps, strict=True):
            wanted = oracle.step(batch[name].astype(np.float64))
            np.testing.assert_allclose(params[name], wanted, atol=1e-5, err_msg=name)
            assert same_on_all_devices(params[name])
            moved.add(np.asarray(params[name]).tobytes())
        np.testing.assert_allclose(training.own()[name], oracle.own, atol=1e-5, err_msg=name)
        rounds = (len(batches) - oracle.offset - plan.delay) // plan.every + 1
        assert len(moved) == (1 if 0 in shape else 1 + rounds)


def test_a_step_at_a_time_is_data_parallelism() -> None:
    tx = jaxcomm.local_steps(optax.sgd(RATE), 1, optax.sgd(1.0), MEAN)
    batches = [gradients(WORLD, seed) for seed in range(4)]
    found = Training(CHECKED, tx).run(*batches)
    shared = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    for batch, (params, _) in zip(batches, found, strict=True):
        for name in SHAPES:
            shared[name] = shared[name] - np.float32(RATE) * (shared[name] - batch[name].mean(0))
            np.testing.assert_allclose(params[name], shared[name], atol=1e-6)


@pytest.mark.parametrize("view", [GLOBAL, CHECKED_MODEL], ids=by_name)
def test_a_device_whose_gradient_is_not_finite_does_not_move(view: View) -> None:
    batches = [gradients(WORLD, seed) for seed in range(3)]
    batches[1]["head"][2, 0, 0] = np.nan
    training, before = Training(view, Plan(3).tx()), None
    for number, batch in enumerate(batches):
        training.run(batch)
        after = training.own()
        if number == 1:
            stayed = [(after["kernel"][r] == before["kernel"][r]).all() for r in range(WORLD)]
            assert stayed == [False, False, True, False]
        before = after
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(training.params))
    assert np.abs(training.params["kernel"]).max() > 0.01


@pytest.mark.parametrize("view", [GLOBAL, CHECKED_MODEL], ids=by_name)
def test_a_device_whose_state_would_not_be_finite_does_not_move(view: View) -> None:
    """Lion's update is a sign, also of what is infinite, and its momentum would stay so."""
    batches = [gradients(WORLD, seed) for seed in range(2)]
    batches[0]["head"][2, 0, 0] = np.inf
    training = Training(view, jaxcomm.local_steps(optax.lion(RATE), 3, optax.sgd(1.0), MEAN))
    ((_, state),) = training.run(batches[0])
    moved = [np.abs(training.own()["kernel"][r]).max() > 0 for r in range(WORLD)]
    assert moved == [True, True, False, True]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.inner.values))
    training.run(batches[1])
    assert np.abs(training.own()["kernel"][2]).max() > 0


def test_a_state_may_begin_with_infinities() -> None:
    best = optax.GradientTransformation(lambda _: jnp.float32(np.inf), lambda u, s, _: (u, s))
    inner = optax.chain(optax.sgd(RATE), best)
    training = Training(GLOBAL, jaxcomm.local_steps(inner, 3, optax.sgd(1.0), MEAN))
    training.run(gradients(WORLD))
    assert all(np.abs(training.own()["kernel"][r]).max() > 0 for r in range(WORLD))


def test_an_outer_step_that_is_not_finite_leaves_everything_as_it_was() -> None:
    batches = [gradients(WORLD, seed) for seed in range(2)]
    batches[1]["head"][:, 1, 1] = 1.5e38  # twice each is finite, their sum is not
    tx = jaxcomm.local_steps(optax.sgd(0.9), 2, DILOCO, MEAN)
    training = Training(GLOBAL, tx)
    (_, before), (params, after) = training.run(*batches)
    assert all(np.isnan(x).all() for x in params.values() if x.size)
    jax.tree.map(np.testing.assert_array_equal, after.outer, before.outer)
    assert all(np.isfinite(x).all() for x in training.own().values())


def test_an_outer_rate_that_overflows_leaves_everything_as_it_was() -> None:
    exchange = jaxcomm.mean("data", "int8", error_feedback=True)
    tx = jaxcomm.local_steps(optax.sgd(0.9), 2, optax.sgd(3e38), exchange)
    (_, before), (params, after) = Training(GLOBAL, tx).run(*[gradients(WORLD)] * 2)
    assert all(np.isnan(x).all() for x in params.values() if x.size)
    jax.tree.map(np.testing.assert_array_equal, after.exchange, before.exchange)


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_bytes(codec: str) -> None:
    """Nothing between exchanges; over a round each weight travels once, flags apart."""
    mean = jaxcomm.mean("data", codec, error_feedback=codec != "float32")
    once = Program(GLOBAL, mean, gradients(WORLD)).report().bytes_max
    reports = []
    for plan in (Plan(4), Plan(4, fragments=2)):
        tx, view = plan.tx(mean), GLOBAL
        with jax.set_mesh(view.mesh(WORLD)):
            params = place(view, {n: np.zeros(s, np.float32) for n, s in SHAPES.items()})
            grads = place(view, gradients(WORLD), "data")
            lowered = jax.jit(tx.update).lower(grads, tx.init(params), params)
            reports.append(jaxcomm.wire_report(lowered.compile()))
    whole, parts = reports
    assert all(c.branch for c in (*whole.collectives, *parts.collectives))
    assert whole.bytes_max == once
    by_branch = {i: report for (_, i), report in parts.by_branch().items()}
    assert by_branch[0].bytes_max == 0
    sent = [by_branch[i].bytes_max for i in (1, 2)]
    flags = (2 if codec != "float32" else 1) * 16 + 60  # of each fragment, and padded blocks
    assert once <= sum(sent) <= once + flags
    assert max(sent) < 0.8 * once


def test_what_a_message_loses_comes_later() -> None:
    mean = jaxcomm.mean("data", "int4", error_feedback=True)
    training = Training(GLOBAL, Plan(2).tx(mean, optax.sgd(1.0)))
    batch = gradients(WORLD)
    training.run(*[batch] * 60)
    for name in ("head", "kernel"):
        np.testing.assert_allclose(training.params[name], batch[name].mean(0), atol=0.1)


def test_shared_parameters_find_the_mean_and_without_an_exchange_nobody_does() -> None:
    batch = gradients(WORLD)
    alone = Training(GLOBAL, Plan(100).tx())
    alone.run(*[batch] * 60)
    together = Training(GLOBAL, Plan(10, 2, delay=1).tx(MEAN, optax.sgd(1.0)))
    together.run(*[batch] * 200)
    for name in ("head", "kernel"):
        np.testing.assert_allclose(alone.own()[name], batch[name], atol=0.01)  # the control
        np.testing.assert_allclose(together.params[name], batch[name].mean(0), atol=0.01)


class TestTypes:
    """Nobody takes one device's parameters, or gradients at them, for what all share."""

    def test_own_parameters_are_nobodys_model(self) -> None:
        training = Training(GLOBAL, Plan(2).tx())
        own = jaxcomm.local_params(training.state)
        assert own["kernel"].shape == (WORLD, *SHAPES["kernel"])
        for use in (lambda x: x * 2, jnp.sum, lambda x: x + x):
            with pytest.raises(TypeError, match="each device's own parameters in float32, which"):
                use(own["kernel"])

    def test_gradients_at_the_shared_parameters_are_refused(self) -> None:
        training = Training(GLOBAL, Plan(2).tx())
        with jax.set_mesh(training.mesh):
            batch = place(GLOBAL, gradients(WORLD), "data")
            _, grads = jaxcomm.value_and_grad(loss_fn, "data")(training.params, batch)
            with pytest.raises(ValueError, match=r"taken at the shared.*local_params\(state\)"):
                training.tx.update(grads, training.state, training.params)

    def test_other_exchanges_refuse_gradients_at_own_parameters(self) -> None:
        training = Training(GLOBAL, Plan(2).tx())
        with jax.set_mesh(training.mesh):
            batch = place(GLOBAL, gradients(WORLD), "data")
            own = jaxcomm.local_params(training.state)
            _, grads = jaxcomm.value_and_grad(loss_fn, "data")(own, batch)
            with pytest.raises(ValueError, match="at each device's own parameters"):
                MEAN.update(grads, MEAN.init(training.params))
            with pytest.raises(TypeError, match="only jaxcomm.local_steps takes it"):
                optax.sgd(0.1).update(grads, optax.sgd(0.1).init(training.params))

    def test_the_state_has_them_once(self) -> None:
        training = Training(GLOBAL, Plan(2).tx())
        assert jaxcomm.local_params((optax.EmptyState(), training.state)).keys() == SHAPES.keys()
        with pytest.raises(ValueError, match="the state of one jaxcomm.local_steps, found 0"):
            jaxcomm.local_params(optax.EmptyState())


def test_a_run_goes_on_with_another_number_of_devices() -> None:
    mean = jaxcomm.mean("data", "int8", error_feedback=True)
    tx, batches = Plan(4, 2, delay=1).tx(mean), [gradients(WORLD, seed) for seed in range(6)]
    four, two = Training(GLOBAL, tx), Training(CHECKED, tx, world=2)
    four.run(*batches)
    saved = jax.tree.map(np.asarray, (four.params, four.state))
    with jax.set_mesh(two.mesh):
        two.params = place(CHECKED, saved[0])
        two.state = jaxcomm.resize_state(two.tx, saved[1], two.params)
    assert int(two.state.step) == int(four.state.step) == 6
    for name, own in two.own().items():
        np.testing.assert_allclose(own, np.stack([four.own()[name].mean(0)] * 2), atol=1e-6)
    for a, b in zip(two.state.exchange, four.state.exchange, strict=True):
        for x, y in zip(a.residual.values, b.residual.values, strict=True):
            np.testing.assert_allclose(np.mean(x, 0), np.mean(y, 0), atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, two.state.outer, four.state.outer)
    half = {name: x[:2] for name, x in batches[0].items()}
    two.run(*[half] * 160)
    np.testing.assert_allclose(two.params["kernel"], half["kernel"].mean(0), atol=0.15)
    with jax.set_mesh(two.mesh), pytest.raises(ValueError, match="not one of this transformation"):
        jaxcomm.resize_state(optax.sgd(0.1), saved[1], two.params)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every to be an integer >= 1, got 0"),
        ({"every": 2.0}, "every to be an integer >= 1, got 2.0"),
        ({"every": True}, "got True"),
        ({"every": 4, "fragments": 0}, "fragments to be an integer >= 1"),
        ({"every": 4, "fragments": 3}, "fragments=3 does not divide every=4"),
        ({"every": 4, "delay": -1}, "delay to be an integer >= 0"),
        ({"every": 4, "delay": 4}, "delay must be less than every=4"),
    ],
)
def test_bad_numbers(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jaxcomm.local_steps(optax.sgd(0.1), outer=DILOCO, exchange=MEAN, **options)


@pytest.mark.parametrize(
    ("inner", "exchange", "fragments", "message"),
    [
        (MEAN, MEAN, 1, "inner exchanges; give local_steps what each device does alone"),
        (optax.sgd(0.1), optax.identity(), 1, "local_steps needs inner transformations that exch"),
        (
            optax.sgd(0.1),
            jaxcomm.one_bit_adam("data", 0.1, dense_steps=1),
            1,
            "local_steps needs an exchange of means, got an optimizer",
        ),
        (optax.sgd(0.1), jaxcomm.majority_vote("data"), 1, "got a vote, whose updates are signs"),
        (
            optax.sgd(0.1),
            optax.chain(MEAN, optax.sgd(1.0)),
            1,
            "a chain with other transformations; give the exchange alone",
        ),
        (optax.sgd(0.1), jaxcomm.set_to_zero("data"), 1, "the frozen part of an optax.partition"),
        (optax.sgd(0.1), MEAN, 6, "fragments=6 is more than the 4 param"),
    ],
)
def test_bad_parts(inner: Any, exchange: Any, fragments: int, message: str) -> None:
    tx = jaxcomm.local_steps(inner, 6, DILOCO, exchange, fragments=fragments)
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    with jax.set_mesh(GLOBAL.mesh(WORLD)), pytest.raises(ValueError, match=message):
        tx.init(params)


def test_an_exchange_in_the_outer_optimizer() -> None:
    tx = jaxcomm.local_steps(optax.sgd(0.1), 6, optax.chain(MEAN, DILOCO), MEAN)
    with jax.set_mesh(GLOBAL.mesh(WORLD)), pytest.raises(ValueError, match="outer exchanges; give"):
        tx.init({"w": jnp.zeros((4, 4))})


def test_without_the_shared_parameters() -> None:
    training = Training(GLOBAL, Plan(2).tx())
    with (
        jax.set_mesh(training.mesh),
        pytest.raises(ValueError, match="needs the shared parameters"),
    ):
        training.tx.update(gradients(WORLD), training.state)
