"""The time of a compiled program's messages is that of the planned ones."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxcomm
from jaxcomm import plan
from jaxcomm.kernels import _device
from jaxcomm.plan.families import Method
from jaxcomm.plan.predict import predictions

COSTS = plan.Costs("none", 1e-3, 1e-8, 1.0, False, 0.0, False, False, 0.0, {})
WORLD, SHAPE = 4, (96, 128)


def report_of(method: Method, make_mesh: Any, shape: Any = SHAPE) -> jaxcomm.WireReport:
    with jax.set_mesh(make_mesh(WORLD)):
        tx = method.transformation("data")
        state = jax.eval_shape(tx.init, jaxcomm.replicate({"w": jnp.zeros(shape)}))
        grads = {"w": jax.ShapeDtypeStruct((WORLD, *shape), jnp.float32)}
        program = jax.jit(tx.update).lower(grads, state)
        return jaxcomm.wire_report(program.compile({"xla_backend_optimization_level": 0}))


def planned(method: Method, costs: plan.Costs, shape: Any = SHAPE) -> float:
    cluster = plan.cluster(plan.fabrics.star("star", WORLD, "unlimited"), costs)
    load = plan.workload({"w": jnp.zeros(shape)}, 1.0)
    rows = predictions(cluster, load, chosen=[method])
    return next(row.exchange for row in rows if row.method == method)


@pytest.mark.parametrize("name", ["bfloat16/ring", "int8/halving_doubling"])
def test_a_program_takes_as_long_as_its_plan(name: str, make_mesh: Any) -> None:
    method = Method(*name.split("/"))
    report = report_of(method, make_mesh)
    for half_duplex in (False, True):
        costs = dataclasses.replace(COSTS, half_duplex=half_duplex)
        assert plan.seconds_of(report, costs) == pytest.approx(planned(method, costs), rel=1e-3)
    free = dataclasses.replace(COSTS, latency=0.0)
    one_way = plan.seconds_of(report, free)
    both = plan.seconds_of(report, dataclasses.replace(free, half_duplex=True))
    # A ring sends one way, the others meet in pairs.
    assert (both > 1.9 * one_way) == (method.algorithm == "halving_doubling")


@pytest.mark.parametrize("name", ["int8/direct", "int8/halving_doubling", "bfloat16/circulant"])
def test_long_messages_are_swapped(
    name: str, make_mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both directions at once between CPU processes, in two messages each."""
    monkeypatch.setattr(_device, "is_between_cpu_processes", lambda: True)
    method, shape = Method(*name.split("/")), (1024, 512)
    report = report_of(method, make_mesh, shape)
    costs = dataclasses.replace(COSTS, half_duplex=True)
    assert plan.seconds_of(report, costs) == pytest.approx(planned(method, costs, shape), rel=1e-3)
    free = dataclasses.replace(COSTS, latency=0.0)
    assert plan.seconds_of(report, free) == pytest.approx(
        plan.seconds_of(report, dataclasses.replace(free, half_duplex=True))
    )


def test_a_loop_without_an_end_is_refused(make_mesh: Any) -> None:
    def body(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda y: jnp.sum(y) < 9, lambda y: jax.lax.psum(y, "data"), x)

    spec = jax.P("data")
    with jax.set_mesh(make_mesh(2)):
        mapped = jax.shard_map(body, in_specs=spec, out_specs=spec, check_vma=False)
        report = jaxcomm.wire_report(jax.jit(mapped).lower(jnp.ones(2)).compile())
    with pytest.raises(ValueError, match="in a loop whose number of trips is not in the program"):
        plan.seconds_of(report, COSTS)


def test_a_cluster_says_what_its_links_take(make_mesh: Any) -> None:
    """Costs that were probed with a cluster have what a device can send, and no link."""
    method = Method("bfloat16", "ring")
    report = report_of(method, make_mesh)
    slow = plan.cluster(plan.fabrics.star("star", WORLD, "1Mbit"), COSTS)
    load = plan.workload({"w": jnp.zeros(SHAPE)}, 1.0)
    (row,) = [r for r in predictions(slow, load, chosen=[method]) if r.method == method]
    assert plan.seconds_of(report, slow) == pytest.approx(row.exchange, rel=1e-3)
    assert plan.seconds_of(report, slow) > 10 * plan.seconds_of(report, COSTS)
    alone = plan.fabrics.explicit("one", hosts=1, switches=(), links=())
    free = plan.cluster(alone, COSTS)
    assert plan.seconds_of(report, free) == plan.seconds_of(report, COSTS)


def test_machines_of_several_devices_or_cards_are_refused(make_mesh: Any) -> None:
    """Their messages share a card, or are spread over several."""
    report = report_of(Method("bfloat16", "ring"), make_mesh)
    devices = {"fabric": "star", "hosts": 2, "rate": 100, "nodes.devices": 2}
    for changes in devices, {"hosts": 4, "nodes.nics": 2}:
        machines = plan.load_cluster("star", changes)
        with pytest.raises(ValueError, match="one device and one card a machine.* this cluster"):
            plan.seconds_of(report, machines)
    with pytest.raises(TypeError, match=r"jaxcomm.wire_report\(compiled\), got str"):
        plan.seconds_of("compiled", COSTS)  # pyright: ignore[reportArgumentType]
