"""Counters of interfaces, and measurements whose result is known."""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from ml_collections import config_dict

import jaxcomm
from train import measure, predicting, sync

PROC_NET_DEV = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo
    lo: 9000001     123    0    0    0     0          0         0  1234567     123    0    0    0
  eth0:     500       5    0    0    0     0          0         0      900       9    0    0    0
"""


def test_counters_are_those_of_what_was_sent() -> None:
    assert measure.interface_counters(PROC_NET_DEV) == {"lo": 1234567, "eth0": 900}


def test_a_burst_of_another_program_is_not_counted() -> None:
    sent = {"lo": [500, 520, 9_000_000, 510, 505], "eth0": [9, 9, 9, 9_000_000, 9]}
    assert measure.busiest(sent) == ("lo", 510)
    assert measure.busiest({}) == (None, 0.0)


class Clock:
    """A clock that only steps move on, so that what they take is known."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def step(self, *seconds: float) -> Any:
        """A step that takes these times in turn."""
        turns = itertools.cycle(seconds)

        def step(state: Any, batch: Any) -> Any:
            del batch
            self.now += next(turns)
            return state, {}

        return step


def test_times_are_means_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(measure, "time", clock)
    step = clock.step(0.01, 0.03)  # such as one that exchanges every second time
    plain, messages = clock.step(10e-3), clock.step(18e-3)
    with jax.set_mesh(jaxcomm.data_mesh()):
        steps = measure.measure_steps(step, 0, plain, 0, None, 400, messages)
    assert steps.step_ms == pytest.approx(20)
    assert steps.compute_ms == pytest.approx(10)
    assert steps.messages_ms == pytest.approx(8)
    # One process sends nothing over an interface, whatever others do meanwhile.
    assert steps.interface is None and steps.interface_bytes is None


@pytest.mark.parametrize(
    ("every", "step_s", "exchange_s"), [(8, 1.3, 1.3), (64, 0.01, 0.64), (32, 0.02, 0.4)]
)
def test_one_exchange_in_many_steps_counts(
    monkeypatch: pytest.MonkeyPatch, every: int, step_s: float, exchange_s: float
) -> None:
    """Blocks without it, or with it alone, would be taken for usual."""
    clock = Clock()
    monkeypatch.setattr(measure, "time", clock)
    step = clock.step(*[step_s] * (every - 1), step_s + exchange_s)
    with jax.set_mesh(jaxcomm.data_mesh()):
        steps = measure.measure_steps(step, 0, clock.step(step_s), 0, None, 400, period=every)
    assert steps.step_ms - steps.compute_ms == pytest.approx(1e3 * exchange_s / every)


def test_a_moment_in_which_another_program_ran_is_not_counted() -> None:
    assert measure.usual([1.0] * 4 + [30.0] + [2.0] * 4) == pytest.approx(11 / 7)
    assert measure.usual([3.0]) == 3.0


@pytest.mark.parametrize(("seconds", "expected"), [(0.01, 200), (0.25, 40), (9.0, measure.BLOCKS)])
def test_slow_steps_are_few(monkeypatch: pytest.MonkeyPatch, seconds: float, expected: int) -> None:
    """No fewer than the blocks, and else no longer than LONGEST in all."""
    clock, taken = Clock(), itertools.count(1)
    monkeypatch.setattr(measure, "time", clock)
    plain = clock.step(seconds)

    def step(state: int, batch: Any) -> Any:
        plain(state, batch)
        return next(taken), {}

    with jax.set_mesh(jaxcomm.data_mesh()):
        measure.measure_steps(step, 0, plain, 0, None, 200)
    assert next(taken) - 1 == 2 + expected  # two tell how long one takes


class Branch(NamedTuple):
    name: str
    conditional: str = "cond"


class Wire(NamedTuple):
    """The part of a `jaxcomm.WireReport` that is looked at."""

    devices: int = 4
    rounds: int = 3
    bytes_max: float = 120.0
    named: tuple[Branch, ...] = (Branch("from step 0"),)
    conditionals: tuple[tuple[str, int], ...] = (("cond", 2),)

    def per_step(self, shares: dict[str, float]) -> float:
        return self.bytes_max * sum(shares.values())


PARAMS = {"w": jnp.zeros((8, 5))}


def test_costs_follow_from_their_parts() -> None:
    steps = measure.Steps(5.0, 4.0, {}, "lo", 130.0)
    network = measure.Bandwidth(0.0024, "config")
    predicted = predicting.Predicted(latency_ms=0.1, bytes_ms=0.4, local_ms=0.3)
    sent = measure.Sent(Wire(), config_dict.create(dense_steps=50), PARAMS)
    found = measure.costs(steps, sent, network, predicted)
    assert found["communication_ms"] == pytest.approx(1.0)
    assert found["efficiency"] == pytest.approx(0.8)
    assert found["predicted_efficiency"] == pytest.approx(4.0 / 4.8)
    assert found["predicted_ms"] == pytest.approx(0.8) and found["predicted_largest"] == "bytes"
    assert found["bytes_per_param"] == pytest.approx(3.0)
    assert found["interface_bytes_per_param"] == pytest.approx(3.25)
    assert (found["gigabits"], found["gigabits_from"]) == (0.0024, "config")
    assert (found["devices"], found["params"], found["rounds"]) == (4, 40, 3)


def test_bytes_of_a_step() -> None:
    sent = measure.Sent(Wire(), config_dict.create(dense_steps=50), PARAMS)
    assert [sent.in_step(step, 0) for step in (1, 50, 51)] == pytest.approx([3.0, 3.0, 0.0])
    adam = measure.Sent(Wire(named=(Branch("one_bit_adam: dense"),)), config_dict.create(), PARAMS)
    assert [adam.in_step(7, frozen_at) for frozen_at in (0, 6)] == [3.0, 0.0]


def test_one_device_sends_nothing() -> None:
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:1])):
        network = measure.bandwidth(config_dict.create(gigabits=1.0, probe_mib=1))
    steps = measure.Steps(5.0, 5.0, {}, None, None)
    sent = measure.Sent(Wire(1, 0, 0.0), config_dict.create(), PARAMS)
    found = measure.costs(steps, sent, network)
    assert found["bytes_per_param"] == 0 and found["predicted_efficiency"] is None
    assert found["gigabits"] is None and found["interface_bytes_per_param"] is None


def test_the_bandwidth_is_the_configs_or_measured() -> None:
    with jax.set_mesh(jaxcomm.data_mesh()):
        given = measure.bandwidth(config_dict.create(gigabits=7.0, probe_mib=1))
        measured = measure.bandwidth(config_dict.create(gigabits=None, probe_mib=1))
    assert given == (7.0, "config")
    assert measured.gigabits is not None and measured.gigabits > 0
    assert measured.source == "a mean of 1 MiB"


def test_which_steps_are_dense() -> None:
    config = config_dict.create(dense_steps=100)
    assert sync.shares(config, 100, 0) == {"from step 0": 1.0, "one_bit_adam: dense": 1.0}
    assert sync.shares(config, 101, 100) == {"from step 0": 0.0, "one_bit_adam: dense": 0.0}
    assert sync.shares(config_dict.create(), 1, 0)["from step 0"] == 0.0
    local = config_dict.create(dense_steps=10, every=4)  # the exchanges of steps 4, 8 and 12
    found = [sync.shares(local, step, 0)["from step 0"] for step in (1, 4, 5, 12, 13, 16)]
    assert found == [1, 1, 1, 1, 0, 0]
