"""What an exchange is predicted to take, from what was measured behind steps."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm import plan
from jaxcomm.wire import wire_report
from train import predicting


@pytest.fixture
def mesh(monkeypatch):
    costs = plan.Costs("none", 9.0, 1e-7, 1.0, False, False, False, 0.0, {})
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


def test_parts_add_up(mesh):
    """Every program takes 1 ms, messages 3 more, of which bytes have a part, and codes 2 more."""
    behind = {predicting.NOTHING: 1.0, predicting.MESSAGES: 1 + 3.0, predicting.CODES: 1 + 2.0}
    wire = sent("bfloat16", mesh)
    found = predicting.predicted(wire, behind, None)
    assert found.ms == pytest.approx(3.0 + 2.0)
    assert found.local_ms == pytest.approx(2.0)
    assert found.bytes_ms == pytest.approx(1e3 * 1e-7 * float(wire.bytes_max), rel=0.02)
    slower = predicting.predicted(wire, behind, gigabits=0.04)
    assert slower.bytes_ms == pytest.approx(2 * found.bytes_ms)
    assert slower.latency_ms == found.latency_ms
    del behind[predicting.CODES]
    assert predicting.predicted(wire, behind, None).local_ms == 0


def test_noise_is_not_negative(mesh):
    behind = {predicting.NOTHING: 2.0, predicting.MESSAGES: 1.0, predicting.CODES: 0.5}
    found = predicting.predicted(sent("float32", mesh), behind, None)
    assert found.latency_ms == 0 and found.local_ms == 0


def test_what_sends_nothing_waits_for_nobody(mesh):
    behind = {predicting.NOTHING: 1.0, predicting.MESSAGES: 5.0}
    assert predicting.predicted(jaxcomm.WireReport((), 4), behind, None).ms == 0


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
    messages = wire_report(predicting._program(wire)[0])

    def described(report):
        return [
            (each.op, each.groups, len(each.shapes), [-(-b // 64) for b in map(float, each.sent)])
            for each in report.collectives
        ]

    assert described(messages) == described(wire)


def test_programs_behind_a_step(mesh):
    params = {"w": jaxcomm.replicate(jnp.ones((8, 5)))}
    exchange, wire = jaxcomm.mean("data", "int8"), sent("int8", mesh)
    programs = predicting.behind(wire, exchange, params)
    assert set(programs) == {*predicting.behind(wire, None, params), predicting.CODES}
    for run in programs.values():
        jax.block_until_ready(run())
    updates, _ = programs[predicting.CODES]()
    # Its own gradients, coded and decoded.
    assert np.allclose(np.asarray(updates["w"]), 1.0, rtol=0.01)


def test_one_device_predicts_nothing():
    wire = jaxcomm.WireReport((), 1)
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:1])):
        assert predicting.behind(wire, jaxcomm.mean("data"), {}) == {}
        assert predicting.predicted(wire, {}, None) is None
