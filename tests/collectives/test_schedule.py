"""Schedules are plain values: everything about them is checked without a device."""

import math
from fractions import Fraction

import pytest

from jaxcomm.collectives.algorithms import Algorithm, circulant, direct, halving_doubling, ring
from jaxcomm.collectives.algorithms.schedule import Schedule

WORLDS = [*range(1, 18), 24, 31, 32, 33, 64]
ALGORITHMS = {
    "ring": ring(),
    "near_first": halving_doubling("near_first"),
    "far_first": halving_doubling("far_first"),
    "circulant": circulant(),
    "direct": direct(),
}


def each(*names: str):
    return pytest.mark.parametrize("algorithm", [ALGORITHMS[n] for n in names], ids=names)


every = each(*ALGORITHMS)
at_every_world = pytest.mark.parametrize("world", WORLDS)


def majority_bits(schedule: Schedule, *, whole_messages: bool = False) -> Fraction:
    """Bits per coordinate that the busiest device sends: a sum of k signs has ceil(log2(k+1)).

    With `whole_messages`, all blocks of a message are as wide as its widest.
    """
    sent = [0] * schedule.world
    for step, counts in zip(schedule.rounds, schedule.counts, strict=True):
        if whole_messages:
            counts = (max(counts),) * len(counts)
        for source, target in step.pairs:
            sent[source] += sum(math.ceil(math.log2(k + 1)) for k in counts)
            sent[target] += step.size  # the way back: one bit
    return Fraction(max(sent), schedule.blocks)


@every
@at_every_world
def test_every_block_is_complete_on_exactly_one_core_device(algorithm: Algorithm, world: int):
    schedule = algorithm.schedule(world)
    everyone = frozenset(range(world))
    owners = {block: set() for block in range(schedule.blocks)}
    for r in range(world):
        for i, held in enumerate(schedule.holdings[-1][r]):
            if held == everyone:
                owners[schedule.order[r][i]].add(r)
    assert all(len(devices) == 1 for devices in owners.values())


@every
@at_every_world
def test_no_device_is_counted_twice(algorithm: Algorithm, world: int):
    schedule = algorithm.schedule(world)
    for step, before in zip(schedule.rounds, schedule.holdings, strict=False):
        for source, target in step.pairs:
            for k in range(step.size):
                arriving = before[source][step.send[0] + k]
                assert not arriving & before[target][step.into + k]


@every
@at_every_world
def test_a_message_is_added_to_the_same_blocks(algorithm: Algorithm, world: int):
    schedule = algorithm.schedule(world)
    for step in schedule.rounds:
        for source, target in step.pairs:
            sent = schedule.order[source][slice(*step.send)]
            assert sent == schedule.order[target][step.into : step.into + step.size]


@every
@at_every_world
def test_order_is_a_permutation_and_pairs_are_a_matching(algorithm: Algorithm, world: int):
    schedule = algorithm.schedule(world)
    assert all(sorted(row) == list(range(schedule.blocks)) for row in schedule.order)
    for step in schedule.rounds:
        sources, targets = zip(*step.pairs, strict=True)
        assert len(set(sources)) == len(sources) and len(set(targets)) == len(targets)
        assert all(source != target for source, target in step.pairs)


@each("ring", "circulant", "direct")
@at_every_world
def test_everyone_sends_the_least_possible(algorithm: Algorithm, world: int):
    assert set(algorithm.schedule(world).blocks_sent) == {2 * (world - 1)}


@each("near_first", "far_first")
@at_every_world
def test_halving_doubling_sends_the_whole_vector_once_more_to_fold(
    algorithm: Algorithm, world: int
):
    schedule = algorithm.schedule(world)
    core = schedule.blocks
    fold = core if world > core else 0
    assert max(schedule.blocks_sent) == 2 * (core - 1) + fold


@at_every_world
def test_rounds(world: int):
    q, up = int(math.log2(world)), math.ceil(math.log2(world))
    assert len(ring().schedule(world).rounds) == world - 1
    assert len(circulant().schedule(world).rounds) == up
    assert len(halving_doubling().schedule(world).rounds) == q + (world > 2**q)


def test_near_first_keeps_the_largest_messages_between_neighbours():
    near = halving_doubling("near_first").schedule(16).rounds
    far = halving_doubling("far_first").schedule(16).rounds
    assert [(step.size, abs(step.pairs[0][0] - step.pairs[0][1])) for step in near] == [
        (8, 1),
        (4, 2),
        (2, 4),
        (1, 8),
    ]
    assert [abs(step.pairs[0][0] - step.pairs[0][1]) for step in far] == [8, 4, 2, 1]


