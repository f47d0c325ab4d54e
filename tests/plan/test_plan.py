"""The plan: what it chooses, what it says, and what it refuses."""

import dataclasses
import json
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm import plan
from jaxcomm.plan.__main__ import main
from jaxcomm.plan.families import Method, methods
from jaxcomm.plan.order import best_order
from jaxcomm.plan.predict import predictions
from jaxcomm.plan.simulate import Model, Simulation
from processes import run_processes

FREE = plan.Costs("none", 0.0, 0.0, 1.0, False, 0.0, False, False, 0.0, {})


def room(hosts: int = 4, rate: Any = "1Gbit", costs: plan.Costs = FREE) -> plan.Cluster:
    return plan.cluster(plan.fabrics.star("room", hosts, rate), costs)


def row_of(made: plan.Cluster, load: plan.Workload, family: str, algorithm: str) -> Any:
    method = Method(family, algorithm)
    return next(r for r in predictions(made, load, chosen=[method]) if r.method == method)


def test_two_levels_beside_exempt_leaves_in_any_order() -> None:
    """Exempt leaves go over all devices at once, also behind a hierarchical exchange."""
    rooms = plan.cluster(plan.fabrics.clusters("rooms", hosts=4, rate="100Mbit"), FREE)
    params = {
        "w": jax.ShapeDtypeStruct((64, 64), "float32"),
        "b": jax.ShapeDtypeStruct((64,), "f4"),
    }
    chosen = [Method("bfloat16", "hierarchical"), Method("bfloat16", "ring")]
    load = plan.workload(params, 1.0)
    found = [plan.plan(rooms, load, chosen=order).as_json() for order in (chosen, chosen[::-1])]
    assert found[0] == found[1] and len(found[0]) == 3


