"""The circulant graph: few rounds for every number of devices, with skips to suit the messages."""

import dataclasses
import functools
from collections.abc import Iterable

from jaxcomm._numbers import is_integer
from jaxcomm.collectives.algorithms._algorithm import Algorithm
from jaxcomm.collectives.algorithms._scheduled import Order, Scheduled
from jaxcomm.collectives.algorithms.schedule import Round, rotations, shift

_SEARCHED = 64  # devices; for more, not all sequences of skips are tried
_FREE = 3  # skips that are tried then; half of the one before follows


@dataclasses.dataclass(frozen=True)
class Circulant(Scheduled):
    """Reduce-scatter over skips that fall to 1 or rise from 1, and all-gather over the rising ones.

    The skips can be chosen freely. Falling skips are each at least half the one before; the
    published ones, ceil(N/2), ceil(N/4), ..., take the fewest rounds. `best_skips` takes at most
    one round more, for votes in fewer bits: sums of 1, 3 or 7 votes fill their bit planes.

    Falling skips send half of the vector to the farthest device. Messages of means, and results,
    are equally wide in any order, so they use `near_skips`, which send most to the next device and
    least to the farthest. Then at most log2(N)/2 vectors cross a link between two halves in each
    direction; with falling skips about N/4 do.

    Wire: 2(N-1)/N of the vector in at most 2 ceil(log2 N) + 2 rounds, for every N.

    Attributes:
      skips: the falling skips, or None for `best_skips`.
      is_near_first: whether to use `near_skips` instead of falling ones.

    References:
      J. L. Traeff, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms", 2024,
      arXiv:2410.14234.
    """

    skips: tuple[int, ...] | None = None
    is_near_first: bool = False
    name = "circulant"

    def rounds(self, world: int) -> tuple[Round, ...]:
        """With skip s after s', position s..s'-1 of device r goes to r + s, to positions 0...

        Position i of device r is block r + i, so the blocks agree without an index that depends
        on the device. `_near` has the rounds and positions of rising skips.
        """
        if self.is_near_first:
            return _near(world)[0]
        skips = best_skips(world) if self.skips is None else self.skips
        ends = (world, *skips)
        pairs = list(zip(ends, skips, strict=False))
        if ends[-1] != 1 or any(not before / 2 <= skip < before for before, skip in pairs):
            raise ValueError(
                f"skips for {world} devices fall from {world} to 1, each at least half of the one "
                f"before, such as {best_skips(world)}, got {skips}."
            )
        return tuple(Round(shift(world, skip), (skip, before), 0) for before, skip in pairs)

    def positions(self, world: int) -> Order:
        """See `Scheduled.positions`."""
        if not self.is_near_first:
            return rotations(world)
        offsets = _near(world)[1]
        return tuple(tuple((r + offset) % world for offset in offsets) for r in range(world))

    @property
    def gathers_as(self) -> Scheduled:
        """See `Scheduled.gathers_as`."""
        return Circulant(is_near_first=True)

    @property
    def for_means(self) -> Algorithm:
        """See `Algorithm.for_means`."""
        return self if self.skips is not None else Circulant(is_near_first=True)


