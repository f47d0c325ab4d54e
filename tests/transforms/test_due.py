"""The host says what a step does by `due=`, `dense=` or `stage=`; there is no conditional."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.interpreters import partial_eval

import jaxcomm
from transforms.both_views import SHAPES, VIEWS, Tree, gradients, place

VIEW, WORLD, RATE = VIEWS[0], 4, 0.1
INT8 = jaxcomm.mean("data", "int8", error_feedback=True)
DILOCO = optax.sgd(0.7, momentum=0.9, nesterov=True)
Due = bool | int | None


def accumulated() -> optax.GradientTransformation:
    return jaxcomm.multi_steps(optax.chain(INT8, optax.sgd(RATE, momentum=0.9)), 3)


def local(fragments: int = 1, delay: int = 0, outer: Any = DILOCO, exchange: Any = INT8) -> Any:
    inner, options = optax.sgd(RATE, momentum=0.5), {"fragments": fragments, "delay": delay}
    return jaxcomm.local_steps(inner, 4, outer, exchange, **options)


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Its gradient is the batch."""
    return sum((jnp.sum(params[name] * batch[name][0]) for name in SHAPES), jnp.float32(0))


def stages() -> optax.GradientTransformation:
    codecs = enumerate(("float32", "int8", "int4"))
    return jaxcomm.stages(
        *((i * i - i // 2, jaxcomm.mean("data", c, error_feedback=True)) for i, c in codecs)
    )


def sparse() -> optax.GradientTransformation:
    return jaxcomm.sparse_mean("data", 0.2, momentum_correction=0.9, dense_steps=1)


def one_bit_adam(dense_steps: int = 2) -> optax.GradientTransformation:
    return jaxcomm.one_bit_adam("data", RATE, dense_steps=dense_steps, b2=0.99)


class Loop:
    """A training loop whose step has `due` as a static argument, which `update` calls by a name."""

    def __init__(self, tx: Any, name: str = "due") -> None:
        self.tx, self.name, self.mesh = tx, name, VIEW.mesh(WORLD)
        with jax.set_mesh(self.mesh):
            zeros = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
            self.params = place(VIEW, zeros)
            self.state = tx.init(self.params)
        self.step = jax.jit(self._step, static_argnames="due")

    def _step(self, batch: Any, state: Any, params: Any, due: Due = None) -> tuple[Any, Any]:
        is_local = isinstance(state, jaxcomm.LocalStepsState)
        at = jaxcomm.local_params(state) if is_local else params
        _, grads = jaxcomm.value_and_grad(loss_fn, "data")(at, batch)
        updates, state = self.tx.update(grads, state, params, **{self.name: due})
        return optax.apply_updates(params, updates), state

    def report(self, due: Due) -> jaxcomm.WireReport:
        with jax.set_mesh(self.mesh):
            grads = place(VIEW, gradients(WORLD), "data")
            lowered = self.step.lower(grads, self.state, self.params, due=due)
            return jaxcomm.wire_report(lowered.compile())

    def run(self, dues: list[Due], grads: list[Tree]) -> None:
        with jax.set_mesh(self.mesh):
            for due, own in zip(dues, grads, strict=True):
                own = place(VIEW, own, "data")
                self.params, self.state = self.step(own, self.state, self.params, due=due)


CASES: dict[str, tuple[Any, list[Due]]] = {
    "multi_steps": (accumulated, [False, False, True]),
    "local_steps": (local, [False, False, False, True]),
    "two fragments": (lambda: local(2), [0, 1, 0, 2]),
    "a delay": (lambda: local(2, 1), [0, 0, 1, 0, 2, 0, 1, 0]),
}
STAGES: dict[str, tuple[Any, list[Due], str]] = {
    "stages": (stages, [1, 2, 2, 3], "stage"),
    "dense first": (lambda: jaxcomm.dense_first(INT8, 2), [True, True, False, False], "dense"),
    "sparse": (sparse, [True, False, False], "dense"),
    "low rank": (lambda: jaxcomm.low_rank_mean("data", 2, dense_steps=1), [True, False], "dense"),
}
ADAM = {"1-bit Adam": (one_bit_adam, [True, True, False, False, False], "dense")}


@pytest.mark.parametrize("name", [*CASES, *STAGES, *ADAM])
def test_the_host_says_what_the_state_would(name: str) -> None:
    make, dues, *argument = (CASES | STAGES | ADAM)[name]
    batches = [gradients(WORLD, seed) for seed in range(len(dues))]
    told, counting = Loop(make(), *argument), Loop(make(), *argument)
    told.run(dues, batches)
    counting.run([None] * len(dues), batches)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, (told.params, told.state), (counting.params, counting.state))
    assert any(np.abs(x).max() > 0 for x in jax.tree.leaves(told.params) if x.size)


@pytest.mark.parametrize("name", CASES)
def test_each_program_sends_its_part_without_a_conditional(name: str) -> None:
    make, dues = CASES[name]
    loop = Loop(make())
    counting = loop.report(None)
    assert {True} == {bool(c.branch) for c in counting.collectives}
    wanted = sorted(report.bytes_max for report in counting.by_branch().values())
    reports = [loop.report(due) for due in sorted(set(dues))]
    assert not any(c.branch for report in reports for c in report.collectives)
    assert sorted(report.bytes_max for report in reports) == wanted
    assert wanted[0] == 0 < wanted[1]


@pytest.mark.parametrize("name", STAGES)
def test_each_stage_has_a_program_without_a_conditional(name: str) -> None:
    make, dues, argument = STAGES[name]
    loop = Loop(make(), argument)
    counting = loop.report(None)
    assert any(c.branch for c in counting.collectives)
    reports = [loop.report(due) for due in sorted(set(dues))]
    assert not any(c.branch for report in reports for c in report.collectives)
    sent = [report.bytes_max for report in reports]
    assert sorted(sent) == sorted(r.bytes_max for r in counting.by_branch().values())
    assert len(set(sent)) == len(sent)


def test_a_stage_at_any_time() -> None:
    loop = Loop(stages(), "stage")
    batches = [gradients(WORLD, seed) for seed in range(5)]
    loop.run([3, 1, None, 2, 3], batches)  # by its count, the third step is of the second stage
    assert int(loop.state.step) == 5
    residuals = [np.mean(x, 0) for x in loop.state.inner[0].residual.values]
    kept = next(x for x in residuals if x.shape == SHAPES["kernel"])
    total = np.sum([batch["kernel"].mean(0) for batch in batches], 0)
    np.testing.assert_allclose(loop.params["kernel"] + kept, total, atol=1e-5)
    assert 1e-3 < np.abs(kept).max() < np.abs(total).max() / 4


@pytest.mark.parametrize("word", ["dense", "stage"])
def test_layers_exchanged_in_the_backward_pass_count_by_themselves(word: str) -> None:
    tx = jaxcomm.in_backward(jaxcomm.dense_first(jaxcomm.mean("data", "int8"), 2), ["layers"])
    with jax.set_mesh(VIEW.mesh(WORLD)):
        params = {"layers": {"w": jnp.zeros((2, 8, 8))}}
        state = tx.init(params)
        with pytest.raises(ValueError, match=f"in_backward takes no {word}=.*leave it out"):
            tx.update(params, state, params, **{word: True})


def test_a_step_of_one_bit_adam_sends_floats_or_bits() -> None:
    loop = Loop(one_bit_adam(), "dense")
    counting, dense, bits = (loop.report(due) for due in (None, True, False))
    assert any(c.branch for c in counting.collectives)
    assert not any(c.branch for c in (*dense.collectives, *bits.collectives))
    assert (
        dense.bytes_max
        < counting.bytes_max
        == max(report.bytes_max for report in counting.by_branch().values())
    )
    assert bits.bytes_max == min(report.bytes_max for report in counting.by_branch().values())
    assert {dtype for c in dense.collectives for dtype in c.dtypes} == {"f32"}


def test_one_bit_adam_may_freeze_the_variance_before_its_time() -> None:
    loop = Loop(one_bit_adam(), "dense")
    batches = [gradients(WORLD, seed) for seed in range(3)]
    loop.run([True], batches[:1])
    v = jax.tree.map(np.asarray, loop.state.v)
    loop.run([False], batches[1:2])
    counting = Loop(one_bit_adam(1), "dense")  # whose state ends the dense steps there
    counting.run([None] * 2, batches[:2])
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, loop.params, counting.params)
    loop.run([True], batches[2:])  # a dense step that is added later moves m alone
    jax.tree.map(np.testing.assert_array_equal, loop.state.v, v)
    assert int(loop.state.frozen_at) == 1 and np.abs(v["kernel"]).max() > 0
    assert max(np.abs(e).max() for e in loop.state.worker_error.values) > 0


