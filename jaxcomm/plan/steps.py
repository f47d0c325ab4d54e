"""Who sends how much to whom in an exchange, step by step.

The pairs are those of the functions that give the programs theirs, `Scheduled.rounds`; in an
all-to-all, r sends to r + 1, r + 2, ... in turn. A schedule says who reduces what; the all-gather
behind it is the same backwards, or another one (`Scheduled.gathers_as`).
"""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from jaxcomm.collectives.algorithms import Algorithm, ring
from jaxcomm.collectives.algorithms._scheduled import Scheduled
from jaxcomm.collectives.algorithms.direct import Direct
from jaxcomm.collectives.algorithms.hierarchical import Hierarchical
from jaxcomm.collectives.algorithms.native import Native
from jaxcomm.collectives.algorithms.schedule import counted


@dataclasses.dataclass(frozen=True, eq=False)
class Pairs:
    """Who sends to whom at once; the same object stands for the same pairs.

    Attributes:
      sources: the devices that send.
      targets: to whom each of them sends.
    """

    sources: np.ndarray
    targets: np.ndarray

    @property
    def back(self) -> "Pairs":
        """The other way around."""
        return Pairs(self.targets, self.sources)


@dataclasses.dataclass(frozen=True)
class Step:
    """Messages that are sent at once, each of the same size.

    Attributes:
      pairs: who sends to whom.
      blocks: in each message.
      of: how many blocks the vector is cut into.
      counts: of how many devices each of these blocks is a partial; None if that is not known, or
        for finished results, which `is_result` tells.
      is_result: whether the blocks are finished.
      times: how often in a row.
    """

    pairs: Pairs
    blocks: int
    of: int
    counts: tuple[int, ...] | None = None
    is_result: bool = False
    times: int = 1

    @property
    def share(self) -> float:
        """Of the vector, in each message."""
        return self.blocks / self.of


def steps(
    algorithm: Algorithm,
    world: int | tuple[int, int],
    with_counts: bool = False,
) -> Iterator[Step]:
    """The steps of an all-reduce, in order; equal ones in a row are one.

    XLA's own all-reduce, and the all-gather behind an all-to-all, are taken for rings, as they are
    between CPU processes.

    Args:
      algorithm: who talks to whom.
      world: the number of devices; for `hierarchical`, those along its two axes, (far, near).
      with_counts: whether the steps of the reduce-scatter have their `counts`.

    Raises:
      TypeError: for an algorithm whose pairs are not known.
    """
    if isinstance(algorithm, Hierarchical) != isinstance(world, tuple):
        raise TypeError(f"hierarchical, and only it, has two sizes (far, near), got {world!r}.")
    if isinstance(world, tuple):
        assert isinstance(algorithm, Hierarchical)
        return _joined(_two_levels(algorithm, *world, with_counts))
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
        rounds = tuple(algorithm.rounds(world))  # alive, so that ids stay theirs
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


def _two_levels(algorithm: Hierarchical, far: int, near: int, with_counts: bool) -> Iterator[Step]:
    """Near there, far there and back on a near block, near back; all groups at once."""
    within = np.arange(far)[:, None] * near
    across = np.arange(near)[:, None]
    parts = algorithm.near.blocks(near)
    there = _there(algorithm.near, near, with_counts)
    yield from _in_groups(there, within, 1)
    there = _there(algorithm.far, far, with_counts)
    for step in _in_groups(itertools.chain(there, _back(algorithm.far, far)), across, near):
        counts = None if step.counts is None else tuple(near * count for count in step.counts)
        yield dataclasses.replace(step, of=parts * step.of, counts=counts)
    results = algorithm.far.blocks(far)  # of which each block of the near exchange consists
    for step in _in_groups(_back(algorithm.near, near), within, 1):
        yield dataclasses.replace(step, blocks=results * step.blocks, of=results * step.of)


def _in_groups(found: Iterator[Step], first: np.ndarray, stride: int) -> Iterator[Step]:
    """Steps of one group, for all groups; device r of a group is number first + stride * r."""
    seen: dict[int, tuple[Pairs, Pairs]] = {}
    for step in found:
        if id(step.pairs) not in seen:
            sources = (first + stride * step.pairs.sources).ravel()
            every = Pairs(sources, (first + stride * step.pairs.targets).ravel())
            seen[id(step.pairs)] = step.pairs, every
        yield dataclasses.replace(step, pairs=seen[id(step.pairs)][1])


def _joined(found: Iterator[Step]) -> Iterator[Step]:
    """Steps that are the same as the one before are counted, not repeated."""
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
