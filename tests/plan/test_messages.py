"""Bytes of messages: those of the formulas, and of compiled programs."""

import math

import jax
import jax.numpy as jnp
import pytest

import algorithm_table
import jaxcomm
from jaxcomm import codecs
from jaxcomm.collectives.algorithms import (
    Algorithm,
    circulant,
    direct,
    halving_doubling,
    hierarchical,
    ring,
    two_clusters,
)
from jaxcomm.plan import Coded, Simulation, Votes, load
from jaxcomm.plan.fabrics import clusters, star

ALGORITHMS = [ring(), halving_doubling(), halving_doubling("spread", 2), circulant(), direct()]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
@pytest.mark.parametrize("world", [3, 4, 8])
def test_a_vote_sends_the_planes_of_its_schedule(algorithm: Algorithm, world: int) -> None:
    if "spread" in str(algorithm) and world == 3:
        return
    n = 32 * 24 * world
    found = Simulation(star("star", world, 100)).exchange(algorithm, Votes(), n)
    bits = algorithm_table.vote_bits(algorithm.schedule(world))
    assert found.sent == pytest.approx(float(bits) * n / 8)


def test_bytes_are_those_of_the_compiled_program() -> None:
    """A device's, padding and scales included; those of a link are its host's."""
    n, world = 10_001, 8
    mesh = jaxcomm.data_mesh()

    def mean(x: jax.Array) -> jax.Array:
        return jaxcomm.pmean(x[0], "data", "int8", circulant())[None]

    spec = jax.P("data")
    f = jax.shard_map(mean, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    program = jax.jit(f).lower(jnp.zeros((world, n))).compile()
    simulation = Simulation(load("star", hosts=world))
    found = simulation.exchange(circulant(), Coded(codecs.from_name("int8")), n)
    assert found.sent == float(jaxcomm.wire_report(program).bytes_max)
    assert found.bytes_busiest_link == pytest.approx(found.sent)
    assert found.seconds == pytest.approx(found.busiest_link_seconds)


def test_the_busiest_link_has_a_name() -> None:
    """A vote of 16 hosts in two clusters: the middle carries 4 bits of a ring, 2.5 near first."""
    made, n = clusters("clusters", 16, 100, middle=90), 32 * 16 * 100
    around = Simulation(made).exchange(ring(), Votes(), n)
    assert around.bytes_busiest_link == pytest.approx(4 * n / 8)
    near = Simulation(made).exchange(halving_doubling(), Votes(), n)
    assert set(near.busiest_link or ()) == {"s0", "s1"}
    # 8 pairs send counts of 8 there and results back, each of 1/16 of the vector.
    assert near.bytes_busiest_link == pytest.approx(8 * (4 + 1) / 16 * n / 8)


def test_results_may_have_another_format() -> None:
    n, world = 4096, 4
    both = Coded(codecs.from_name("float32"), codecs.from_name("bfloat16"))
    found = Simulation(star("star", world, 100)).exchange(ring(), both, n)
    assert found.sent == 3 * n / 4 * (4 + 2)
    two = Simulation(star("star", world, 100)).exchange(ring(), Votes(2, 2), n)
    one = Simulation(star("star", world, 100)).exchange(ring(), Votes(), n)
    assert two.sent == 2 * one.sent


def test_two_levels_count_devices_of_both() -> None:
    """4 x 4: partials of 4, 8 and 12 devices go far, of a block of a sixteenth."""
    n = 32 * 16
    made = Simulation(star("star", 16, 100))
    found = made.exchange(hierarchical(near=direct(), far=ring()), Votes(), n, (4, 4))
    planes = [1] * 3 * 4 + [math.ceil(math.log2(k + 1)) for k in (4, 8, 12)] + [1] * 3 + [1] * 3 * 4
    assert found.sent == sum(planes) * n / 16 / 8
    with pytest.raises(ValueError, match="needs as many hosts; there are 16"):
        made.exchange(ring(), Votes(), n, 8)


def test_two_clusters_are_planned_with_the_bits_that_they_send() -> None:
    """By its programs in tests/collectives/test_two_clusters.py: 2.72 bits a vote of 16 devices."""
    n = 32 * 16 * 36 * 100
    found = Simulation(clusters("clusters", 16, 100)).exchange(two_clusters(), Votes(), n)
    assert found.seconds == pytest.approx(2.722 * n / 100e6, rel=1e-3)
    assert found.sent == pytest.approx(2.72 / 8 * n, rel=1e-2)
    assert found.bytes_busiest_link == pytest.approx(2.72 / 8 * n, rel=1e-2)