def test_without_a_dense_step_there_is_no_variance() -> None:
    """Nothing would move, silently: no coordinate has a variance."""
    loop = Loop(one_bit_adam(), "dense")
    loop.run([False], [gradients(WORLD)])
    assert all(np.isnan(x).all() for x in jax.tree.leaves(loop.params) if x.size)
    assert int(loop.state.count) == 0


@pytest.mark.parametrize("due", [np.bool_(True), np.int64(2)])
def test_numbers_of_numpy_make_no_conditional_either(due: Any) -> None:
    loop = Loop(local(2) if due == 2 else accumulated())
    report = loop.report(due)
    assert report.bytes_max > 0 and not any(c.branch for c in report.collectives)


def test_accumulates_until_the_host_says_so() -> None:
    loop = Loop(jaxcomm.multi_steps(optax.chain(jaxcomm.mean("data"), optax.sgd(1.0)), 3))
    batches = [gradients(WORLD, seed) for seed in range(6)]
    loop.run([False] * 4 + [True], batches[:5])
    mean = np.mean([batch["kernel"] for batch in batches[:5]], (0, 1))
    np.testing.assert_allclose(loop.params["kernel"], -mean, atol=1e-6)
    loop.run([True], batches[5:])
    mean += batches[5]["kernel"].mean(0)
    np.testing.assert_allclose(loop.params["kernel"], -mean, atol=1e-6)
    assert int(loop.state.mini_step) == 0


