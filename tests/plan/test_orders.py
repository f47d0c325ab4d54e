"""The order of the ranks that a plan chooses, and what a plan says."""

import json
from typing import Any

import jax
import pytest

import jaxcomm
from jaxcomm import plan

FABRICS = ("star", "chain", "ring", "clusters", "fat_tree", "dln", "dln_2d")
LOAD = plan.workload(1e7, 100.0)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("hosts", [4, 8, 16])
@pytest.mark.parametrize("fabric", FABRICS)
def test_a_regular_network_is_no_slower_for_being_reordered(
    fabric: str, hosts: int, device: str
) -> None:
    settings = {"hosts_per_switch": 2} if fabric == "fat_tree" else {}
    network = getattr(plan.fabrics, fabric)("it", hosts=hosts, rate="10Gbit", **settings)
    cluster = plan.cluster(network, plan.defaults(device))
    found = plan.plan(cluster, LOAD)
    kept = plan.plan(cluster, LOAD, reorder=False)
    assert found.choice.step <= 1.005 * kept.choice.step
    assert found.float32.step <= 1.005 * kept.float32.step


def test_the_order_is_of_whole_numbers() -> None:
    shuffled = plan.load_cluster("chain", {"hosts": 4, "order": [2, 0, 3, 1]})
    found = plan.plan(shuffled, LOAD)
    assert found.cluster.order != shuffled.order
    assert sorted(json.loads(json.dumps(found.cluster.order))) == [0, 1, 2, 3]
    (line,) = [line for line in found.lines() if line.startswith("order of the devices")]
    assert line.startswith("order of the devices for faster messages: ")


def test_the_transformation_exempts_what_the_workload_does(make_mesh: Any) -> None:
    shapes = {n: jax.ShapeDtypeStruct((256, 256), "float32") for n in ("body", "head")}
    load = plan.workload(shapes, 1.0, exempt=["head"])
    slow = plan.cluster(plan.fabrics.star("star", 4, "50Mbit"))
    found = plan.plan(slow, load, chosen=[plan.Method("int8", "direct")])
    assert found.choice.method.family == "int8"

    def sent(**options: Any) -> float:
        with jax.set_mesh(make_mesh(4)):
            tx = found.transformation("data", **options)
            return float(jaxcomm.explain(tx, shapes).bytes_max)

    assert sent() == pytest.approx(found.choice.bytes_busiest_link, rel=0.01)
    assert sent(exempt=["head"]) == sent() > 1.5 * sent(exempt=())


def test_what_is_hidden_does_not_limit() -> None:
    fast = plan.cluster(plan.fabrics.star("star", 4, "100Gbit"), plan.defaults("gpu"))
    assert plan.plan(fast, plan.workload(25.6e6, 234.0)).limits.startswith(
        "what limits you: the step itself; an exchange in float32 takes "
    )
    slow = plan.cluster(plan.fabrics.star("star", 4, "50Mbit"))
    assert plan.plan(slow, LOAD).limits.startswith("what limits you: h0-s0 with float32 (")
    few = plan.plan(plan.cluster(plan.fabrics.star("star", 16, "10Gbit")), plan.workload(1e3, 1.0))
    assert few.limits.startswith("what limits you: latency with float32")
    assert few.limits.endswith("; fewer exchanges would help.")


@pytest.mark.parametrize("axis_name", [3, ("a", "b", "c"), ("a",), ("a", 2), None])
def test_a_mesh_has_one_axis_or_two(axis_name: Any) -> None:
    found = plan.plan(plan.cluster(plan.fabrics.star("star", 4, 100)), LOAD)
    with pytest.raises(TypeError, match="axis_name is the name of an axis, or two, such as"):
        found.mesh(axis_name, jax.devices()[:4])


@pytest.mark.parametrize(
    ("text", "mbit"),
    [("2.5Gbit", 2500), ("10 Gb/s", 10_000), ("10Gbit/s", 10_000), ("50Mbps", 50), ("8", 8)],
)
def test_rates(text: str, mbit: float) -> None:
    star = plan.fabrics.star("star", 2, text)
    assert star.links[0].rate == mbit


@pytest.mark.parametrize("text", ["1Gbitt", "Gbit", "1 GB/s", "1gbit", "", True, "1e", "1Gbit/"])
def test_what_is_no_rate(text: Any) -> None:
    with pytest.raises(ValueError, match="a rate is a number of Mbit/s, or such as 50Mbit"):
        plan.fabrics.star("star", 2, text)


def test_links_may_be_tuples() -> None:
    made = plan.fabrics.explicit("two", 2, [("h0", "h1", "1Gbit")])
    assert made.links[0].rate == 1000
