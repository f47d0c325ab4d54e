"""The algorithm that stands for None, by a plan."""

import dataclasses

import jax
import numpy as np
import pytest

import jaxcomm
from jaxcomm import codecs, collectives, plan
from jaxcomm.collectives.reductions import Majority
from jaxcomm.plan import messages, using
from jaxcomm.plan.fabrics import clusters, star


@pytest.fixture(autouse=True)
def nobody():
    yield
    plan.use(None)


def sent_by(tx, n=2**18):
    """The collectives of an exchange on eight devices, and its result."""
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:8])):
        params = jax.numpy.zeros((512, n // 512))
        state = tx.init(params)
        grads = jax.random.normal(jax.random.key(0), (8, *params.shape))
        program = jax.jit(lambda g, s: tx.update(g, s)).lower(grads, state).compile()
        report = jaxcomm.wire_report(program)
        return {c.op for c in report.collectives}, np.asarray(program(grads, state)[0])


def slow_middle(hosts=8):
    return plan.cluster(clusters("rooms", hosts=hosts, rate="100Mbit"))


def mean():
    return jaxcomm.mean("data", "int8", error_feedback=True, exempt=())


def test_across_a_slow_middle_codes_go_around_a_ring():
    direct, exact = sent_by(mean())
    plan.use(slow_middle())
    ring, other = sent_by(mean())
    assert "all-to-all" in direct and "all-to-all" not in ring
    np.testing.assert_allclose(other, exact, atol=0.1)
    plan.use(None)
    assert sent_by(mean())[0] == direct


def test_what_devices_compute_counts_too() -> None:
    """Encoding partial sums again takes longer here than the link in the middle."""
    rooms = slow_middle()
    local = {**rooms.costs.local, "int8/ring": (1e-6, 1e-6)}
    plan.use(dataclasses.replace(rooms, costs=dataclasses.replace(rooms.costs, local=local)))
    assert "all-to-all" in sent_by(mean())[0]


def test_what_was_compiled_before_is_compiled_anew():
    """Else a program would go on with other algorithms than that of a process that began later."""
    traced = []
    plan.use(None)  # as it is
    step = jax.jit(lambda x: traced.append(1) or x + 1)
    step(1.0)
    plan.use(None)
    step(1.0)
    assert len(traced) == 1
    plan.use(slow_middle())
    step(1.0)
    assert len(traced) == 2


def test_votes_stay_direct_where_nothing_is_faster():
    votes = jaxcomm.majority_vote("data")
    plan.use(plan.cluster(star("room", hosts=8, rate="10Mbit")))
    planned = sent_by(votes)
    plan.use(None)
    usual = sent_by(votes)
    assert planned[0] == usual[0]
    np.testing.assert_array_equal(planned[1], usual[1])


def test_another_number_of_devices_is_not_planned():
    direct, _ = sent_by(mean())
    plan.use(slow_middle(hosts=4))
    assert sent_by(mean())[0] == direct


def test_a_named_algorithm_is_taken_as_it_is():
    plan.use(slow_middle())
    found, _ = sent_by(jaxcomm.mean("data", "int8", algorithm="direct"))
    assert "all-to-all" in found


def test_a_name_is_no_cluster():
    with pytest.raises(TypeError, match=r"plan.load_cluster\('star'\)"):
        plan.use("star")


def test_long_votes_of_two_clusters_keep_the_link_between_them_busy():
    votes = jaxcomm.majority_vote("data")
    usual = sent_by(votes, n=2**20)
    plan.use(plan.cluster(clusters("rooms", hosts=8, rate="10Mbit")))
    planned = sent_by(votes, n=2**20)
    assert "all-to-all" in usual[0] and "all-to-all" not in planned[0]
    np.testing.assert_array_equal(planned[1], usual[1])
    named = sent_by(jaxcomm.majority_vote("data", "two_clusters"), n=2**20)
    assert named[0] == planned[0]
    np.testing.assert_array_equal(named[1], usual[1])


def test_messages_are_those_of_the_reduction() -> None:
    mean, _ = collectives.mean_of("int8", None, second_hop="bfloat16")
    expected = messages.Coded(codecs.int8(), codecs.bfloat16())
    assert using._as_messages(mean, 4) == expected
    bits = {("zero", "random", 4): (1, 2), ("zero", "random", 3): (1, 1)}
    bits |= {("random", "random", 4): (1, 1), ("random", "abstain", 3): (2, 2)}
    for (ties, zeros, world), votes in bits.items():
        assert using._as_messages(Majority(ties, zeros, None), world) == messages.Votes(*votes)
