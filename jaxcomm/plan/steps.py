"""Who sends how much to whom in an exchange, step by step.

The pairs come from `Scheduled.rounds`, as those of the programs do; in an all-to-all, r sends to
r + 1, r + 2, ... in turn. A schedule says who reduces what; the all-gather that follows is the same
schedule backwards, or another one (`Scheduled.gathers_as`).
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from jaxcomm.collectives.algorithms import Algorithm, ring
from jaxcomm.collectives.algorithms._scheduled import Scheduled
from jaxcomm.collectives.algorithms.direct import Direct
from jaxcomm.collectives.algorithms.hierarchical import Hierarchical
from jaxcomm.collectives.algorithms.native import Native
from jaxcomm.collectives.algorithms.schedule import counted
from jaxcomm.collectives.algorithms.two_clusters import TwoClusters, round_of, weights


class Codec(Protocol):
    """What the planner needs of a codec."""

    def message_bytes(self, n: int) -> int:
        """The bytes of a message of n values."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Pairs:
    """Who sends to whom at once; equal pairs are the same object.

    Attributes:
      sources: the devices that send.
      targets: the device that each of them sends to.
    """

    sources: np.ndarray
    targets: np.ndarray

    @property
    def back(self) -> "Pairs":
        """The pairs with sources and targets exchanged."""
        return Pairs(self.targets, self.sources)


@dataclasses.dataclass(frozen=True)
class Step:
    """Messages that are sent at once, each of the same size.

    Attributes:
      pairs: who sends to whom.
      blocks: the number of blocks in each message.
      of: the number of blocks that the vector is cut into.
      counts: how many devices each of these blocks is a partial of; None if that is unknown, or for
        finished results (`is_result`).
      is_result: whether the blocks are finished.
      times: how often the step is repeated in a row.
      codec: the format of these messages, if they have their own.
      within: whether they stay within hosts.
    """

    pairs: Pairs
    blocks: int
    of: int
    counts: tuple[int, ...] | None = None
    is_result: bool = False
    times: int = 1
    codec: Codec | None = None
    within: bool = False

    @property
    def share(self) -> float:
        """The share of the vector in each message."""
        return self.blocks / self.of


def steps(
    algorithm: Algorithm,
    world: int | tuple[int, int],
    with_counts: bool = False,
) -> Iterator[Step]:
    """The steps of an all-reduce, in order; equal steps in a row are merged.

    XLA's own all-reduce, and the all-gather after an all-to-all, count as rings, as between CPU
    processes.

    Args:
      algorithm: who talks to whom.
      world: the number of devices; for `hierarchical`, those along its two axes, (far, near).
      with_counts: whether to fill in the `counts` of the steps of the reduce-scatter.

    Raises:
      TypeError: for an algorithm whose pairs are unknown.
    """
    if isinstance(algorithm, Hierarchical) != isinstance(world, tuple):
        raise TypeError(f"hierarchical, and only it, has two sizes (far, near), got {world!r}.")
    if isinstance(world, tuple):
        assert isinstance(algorithm, Hierarchical)
        return _joined(_two_levels(algorithm, *world, with_counts))
    if isinstance(algorithm, TwoClusters):
        return _joined(_two_clusters(world, with_counts))
    if isinstance(algorithm, Native):
        algorithm = ring()
    there = _there(algorithm, world, with_counts)
    return _joined(itertools.chain(there, _back(algorithm, world)))


def _there(algorithm: Algorithm, world: int, with_counts: bool) -> Iterator[Step]:
    """The reduce-scatter."""
    if isinstance(algorithm, Direct):
        everyone = np.arange(world)
        for k in range(1, world):
            pairs = Pairs(everyone, (everyone + k) % world)
            yield Step(pairs, 1, world, (1,) if with_counts else None)
    elif isinstance(algorithm, Scheduled):
        seen: dict[int, Pairs] = {}
        rounds = tuple(algorithm.rounds(world))  # kept alive, so that ids stay unique
        blocks = algorithm.blocks(world)
        counts = counted(world, blocks, rounds)[0] if with_counts else [None] * len(rounds)
        for step, count in zip(rounds, counts, strict=True):
            if id(step.pairs) not in seen:
                seen[id(step.pairs)] = Pairs(*np.asarray(step.pairs, int).T)
            yield Step(seen[id(step.pairs)], step.size, blocks, count)
    else:
        raise TypeError(f"the pairs of {algorithm!r} are not known.")


