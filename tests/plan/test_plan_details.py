"""What else the planner refuses, counts and says."""

import dataclasses
import pickle
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm import codecs, plan
from jaxcomm.collectives._sending import LEAST_SWAPPED
from jaxcomm.plan.fabrics import star
from jaxcomm.plan.families import Method
from jaxcomm.plan.simulate import Model, Simulation
from jaxcomm.plan.steps import Pairs

FREE = plan.Costs("none", 0.0, 0.0, 1.0, False, 0.0, False, False, 0.0, {})


def room(hosts: int = 4, rate: Any = "1Gbit", costs: plan.Costs = FREE) -> plan.Cluster:
    return plan.cluster(star("room", hosts, rate), costs)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("efficiency: 1.0", "efficiency: 0.0", r"efficiency is a share in \(0, 1\], got 0.0"),
        ("local: {}", "local: {int8: [-1e-9, 1e-9]}", "int8 takes seconds per value, 0 or more"),
        ("local: {}", "local: {int8: [1e-9, x]}", "int8 takes seconds per value, among"),
        ("stripes: false", "stripes: 1", "stripes is true or false, got 1"),
        ("half_duplex: false", "half_duplex: 1", "half_duplex is true or false, got 1"),
        ("source: none", "source: 3", "source is a text, got 3"),
    ],
)
def test_a_wrong_file_is_one_line(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.yaml"
    FREE.save(path)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ValueError, match=message):
        plan.read_costs(path)


@pytest.mark.parametrize(("field", "value"), [("half_duplex", True), ("swap", 1e-9)])
def test_what_behaves_as_cpus_do(field: str, value: Any) -> None:
    assert dataclasses.replace(FREE, **{field: value}).is_between_cpus


def test_of_gpus_no_error_is_known_also_where_they_were_measured() -> None:
    assert not dataclasses.replace(FREE, source="measured").are_measured
    assert dataclasses.replace(FREE, source="measured", swap=1e-9).are_measured


def test_the_headline_goes_from_float32_to_the_choice() -> None:
    found = plan.plan(room(rate="50Mbit"), plan.workload(4e6, 100.0), "16bit")
    (before, after), (little, more) = (
        map(float, found_.groups())
        for found_ in (
            re.search(r"([\d.,]+) -> ([\d.,]+) ms a step", found.headline.replace(",", "")),
            re.search(r"([\d.]+)% -> ([\d.]+)% of it computes", found.headline),
        )
        if found_
    )
    assert before == pytest.approx(1e3 * found.float32.step, rel=0.01)
    assert after == pytest.approx(1e3 * found.choice.step, rel=0.01)
    assert little == pytest.approx(100 * found.float32.efficiency, abs=0.1)
    assert more == pytest.approx(100 * found.choice.efficiency, abs=0.1)


def test_what_compressing_would_save_at_most() -> None:
    """A share of the step of the choice."""
    costs = dataclasses.replace(FREE, local={"float32": (0.0, 0.0), "int8": (0.0, 0.0)})
    made, load = room(costs=costs), plan.workload(4e6, 100.0)
    for family, what in (("bfloat16", "16 bits"), ("int8", "compressing")):
        chosen = [Method("float32", "native"), Method(family, "direct")]
        found = plan.plan(made, load, chosen=chosen)
        dense, other = found.float32, next(r for r in found.rows if r.method == chosen[1])
        better = dataclasses.replace(found, rows=(dense, other))
        share = 1 - other.step / dense.step
        assert better.headline.endswith(
            f", and {what} would save at most {share:.1%} of a step ({family}/direct)."
        )
    both = [Method(name, "direct") for name in ("bfloat16", "int8")]
    found = plan.plan(made, load, chosen=[Method("float32", "native"), *both])
    rows = (found.float32, *(row for row in found.rows if row.method in both))
    assert "and compressing would save" in dataclasses.replace(found, rows=rows).headline


def test_two_names_need_two_levels() -> None:
    found = plan.plan(room(), plan.workload(4e6, 100.0))
    with pytest.raises(ValueError, match="this cluster has no two levels; name one axis"):
        found.mesh(("far", "near"), jax.devices()[:4])


