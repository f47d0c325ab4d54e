"""Parts of a prediction that no measurement would notice."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxcomm
from jaxcomm import algorithms, plan
from jaxcomm.plan import predict
from jaxcomm.plan.families import Method
from jaxcomm.plan.messages import Lists
from jaxcomm.plan.sending import Sent
from jaxcomm.plan.simulate import Exchange

FREE = plan.Costs("none", 0.0, 0.0, 1.0, False, 0.0, False, False, 0.0, {})


def test_short_vectors_are_predicted_less_well() -> None:
    method = Method("bfloat16", "ring")
    short, long = (predict.error_of(method, n) for n in (10**6 - 1, 10**6))
    assert short == pytest.approx(predict.MORE * long) and predict.MORE > 1


def test_of_defaults_no_error_is_known() -> None:
    room = plan.cluster(plan.fabrics.star("room", 4, "1Gbit"), plan.defaults("cpu"))
    load = plan.workload(4e6, 100.0)
    assert {row.error for row in plan.plan(room, load).rows} == {None}
    measured = dataclasses.replace(room.costs, source="measured")
    assert plan.plan(plan.cluster(room.topology, measured), load).choice.error


def test_a_tree_has_a_level_within_machines_too() -> None:
    star = plan.fabrics.star("star", 64, "400Gbit")
    made = dataclasses.replace(plan.cluster(star, plan.defaults("gpu")), near=8, per_machine=8)
    assert made.native_latency == pytest.approx(made.costs.latency * (3 + 1) / 63)


def test_in_float32_exempt_leaves_are_in_the_buckets_of_the_others() -> None:
    costs = dataclasses.replace(FREE, local={"float32": (4e-9, 1e-9)})
    room = plan.cluster(plan.fabrics.star("room", 4, "1Gbit"), costs)
    params = {"w": jnp.zeros((1024, 1024)), "b": jnp.zeros(2**20)}
    found = plan.plan(room, plan.workload(params, 10.0), "exact")
    assert found.float32.local == pytest.approx(1e-9 * 2**21)


def test_the_limit_is_what_takes_longest() -> None:
    room = plan.cluster(plan.fabrics.star("room", 4, "1Gbit"), FREE)
    row = plan.plan(room, plan.workload(4e6, 100.0), "exact").float32
    row = dataclasses.replace(row, exchange=1.0, local=0.25, latency=0.2, device=0.0)
    assert dataclasses.replace(row, link=0.4).limit == "h0-s0"
    assert dataclasses.replace(row, link=0.2).limit == "messages that meet on links"


def test_a_number_of_parameters_is_matrices_and_a_rest() -> None:
    found = plan.workload(2**20 + 5 * 1024 + 3, 1.0)
    assert found.shapes == ((1024, 1024), (5, 1024), (3,))
    assert plan.workload(2**20 + 2047, 1.0).shapes == ((1024, 1024), (2047,))


def test_the_transformation_exempts_what_the_workload_does(mesh8: Any) -> None:
    params = {"w": jnp.zeros((64, 64)), "head": jnp.zeros((64, 64))}
    room = plan.cluster(plan.fabrics.star("room", 8, "50Mbit"))
    tx = plan.plan(room, plan.workload(params, 1.0, exempt=["head"])).transformation("data")
    with jax.set_mesh(mesh8):
        travels = {leaf.path: leaf.travels for leaf in jaxcomm.explain(tx, params).leaves}
    assert travels["head"] == "float32, native" != travels["w"]


def test_the_busiest_link_is_that_of_all_runs_of_a_part() -> None:
    """Buckets run several times, and the exchange of exempt leaves once."""
    cluster = plan.cluster(plan.fabrics.star("room", 4, "1Gbit"), plan.defaults("cpu"))
    load, method = plan.workload(4e6, 100.0), plan.Method("bfloat16", "ring")
    parts = [Sent(algorithms.ring(), Lists(1.0, 0.0), 10, times) for times in (1, 3)]
    exchanges = [
        Exchange(1.0, 1.0, link, 1.0, s, 1) for link, s in ((("a", "s"), 2.0), (("b", "s"), 1.0))
    ]
    row = predict._prediction(cluster, load, method, list(zip(parts, exchanges, strict=True)), 1.0)
    assert (row.busiest_link, row.link) == (("b", "s"), 5.0)
