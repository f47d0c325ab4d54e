"""Exchanges on networks: the programs' own pairs, closed forms, and every stream followed."""

import itertools
import math

import numpy as np
import pytest

from jaxcomm.collectives.algorithms import (
    Algorithm,
    circulant,
    direct,
    halving_doubling,
    hierarchical,
    native,
    ring,
)
from jaxcomm.plan import Model, Simulation, Topology, load
from jaxcomm.plan.fabrics import clusters, dln, dln_2d, fat_tree, star
from jaxcomm.plan.messages import Votes
from jaxcomm.plan.steps import Pairs, steps
from max_min import finish_times

ALGORITHMS = {
    "ring": ring(),
    "halving_doubling": halving_doubling(),
    "far_first": halving_doubling("far_first"),
    "shifted": halving_doubling("shifted", 2),
    "spread": halving_doubling("spread", 2),
    "circulant": circulant(),
    "direct": direct(),
    "native": native(),
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("world", [4, 8, 16])
def test_every_device_sends_and_gets_its_part(name: str, world: int) -> None:
    sent, got = np.zeros(world), np.zeros(world)
    for step in steps(ALGORITHMS[name], world):
        np.add.at(sent, step.pairs.sources, step.times * step.share)
        np.add.at(got, step.pairs.targets, step.times * step.share)
        assert (step.pairs.sources != step.pairs.targets).all()
    np.testing.assert_allclose(sent, 2 * (world - 1) / world)
    np.testing.assert_allclose(got, 2 * (world - 1) / world)


def test_pairs_are_those_of_the_schedule_there_and_back() -> None:
    algorithm = halving_doubling("spread", 4)
    rounds = algorithm.schedule(16).rounds
    found = [set(zip(s.pairs.sources, s.pairs.targets, strict=True)) for s in steps(algorithm, 16)]
    there = [set(step.pairs) for step in rounds]
    back = [{(b, a) for a, b in pairs} for pairs in reversed(there)]
    assert found == there + back
    assert [(step.times, step.share) for step in steps(ring(), 8)] == [(7, 1 / 8)] * 2


def test_two_levels() -> None:
    """4 hosts of 2 devices: half of the vector near, then a quarter of that far, and back."""
    found = list(steps(hierarchical(near=direct(), far=ring()), (4, 2)))
    shares = [(step.share, step.times, len(step.pairs.sources)) for step in found]
    assert shares == [(1 / 2, 1, 8), (1 / 8, 3, 8), (1 / 8, 3, 8), (1 / 2, 1, 8)]
    near, far = found[0].pairs, found[1].pairs
    assert (near.sources // 2 == near.targets // 2).all()
    assert (far.sources % 2 == far.targets % 2).all()
    assert ((far.sources // 2 + 1) % 4 == far.targets // 2).all()
    with pytest.raises(TypeError, match="two sizes"):
        steps(hierarchical(near=direct(), far=ring()), 8)
    with pytest.raises(TypeError, match="pairs of .* are not known"):
        list(steps(Algorithm(), 8))


NETWORKS = {
    "star": star("star", 16, 100, links_per_host=2),
    "clusters": clusters("clusters", 16, 100, 2, 30),
    "fat_tree": fat_tree("fat_tree", 16, 100, 4),
    "hashed": fat_tree("fat_tree", 16, 100, 4, routing="hashed"),
    "dln": dln("dln", 16, 100, 2, 1, 70),
    "dln_2d": dln_2d("dln_2d", 16, 100, 2, cables=2),
    "chain": load("chain_heterogeneous", hosts=16),
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_takes_as_long_as_its_slowest_stream(network: str, name: str) -> None:
    """Beside streams that are followed through all changes of their rates."""
    made = NETWORKS[network]
    simulation = Simulation(made)
    for cost, step in simulation.costs(ALGORITHMS[name]):
        streams, links = made.routes(step.pairs.sources, step.pairs.targets)
        ends = finish_times(streams, links, made.rates / 8e-6, np.full(16, 1e6))
        assert cost.seconds(1e6) == pytest.approx(ends.max())


def test_latency_is_that_of_the_slowest_message() -> None:
    """Far messages have more hops, near ones a busier link: which is slower depends on bytes."""
    made = load("clusters", hosts=4, rate=8, middle=80)
    simulation = Simulation(made, Model(latency=1e-3, hop=1e-2))
    cost = simulation.cost(Pairs(np.asarray([0, 1, 2]), np.asarray([1, 2, 0])))
    assert cost.seconds(0) == pytest.approx(31e-3)
    assert cost.seconds(1e6) == pytest.approx(1 + 31e-3)
    fast = Simulation(load("clusters", hosts=4, rate=80, middle=8), Model(1e-3, 1e-2))
    pairs = Pairs(np.asarray([0, 1, 2, 3]), np.asarray([2, 3, 0, 1]))
    assert fast.cost(pairs).seconds(1e6) == pytest.approx(2 + 31e-3)


def test_both_directions_between_two_devices_may_share_a_rate() -> None:
    made = load("star", hosts=4, rate=8)
    there = Pairs(np.arange(4), np.arange(4) ^ 1)
    around = Pairs(np.arange(4), (np.arange(4) + 1) % 4)
    for pairs, ways in ((there, 2), (around, 1)):
        assert Simulation(made).cost(pairs).seconds(1e6) == pytest.approx(1)
        half = Simulation(made, Model(0.1, half_duplex=True)).cost(pairs)
        assert half.seconds(3e4) == pytest.approx(ways * 0.03 + 0.1)
        # Long messages are swapped: at once, and in two halves.
        assert half.seconds(1e6) == pytest.approx(1 + ways * 0.1)
        # Only swaps pay for what they add and subtract, long ones, and whatever messages share.
        for model in (Model(0.1, swap=1e-6), Model(0.1, half_duplex=True, swap=1e-6)):
            cost = Simulation(made, model).cost(pairs)
            assert cost.seconds(1e6) == pytest.approx(ways + ways * 0.1)
            shared = ways if model.half_duplex else 1
            assert cost.seconds(3e4) == pytest.approx(shared * 0.03 + 0.1)
    beside = Pairs(np.arange(3), np.asarray([1, 0, 3]))  # a pair, and one who only sends
    for values, ways in ((3e4, 2), (1e6, 1)):
        cost = Simulation(made, Model(half_duplex=True)).cost(beside)
        assert cost.seconds(values) == pytest.approx(ways * values / 1e6)
    some = Pairs(np.arange(4), np.asarray([1, 0, 3, 0]))
    assert Simulation(made, Model(half_duplex=True)).cost(some).seconds(1e6) == pytest.approx(2)
    # Where two pairs share a link, each direction of it carries one of them at a time.
    middle = load("clusters", hosts=4, rate=8)
    across = Pairs(np.arange(4), np.arange(4) ^ 2)
    for model in (Model(), Model(half_duplex=True)):
        assert Simulation(middle, model).cost(across).seconds(1e6) == pytest.approx(2)


def test_devices_that_are_slower_than_their_links_share_a_rate_too() -> None:
    fast = Simulation(load("star", hosts=2, rate=8e6), Model(half_duplex=True, per_byte=1e-6))
    swap = Pairs(np.arange(2), np.asarray([1, 0]))
    assert fast.cost(swap).seconds(3e4) == pytest.approx(2 * 0.03)
    one_way = Pairs(np.arange(1), np.asarray([1]))
    assert fast.cost(one_way).seconds(3e4) == pytest.approx(0.03)


def test_in_the_spread_order_few_devices_send_to_each_other() -> None:
    """Only over half of a ring: the last round in a switch of 16, some of each round between 4."""
    half = Simulation(_loop(64, (4,), 16), Model(half_duplex=True))
    for order, of_64 in (((), 2 * 63), (("spread", 16), 32 + 16 + 8 + 2 * 4 + 2 * 2 + 2 * 1)):
        seconds = half.seconds(halving_doubling(*order), 32e3) / 2 / (32e3 * 8e-8)
        assert seconds == pytest.approx(of_64 / 64)


def test_an_order_of_hosts() -> None:
    """A ring in order crosses the middle of two clusters once each way; a shuffled one often."""
    made = load("clusters", hosts=8, rate=80)
    ordered = Simulation(made).seconds(ring(), 8e6)
    shuffled = Simulation(made, hosts=[0, 4, 1, 5, 2, 6, 3, 7]).seconds(ring(), 8e6)
    assert ordered == pytest.approx(2 * 7 / 8 * 0.8) and shuffled == pytest.approx(4 * ordered)
    with pytest.raises(ValueError, match="numbers from 0 to 7, each once"):
        Simulation(made, hosts=[0, 0])
    with pytest.raises(ValueError, match="numbers from 0 to 7, each once"):
        Simulation(made, hosts=[0, 8])


def test_ring_takes_what_its_formula_says_on_every_network() -> None:
    for made in (NETWORKS["star"], NETWORKS["fat_tree"], NETWORKS["dln_2d"]):
        seconds = Simulation(made, Model(latency=1e-3)).seconds(ring(), 1e6)
        assert seconds == pytest.approx(30 * (1e6 / 16 * 8e-8 + 1e-3))


def closed_form(devices: int, switches: int, sharing: float) -> float:
    """Half of the seconds for a vector that a host's link takes one second for.

    Inside a switch every device has its own link; between switches `sharing` devices share one.
    """
    world = devices * switches
    return (1 - 1 / devices) + sharing * (switches - 1) / world


@pytest.mark.parametrize("grid", [(32,), (4, 8)])
def test_512_devices_on_a_loop_network(grid: tuple[int, ...]) -> None:
    """z = 16, q = 5, w = 2: 8 devices share a cable, or 2, or 1 until the last round's 4."""
    made = _loop(512, grid, 2)
    found = {
        name: Simulation(made).seconds(halving_doubling(*order), 1e8) / 2 / (1e8 * 8e-8)
        for name, order in {
            "plain": (),
            "shifted": ("shifted", 16),
            "spread": ("spread", 16, grid),
        }.items()
    }
    assert found["plain"] == pytest.approx(closed_form(16, 32, 8))
    assert found["shifted"] == pytest.approx(closed_form(16, 32, 2))
    assert found["shifted"] / found["plain"] == pytest.approx(0.745, abs=0.001)
    assert found["spread"] == pytest.approx(closed_form(16, 32, 1) + 3 / 512)
    # Nobody can be faster than the link of a host, which carries all but its own block.
    assert found["spread"] < 1.006 * (511 / 512)


@pytest.mark.parametrize(("cables", "limits"), [(1, (1.43, 1.24, 1.1)), (2, (1.43, 1.1, 1.1))])
def test_spread_stays_near_the_bound_of_the_shortcuts(cables: int, limits: tuple) -> None:
    """All bytes that leave a switch, over all of its shortcuts together, or over its hosts."""
    for grid, limit in zip(((8,), (32,), (4, 8)), limits, strict=True):
        switches = math.prod(grid)
        shortcuts = sum(2 * (n.bit_length() - 1) - 1 for n in grid)
        found = {}
        for order in ("spread", "shifted"):
            simulation = Simulation(_loop(16 * switches, grid, cables))
            costs = simulation.costs(halving_doubling(order, 16, grid))
            found[order] = sum(c.seconds(s.share) for c, s in costs[4 : len(costs) // 2]) / 8e-8
        bound = (switches - 1) / (16 * switches) * max(1, 16 / (shortcuts * cables))
        assert bound <= found["spread"] <= limit * bound, (grid, found["spread"] / bound)
        assert found["spread"] < 0.8 * found["shifted"]


def _loop(hosts: int, grid: tuple[int, ...], cables: int) -> Topology:
    if len(grid) == 1:
        return dln("dln", hosts, 100, 16, cables)
    return dln_2d("dln_2d", hosts, 100, 16, grid, cables)


def test_orders_differ_only_where_devices_share() -> None:
    """On a star all orders take the same time: nothing is shared."""
    made = star("star", 32, 100)
    orders = [(), ("far_first",), ("shifted", 4), ("spread", 4)]
    seconds = [Simulation(made).seconds(halving_doubling(*order), 1e6) for order in orders]
    for a, b in itertools.pairwise(seconds):
        assert a == pytest.approx(b)


def test_vectors_of_fewer_than_no_values_are_refused() -> None:
    simulation = Simulation(star("star", 4, 100))
    with pytest.raises(ValueError, match="n is a number of values, 0 or more, got -5"):
        simulation.exchange(ring(), Votes(), n=-5)
    with pytest.raises(ValueError, match="a vector has 0 bytes or more, got -1000000.0"):
        simulation.seconds(ring(), vector_bytes=-1e6)


def test_cards_of_a_fat_tree_have_links_of_their_own_upwards() -> None:
    one, two = (fat_tree("tree", 16, 100, 4, links_per_host=n) for n in (1, 2))
    up = [sum("t0" in link.ends for link in tree.links) for tree in (one, two)]
    assert up == [4, 8]
    ratio = [
        Simulation(tree.striped()).exchange(ring(), Votes(), 2**24).seconds for tree in (one, two)
    ]
    assert ratio[0] == pytest.approx(2 * ratio[1])