def test_a_line_of_the_table() -> None:
    costs = dataclasses.replace(FREE, overlap=True)
    found = plan.plan(room(costs=costs), plan.workload(4e6, 100.0, 4), "exact")
    row = found.float32
    (line,) = [x for x in found.lines() if x.startswith("float32/native ")]
    _, exchange, _, exposed, step, computes, speedup, link, ends = line.split()
    assert float(exchange) == pytest.approx(1e3 * row.exchange, abs=0.1)
    assert float(exposed) == pytest.approx(1e3 * row.exposed, abs=0.1)
    assert row.exposed < 0.9 * row.exchange
    assert float(step) == pytest.approx(1e3 * row.step, abs=0.1)
    assert float(link) == pytest.approx(row.bytes_busiest_link / 1e6, abs=0.01)
    assert (computes, speedup) == (f"{row.efficiency:.1%}", "1.00")
    assert ends == "-".join(row.busiest_link)
    assert "100 ms a step without exchange, 4 accumulated" in found.lines()[2]


def test_a_default_is_kept_where_another_is_hardly_faster() -> None:
    """A ring here takes 3 % less than going directly."""
    n = 2**20
    sent = 1.5 * codecs.int8().message_bytes(n)
    try:
        for share, is_ring in ((0.03, False), (0.08, True)):
            # Seconds of codes that are so much of those of going directly.
            codes = share * 8e-6 * sent / 1000 / (1 - share) / n
            local = {"int8": (codes, codes), "int8/ring": (0.0, 0.0)}
            plan.use(room(costs=dataclasses.replace(FREE, local=local)))
            with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
                tx = jaxcomm.mean("data", "int8")
                travels = str(jaxcomm.explain(tx, {"w": jnp.zeros((1024, 1024))}))
            assert ("int8, direct" in travels) == (not is_ring), travels
    finally:
        plan.use(None)


def test_votes_of_few_and_of_an_odd_number_of_devices() -> None:
    """Which two clusters cannot decide, or have one device each."""
    try:
        for devices in (2, 3, 5, 7):
            plan.use(plan.cluster(plan.fabrics.chain("row", devices, "10Mbit")))
            with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:devices])):
                tx = jaxcomm.majority_vote("data")
                params = {"w": jnp.zeros((1024, 1024))}
                jaxcomm.explain(tx, params)
    finally:
        plan.use(None)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("fabric: star\nhosts: 2\nrate: .inf", "line 3: rate is inf Mbit/s; rates are positive"),
        ("fabric: star\nhosts:\nrate: 5", "line 2: hosts is empty; give it a value"),
        (
            "fabric: clusters\nhosts: 2\nrate: 5\nmiddle:",
            "line 4: middle is empty; give it a value",
        ),
        ("fabric: chain\nhosts: 2\nrate: 5\nrates: &a [*a]", "line 4: a rate is a number"),
    ],
)
@pytest.mark.timeout(60)
def test_what_cannot_be_is_refused(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=error):
        plan.load(str(path))


@pytest.mark.parametrize("accumulate", [0, -1, 2.5, True])
def test_microbatches_are_a_whole_number(accumulate: Any) -> None:
    with pytest.raises(ValueError, match=f"accumulate is 1, 2, ..., got {accumulate}"):
        plan.workload(1e6, 1.0, accumulate)


def test_a_step_that_never_ends() -> None:
    with pytest.raises(ValueError, match="a step takes a positive time, got inf"):
        plan.workload(1e6, float("inf"))


def test_a_flag_for_each_leaf() -> None:
    with pytest.raises(ValueError, match="exempt has 1 entries for 2 leaves"):
        plan.Workload(((8, 8), (8,)), 1.0, exempt=(True,))


def test_a_time_is_a_number() -> None:
    called: Any = plan.workload
    with pytest.raises(TypeError, match="step_ms is a number of milliseconds, got '234'"):
        called(1e6, "234")


def test_two_rows_are_a_matrix() -> None:
    assert plan.workload(2048, 1.0).shapes == ((2, 1024),)


def test_hosts_are_not_counted_from_the_end() -> None:
    with pytest.raises(ValueError, match="numbers from 0 to 3, each once"):
        Simulation(star("star", 4, 100), hosts=[0, 1, -1])


def test_the_shortest_message_that_is_swapped() -> None:
    pair = Pairs(np.arange(2), np.asarray([1, 0]))
    cost = Simulation(star("star", 2, 8), Model(half_duplex=True)).cost(pair)
    assert cost.seconds(LEAST_SWAPPED) == pytest.approx(LEAST_SWAPPED / 1e6)
    assert cost.seconds(LEAST_SWAPPED - 1) == pytest.approx(2 * (LEAST_SWAPPED - 1) / 1e6)


def test_functions_that_use_the_module_are_sent_to_other_processes() -> None:
    """As cloudpickle does, which sends modules by name only if their class is that of modules."""
    assert pickle.loads(pickle.dumps(plan)) is plan