def _back(algorithm: Algorithm, world: int) -> Iterator[Step]:
    """The all-gather."""
    if isinstance(algorithm, Direct):
        algorithm = ring()
    if isinstance(algorithm, Scheduled):
        algorithm = algorithm.gathers_as
    seen: dict[int, Pairs] = {}
    for step in reversed(tuple(_there(algorithm, world, False))):
        back = seen.setdefault(id(step.pairs), step.pairs.back)
        yield dataclasses.replace(step, pairs=back, is_result=True)


def _two_clusters(world: int, with_counts: bool) -> Iterator[Step]:
    """Bits of votes, of segments that are as many units long as their weights."""
    near = world // 2
    lengths = weights(near)
    units, bits = 2 * near * sum(lengths), near.bit_length()
    turns = itertools.chain(lengths, (0, 0, 0))
    before = itertools.accumulate(turns, lambda last, n: (n, *last[:3]), initial=(0, 0, 0, 0))
    for a, b, c, d in itertools.islice(before, 1, None):
        longest = max(2 * a + c + d, bits * b + c)
        for distance in range(1, near + 1):
            pairs = round_of(distance, near, a + c + d > 0, b + c > 0)
            counts = (1,) * longest if with_counts else None
            if pairs:  # a cluster of one device sends nothing within it
                yield Step(Pairs(*np.asarray(pairs, int).T), longest, units, counts)


def _two_levels(algorithm: Hierarchical, far: int, near: int, with_counts: bool) -> Iterator[Step]:
    """Near reduce-scatter, far all-reduce of a near block, near all-gather; all groups at once."""
    within = np.arange(far)[:, None] * near
    across = np.arange(near)[:, None]
    parts = algorithm.near.blocks(near)
    there = _there(algorithm.near, near, with_counts)
    for step in _in_groups(there, within, 1):
        yield dataclasses.replace(step, codec=algorithm.near_codec, within=True)
    there = _there(algorithm.far, far, with_counts)
    for step in _in_groups(itertools.chain(there, _back(algorithm.far, far)), across, near):
        counts = None if step.counts is None else tuple(near * count for count in step.counts)
        yield dataclasses.replace(step, of=parts * step.of, counts=counts)
    results = algorithm.far.blocks(far)  # each block of the near exchange consists of these
    for step in _in_groups(_back(algorithm.near, near), within, 1):
        blocks, of = results * step.blocks, results * step.of
        yield dataclasses.replace(step, blocks=blocks, of=of, within=True)


def _in_groups(found: Iterator[Step], first: np.ndarray, stride: int) -> Iterator[Step]:
    """The steps of one group, for all groups; device r of a group is number first + stride * r."""
    seen: dict[int, tuple[Pairs, Pairs]] = {}
    for step in found:
        if id(step.pairs) not in seen:
            sources = (first + stride * step.pairs.sources).ravel()
            every = Pairs(sources, (first + stride * step.pairs.targets).ravel())
            seen[id(step.pairs)] = step.pairs, every
        yield dataclasses.replace(step, pairs=seen[id(step.pairs)][1])


def _joined(found: Iterator[Step]) -> Iterator[Step]:
    """The steps, with a step equal to the one before counted instead of repeated."""
    last: Step | None = None
    for step in found:
        if last is not None and step == dataclasses.replace(last, times=1):
            last = dataclasses.replace(last, times=last.times + 1)
            continue
        if last is not None:
            yield last
        last = step
    if last is not None:
        yield last
