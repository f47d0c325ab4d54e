"""Schedules are plain values: everything about them is checked without a device."""

import collections
import dataclasses
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import oracles
from algorithm_table import CASES, SCHEDULED, vote_bits
from jaxcomm.collectives import algorithms
from jaxcomm.collectives._sending import swaps_of
from jaxcomm.collectives.algorithms import _scheduled, circulant, direct, halving_doubling, ring
from jaxcomm.collectives.algorithms.schedule import Round, Schedule

WORLDS = [*range(1, 18), 24, 31, 32, 33, 64]
every = pytest.mark.parametrize("name", SCHEDULED)


def holdings(schedule: Schedule) -> list[list[list[frozenset[int]]]]:
    """`holdings(schedule)[t][r][i]`: whose values position i of device r holds before round t.

    There is one entry more than there are rounds: the last is the state at the end.
    """
    history = [[[frozenset((r,))] * schedule.blocks for r in range(schedule.world)]]
    for step in schedule.rounds:
        state = [list(row) for row in history[-1]]
        for source, target in step.pairs:
            for k in range(step.size):
                arrived = history[-1][source][step.send[0] + k]
                state[target][step.into + k] = history[-1][target][step.into + k] | arrived
        history.append(state)
    return history


def complete(schedule: Schedule, held: list[list[frozenset[int]]]) -> bool:
    """Every block is complete on exactly one device."""
    everyone = frozenset(range(schedule.world))
    owners = {block: set() for block in range(schedule.blocks)}
    for r in range(schedule.world):
        for i, devices in enumerate(held[r]):
            if devices == everyone:
                owners[schedule.order[r][i]].add(r)
    return all(len(devices) == 1 for devices in owners.values())


def assert_reduce_scatter(schedule: Schedule) -> None:
    """Nobody is counted twice, blocks are added to themselves, every block ends complete."""
    assert all(sorted(row) == list(range(schedule.blocks)) for row in schedule.order)
    history = holdings(schedule)
    for step, before in zip(schedule.rounds, history, strict=False):
        sources, targets = zip(*step.pairs, strict=True)
        assert len(set(sources)) == len(sources) and len(set(targets)) == len(targets)
        for source, target in step.pairs:
            assert source != target
            sent = schedule.order[source][slice(*step.send)]
            assert sent == schedule.order[target][step.into : step.into + step.size]
            for k in range(step.size):
                arriving = before[source][step.send[0] + k]
                assert not arriving & before[target][step.into + k]
    assert complete(schedule, history[-1])


def test_every_name_has_a_row():
    for name, make in algorithms.BY_NAME.items():
        if (
            make is algorithms.two_clusters
        ):  # for votes alone: tests/collectives/test_two_clusters.py
            continue
        assert name in CASES, f"{name} has no row in tests/algorithm_table.py"
        assert CASES[name].of(2) == make()
        assert name in SCHEDULED or make is algorithms.BY_NAME["native"]


@every
@pytest.mark.parametrize("world", WORLDS)
def test_every_schedule_is_a_reduce_scatter(name: str, world: int):
    case = CASES[name]
    schedule = case.schedule(world)
    assert_reduce_scatter(schedule)
    assert len(schedule.rounds) == case.rounds(world)
    assert max(schedule.blocks_sent) == case.blocks_sent(world)
    least = 2 * (world - 1)
    if schedule.blocks == world and case.blocks_sent(world) == least:
        assert set(schedule.blocks_sent) == {least}


def test_a_schedule_that_is_none_is_noticed():
    whole = ring().schedule(4)
    short = dataclasses.replace(whole, rounds=whole.rounds[:-1])
    twice = dataclasses.replace(whole, rounds=whole.rounds + whole.rounds[-1:])
    backwards = tuple((target, source) for source, target in whole.rounds[0].pairs)
    other = dataclasses.replace(
        whole, rounds=tuple(dataclasses.replace(step, pairs=backwards) for step in whole.rounds)
    )
    for schedule in (short, twice, other):
        with pytest.raises(AssertionError):
            assert_reduce_scatter(schedule)


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


