"""Hosts of several devices: rows that go by hosts, as programs do without an algorithm."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxcomm
from jaxcomm import plan, sparse
from jaxcomm.collectives.algorithms import _default
from jaxcomm.plan import probing
from jaxcomm.plan.costs import BY_HOSTS
from jaxcomm.plan.families import Method, methods
from jaxcomm.plan.sending import sent

SHAPES = [(1024, 1024)] * 4
HOSTS = (0, 0, 1, 1, 2, 2, 3, 3)
LOAD = plan.workload([jax.ShapeDtypeStruct(shape, "float32") for shape in SHAPES], step_ms=10)


def office(tmp_path: Path, devices: int, **nodes: Any) -> plan.Cluster:
    path = tmp_path / "office.yaml"
    fields = ", ".join(f"{k}: {v}" for k, v in {"devices": devices, **nodes}.items())
    path.write_text(f"fabric: star\nhosts: 4\nrate: 10Gbit\ndevice: gpu\nnodes: {{{fields}}}\n")
    return plan.load_cluster(str(path))


def rows(cluster: plan.Cluster) -> dict[str, Any]:
    found = plan(cluster, LOAD, quality="any")
    return {row.method.name: row for row in found.rows}


def test_each_host_sends_one_vector(tmp_path: Path) -> None:
    """And of the default's rows, none sends more than XLA's own float32 mean."""
    values = 4 * 2**20
    for devices in 2, 4, 8:
        found = rows(office(tmp_path, devices))
        base = found["float32/native"]
        for family, size in ("bfloat16", 2), ("int8", 1), ("cnat", 1), ("int4", 0.5625):
            row = found[f"{family}/hierarchical/{devices}"]
            assert row.bytes_busiest_link == pytest.approx(1.5 * size * values, rel=0.03)
            assert row.step < base.step
            assert row.method.is_usual(4 * devices, False, None, devices)
            assert row.bytes_busiest_link <= found[f"{family}/direct"].bytes_busiest_link


@pytest.mark.parametrize("family", ["bfloat16", "int8", "int4", "vote"])
def test_the_row_is_the_default_of_programs(family: str, tmp_path: Path, hosts_of: Any) -> None:
    hosts_of(*HOSTS)
    cluster = office(tmp_path, 2)
    (method,) = [
        m for m in methods("any", True, (), None, 2) if m.name == f"{family}/hierarchical/2"
    ]
    row = next(r for r in plan(cluster, LOAD, quality="any").rows if r.method == method)
    assert "algorithm" not in row.as_json()["config"]
    config = dict(row.as_json()["config"])
    config.pop("local_optimizer", None)
    factory = getattr(jaxcomm, config.pop("method"))
    sent = []
    with jax.set_mesh(jaxcomm.data_mesh()):
        params = [jnp.zeros(shape) for shape in SHAPES]
        grads = [jax.ShapeDtypeStruct((8, *shape), "float32") for shape in SHAPES]
        for tx in method.transformation("data"), factory("data", **config):
            state = jax.eval_shape(tx.init, params)
            compiled = jax.jit(tx.update).lower(grads, state).compile()
            sent.append(jaxcomm.wire_report(compiled).bytes_between(HOSTS))
    assert sent[0] == sent[1]
    assert row.bytes_busiest_link == pytest.approx(sent[0], rel=0.02)


def test_float32_within_a_host_costs_what_its_links_take(tmp_path: Path) -> None:
    """Half of the vector in float32 and half of it back in 8 bits, at 1 GB/s."""
    slow, fast = (
        rows(office(tmp_path, 2, bandwidth=rate))["int8/hierarchical/2"].exchange
        for rate in ("8Gbit", "8000Gbit")
    )
    assert slow - fast == pytest.approx(4 * 2**20 * (2 + 0.5) / 1e9, rel=0.1)


@pytest.mark.parametrize("family", sparse.BY_NAME)
def test_sparse_means_go_by_hosts(family: str, tmp_path: Path, hosts_of: Any) -> None:
    hosts_of(*HOSTS)
    row = rows(office(tmp_path, 2))[family]
    with jax.set_mesh(jaxcomm.data_mesh()):
        params = [jnp.zeros(shape) for shape in SHAPES]
        found = jaxcomm.explain(row.method.transformation("data"), params)
    assert row.bytes_busiest_link == pytest.approx(found.host_bytes, rel=0.02)
    slow, fast = (
        rows(office(tmp_path, 2, bandwidth=rate))[family].exchange for rate in ("8Gbit", "8000Gbit")
    )
    # Within a host half of the vector and half of it back, in float32, at 1 GB/s.
    assert slow - fast == pytest.approx(4 * 2**20 * 4 / 1e9, rel=0.1)


def test_a_plan_in_use_keeps_to_hosts(tmp_path: Path, hosts_of: Any) -> None:
    hosts_of(*HOSTS)
    for devices in 2, 1:  # a plan of other machines says nothing
        cluster = office(tmp_path, devices)
        if devices == 1:
            cluster = plan.cluster(plan.fabrics.star("eight", hosts=8, rate="10Gbit"))
        plan.use(cluster)
        try:
            with jax.set_mesh(jaxcomm.data_mesh()):
                tx = jaxcomm.mean("data", "int4", error_feedback=True)
                params = {"w": jnp.zeros((1024, 1024))}
                grads = {"w": jax.ShapeDtypeStruct((8, 1024, 1024), "float32")}
                state = jax.eval_shape(tx.init, params)
                compiled = jax.jit(tx.update).lower(grads, state).compile()
        finally:
            plan.use(None)
        assert jaxcomm.wire_report(compiled).bytes_between(HOSTS) < 1.05 * 1.5 * 2**20 * 0.5625


def test_levels_of_switches_are_no_hosts(tmp_path: Path) -> None:
    cluster = plan.cluster(plan.fabrics.clusters("rooms", hosts=8, rate="100Mbit"))
    assert cluster.levels == (2, 4) and cluster.devices_per_host == 1
    assert office(tmp_path, 2).devices_per_host == 2
    with pytest.raises(ValueError, match="int8/hierarchical/3 needs hosts of 3 devices in a row"):
        three = Method("int8", "hierarchical", (("devices_per_host", 3),))
        plan(office(tmp_path, 2), LOAD, chosen=[three], quality="any")


@pytest.mark.parametrize("between_cpus", [True, False])
@pytest.mark.parametrize("family", ["bfloat16", "int8", "cnat", "int4", "vote"])
def test_rows_are_predicted_as_the_default_goes(family: str, between_cpus: bool) -> None:
    """Also between many hosts, and CPUs."""
    method = Method(family, "hierarchical", (("devices_per_host", 4),))
    kinds = {"bfloat16": "16 bits", "int8": "8 bits", "cnat": "cnat", "int4": "codes"}
    for hosts in 4, 24, 40:
        for values in 10_000, 2**22:
            expected = _default.usual(
                kinds.get(family, "votes"), 4 * hosts, between_cpus, values, 4
            )
            assert method.made(4 * hosts, between_cpus, values) == expected
    load = plan.workload([jax.ShapeDtypeStruct((2048, 1024), "float32")], step_ms=1)
    (part,) = sent(method, load, 96, between_cpus)
    assert part.algorithm == method.made(96, between_cpus, part.values)


def test_float32_by_hosts_is_no_config(tmp_path: Path, hosts_of: Any) -> None:
    """No algorithm stands for XLA's own mean there."""
    hosts_of(*HOSTS)
    row = rows(office(tmp_path, 2))["float32/hierarchical/2"]
    assert row.as_json()["config"] is None
    with jax.set_mesh(jaxcomm.data_mesh()):
        params = [jnp.zeros(shape) for shape in SHAPES]
        found = jaxcomm.explain(row.method.transformation("data"), params)
    assert "float32, hierarchical" in str(found)
    assert found.host_bytes == pytest.approx(row.bytes_busiest_link, rel=1e-4)