@pytest.mark.parametrize(
    ("delay", "counted"), [(0, 0), (1, 0), (2, 0), (1, 5), (2, 4), (1, 1), (2, 2), (2, 3)]
)
def test_an_exchange_at_any_time(delay: int, counted: int) -> None:
    """It averages what the devices moved since the last one, and each keeps what it moved since.

    With a delay, that is up to the step before, or up to where the count has begun an exchange.
    """
    loop = Loop(local(2, delay, outer=optax.sgd(1.0), exchange=jaxcomm.mean("data")))
    fragment = loop.state.fragments.of[sorted(SHAPES).index("kernel")] + 1
    dues: list[Due] = [2, 0, 1, 1, 0, 2, 0, 1, 2, 2, 0, 1, 2, 1]
    dues[:counted] = [*[0] * delay, 0, 1, 0, 2][:counted]
    momentum = own = taken = np.zeros((WORLD, *SHAPES["kernel"]))
    shared = np.zeros(SHAPES["kernel"])
    for number, due in enumerate(dues, start=1):
        batch = gradients(WORLD, number)
        loop.run([due if number > counted else None], [batch])
        momentum = 0.5 * momentum + batch["kernel"]
        own = own - RATE * momentum
        if due == fragment:
            taken = taken if delay else own
            shared = taken.mean(0)
            own = shared + own - taken
        since = number - 2 * fragment  # the movement was taken by the count
        if number > counted or since <= 0 or (since - 1) % 4 >= delay or due == fragment:
            taken = own
        found = jaxcomm.unmark_local(jaxcomm.local_params(loop.state))["kernel"]
        np.testing.assert_allclose(found, own, atol=1e-5)
        np.testing.assert_allclose(loop.params["kernel"], shared, atol=1e-5)
    assert dues.count(fragment) > 3