class TestNumbers:
    """With free messages and codes, times are bytes over rates."""

    load = plan.workload(4e6, 100.0)

    def test_float32_and_its_speedup(self) -> None:
        row = row_of(room(), self.load, "float32", "native")
        assert row.exchange == pytest.approx(1.5 * 4 * 4e6 * 8 / 1e9)
        assert row.step == pytest.approx(0.1 + row.exchange) and row.speedup == 1
        assert row.efficiency == pytest.approx(0.1 / row.step)

    def test_a_ring_of_votes_takes_log2_n_bits(self) -> None:
        for hosts in (2, 4, 8, 16):
            row = row_of(room(hosts), self.load, "vote", "ring")
            assert row.bytes_busiest_link == pytest.approx(np.log2(hosts) * 4e6 / 8, rel=1e-3)

    def test_costs_add_up(self) -> None:
        costs = dataclasses.replace(FREE, latency=1e-3, call=5e-3, local={"int8": (1e-9, 1e-9)})
        row = row_of(room(costs=costs), self.load, "int8", "ring")
        free = row_of(room(), self.load, "int8", "ring")
        buckets = 2  # of 8 MiB
        assert row.local == pytest.approx(4e6 * 1e-9)
        assert row.latency == pytest.approx(5e-3 + buckets * 6e-3)
        assert row.exchange == pytest.approx(free.exchange + row.local + row.latency)

    def test_codes_take_the_time_of_their_sizes(self) -> None:
        """Of each size what was measured, a line between them, and bucket after bucket."""
        costs = dataclasses.replace(FREE, local={"int8": (4e-9, 1e-9), "vote": (3e-9, 2e-9)})
        small, full = 2**18, 2**21
        assert costs.local_seconds("int8", small / 2) == pytest.approx(4e-9 * small / 2)
        assert costs.local_seconds("int8", 3 * full) == pytest.approx(1e-9 * 3 * full)
        middle = (4e-9 * small + 1e-9 * full) / 2
        assert costs.local_seconds("int8", (small + full) / 2) == pytest.approx(middle)
        assert costs.local_seconds("cnat", full) == 2e-9 * full  # not there: as the dearest
        assert FREE.local_seconds("cnat", full) == 0

    def test_what_travels_on_may_take_longer(self) -> None:
        """Algorithms that merge on the way have costs of their own, where these are known."""
        local = {"int8": (1e-9, 1e-9), "int8/ring": (3e-9, 3e-9), "cnat": (2e-9, 2e-9)}
        costs = dataclasses.replace(FREE, local=local)
        seconds = {
            (family, algorithm): row_of(room(costs=costs), self.load, family, algorithm).local
            for family in ("int8", "cnat")
            for algorithm in ("direct", "ring", "halving_doubling", "circulant")
        }
        of = {"int8": (1e-9, 3e-9), "cnat": (2e-9, 2e-9)}
        assert seconds == {
            (family, algorithm): pytest.approx(4e6 * of[family][algorithm != "direct"])
            for family, algorithm in seconds
        }

    def test_what_hides_behind_the_backward_pass(self) -> None:
        hides = dataclasses.replace(FREE, overlap=True)
        short = row_of(room(rate="100Gbit", costs=hides), self.load, "float32", "native")
        # Only the last bucket has nothing to hide behind: the first leaf, of 8 MiB with the next.
        assert short.exposed == pytest.approx(short.exchange * 2 * 2**20 / 4e6)
        one = plan.workload({"blocks": jnp.zeros((4, 1000, 1000))}, 100.0)
        stack = row_of(room(rate="100Gbit", costs=hides), one, "float32", "native")
        assert stack.exposed == pytest.approx(stack.exchange)  # there as a whole in the end
        coded = dataclasses.replace(hides, local={"float32": (1e-9, 1e-9)})
        row = row_of(room(rate="100Gbit", costs=coded), self.load, "float32", "native")
        assert row.exposed == pytest.approx(short.exposed + row.local)  # hides behind nothing
        long = row_of(room(rate="100Mbit", costs=hides), self.load, "float32", "native")
        assert long.exchange > 0.3 and long.exposed > long.exchange - 0.1

    def test_accumulation_pays_for_one_exchange_in_several_steps(self) -> None:
        twice = row_of(room(), plan.workload(4e6, 100.0, 2), "float32", "native")
        once = row_of(room(), self.load, "float32", "native")
        assert twice.exchange == once.exchange and twice.efficiency > once.efficiency
        assert twice.efficiency == pytest.approx(0.2 / (0.2 + once.exchange))

    def test_a_pytree_has_the_thin_matrices_of_its_leaves(self) -> None:
        params = {"w": jnp.zeros((300, 500)), "b": jnp.zeros(500)}
        row = row_of(room(), plan.workload(params, 1.0), "powersgd2", "native")
        assert row.bytes_busiest_link == pytest.approx(1.5 * 4 * (2 * 800 + 500), rel=1e-2)

    def test_exempt_leaves_cost_what_float32_costs(self) -> None:
        """Of vectors alone, every method is the float32 mean; half a model, half of it."""
        costs = dataclasses.replace(FREE, local={"int8": (1e-9, 1e-9), "float32": (3e-9, 3e-9)})
        vector, matrix = jnp.zeros(2**20), jnp.zeros((2**10, 2**10))
        load = plan.workload({"v": vector}, 10.0)
        found = plan.plan(room(costs=costs), load)
        assert load.exempt_values == load.values and len({row.exchange for row in found.rows}) == 1
        assert found.choice.method == Method("float32", "native")
        assert found.headline.endswith(", and all leaves are exempt from compression.")

        def row(params: Any) -> Any:
            return row_of(room(costs=costs), plan.workload(params, 10.0), "int8", "direct")

        both, alone = row({"v": vector, "w": matrix}), row({"w": matrix})
        assert both.local == pytest.approx(4e-9 * 2**20) and alone.local < both.local
        sent = 1.5 * 4 * 2**20
        assert both.bytes_busiest_link == pytest.approx(alone.bytes_busiest_link + sent)

    def test_what_is_exempt_is_what_a_mean_says(self) -> None:
        params = {"w": jnp.zeros((8, 8)), "head": jnp.zeros((8, 2)), "b": jnp.zeros(8)}
        assert plan.workload(params, 1.0).exempt_values == 8
        assert plan.workload(params, 1.0, exempt=["head"]).exempt_values == 24
        assert plan.workload(params, 1.0, exempt=lambda path, shape: False).exempt_values == 0
        assert plan.workload(1000, 1.0).exempt_values == 0
        with pytest.raises(ValueError, match="exempt names 'tail', which fits no parameter"):
            plan.workload(params, 1.0, exempt=["tail"])


