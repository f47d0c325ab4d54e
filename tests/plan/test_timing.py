"""The leading methods of a plan, timed."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

import jaxcomm
from jaxcomm import plan
from jaxcomm.plan import timing
from jaxcomm.plan.families import SCHEDULED, Method
from processes import run_processes

BF16 = Method("bfloat16", "ring")
VOTE, OTHER_VOTE = Method("vote", "direct"), Method("vote", "ring")
FLOAT32, INT8, CNAT = Method("float32", "native"), Method("int8", "ring"), Method("cnat", "ring")
INT4 = Method("int4", "ring")


def planned(predicted: dict[Method, float], compute: float = 1.0) -> plan.Plan:
    """A plan of four devices with these exchanges, in seconds; the first is the choice."""
    costs = dataclasses.replace(plan.defaults("cpu"), half_duplex=False)
    room = plan.cluster(plan.fabrics.star("room", 4, "1Gbit"), costs)
    load = plan.workload({"w": jax.ShapeDtypeStruct((64, 64), "float32")}, 1e3 * compute)
    found = plan.plan(room, load, chosen=list(predicted))
    by_method = {row.method: row for row in found.rows}
    rows = tuple(
        plan.predict.with_exchange(room, load, by_method[method], seconds, error=0.2)
        for method, seconds in predicted.items()
    )
    return dataclasses.replace(found, rows=rows)


@pytest.fixture
def taking(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[plan.Plan, list[Method]]]:
    """Times a plan whose exchanges take so long; also says what was made."""

    def timed(found: plan.Plan, seconds: dict[Method, float]) -> tuple[plan.Plan, list[Method]]:
        made: list[Method] = []

        def exchanges(found: plan.Plan, mesh: Any, methods: Any, devices: Any) -> list[Any]:
            made.extend(methods)
            return list(methods)

        monkeypatch.setattr(timing, "_exchanges", exchanges)
        times = lambda mesh, runs, repeats: {method: seconds[method] for method in runs}  # noqa: E731
        monkeypatch.setattr(timing, "_medians", times)
        monkeypatch.setattr(timing, "_quick", lambda mesh, run: 1)
        return plan.timed(found, jax.devices()[:4]), made

    return timed


def test_the_fastest_of_those_that_may_lead_is_taken(taking: Any) -> None:
    found = planned({BF16: 0.50, INT8: 0.49, VOTE: 0.6, CNAT: 0.7, OTHER_VOTE: 0.8, FLOAT32: 1.5})
    times = {BF16: 0.6, INT8: 0.5, VOTE: 0.9, CNAT: 1.0, FLOAT32: 2.0}
    result, made = taking(found, times)
    assert made == [BF16, INT8, VOTE, FLOAT32, CNAT]  # the last is the fastest unbiased one
    assert result.choice.method == INT8 and result.choice.exchange == 0.5
    assert result.choice.speedup == pytest.approx(3.0 / 1.5)  # over float32 as it was timed
    by_method = {row.method: row for row in result.rows}
    assert all(by_method[method].error == 0 for method in made)
    assert by_method[OTHER_VOTE].exchange == pytest.approx(0.8 * 0.9 / 0.6)
    assert "timed" in result.lines()[4] and "timed" not in result.lines()[-2]


def test_far_slower_ones_and_those_predicted_alike_are_not_timed() -> None:
    alike = planned({BF16: 0.5, Method("float16", "ring"): 0.5, INT8: 0.50001, FLOAT32: 1.5})
    assert [row.method for row in timing.finalists(alike.rows)] == [BF16, INT8, FLOAT32]
    exact = planned({BF16: 0.5, Method("float32", "ring"): 1.2, FLOAT32: 1.5})
    names = [row.method.name for row in timing.finalists(exact.rows)]
    assert names == ["bfloat16/ring", "float32/native", "float32/ring"]
    near = planned({BF16: 0.5, VOTE: 0.94, INT8: 0.96, FLOAT32: 1.5})  # 1.3 * 1.5 = 1.95
    assert [row.method for row in timing.finalists(near.rows)] == [BF16, VOTE, FLOAT32]


def test_who_leads_when_others_disappoint_is_timed_too(taking: Any) -> None:
    """What is not timed is thought to disappoint as its family does; at most eight are timed."""
    found = planned({VOTE: 0.1, OTHER_VOTE: 0.12, BF16: 0.5, INT4: 0.55, INT8: 0.6, FLOAT32: 2.0})
    times = {VOTE: 1.0, OTHER_VOTE: 1.3, BF16: 0.65, INT4: 0.9, INT8: 0.64, FLOAT32: 2.1}
    result, made = taking(found, times)
    assert made == [VOTE, OTHER_VOTE, FLOAT32, BF16]
    assert result.choice.method == BF16
    int8 = next(row for row in result.rows if row.method == INT8)
    # In proportion to the median of votes, bfloat16 and float32: of what was far off for votes.
    assert int8.exchange == pytest.approx(0.6 * 1.3) and int8.error > 5
    # Where families were right, nobody is pulled along.
    result, made = taking(found, times | {VOTE: 0.7, OTHER_VOTE: 0.12, FLOAT32: 2.0})
    assert result.choice.method == OTHER_VOTE


def test_those_far_behind_are_not_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned({BF16: 0.5, INT8: 0.6, FLOAT32: 1.5})
    asked = []

    def measure(methods: Any, longest: float | None) -> dict[Method, float]:
        asked.append((list(methods), longest))
        return {m: {BF16: 0.7, INT8: 0.6, FLOAT32: 1.5}[m] for m in methods}

    assert timing.settle(found, measure).choice.method == INT8
    assert asked == [([BF16, INT8, FLOAT32], None), ([BF16, INT8], 0.7)]


def test_not_to_compress_may_be_what_is_found(taking: Any) -> None:
    found = planned({BF16: 0.5, FLOAT32: 0.6, VOTE: 0.7, OTHER_VOTE: 0.8})
    result, made = taking(found, {BF16: 0.62, FLOAT32: 0.6, VOTE: 0.63})
    assert made == [BF16, FLOAT32, VOTE]
    assert result.headline.startswith("Do not compress: float32")
    assert "would save nothing (bfloat16/ring)" in result.headline  # of what was timed
    assert result.choice.speedup == 1.0 and result.rows[1].speedup == pytest.approx(1.6 / 1.62)


def test_of_algorithms_that_are_as_fast_the_default_between_cpus_is_taken(taking: Any) -> None:
    usual, other = Method("cnat", "two_way_ring"), Method("cnat", "direct")
    found = planned({other: 0.5, usual: 0.52, FLOAT32: 1.5})
    result, _ = taking(found, {other: 0.5, usual: 0.505, FLOAT32: 1.5})
    assert result.choice.method == usual


def test_exchanges_are_real() -> None:
    """Of dense, sparse, low-rank and two-level methods, with a state and an exempt leaf."""
    room = plan.cluster(plan.fabrics.clusters("rooms", hosts=4, rate="100Mbit"))
    params = {
        "w": jax.ShapeDtypeStruct((64, 32), "float32"),
        "b": jax.ShapeDtypeStruct((32,), "f4"),
    }
    load = plan.workload(params, 1.0)
    chosen = [Method("int8", "ring"), Method("oktopk", "own"), Method("powersgd1", "native")]
    chosen.append(Method("scaled_sign", "hierarchical"))
    found = plan.plan(room, load, chosen=chosen)
    devices = jax.devices()[:4]
    for run in timing._exchanges(found, found.mesh("data", devices), chosen, devices):
        updates, _ = run()
        assert [u.shape for u in updates] == [(32,), (64, 32)]
        assert all(np.isfinite(u).all() and np.any(u) for u in updates)
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:8])):  # not the plan's
        result = plan.timed(found, jax.devices()[:4])
    assert result.choice.error == 0 and {r.method for r in result.rows} == {*chosen, FLOAT32}


def test_one_device_has_nothing_to_time() -> None:
    alone = plan.cluster(plan.fabrics.star("one", 1, "1Gbit"))
    found = plan.plan(alone, plan.workload(1e6, 1.0))
    assert plan.timed(found, jax.devices()[:1]) is found


def test_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="timed takes a plan, such as plan"):
        plan.timed(plan.cluster(plan.fabrics.star("room", 4, "1Gbit")))  # pyright: ignore[reportArgumentType]
    found = planned({BF16: 0.5, FLOAT32: 0.6})
    with pytest.raises(ValueError, match="the cluster has 4 devices, got 3; plan for the hosts"):
        plan.timed(found, jax.devices()[:3])


@pytest.mark.multiprocess
def test_processes_find_the_same() -> None:
    script = """
        from jaxcomm import plan
        room = plan.cluster(plan.fabrics.star("room", 2, "unlimited"), plan.defaults("cpu"))
        found = plan.timed(plan.plan(room, plan.workload(1e5, 1.0), "16bit"))
        print(sum(row.error == 0 for row in found.rows) >= 2, found.as_json())
    """
    lines = [process.stdout.splitlines()[-1] for process in run_processes(2, script)]
    assert lines[0] == lines[1] and lines[0].startswith("True")


def test_costs_that_are_free(taking: Any) -> None:
    found = planned({BF16: 0.0, FLOAT32: 0.0})
    result, made = taking(found, {BF16: 0.5, FLOAT32: 0.4})
    assert made == [BF16, FLOAT32] and result.choice.method == FLOAT32


def test_what_was_not_timed_on_gpus_has_no_error() -> None:
    """An error of 0 is that of rows that were."""
    room = plan.cluster(plan.fabrics.star("room", 8, "10Gbit"), plan.defaults("gpu"))
    found = plan.plan(room, plan.workload(25.6e6, 100.0))
    seconds = {row.method: 2 * row.exchange for row in found.rows}
    timed_: set[Method] = set()

    def measure(methods: Sequence[Method], longest: float | None) -> dict[Method, float]:
        timed_.update(methods)
        return {method: seconds[method] for method in methods}

    rows = timing.settle(found, measure).rows
    assert {row.method for row in rows if row.error == 0} == timed_
    assert {row.error for row in rows if row.method not in timed_} == {None}


def test_of_methods_predicted_alike_the_default_is_timed(taking: Any) -> None:
    ways = [Method("bfloat16", name) for name in SCHEDULED]
    usual = next(m for m in ways if m.is_usual(4, True, 64 * 64))
    other = next(m for m in ways if m != usual)
    found = planned({FLOAT32: 0.5, other: 0.2, usual: 0.2})
    result, made = taking(found, {FLOAT32: 0.5, other: 0.2, usual: 0.2})
    assert usual in made and result.choice.method == usual


def test_only_what_was_timed_is_chosen() -> None:
    """Not int8, although it is as near as it is good, where three others are timed before it."""
    third = Method("vote", "circulant")
    seconds = {VOTE: 0.5, OTHER_VOTE: 0.505, third: 0.507, INT8: 0.51, FLOAT32: 1.5}
    found = planned(seconds)
    result = timing.settle(found, lambda methods, _: {m: seconds[m] for m in methods})
    assert result.choice.method.family == "vote" and result.choice.error == 0
    assert {row.method for row in result.rows if row.error} == {INT8}
    for row in result.rows:
        assert row.efficiency == pytest.approx(found.load.compute_seconds / row.step)


def test_the_work_of_a_device_is_not_hidden_also_where_it_takes_longer() -> None:
    """On GPUs messages are hidden, but for those of the last bucket; all parts take as long."""
    room = plan.cluster(plan.fabrics.star("room", 8, "100Gbit"), plan.defaults("gpu"))
    load = plan.workload(25.6e6, 1000.0)
    found = plan.predict.predictions(room, load, chosen=[INT4])
    row = next(row for row in found if row.method == INT4)
    again = plan.predict.with_exchange(room, load, row, 3 * row.exchange, error=0.0)
    assert row.exposed < row.exchange
    assert again.exposed == pytest.approx(3 * row.exposed)