def test_a_plan_of_machines_that_jax_does_not_see(tmp_path: Path) -> None:
    """Flat algorithms are compared on its links, as in processes of one device each."""
    path = tmp_path / "two.yaml"
    path.write_text("fabric: star\nhosts: 2\nrate: 1Gbit\ndevice: gpu\nnodes: {devices: 4}\n")
    tx = jaxcomm.mean("data", "int8")
    plan.use(plan.load_cluster(str(path)))
    try:
        with jax.set_mesh(jaxcomm.data_mesh()):
            assert "int8, halving_doubling" in str(jaxcomm.explain(tx, [jnp.zeros((1024, 1024))]))
    finally:
        plan.use(None)


def test_the_table_of_the_docs(tmp_path: Path) -> None:
    """Bytes that leave a host, per weight: what the links of these networks carry."""
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    shape = jax.ShapeDtypeStruct((1024, 1024), "float32")
    lines = re.findall(r"^\| 4 hosts of (\d+) \| (.*) \|$", text, re.MULTILINE)
    assert [int(devices) for devices, _ in lines] == [1, 2, 8]
    for devices, cells in lines:
        cluster = office(tmp_path, int(devices))
        found = plan(cluster, plan.workload([shape] * 64, step_ms=10), quality="any").rows
        sent = {row.method.name: row.bytes_busiest_link / 2**26 for row in found}
        by = "direct" if devices == "1" else f"hierarchical/{devices}"
        names = [
            f"{family}/{way}" for family in ("bfloat16", "int4", "vote") for way in (by, "direct")
        ]
        expected = [f"{sent[name]:.2f}" for name in ("float32/native", *names)]
        assert cells.split(" | ") == expected