SWITCHES = [(1, (4,)), (2, (2,)), (4, (4,)), (4, (16,)), (2, (4, 4)), (4, (2, 8)), (8, (1,))]


@pytest.mark.parametrize(("per_switch", "grid"), SWITCHES)
def test_the_shifted_order_is_a_reduce_scatter_too(per_switch: int, grid: tuple[int, ...]):
    world = per_switch * math.prod(grid)
    algorithm = halving_doubling("shifted", per_switch, grid)
    test_every_block_is_complete_on_exactly_one_core_device(algorithm, world)
    test_no_device_is_counted_twice(algorithm, world)
    test_a_message_is_added_to_the_same_blocks(algorithm, world)
    test_order_is_a_permutation_and_pairs_are_a_matching(algorithm, world)
    assert set(algorithm.schedule(world).blocks_sent) == {2 * (world - 1)}


def test_the_shifted_order_stays_in_the_switch_first_and_then_spreads_over_shortcuts():
    """Device l of a switch is at distance 2^((l + j) mod q) in step j."""
    per_switch, switches, q = 4, 8, 3
    rounds = halving_doubling("shifted", per_switch).schedule(per_switch * switches).rounds
    for step, distance in zip(rounds[:2], (1, 2), strict=True):
        assert all(s ^ t == distance for s, t in step.pairs)
    for j, step in enumerate(rounds[2:]):
        for source, target in step.pairs:
            assert source % per_switch == target % per_switch
            hop = (source // per_switch) ^ (target // per_switch)
            assert hop == 2 ** ((source % per_switch + j) % q)


def test_the_shifted_order_goes_through_one_dimension_after_the_other():
    rounds = halving_doubling("shifted", 2, (4, 8)).schedule(64).rounds
    hops = [{(s ^ t) // 2 for s, t in step.pairs} for step in rounds[1:]]
    assert hops[:2] == [{1, 2}, {1, 2}]
    assert hops[2:] == [{4, 8}, {8, 16}, {16, 4}]


@pytest.mark.parametrize(
    ("arguments", "world", "message"),
    [
        (("shifted",), 8, "devices_per_switch belongs to order"),
        (("near_first", 2), 8, "devices_per_switch belongs to order"),
        (("far_first", None, (2, 2)), 8, "grid belongs to order"),
        (("shifted", 3), 12, "all powers of two; got 3 x 4"),
        (("shifted", 2, (2, 2)), 16, "to be the 16 devices of the axis.*got 2 x 2 x 2"),
    ],
)
def test_an_order_that_does_not_fit_is_refused(arguments: tuple, world: int, message: str):
    with pytest.raises(ValueError, match=message):
        halving_doubling(*arguments).schedule(world)


@pytest.mark.parametrize("device", [0, 2])
def test_one_aggregator_gets_everything_and_answers_everyone(device: int):
    schedule = direct(aggregator=device).schedule(5)
    assert schedule.holdings[-1][device] == (frozenset(range(5)),)
    assert schedule.blocks_sent == tuple(4 if r == device else 1 for r in range(5))


@pytest.mark.parametrize("aggregator", ["server", -1, 1.5])
def test_an_aggregator_is_a_device_number(aggregator):
    with pytest.raises(ValueError, match='must be "sharded" or a device number'):
        direct(aggregator=aggregator)


def test_an_aggregator_that_is_not_on_the_axis_is_refused():
    with pytest.raises(ValueError, match="the aggregator 4 is not on the axis, which has 4"):
        direct(aggregator=4).schedule(4)


def test_counts_give_the_published_bits_of_a_majority_vote():
    for world, bits in {3: 4 / 3, 5: 1.8, 6: 2.0, 7: 15 / 7, 9: 20 / 9}.items():
        schedule = circulant().schedule(world)
        assert float(majority_bits(schedule, whole_messages=True)) == pytest.approx(bits)
        assert majority_bits(schedule) <= majority_bits(schedule, whole_messages=True)
    for world in WORLDS[1:]:
        on_ring = sum(math.ceil(math.log2(i + 1)) for i in range(1, world)) + world - 1
        assert majority_bits(ring().schedule(world)) == Fraction(on_ring, world)
        assert majority_bits(circulant().schedule(world)) < 3
        assert majority_bits(circulant().schedule(world)) <= Fraction(on_ring, world)


def test_an_unknown_order_is_refused_at_once():
    with pytest.raises(ValueError, match="choose one of near_first, far_first"):
        halving_doubling("nearest")