class TestChoice:
    """The fastest, unless something better is as fast."""

    def test_on_fast_links_it_says_not_to_compress(self) -> None:
        found = plan.plan(room(rate="100Gbit", costs=plan.defaults("gpu")), TestNumbers.load)
        assert found.choice.method == Method("float32", "native")
        assert found.headline.startswith("Do not compress: float32; 9")

    def test_on_slow_links_it_compresses_as_far_as_is_allowed(self) -> None:
        for quality, family in (("exact", "float32"), ("16bit", "bfloat16"), ("unbiased", "cnat")):
            found = plan.plan(room(rate="50Mbit"), TestNumbers.load, quality)
            assert found.choice.method.family == family
            assert any(row.method == Method("float32", "native") for row in found.rows)
        assert plan.plan(room(rate="50Mbit"), TestNumbers.load, "16bit").headline.startswith(
            "Send 16 bits, bfloat16/"
        )
        best = plan.plan(room(rate="50Mbit"), TestNumbers.load, "any")
        assert best.choice.speedup > 10 and best.headline.startswith("Compress, powersgd1/")
        assert best.headline.endswith("; needs SGD, matrices, dense_steps at the start.")
        assert best.rows[1].step <= best.rows[2].step <= best.rows[-1].step

    @pytest.mark.parametrize("chosen", [None, [Method("float32", "ring")]])
    def test_float32_alone(self, chosen: Any, tmp_path: Path) -> None:
        """What was not compared is not said to be worse."""
        found = plan.plan(room(), TestNumbers.load, "exact", chosen)
        assert re.fullmatch("Only float32 was compared: float32.*% of .*s.", found.headline)
        assert found.lines()[0] == found.headline
        found.save(tmp_path / "plan.json")
        saved = json.loads((tmp_path / "plan.json").read_text())
        assert (saved["headline"], len(saved["rows"])) == (found.headline, len(found.rows))

    def test_what_is_chosen_among_is_of_the_quality(self) -> None:
        with pytest.raises(ValueError, match="quality is one of exact, 16bit, unbiased, any, got"):
            plan.plan(room(), TestNumbers.load, "best", [Method("float32", "ring")])
        with pytest.raises(ValueError, match="int4/direct is of lower quality than 'exact'"):
            plan.plan(room(), TestNumbers.load, "exact", [Method("int4", "direct")])
        with pytest.raises(ValueError, match="no names to exempt; give a pytree"):
            plan.workload(1e6, 10, exempt=["head"])

    def test_the_default_algorithm_is_taken_where_another_is_hardly_faster(self) -> None:
        late = dataclasses.replace(FREE, latency=2e-4)
        found = plan.plan(room(8, costs=late), plan.workload(4e6, 100.0), "exact")
        assert found.choice.method == Method("float32", "native")
        assert found.rows[1].step < found.choice.step < 1.02 * found.rows[1].step
        far = plan.plan(room(8, costs=dataclasses.replace(late, latency=1e-2)), found.load, "exact")
        assert far.choice.method == Method("float32", "halving_doubling")

    def test_what_limits(self) -> None:
        found = plan.plan(room(rate="50Mbit"), TestNumbers.load, "exact")
        assert found.choice.limit == "h0-s0"
        slow = dataclasses.replace(FREE, local={"float32": (1e-5, 1e-5)})
        assert row_of(room(costs=slow), TestNumbers.load, "float32", "native").limit == (
            "encoding and decoding"
        )
        late = dataclasses.replace(FREE, latency=10.0)
        row = row_of(room(costs=late), TestNumbers.load, "float32", "native")
        assert row.limit == "latency"

    def test_it_makes_what_it_chose(self, make_mesh: Any) -> None:
        found = plan.plan(room(rate="50Mbit"), TestNumbers.load, "16bit")
        mesh = found.mesh("data", jax.devices()[:4])
        with jax.set_mesh(mesh):
            tx = found.transformation("data")
            params = jaxcomm.replicate({"w": jnp.ones((4, 4))})
            grads = {"w": jnp.ones((4, 4, 4))}
            updates, _ = jax.jit(tx.update)(grads, tx.init(params))
        np.testing.assert_array_equal(updates["w"], 1)
        with pytest.raises(ValueError, match="the cluster has 4 devices, got 3"):
            found.mesh("data", jax.devices()[:3])

    def test_a_device_that_sends_slowly(self) -> None:
        """Links are not to blame where they are unlimited, or faster than a device can send."""
        costs = dataclasses.replace(FREE, per_byte=1e-9)
        for rate, limit in (("unlimited", "what a device can send"), ("100Mbit", "h0-s0")):
            found = row_of(room(rate=rate, costs=costs), TestNumbers.load, "float32", "native")
            assert found.limit == limit and found.device == pytest.approx(1.5 * 4 * 4e6 * 1e-9)
            assert found.as_json()["device_ms"] == 1e3 * found.device
        both_ways = dataclasses.replace(costs, half_duplex=True)
        found = plan.plan(room(rate="100Gbit", costs=both_ways), TestNumbers.load)
        assert "what limits you: what a device can send with float32" in found.limits

    def test_one_device_has_nothing_to_exchange(self) -> None:
        found = plan.plan(room(1, costs=plan.defaults("cpu")), plan.workload(25.6e6, 234))
        assert found.choice.method == Method("float32", "native")
        assert (found.choice.exchange, found.choice.latency, found.choice.efficiency) == (0, 0, 1)
        assert found.headline == "Do not compress: float32; one device has nothing to exchange."
        assert found.lines()[1] == "what limits you: the step itself; nothing is exchanged."

    def test_what_is_no_plan(self) -> None:
        called: Any = plan.plan
        with pytest.raises(TypeError, match=r"such as plan.load_cluster\('star'\), got 'star'"):
            called("star", TestNumbers.load)
        with pytest.raises(TypeError, match=r"such as plan.workload\(25.6e6, step_ms=234\), got 5"):
            called(room(), 5)
        with pytest.raises(ValueError, match="int8/hierarchical needs a cluster of two levels"):
            called(room(), TestNumbers.load, chosen=[Method("int8", "hierarchical")])
        with pytest.raises(ValueError, match="rows is 0 or more, got -1"):
            called(room(), TestNumbers.load).lines(-1)


