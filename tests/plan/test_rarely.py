"""Methods that exchange in every n-th step, as `jaxcomm.local_steps` does."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import plan
from jaxcomm.plan.families import methods
from jaxcomm.plan.predict import choose, predictions

LOAD = plan.workload(4e6, 100.0)
OFTEN, RARELY = plan.Method("scaled_sign", "direct"), plan.Method("scaled_sign", "direct", every=4)


def star(device: str) -> plan.Cluster:
    return plan.cluster(plan.fabrics.star("star", 4, "200Mbit"), plan.defaults(device))


def both(device: str, load: plan.Workload = LOAD) -> list[plan.Prediction]:
    """The rows of the exchange in every step and in every 4th."""
    rows = {row.method: row for row in predictions(star(device), load, [OFTEN, RARELY])}
    return [rows[OFTEN], rows[RARELY]]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_step_has_a_part_of_the_exchange_and_hides_nothing(device: str) -> None:
    often, rarely = both(device)
    assert rarely.exchange == often.exchange
    assert rarely.bytes_busiest_link == often.bytes_busiest_link
    assert rarely.exposed == pytest.approx(rarely.exchange / 4)
    assert rarely.step == pytest.approx(0.1 + rarely.exchange / 4)
    assert rarely.efficiency == pytest.approx(0.1 / rarely.step)
    assert rarely.speedup == pytest.approx(often.speedup * often.step / rarely.step)
    assert (often.exposed < often.exchange) == (device == "gpu")


def test_the_bytes_are_those_of_the_transformation(make_mesh: Any) -> None:
    weights = jax.ShapeDtypeStruct((1024, 1024), "float32")
    with jax.set_mesh(make_mesh(4)):
        tx = jaxcomm.local_steps(
            optax.sgd(1e-3), RARELY.every, optax.sgd(1.0), RARELY.transformation("data")
        )
        sent = float(jaxcomm.explain(tx, weights).bytes_max)
    row = both("cpu", plan.workload({"w": np.zeros((1024, 1024))}, 1.0))[1]
    assert row.bytes_busiest_link == pytest.approx(sent, rel=0.01)


def test_an_exchange_in_every_step_is_preferred() -> None:
    rows = [dataclasses.replace(row, step=1.0) for row in both("cpu")]
    assert choose(rows[::-1], LOAD, star("cpu"))[0].method == OFTEN


def test_any_quality_has_it_and_its_needs_are_told() -> None:
    room = plan.cluster(plan.fabrics.star("star", 4, "50Mbit"))
    found = plan.plan(room, LOAD, "any", optimizer="adam")
    assert found.choice.method == RARELY
    assert found.headline.startswith("Exchange in one of 4 steps, scaled_sign/direct/every4: ")
    assert "; needs error feedback, jaxcomm.local_steps, its rates" in found.headline
    row = json.loads(json.dumps(found.as_json()))[0]
    assert (row["config"]["every"], row["config"]["method"]) == (4, "mean")
    assert "local_optimizer" not in row["config"]
    assert not any(m.every > 1 for m in methods("unbiased"))


def test_one_of_ones_own() -> None:
    """DiLoCo in 16 bits, which trains like float32 only if it is in every step."""
    room = plan.cluster(plan.fabrics.star("star", 4, "50Mbit"))
    diloco = plan.Method("bfloat16", "ring", every=32)
    found = plan.plan(room, LOAD, chosen=[diloco, plan.Method("float32", "ring", every=500)])
    assert found.choice.method.name == "float32/ring/every500"
    assert found.headline.startswith("Exchange in one of 500 steps, float32/ring/every500: ")
    assert diloco.quality == "any" and diloco.needs.startswith("jaxcomm.local_steps, its rates")
    with pytest.raises(ValueError, match="bfloat16/ring/every32 is of lower quality than '16bit'"):
        plan.plan(room, LOAD, "16bit", [diloco])


@pytest.mark.parametrize(
    ("family", "every", "message"),
    [
        ("bfloat16", 0, "every is 1, 2, ... steps, got 0"),
        ("bfloat16", 2.0, "every is 1, 2, ... steps, got 2.0"),
        ("vote", 4, "local_steps exchanges means, and a vote is none; write every=1"),
    ],
)
def test_what_cannot_be(family: str, every: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan.Method(family, "ring", every=every)


def test_a_table_has_a_row_for_each_family() -> None:
    room = plan.cluster(plan.fabrics.star("star", 4, "50Mbit"))
    found = plan.plan(room, LOAD, "any")
    head = next(i for i, line in enumerate(found.lines()) if line.startswith("method"))
    shown = [line.split()[0] for line in found.lines(rows=99)[head + 1 :]]
    fastest = {}
    for row in found.rows:
        kind = (row.method.family, row.method.every, row.method.name == "float32/native")
        fastest.setdefault(kind, row.method.name)
    assert shown == list(fastest.values())
    assert "float32/native" in shown and any(name.endswith("/every4") for name in shown)
    assert len(found.lines()) - head - 1 == len(found.rows)
    assert [line.split()[0] for line in found.lines(rows=2)[head + 1 :]] == shown[:2]


def test_numbers_of_numpy_and_needs_of_ones_own() -> None:
    room = plan.cluster(plan.fabrics.star("star", 4, "50Mbit"))
    own = plan.Method("powersgd2", "native", every=np.int64(4))  # pyright: ignore[reportArgumentType]
    found = plan.plan(room, LOAD, chosen=[own])
    row = next(row for row in json.loads(json.dumps(found.as_json())) if "every" in row["method"])
    assert row["needs"].startswith("SGD; matrices; dense_steps at the start; jaxcomm.local_steps")
    assert "Adam" not in row["needs"]
    assert plan.load("star", hosts=np.int64(4)).hosts == plan.load("star", hosts=4).hosts
    assert hash(plan.workload({"w": np.zeros((4, 4))}, 5.0, exempt=["w"]))
    with pytest.raises(ValueError, match=r"^links=\[\['h0'\]\]: a link is \[end, end\]"):
        plan.load_cluster("chain", {"fabric": "explicit", "hosts": 2, "links": "[[h0]]"})