@pytest.mark.parametrize("order", ["shifted", "spread"])
@pytest.mark.parametrize(("per_switch", "grid"), SWITCHES)
def test_orders_on_switches_are_reduce_scatters_too(
    order: str, per_switch: int, grid: tuple[int, ...]
):
    world = per_switch * math.prod(grid)
    schedule = halving_doubling(order, per_switch, grid).schedule(world)
    assert_reduce_scatter(schedule)
    assert set(schedule.blocks_sent) == {2 * (world - 1)}


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
    ("per_switch", "grid", "loads"),
    [
        (16, (32,), [2, 2, 2, 2, 8]),
        (16, (4, 8), [2, 2, 2, 2, 8]),
        (2, (8,), [1, 1, 1]),
        (16, (256,), [2, 2, 2, 2, 2, 2, 2, 2]),
    ],
)
def test_the_spread_order_uses_all_shortcuts_evenly(
    per_switch: int, grid: tuple[int, ...], loads: list[int]
):
    """Of 16 devices on 9 shortcuts, two share one, until the shortest messages; cables are even."""
    world = per_switch * math.prod(grid)
    rounds = halving_doubling("spread", per_switch, grid).rounds(world)
    rounds = rounds[per_switch.bit_length() - 1 :]
    for step, load in zip(rounds, loads, strict=True):
        shortcuts = collections.Counter((s // per_switch, t // per_switch) for s, t in step.pairs)
        cables = collections.Counter(
            (s // per_switch, t // per_switch, s % 2) for s, t in step.pairs
        )
        assert all(s % per_switch == t % per_switch for s, t in step.pairs)
        assert max(shortcuts.values()) == load and max(cables.values()) == -(-load // 2)
        for s, t in shortcuts:
            near, far = (t - s) % grid[0], (t // grid[0] - s // grid[0]) % math.prod(grid[1:])
            apart = min(near, grid[0] - near) + min(far, math.prod(grid[1:]) - far)
            assert apart & (apart - 1) == 0 and (near == 0 or far == 0)


@pytest.mark.parametrize(
    ("arguments", "world", "message"),
    [
        (("shifted",), 8, "devices_per_switch belongs to order"),
        (("near_first", 2), 8, "devices_per_switch belongs to order"),
        (("far_first", None, (2, 2)), 8, "grid belongs to order"),
        (("spread",), 8, "devices_per_switch belongs to order"),
        (("shifted", 3), 12, "all powers of two; got 3 x 4"),
        (("spread", 3), 12, "all powers of two; got 3 x 4"),
        (("shifted", 2, (2, 2)), 16, "to be the 16 devices of the axis.*got 2 x 2 x 2"),
    ],
)
def test_an_order_that_does_not_fit_is_refused(arguments: tuple, world: int, message: str):
    with pytest.raises(ValueError, match=message):
        halving_doubling(*arguments).schedule(world)


@pytest.mark.parametrize("device", [0, 2])
def test_one_aggregator_gets_everything_and_answers_everyone(device: int):
    schedule = direct(aggregator=device).schedule(5)
    assert holdings(schedule)[-1][device] == [frozenset(range(5))]
    assert schedule.blocks_sent == tuple(4 if r == device else 1 for r in range(5))


@pytest.mark.parametrize("aggregator", ["server", -1, 1.5])
def test_an_aggregator_is_a_device_number(aggregator):
    with pytest.raises(ValueError, match='must be "sharded" or a device number'):
        direct(aggregator=aggregator)


def test_an_aggregator_that_is_not_on_the_axis_is_refused():
    with pytest.raises(ValueError, match="the aggregator 4 is not on the axis, which has 4"):
        direct(aggregator=4).schedule(4)


def published_skips(world: int) -> tuple[int, ...]:
    skips = [-(-world // 2)]
    while skips[-1] > 1:
        skips.append(-(-skips[-1] // 2))
    return tuple(skips)


@pytest.mark.parametrize("world", range(2, 13))
def test_no_skips_send_fewer_bits(world: int) -> None:
    """All graphs of at most one round more than the fewest, counted in their schedules."""

    def bits(schedule: Schedule) -> int:
        return sum(count.bit_length() + 1 for counts in schedule.counts for count in counts)

    rounds = math.ceil(math.log2(world)) + 1
    found = []
    for chosen in range(2 ** (world - 2)):  # which of 2, ..., N - 1 are skips
        skips = (*[s for s in range(world - 1, 1, -1) if chosen >> (s - 2) & 1], 1)
        ends = (world, *skips)
        fits = all(2 * b >= a for a, b in zip(ends, skips, strict=False))
        if fits and len(skips) <= rounds and world > 1:
            found.append((bits(circulant(skips).schedule(world)), len(skips)))
    best = circulant().schedule(world)
    assert (bits(best), len(best.rounds)) == min(found)


def test_skips_that_are_as_good_as_any() -> None:
    """Beyond 12 devices: the bits of a vote, and the rounds."""
    for world, (bits, rounds) in {16: (2.1875, 5), 32: (2.375, 6), 64: (2.46875, 7)}.items():
        schedule = circulant().schedule(world)
        assert float(vote_bits(schedule)) == bits and len(schedule.rounds) == rounds


@pytest.mark.parametrize("world", [65, 96, 100, 127, 128, 256])
def test_among_many_devices_skips_send_fewer_bits_than_the_published_ones(world: int) -> None:
    best, published = (a.schedule(world) for a in (circulant(), circulant(published_skips(world))))
    assert vote_bits(best) < 0.9 * vote_bits(published)
    assert len(best.rounds) <= len(published.rounds) + 1


@pytest.mark.parametrize("world", [2, 3, 4, 6, 7, 8, 12, 16, 32, 64])
@pytest.mark.parametrize("name", ["ring", "direct", "circulant", "halving_doubling"])
def test_no_pair_sends_both_ways_unless_all_do(name: str, world: int) -> None:
    """Rounds of gloo: one operation each, a swap or messages of which none waits for its turn."""
    for step in getattr(algorithms, name)().schedule(world).rounds:
        assert swaps_of(step.pairs) in ([], list(step.pairs))


@pytest.mark.parametrize("world", range(3, 65))
def test_rising_skips_send_least_to_the_farthest_and_no_pair_both_ways(world: int) -> None:
    rounds = circulant().for_means.schedule(world).rounds
    assert not any(swaps_of(step.pairs) for step in rounds)
    is_power = world & (world - 1) == 0
    assert len(rounds) == math.ceil(math.log2(world)) + is_power
    assert rounds[0].size == max(step.size for step in rounds)

    def across_the_middle(rounds: Sequence[Round]) -> int:
        half = (world + 1) // 2
        return sum(sum(s < half <= t for s, t in step.pairs) * step.size for step in rounds)

    near, far = map(across_the_middle, (rounds, circulant().schedule(world).rounds))
    assert near <= far if world < 16 else 1.5 * near < far


def test_votes_and_means_take_skips_of_their_own() -> None:
    assert circulant().for_means.schedule(8).rounds[0].pairs[0] == (0, 1)
    assert circulant().schedule(8).rounds[0].pairs[0] == (0, 5)
    assert circulant((4, 2, 1)).for_means == circulant((4, 2, 1))
    both = algorithms.hierarchical(near=ring(), far=circulant()).for_means
    assert both == algorithms.hierarchical(near=ring(), far=circulant().for_means)


def test_the_documented_skips() -> None:
    """Of each row: N, then skips, rounds and bits, published and chosen."""
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    rows = re.findall(
        r"^\| (\d+) \| ([\d, ]+) \| (\d) \| (.*) \| ([\d, ]+) \| (\d) \| (.*) \|$", page, re.M
    )
    assert len(rows) == 9
    for world, *found in rows:
        chosen = (circulant(published_skips(int(world))), circulant())
        for algorithm, *row in zip(
            chosen, *([found[i], found[i + 3]] for i in range(3)), strict=True
        ):
            schedule = algorithm.schedule(int(world))
            skips = ", ".join(str(step.pairs[0][1]) for step in schedule.rounds)
            assert row == [skips, str(len(schedule.rounds)), f"{float(vote_bits(schedule)):.2f}"]


@pytest.mark.parametrize("skips", [(), (3, 2), (2, 2, 1), (1, 2), (2.0, 1)])
def test_skips_that_do_not_fall_to_one(skips: Any) -> None:
    with pytest.raises(ValueError, match="skips fall to 1"):
        circulant(skips)


def test_skips_for_another_number_of_devices() -> None:
    with pytest.raises(ValueError, match=r"for 8 devices fall from 8 to 1.*such as \(5, 3, 2, 1\)"):
        circulant((3, 2, 1)).schedule(8)


def test_counts_give_the_published_bits_of_a_majority_vote():
    """A sum of k signs has ceil(log2(k+1)) bits; the programs send what the schedules say."""
    for world, bits in {3: 4 / 3, 5: 1.8, 6: 2.0, 7: 15 / 7, 9: 20 / 9}.items():
        schedule = circulant(published_skips(world)).schedule(world)
        # As published, all blocks of a message are as wide as its widest.
        widest = [max(counts) for counts in schedule.counts]
        whole = sum(
            step.size * (math.ceil(math.log2(most + 1)) + 1)
            for step, most in zip(schedule.rounds, widest, strict=True)
        )
        assert whole / world == pytest.approx(bits)
        assert vote_bits(schedule) <= Fraction(whole, world)
    for world in WORLDS[1:]:
        found = {name: vote_bits(CASES[name].schedule(world)) for name in SCHEDULED}
        for name in ("ring", "two_way_ring", "direct"):
            assert float(found[name]) == pytest.approx(oracles.majority_bits(world, name))
        assert found["circulant"] < 3 and found["circulant"] <= found["two_way_ring"]
        assert found["aggregator"] == world - 1
        near, far = found["halving_doubling"], found["far_first"]
        if world & (world - 1) == 0:
            expected = oracles.majority_bits(world, "halving_doubling")
            assert near == far == pytest.approx(expected) and found["circulant"] <= near
        else:  # each pair folds once more: a bit there, and the finished bit back
            q = world.bit_length() - 1
            assert near <= 1 + sum((j + 1) / 2**j for j in range(1, q + 1)) + 1 - 2.0**-q


def test_an_unknown_order_is_refused_at_once():
    with pytest.raises(ValueError, match="choose one of near_first, far_first"):
        halving_doubling("nearest")


@pytest.mark.parametrize("algorithm", [circulant((33, 17, 9, 5, 3, 2, 1)), circulant().for_means])
def test_blocks_of_many_devices_come_back_to_their_places(algorithm: Any) -> None:
    """They are gathered, in place of an operation for each."""
    order, x = algorithm.schedule(65).order, np.arange(65.0, dtype=np.float32)[:, None]
    for me in map(jax.numpy.int32, (0, 3, 64)):
        mine = _scheduled._reorder(x, order, me)
        np.testing.assert_array_equal(mine[:, 0], order[int(me)])
        np.testing.assert_array_equal(_scheduled._by_block(mine, order, me), x)
