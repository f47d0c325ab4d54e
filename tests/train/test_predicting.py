"""What an exchange is predicted to take, from what was measured behind steps."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import plan
from jaxcomm.wire import Collective, wire_report
from train import predicting


@pytest.fixture
def mesh(monkeypatch):
    costs = plan.Costs("none", 9.0, 1e-7, 1.0, False, 0.0, False, False, 0.0, {})
    monkeypatch.setattr(plan, "probe", lambda mesh, families: costs)
    mesh = jaxcomm.data_mesh(devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        yield mesh


def sent(codec, mesh, algorithm="ring"):
    """What the exchange of 1000 values sends."""
    tx = jaxcomm.mean("data", codec, algorithm=algorithm)
    grads = [jnp.zeros((mesh.size, 1000))]
    state = tx.init(jaxcomm.replicate([jnp.zeros(1000)]))
    return wire_report(jax.jit(tx.update).lower(grads, state).compile())


def nothing(mesh):
    return jaxcomm.WireReport((), mesh.size)


def test_parts_add_up(mesh):
    """Messages add 3 ms to a step, of which bytes have a part, and codes 2 more."""
    wire = sent("bfloat16", mesh)
    found = predicting.predicted(wire, nothing(mesh), 3.0, 2.0, None)
    assert found.ms == pytest.approx(3.0 + 2.0)
    assert found.local_ms == pytest.approx(2.0)
    assert found.bytes_ms == pytest.approx(1e3 * 1e-7 * float(wire.bytes_max), rel=0.02)
    slower = predicting.predicted(wire, nothing(mesh), 3.0, 2.0, gigabits=0.04)
    assert slower.bytes_ms == pytest.approx(2 * found.bytes_ms)
    assert slower.latency_ms == found.latency_ms


def test_what_a_step_sends_anyway_is_not_the_exchange(mesh):
    wire = sent("bfloat16", mesh)
    assert predicting.predicted(wire, wire, 0.0, 0.0, None).ms == 0


def test_noise_is_not_negative(mesh):
    assert (
        predicting.predicted(sent("float32", mesh), nothing(mesh), 0.0, 0.0, None).latency_ms == 0
    )


@pytest.mark.parametrize(
    ("codec", "algorithm"),
    [
        ("float32", "native"),
        *itertools.product(["float32", "bfloat16", "int8"], ["ring", "direct", "halving_doubling"]),
    ],
)
def test_messages_are_those_of_the_exchange(codec, algorithm, mesh):
    """The same operations of the same sizes, between the same devices, and nothing else."""
    wire = sent(codec, mesh, algorithm)
    tx = predicting.messages(wire, nothing(mesh))
    updates = {"w": jaxcomm.replicate(jnp.arange(5.0)), "b": jaxcomm.replicate(jnp.float16(3))}
    replayed = jax.jit(tx.update).lower(updates, optax.EmptyState()).compile()
    assert described(wire_report(replayed)) == described(wire)
    same, _ = replayed(updates, optax.EmptyState())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-20), same, updates)


def described(report):
    return [
        (each.op, each.groups, len(each.shapes), [-(-b // 64) for b in map(float, each.sent)])
        for each in report.collectives
    ]


def test_a_mesh_of_two_axes(mesh):
    """Groups are of devices in the mesh's order, as the compiler prints them."""
    del mesh
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("nodes", "data"), auto, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        ring = jaxcomm.algorithms.ring()
        two_levels = jaxcomm.algorithms.hierarchical(near=ring, far=ring)
        tx = jaxcomm.mean(mesh.axis_names, "int8", algorithm=two_levels)
        grads = [jnp.zeros((4, 1000))]
        state = tx.init(jaxcomm.replicate([jnp.zeros(1000)]))
        wire = wire_report(jax.jit(tx.update).lower(grads, state).compile())
        replay = predicting.messages(wire, nothing(mesh))
        at = jaxcomm.replicate([jnp.zeros(1000)])
        replayed = jax.jit(replay.update).lower(at, optax.EmptyState()).compile()
    assert described(wire_report(replayed)) == described(wire)


def test_messages_of_both_steps_that_were_joined_are_taken_apart():
    """The mean of the loss, three values, travels with what is exempt."""
    groups = ((0, 1, 2, 3),)
    loss = Collective("a", "all-reduce", ("f32",), ((3,),), groups, 4, ())
    joined = Collective("a", "all-reduce", ("f32", "f32"), ((298,), (3,)), groups, 4, ())
    other = Collective("b", "all-gather", ("u8",), ((3,),), groups, 4, (), times=2)
    found = predicting._added(
        jaxcomm.WireReport((other, joined), 4), jaxcomm.WireReport((loss,), 4)
    )
    gathered = ("all-gather", groups, (("u8", (3,)),))
    assert found == [gathered, gathered, ("all-reduce", groups, (("f32", (298,)),))]
    assert predicting._added(jaxcomm.WireReport((loss,), 4), jaxcomm.WireReport((loss,), 4)) == []


def test_codes_are_what_an_exchange_does_between_messages(monkeypatch):
    with jax.set_mesh(jaxcomm.data_mesh()):  # all devices of a process, as in the program
        params = {"w": jaxcomm.replicate(jnp.ones((80, 50)))}
        exchange = jaxcomm.mean("data", "int8")
        at = exchange.init(params)
        whole, sends = predicting._by_itself(exchange, at, params)
        assert described(wire_report(sends.program)) == described(wire_report(whole.program))
        for updates, _ in (whole(), sends()):
            assert np.allclose(np.asarray(updates["w"]), 1.0, rtol=0.01)
        took = iter([2.0, 2.0, *[3.0, 1.0] * predicting.ROWS])
        monkeypatch.setattr(predicting, "_mean_seconds", lambda p, _: [next(took) for _ in p])
        assert predicting.codes_ms(exchange, at, params) == pytest.approx(2000)


GROUPS = ((0, 1, 2, 3),)


def test_messages_are_those_of_the_branch_that_sends_least():
    """Dense steps, the first of a run, are not what an exchange is predicted to take."""
    rare, usual = (
        Collective(name, "all-reduce", ("f32",), ((n,),), GROUPS, 4, (6 * n,) * 4, branch=branch)
        for name, n, branch in (("a", 1000, (("cond", 0),)), ("b", 10, (("cond", 1),)))
    )
    wire = jaxcomm.WireReport((rare, usual), 4, (("cond", 2),))
    assert [each.name for each in predicting._least(wire).collectives] == ["b"]


def test_of_equal_messages_of_an_exchange_one_is_the_steps_own():
    three = Collective("a", "all-reduce", ("f32",), ((3,),), GROUPS, 4, (), times=3)
    one = Collective("b", "all-reduce", ("f32",), ((3,),), GROUPS, 4, ())
    found = predicting._added(jaxcomm.WireReport((three,), 4), jaxcomm.WireReport((one,), 4))
    assert found == 2 * [("all-reduce", GROUPS, (("f32", (3,)),))]


def test_a_message_of_flags_has_a_byte_for_each():
    message = predicting._Message("all-reduce", ((0, 1),), (("pred", (64,)), ("u16", (64,))))
    assert predicting._words(message) == [16, 32]