@functools.cache
def best_skips(world: int) -> tuple[int, ...]:
    """The skips of a majority vote that sends the fewest bits; among equals, the fewest rounds.

    For more devices than `_SEARCHED`, the fewest bits among those that are tried.
    """
    most = (world - 1).bit_length() + 1
    if world <= _SEARCHED:
        tried = _sequences(world, most)
    else:
        some = _some_sequences(world, -(-world // _SEARCHED), _FREE)
        tried = [skips for skips in some if len(skips) <= most]
    return min(tried, key=lambda skips: (_bits(world, skips), len(skips)))


def _sequences(before: int, rounds: int) -> list[tuple[int, ...]]:
    """All sequences of at most `rounds` skips that can follow a skip; none if these are too few."""
    if before == 1:
        return [()]
    if before > 2**rounds:
        return []
    return [
        (skip, *rest)
        for skip in range(-(-before // 2), before)
        for rest in _sequences(skip, rounds - 1)
    ]


def _some_sequences(before: int, step: int, free: int) -> list[tuple[int, ...]]:
    """Sequences whose first skips, `free` of them or fewer, are `step` apart from each other's."""
    least = -(-before // 2)
    halves = [least]
    while halves[-1] > 1:
        halves.append(-(-halves[-1] // 2))
    return [tuple(halves)] + [
        (skip, *rest)
        for skip in range(least, before, step)
        if free
        for rest in _some_sequences(skip, step, free - 1)
    ]


def _bits(world: int, skips: tuple[int, ...]) -> int:
    """The bits of a block that a device sends in a vote and in the all-gather of its result."""
    votes, before, total = [1] * world, world, 0
    for skip in skips:
        sent = votes[skip:before]
        total += sum(count.bit_length() for count in sent) + len(sent)
        votes[: len(sent)] = [a + b for a, b in zip(votes, sent, strict=False)]
        before = skip
    return total


def near_skips(world: int) -> tuple[int, ...]:
    """The skips 1, 2, 4, ... of a reduce-scatter that sends the fewest blocks to the farthest.

    A skip sends the blocks at its odd multiples to even ones. If the number of multiples is odd,
    the last is even, so every odd one also has an even neighbour above it, and the skip is
    negative. A skip of N/2 would make pairs of devices send to each other, so the last four of 2^q
    devices form a ring instead, for one round more.
    """
    skips: list[int] = []
    blocks, skip = world, 1
    while blocks > 1:
        if blocks == 4 and 4 * skip == world:  # noqa: PLR2004
            return *skips, skip, skip, skip
        skips.append(-skip if blocks % 2 else skip)
        blocks, skip = -(-blocks // 2), 2 * skip
    return tuple(skips)


@functools.cache
def _near(world: int) -> tuple[tuple[Round, ...], tuple[int, ...]]:
    """The rounds over `near_skips`, and the offset of the block at each position.

    Offsets stand in the order in which the all-gather gets them, so that a round sends the last.
    """
    offsets, rounds = [0], []
    for skip in reversed(near_skips(world)):
        known = set(offsets)
        new = [o + skip for o in offsets if 0 < o + skip < world and o + skip not in known]
        send, into = (len(offsets), len(offsets) + len(new)), offsets.index(new[0] - skip)
        rounds.append(Round(shift(world, skip), send, into))
        offsets += new
    return tuple(reversed(rounds)), tuple(offsets)


def circulant(skips: Iterable[int] | None = None) -> Circulant:
    """The circulant graph: at most 2 ceil(log2 N) + 2 rounds for every N.

    Args:
      skips: how far devices send in each round of the reduce-scatter, such as (5, 3, 2, 1) for 8
        devices. None means: for votes, the skips with the fewest bits; for means, rising skips,
        which send least to the farthest device. Results always use rising skips.

    Returns:
      The algorithm, for `algorithm=`.

    Raises:
      TypeError: for skips that are not a sequence.
      ValueError: for skips that do not fall to 1; in the first step, for skips that do not fit the
        number of devices.

    Wire: 2(N-1)/N of the vector.

    References:
      J. L. Traeff, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms", 2024,
      arXiv:2410.14234.
    """
    if skips is None:
        return Circulant()
    if not isinstance(skips, Iterable):
        raise TypeError(f"skips are numbers, such as (5, 3, 2, 1), got {skips!r}.")
    each = tuple(skips)
    pairs = zip(each, (*each[1:], 0), strict=False)
    if not each or each[-1] != 1 or not all(is_integer(s) and s > t for s, t in pairs):
        raise ValueError(f"skips fall to 1, such as (5, 3, 2, 1) for 8 devices, got {each}.")
    return Circulant(tuple(map(int, each)))