class TestOrderAndLevels:
    """Ranks that were dealt without a look at the network, and networks of two levels."""

    def test_shuffled_ranks_of_a_chain_cost_nothing(self) -> None:
        made, shuffled = plan.fabrics.chain("c", 16, 100), tuple(np.random.permutation(16).tolist())
        order = best_order(made, Model(), shuffled)
        times = [
            Simulation(made, Model(), o).seconds(jaxcomm.algorithms.ring(), 1e8)
            for o in (range(16), order, shuffled)
        ]
        assert times[1] <= 1.05 * times[0] < times[2]
        moved = dataclasses.replace(plan.cluster(made, FREE), order=shuffled)
        found = plan.plan(moved, TestNumbers.load)
        assert found.cluster.order != shuffled and "order of the devices" in "\n".join(
            found.lines()
        )
        kept = plan.plan(moved, TestNumbers.load, reorder=False)
        assert kept.cluster.order == shuffled and kept.float32.step > found.float32.step

    def test_clusters_whose_hosts_are_mixed_are_walked_one_after_the_other(self) -> None:
        made = plan.fabrics.clusters("c", 8, 100)
        order = best_order(made, Model(), (0, 4, 1, 5, 2, 6, 3, 7))
        assert {frozenset(order[:4]), frozenset(order[4:])} == {
            frozenset(range(4)),
            frozenset(range(4, 8)),
        }

    @pytest.mark.parametrize(
        ("made", "dimensions"),
        [
            (plan.fabrics.dln("d", 64, 100, hosts_per_switch=8), {"order", "devices_per_switch"}),
            (plan.fabrics.dln_2d("d", 128, 100, hosts_per_switch=8), {"order"}),
            (plan.fabrics.star("s", 16, 100), set()),
            (plan.fabrics.clusters("c", 12, 100), set()),
        ],
        ids=["dln", "dln_2d", "star", "two switches"],
    )
    def test_dimensions_of_halving_doubling(self, made: Any, dimensions: set[str]) -> None:
        """Where devices share the links between switches, they take them in different orders."""
        room = plan.cluster(made, FREE)
        found = plan.plan(room, TestNumbers.load, "exact", reorder=False)
        row = next(r for r in found.rows if r.method.algorithm == "halving_doubling")
        assert dimensions <= dict(row.method.dimensions).keys()
        plain = row_of(room, TestNumbers.load, "float32", "halving_doubling")
        if not dimensions:
            assert row.method == plain.method
            return
        assert row.exchange < 0.8 * plain.exchange
        assert row.method.name.removeprefix("float32/halving_doubling/") in ("shifted", "spread")
        called = eval(row.method.config["algorithm"], dict(vars(jaxcomm.algorithms)))
        assert called == row.method.made(4, False) != plain.method.made(4, False)

    def test_levels(self, tmp_path: Path) -> None:
        assert plan.cluster(plan.fabrics.clusters("c", 8, 100)).levels == (2, 4)
        assert plan.cluster(plan.fabrics.chain("c", 8, 100)).levels is None
        assert room(8).levels is None
        path = tmp_path / "nodes.yaml"
        path.write_text(
            "fabric: star\nhosts: 2\nrate: 1Gbit\nnodes: {devices: 4, bandwidth: 300Gbit}"
        )
        made = plan.load_cluster(str(path), costs=FREE)
        assert made.levels == (2, 4) and made.devices == 8
        names = {r.method.name for r in predictions(made, TestNumbers.load, methods("any", True))}
        assert "bfloat16/hierarchical" in names and "cnat/ring" in names
        found = plan.plan(made, TestNumbers.load, "16bit")
        assert found.mesh(("far", "near"), jax.devices()[:8]).shape == {"far": 2, "near": 4}


