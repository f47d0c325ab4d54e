"""Clusters: what their files and settings say, and what is refused."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxcomm import plan
from jaxcomm.plan.families import Method
from jaxcomm.plan.predict import predictions

FREE = plan.Costs("none", 0.0, 0.0, 1.0, False, 0.0, False, False, 0.0, {})
STAR = "fabric: star\nhosts: 4\nrate: 1\ndevice: gpu\n"
EXPLICIT = "fabric: explicit\nhosts: 2\nlinks:\n- [h0, h1, 3]\n"


@pytest.mark.parametrize(
    ("text", "sets", "message"),
    [
        ("fabric: star\nhosts: 4\nrate: 0\n", {}, "line 3: rate is 0 Mbit/s"),
        ("fabric: star\nhosts: 4\nrate: 1 parsec\n", {}, "line 3: a rate is a number of Mbit/s"),
        ("fabric: star\nhosts: 4\nrate: 1\nnodes: 3\n", {}, "line 4: nodes has devices, nics"),
        ("fabric: star\nhosts: 4\nrate: 1\nnodes: {gpus: 3}\n", {}, "line 4: unknown key 'gpus'"),
        ("fabric: star\nhosts: 4\nrate: 1\norder: [0, 1]\n", {}, "line 4: order names every host"),
        (
            "fabric: star\nhosts: 4\nrate: 1\ndevice: abacus\n",
            {},
            "line 4: unknown device 'abacus'",
        ),
        ("fabric: star\nhosts: 4\nrate: 1\ncosts: no.yaml\n", {}, "line 4: there is no file"),
        (
            "fabric: explicit\nhosts: 1\nlinks: []\nnodes: {nics: 2}\n",
            {},
            "line 4: an explicit network has its cards in links",
        ),
        (
            "version: 9\nfabric: star\nhosts: 4\nrate: 1\n",
            {},
            "line 1: the file is version 9; this",
        ),
        ("fabric: star\nhosts: 2\nrate: 1\norder: [0, '1']\n", {}, "line 4: order names every"),
        ("fabric: star\nhosts: 2\nrate: 1\norder: [0, yes]\n", {}, "line 4: order names every"),
        ("fabric: star\nhosts: 4\nrate: 1\ndevice: [a]\n", {}, r"line 4: unknown device \['a'\]"),
        (STAR, {"device": "tpu"}, "^device=tpu: unknown device 'tpu'; write cpu or gpu"),
        (STAR + "costs: no.yaml\n", {"device": "cpu"}, "^device=cpu: device chooses default costs"),
        (STAR, {"order": "[0, 0]"}, r"^order=\[0, 0\]: order names every host from 0 to 3 once"),
        (STAR, {"costs": "no.yaml"}, "^costs=no.yaml: there is no file"),
        (STAR, {"nodes.devices": "0"}, "^nodes.devices=0: devices is a positive number, got 0"),
        (STAR, {"nodes.nics": "0"}, "^nodes.nics=0: nics is a positive number, got 0"),
        (STAR, {"nodes.bandwidth": "foo"}, "^nodes.bandwidth=foo: a rate is a number of Mbit/s"),
        (STAR, {"nodes.bandwidth": "-1"}, "^nodes.bandwidth=-1: bandwidth is -1 Mbit/s"),
        (
            STAR,
            {"nodes.devices": "2", "nodes.bandwidth": ".inf"},
            "^nodes.bandwidth=inf: bandwidth",
        ),
        (STAR, {"link[h0,s0].rate": ".nan"}, r"^link\[h0,s0\]=nan: nan Mbit/s; rates are positive"),
        ("fabric: star\nhosts: 4.0\nrate: 1\n", {}, "line 2: hosts is a whole number, got 4.0"),
        (EXPLICIT + "- [h0, h1, 2Mb/t]\n", {}, "line 5: a rate is a number of Mbit/s, or such as"),
        (EXPLICIT + "- [h0]\n", {}, r"line 5: a link is \[end, end\] or .*, got \['h0'\]"),
        (STAR, {"nodes.gpus": "1"}, "^nodes.gpus=1: unknown key 'gpus' of nodes"),
        (STAR, {"link[h0,s0].rate": "foo"}, r"^link\[h0,s0\]=foo: a rate is a number of Mbit/s"),
        (STAR, {"rate": "[1"}, r"^rate=\[1: this is not YAML: "),
        ("fabric: star\nhosts: 4\nrate: 1\n", {"link[s0,h9].rate": 5}, "there is no such link"),
        ("fabric: star\nhosts: 4\nrate: 1\n", {"link.rate": 5}, r"write link\[s0,s1\]"),
        ("fabric: star\nhosts: 4\nrate: 1\n", {"gpus.rate": 5}, "gpus.rate: unknown setting"),
        ("fabric: star\nhosts: 4\nrate: 1\n", {"rate": "-3"}, "rate=-3: rate is -3 Mbit/s"),
        ("fabric: explicit\nhosts: 3\nlinks: [[h0, h1, 5]]\n", {}, "no path leads from h0 to h2"),
        ("fabric: explicit\nhosts: 2\nlinks: [[h0, h1]]\n", {}, r"\['h0', 'h1'\] has no rate"),
        ("fabric: explicit\nhosts: 2\nlinks:\n", {}, "line 3: links is empty"),
        ("fabric: star\nhosts: 4\nrate:\n", {}, "line 3: rate is empty; .* or unlimited"),
        (STAR, {"nodes.devices": "2000"}, "^nodes.devices=2000: .* more than 4096 devices"),
        (STAR, {"nodes.nics": "2", "links_per_host": "8"}, "nics is 2, but links_per_host 8"),
    ],
)
def test_a_wrong_cluster_is_one_line(
    text: str, sets: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        plan.load_cluster(str(path), sets)
    assert "\n" not in str(error.value)


def test_settings_change_a_link() -> None:
    slow = plan.load_cluster("clusters", {"link[0,1].bandwidth": "10Mbit", "hosts": "4"}, FREE)
    rates = {link.ends: link.rate for link in slow.topology.links}
    assert rates["s0", "s1"] == 10 and rates["h0", "s0"] == 50
    doubled = plan.load_cluster("star", {"links_per_host": "2"}, FREE)
    assert len(doubled.topology.links) == 2 * doubled.devices


def test_machines_of_gpus(tmp_path: Path) -> None:
    """By hand: on 8 x 8 behind 8 cards of 400 Gbit/s, and in one machine, nothing is gained."""
    path = tmp_path / "nodes.yaml"
    nodes = "{devices: 8, nics: 8, bandwidth: 3600Gbit}"
    path.write_text(f"fabric: star\nhosts: 8\nrate: 400Gbit\ndevice: gpu\nnodes: {nodes}")
    load = plan.workload(7e9, 1500.0)
    for hosts, seconds in ((8, 2 * 63 / 64 * 28e9 / (8 * 50e9)), (1, 1.75 * 28e9 / 450e9)):
        made = plan.load_cluster(str(path), {"hosts": hosts})
        found = plan.plan(made, load)
        row = found.float32
        assert row.exchange - row.latency - row.local == pytest.approx(seconds / 0.93, rel=0.05)
        assert found.headline.startswith("Do not compress: float32; 99")
        assert row.error is None and row.as_json()["interval_ms"] is None
        assert all(" ? " in line for line in found.lines()[4:])
    assert "links of 400,000 to 3,600,000 Mbit/s" in found.lines()[2]


def test_one_device_has_no_bandwidth_within(tmp_path: Path) -> None:
    path = tmp_path / "flow.yaml"
    path.write_text("fabric: star\nhosts: 2\nrate: 100Gbit\nnodes: {bandwidth: 5Gbit}")
    with pytest.raises(ValueError, match="bandwidth is that of several devices within"):
        plan.load_cluster(str(path))


def test_ranks_that_a_cluster_gives_are_those_of_the_devices(tmp_path: Path) -> None:
    """Machines 0 and 1 are behind one switch; rank 1 is machine 2."""
    path = tmp_path / "rooms.yaml"
    path.write_text("fabric: clusters\nhosts: 4\nrate: 1Gbit\nmiddle: 100Mbit\norder: [0, 2, 1, 3]")
    found = plan.plan(plan.load_cluster(str(path), costs=FREE), plan.workload(4e6, 100.0))
    assert found.given_order == (0, 2, 1, 3) and found.cluster.order == (0, 1, 2, 3)
    ranks = jax.devices()[:4]
    assert list(found.mesh("data", ranks).devices) == [ranks[i] for i in (0, 2, 1, 3)]
    as_given = plan.plan(found.cluster, plan.workload(4e6, 100.0), reorder=False)
    assert list(as_given.mesh("data", ranks).devices) == ranks


def test_two_cards_halve_the_time_of_a_machine(tmp_path: Path) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text("fabric: star\nhosts: 2\nrate: 1Gbit\nnodes: {devices: 4}")

    def exchange(costs: plan.Costs, algorithm: str, **sets: int) -> float:
        made = plan.load_cluster(str(path), {f"nodes.{k}": v for k, v in sets.items()}, costs)
        method = Method("float32", algorithm)
        found = predictions(made, plan.workload(4e6, 100.0), chosen=[method])
        return next(row.exchange for row in found if row.method == method)

    # A message takes one cable, the number of its target says which; NCCL's rings take all.
    striped = dataclasses.replace(FREE, stripes=True)
    for costs in (FREE, striped):
        assert exchange(costs, "direct", nics=2) < 0.8 * exchange(costs, "direct")
        assert exchange(costs, "ring", nics=2) == exchange(costs, "ring")
    for algorithm in ("native", "direct"):
        both = exchange(striped, algorithm, nics=2)
        assert both == pytest.approx(0.5 * exchange(striped, algorithm))
    assert exchange(FREE, "native", nics=2) == exchange(FREE, "native")


def test_an_explicit_network_by_itself_or_with_numbers_for_names(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("fabric: explicit\nhosts: 1\nlinks: []\n")
    alone = plan.plan(plan.load_cluster(str(tmp_path / "one.yaml")), plan.workload(1e6, 20.0))
    assert alone.headline.endswith("one device has nothing to exchange.")
    text = "links: [[h0, 1], [h1, 2], [1, 2]]\nswitches: [1, 2]\nnodes: {nics: 1}\n"
    (tmp_path / "two.yaml").write_text(f"fabric: explicit\nhosts: 2\nrate: 1Gbit\n{text}")
    assert plan.load_cluster(str(tmp_path / "two.yaml")).topology.switches == ("1", "2")


def test_costs_are_read_before() -> None:
    with pytest.raises(TypeError, match=r"plan.read_costs\('costs.yaml'\)"):
        plan.load_cluster("star", costs="costs.yaml")  # type: ignore[arg-type]


def test_the_files_of_the_planners_page_can_be_read(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "planner.md"
    found = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
    for number, text in enumerate(found):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        assert plan.load_cluster(str(path)).devices == 4
    assert len(found) == 2


def test_of_sparse_means_only_gtopk_takes_one_cable(tmp_path: Path) -> None:
    """It goes by pairs; the others are collectives of XLA, for which NCCL takes all cables."""
    path = tmp_path / "nodes.yaml"
    path.write_text("fabric: star\nhosts: 4\nrate: 1Gbit")
    costs = dataclasses.replace(FREE, stripes=True)
    chosen = [Method(name, "own") for name in ("gtopk", "topk_allgather")]
    one, two = (
        {row.method.family: row.exchange for row in predictions(made, load, chosen=chosen)}
        for load in [plan.workload(4e6, 100.0)]
        for made in (plan.load_cluster(str(path), {"nodes.nics": n}, costs) for n in (1, 2))
    )
    assert two["gtopk"] == one["gtopk"]
    assert two["topk_allgather"] == pytest.approx(0.5 * one["topk_allgather"])


def test_devices_that_are_not_in_the_order_of_their_switches_have_one_level(tmp_path: Path) -> None:
    text = "fabric: clusters\nhosts: 4\nrate: 1Gbit\nmiddle: 100Mbit\n"
    for order, levels in (("[0, 1, 2, 3]", (2, 2)), ("[0, 2, 1, 3]", None)):
        (tmp_path / "rooms.yaml").write_text(f"{text}order: {order}\n")
        assert plan.load_cluster(str(tmp_path / "rooms.yaml")).levels == levels


def test_a_better_order_may_have_two_levels(tmp_path: Path) -> None:
    """What is planned for shuffled machines is what is planned for sorted ones."""
    text = "fabric: clusters\nhosts: 12\nrate: 1Gbit\nmiddle: 100Mbit\n"
    found = []
    for order in (list(range(12)), [6 * (i % 2) + i // 2 for i in range(12)]):
        (tmp_path / "rooms.yaml").write_text(f"{text}order: {order}\n")
        made = plan.load_cluster(str(tmp_path / "rooms.yaml"), costs=FREE)
        found.append(plan.plan(made, plan.workload(25e6, 1000.0)))
    assert found[0].choice.method.algorithm == "hierarchical"
    assert found[0].as_json() == found[1].as_json()


def test_an_order_in_which_only_halving_doubling_is_faster(tmp_path: Path) -> None:
    text = "fabric: dln\nhosts: 8\nrate: 1Gbit\nshortcut: 100Mbit\n"
    steps = []
    for order in (list(range(8)), [4, 3, 6, 0, 5, 1, 7, 2]):
        (tmp_path / "loop.yaml").write_text(f"{text}order: {order}\n")
        made = plan.load_cluster(str(tmp_path / "loop.yaml"), costs=FREE)
        steps.append(plan.plan(made, plan.workload(25e6, 234.0)).choice.step)
    assert steps[1] == pytest.approx(steps[0])


@pytest.mark.parametrize(("params", "rate"), [(25e6, "10Gbit"), (8e3, "10Mbit")])
def test_the_ring_of_xla_is_no_faster_on_more_hosts(params: float, rate: str) -> None:
    """Two hosts send to each other at once in it, unlike in messages of their own."""
    costs, load, times = plan.defaults("cpu"), plan.workload(params, 200.0), []
    assert costs.half_duplex and costs.swap
    for hosts in (2, 3, 4):
        made = plan.cluster(plan.fabrics.star("star", hosts, rate), costs)
        times.append(plan.plan(made, load).float32.exchange)
    assert times == sorted(times)


@pytest.mark.parametrize(
    "make",
    [
        lambda: plan.cluster("star"),
        lambda: plan.load_cluster(3),
        lambda: plan.cluster(plan.fabrics.star("star", 4, 1000), "costs.yaml"),
        lambda: plan.plan(plan.load_cluster("star"), plan.workload(1e6, 1), chosen=["int8"]),
    ],
)
def test_arguments_of_other_types(make: Any) -> None:
    with pytest.raises(
        TypeError,
        match=r"topology of plan.fabrics|plan.read_costs|plan.methods\(\)|the name of a topology",
    ):
        make()


def test_leaves_without_elements_send_nothing() -> None:
    shapes = {"v": jax.ShapeDtypeStruct((8, 8), "f4"), "z": jax.ShapeDtypeStruct((0, 4), "f4")}
    assert plan.workload(shapes, 1.0) == plan.workload({"v": shapes["v"]}, 1.0)
    with pytest.raises(ValueError, match="this tree has no values"):
        plan.workload({"z": shapes["z"]}, 1.0)


def test_measured_costs_given_as_a_setting_are_those_of_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = dataclasses.replace(plan.defaults("cpu"), latency=1e-3)
    (tmp_path / "cluster.yaml").write_text("fabric: star\nhosts: 2\nrate: 1Gbit\n")
    (tmp_path / "here").mkdir()
    costs.save(tmp_path / "here" / "costs.yaml")
    monkeypatch.chdir(tmp_path / "here")
    found = plan.load_cluster(str(tmp_path / "cluster.yaml"), {"costs": "costs.yaml"})
    assert found.costs == costs