def test_work_by_hosts_has_costs_of_its_own(
    tmp_path: Path, make_mesh: Any, hosts_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What hosts encode is a part of the vector, which may take less than all of it, or more."""
    cluster = office(tmp_path, 2)
    local = {"int8": (1e-9, 1e-9), "int8/ring": (2e-9, 2e-9), "vote": (1e-9, 1e-9)}

    def seconds(**more: tuple[float, float]) -> list[float]:
        costs = dataclasses.replace(cluster.costs, local=local | more)
        costs.save(tmp_path / "costs.yaml")
        costs = plan.read_costs(tmp_path / "costs.yaml")
        found = rows(dataclasses.replace(cluster, costs=costs))
        names = ("int8/direct", "int8/ring", "int8/hierarchical/2", "vote/hierarchical/2")
        return [found[name].local / (4 * 2**20) for name in names]

    assert seconds() == pytest.approx([1e-9, 2e-9, 2e-9, 1e-9])
    assert seconds(**{"int8/hosts": (5e-9, 5e-9)}) == pytest.approx([1e-9, 2e-9, 5e-9, 1e-9])

    named = lambda _, asked, *__: {(m, n): (m.name, n) for m, n in asked}  # noqa: E731
    monkeypatch.setattr(probing, "_seconds", named)
    monkeypatch.setattr(probing, "Costs", lambda **fields: fields)
    for hosts, ends in (HOSTS, {"", "/ring", "/hosts"}), ((0,) * 8, {"", "/ring"}):
        hosts_of(*hosts)
        found = plan.probe(make_mesh(8), families=["cnat", "float32", "oktopk"])["local"]
        assert {name for name in found if name.startswith("cnat")} == {f"cnat{e}" for e in ends}
        assert {name for name in found if name.endswith("/hosts")} <= {"cnat/hosts"}


def test_what_is_used_depends_on_these_costs(tmp_path: Path, hosts_of: Any) -> None:
    hosts_of(*HOSTS)
    cluster, tx = office(tmp_path, 2), jaxcomm.mean("data", "int8")
    dear = dict(cluster.costs.local) | {"int8/hosts": (1e-6, 1e-6)}
    costly = dataclasses.replace(cluster, costs=dataclasses.replace(cluster.costs, local=dear))
    for used, goes_by_hosts in (cluster, True), (costly, False):
        plan.use(used)
        try:
            with jax.set_mesh(jaxcomm.data_mesh()):
                found = str(jaxcomm.explain(tx, [jnp.zeros((1024, 1024))]))
        finally:
            plan.use(None)
        assert ("int8, hierarchical" in found) == goes_by_hosts


def test_what_is_used_does_not_change_what_is_probed(tmp_path: Path, hosts_of: Any) -> None:
    hosts_of(*HOSTS)
    cluster = office(tmp_path, 2)
    dear = dict(cluster.costs.local) | {"int8/hosts": (1e-6, 1e-6)}
    plan.use(dataclasses.replace(cluster, costs=dataclasses.replace(cluster.costs, local=dear)))
    try:
        with jax.set_mesh(mesh := jaxcomm.data_mesh()):
            method = probing._methods_of("int8", mesh)[BY_HOSTS]
            tx = probing._exchange(mesh, method, 2**21).tx
            found = str(jaxcomm.explain(tx, [jnp.zeros((1024, 1024))]))
    finally:
        plan.use(None)
    assert "int8, hierarchical" in found