@pytest.mark.parametrize("delay", [1, 2])
def test_the_first_steps_wait_for_no_exchange(delay: int) -> None:
    """The count has begun none: what is told exchanges the movement up to the step before."""
    loop = Loop(local(1, delay, outer=optax.sgd(1.0), exchange=jaxcomm.mean("data")))
    batches = [gradients(WORLD, seed) for seed in range(delay + 1)]
    for batch in batches[:-1]:
        loop.run([None], [batch])
    own = jaxcomm.unmark_local(jaxcomm.local_params(loop.state))["kernel"]
    loop.run([True], batches[-1:])
    assert np.abs(own).max() > 0
    np.testing.assert_allclose(loop.params["kernel"], np.mean(own, 0), atol=1e-6)


@pytest.mark.parametrize("delay", [0, 1])
def test_with_a_delay_what_is_sent_waits_for_no_gradient(delay: int) -> None:
    loop = Loop(local(1, delay))
    with jax.set_mesh(loop.mesh):
        grads = place(VIEW, gradients(WORLD), "data")
        traced = jax.make_jaxpr(lambda g: loop._step(g, loop.state, loop.params, due=True)[0])
        jaxpr = traced(grads).jaxpr
    _, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    assert any(used) == (delay == 0)


ARGUMENTS = {
    accumulated: "due",
    local: "due",
    one_bit_adam: "dense",
    sparse: "dense",
    stages: "stage",
}


@pytest.mark.parametrize("make", [accumulated, local, *ARGUMENTS])
def test_only_the_host_can_say_it(make: Any) -> None:
    loop = Loop(make(), ARGUMENTS.get(make, "due"))
    message = f"takes {loop.name}= from the host.*static_argnames='{loop.name}"
    with jax.set_mesh(loop.mesh):
        grads = place(VIEW, gradients(WORLD), "data")
        step: Any = jax.jit(loop._step)
        with pytest.raises(TypeError, match=message):
            step(grads, loop.state, loop.params, due=True)


@pytest.mark.parametrize(
    ("make", "due", "message"),
    [
        (accumulated, 2, "multi_steps takes due=True or False, got 2"),
        (accumulated, "yes", "due=True or False, got 'yes'"),
        (one_bit_adam, 2, "one_bit_adam takes dense=True or False, got 2"),
        (local, 2.0, "local_steps takes due=True or False, got 2.0"),
        (lambda: local(2), True, "due=a fragment, 1 to 2, or 0 for none, got True"),
        (lambda: local(2), 3, "due=a fragment, 1 to 2, or 0 for none, got 3"),
        (lambda: local(2), -1, "got -1"),
        (sparse, 2, "dense_first takes dense=True or False, got 2"),
        (stages, 0, "this plan takes stage=1 to 3, got 0"),
        (stages, 4, "this plan takes stage=1 to 3, got 4"),
        (stages, True, "this plan takes stage=1 to 3, got True"),
    ],
)
def test_what_due_may_be(make: Any, due: Any, message: str) -> None:
    loop = Loop(make(), ARGUMENTS.get(make, "due"))
    with pytest.raises(ValueError, match=message):
        loop.run([due], [gradients(WORLD)])


def test_what_the_host_put_off_is_exchanged_next() -> None:
    tx = jaxcomm.multi_steps(jaxcomm.mean("data"), 2)
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        state = tx.init(jaxcomm.replicate({"w": jnp.ones((2, 2))}))
        grads = {"w": jnp.ones((2, 2, 2))}
        update = jax.jit(tx.update, static_argnames="due")
        for _ in range(3):
            _, state = update(grads, state, due=False)
        updates, state = update(grads, state)
    assert np.all(updates["w"] == 1) and state.mini_step == 0