@pytest.mark.parametrize(
    "number", [1000, 1e3, np.int64(1000), np.float32(1000), np.array(1000), jnp.float32(1000)]
)
def test_a_number_of_any_type_is_a_number_of_parameters(number: Any) -> None:
    assert plan.workload(number, 1.0) == plan.workload(1000, 1.0)
    assert plan.workload(number, 1.0).values == 1000


@pytest.mark.parametrize(
    ("params", "step_ms", "message"),
    [
        (0, 1.0, r"params is a number of 1 to 1e\+12 parameters, got 0"),
        (np.int64(0), 1.0, r"params is a number of 1 to 1e\+12 parameters, got 0"),
        (1e30, 1.0, r"params is a number of 1 to 1e\+12 parameters, got 1e\+30"),
        (True, 1.0, "or their number, got True"),
        (1e6, -1.0, "a step takes a positive time, got -0.001"),
        ({"w": 3.0}, 1.0, "a pytree of arrays or of shapes"),
        ({}, 1.0, "such as 25.6e6; this tree has no values"),
    ],
)
def test_a_wrong_workload(params: Any, step_ms: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan.workload(params, step_ms)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["plan", *arguments])
    return main()


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("star", "--params=25.6e6", "--step-ms=234", "--set", "rate=1Gbps")
    assert run(monkeypatch, *asked, "--json") == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert rows[0]["step_ms"] <= rows[-1]["step_ms"]
    assert {"method", "exchange_ms", "interval_ms", "busiest_link", "config"} <= set(rows[0])
    assert {row["quality"] for row in rows} == {"exact", "16bit"}
    assert run(monkeypatch, *asked, "--accumulate=1,4") == 0
    shown = capsys.readouterr().out
    answer, every, four, plain, limits = shown.splitlines()[:5]
    assert answer.startswith("Send 16 bits, ") and every.startswith("with --quality=any: Exchange")
    assert four.startswith("with --accumulate=4: Send 16 bits")
    assert plain.startswith("without --set: Send 16") and plain.partition(": ")[2] != answer
    assert limits.startswith("what limits you: h0-s0")
    assert run(monkeypatch, *asked, "--quality=exact") == 0
    assert "--quality=any" not in capsys.readouterr().out
    assert run(monkeypatch, *asked, "--quality=any") == 0
    assert capsys.readouterr().out.startswith(every.partition(": ")[2])
    assert run(monkeypatch, *asked, "--optimizer=adam") == 0
    assert "powersgd" not in capsys.readouterr().out.splitlines()[1]
    assert run(monkeypatch, *asked[:3], "--set", "link[s0,s9].rate=1") == 2
    said = capsys.readouterr().err
    assert said.startswith("plan: link[s0,s9]: there is no such link; there are h0-s0")
    assert said.count("\n") == 1


def test_the_module_plans_and_hides_none_of_its_parts() -> None:
    called: Any = jaxcomm.plan
    room = plan.cluster(plan.fabrics.star("room", hosts=4, rate="1Gbit"))
    load = plan.workload(1e6, 10)
    assert called(room, load, quality="exact") == plan.plan(room, load, quality="exact")
    parts = {p.name for p in pkgutil.iter_modules(plan.__path__)}
    assert len(parts) > 10 and parts & set(plan.__all__) == {"fabrics"}


@pytest.mark.multiprocess
def test_a_probe_of_two_processes_under_a_mesh_of_both() -> None:
    """As in a training program, where codes are of one device and the mesh that is set of all."""
    script = """
        import jaxcomm
        from jaxcomm.plan import probing

        probing.LARGE, probing.SIZES, probing.REPEATS, probing.OFTEN = (1000,), (2048, 4096), 1, 1
        with jax.set_mesh(jaxcomm.data_mesh()):
            costs = jaxcomm.plan.probe(families=("int8", "scaled_sign"))
        print(costs.latency > 0, {"int8", "scaled_sign"} <= costs.local.keys(), costs.local)
    """
    lines = [process.stdout.splitlines()[-1] for process in run_processes(2, script)]
    assert lines[0] == lines[1] and lines[0].startswith("True True")
