"""Who sends how much to whom in an exchange, step by step.

The pairs are those of the functions that give the programs theirs: `Scheduled.rounds` and
`_all_to_all.targets`. A schedule says who reduces what; the all-gather behind it is the same
backwards.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from jaxcomm.collectives._all_to_all import targets
from jaxcomm.collectives.algorithms import Algorithm, ring
from jaxcomm.collectives.algorithms._scheduled import Scheduled
from jaxcomm.collectives.algorithms.direct import Direct
from jaxcomm.collectives.algorithms.hierarchical import Hierarchical
from jaxcomm.collectives.algorithms.native import Native


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
      share: of the vector, in each message.
      times: how often in a row.
    """

    pairs: Pairs
    share: float
    times: int = 1


def steps(algorithm: Algorithm, world: int | tuple[int, int]) -> Iterator[Step]:
    """The steps of an all-reduce, in order; equal ones in a row are one.

    XLA's own all-reduce, and the all-gather behind an all-to-all, are taken for rings, as they are
    between CPU processes.

    Args:
      algorithm: who talks to whom.
      world: the number of devices; for `hierarchical`, those along its two axes, (far, near).

    Raises:
      TypeError: for an algorithm whose pairs are not known.
    """
    if isinstance(algorithm, Hierarchical) != isinstance(world, tuple):
        raise TypeError(f"hierarchical, and only it, has two sizes (far, near), got {world!r}.")
    return _joined(_both_ways(algorithm, world))


def _both_ways(algorithm: Algorithm, world: int | tuple[int, int]) -> Iterator[Step]:
    if isinstance(world, tuple):
        assert isinstance(algorithm, Hierarchical)
        yield from _two_levels(algorithm, *world)
    elif isinstance(algorithm, Native):
        yield from _both_ways(ring(), world)
    else:
        yield from _there(algorithm, world)
        yield from _back(algorithm, world)


def _there(algorithm: Algorithm, world: int) -> Iterator[Step]:
    """The reduce-scatter."""
    if isinstance(algorithm, Direct):
        everyone = np.arange(world)
        parts = 2 if world == 4 else 1
        for row in targets(world) if world > 1 else ():
            yield Step(Pairs(everyone, np.asarray(row)), 1 / (world * parts))
    elif isinstance(algorithm, Scheduled):
        seen: dict[int, Pairs] = {}
        rounds = tuple(algorithm.rounds(world))  # alive, so that ids stay theirs
        for step in rounds:
            if id(step.pairs) not in seen:
                seen[id(step.pairs)] = Pairs(*np.asarray(step.pairs, int).T)
            yield Step(seen[id(step.pairs)], step.size / algorithm.blocks(world))
    else:
        raise TypeError(f"the pairs of {algorithm!r} are not known.")


def _back(algorithm: Algorithm, world: int) -> Iterator[Step]:
    """The all-gather."""
    if isinstance(algorithm, Direct):
        yield from _there(ring(), world)
        return
    seen: dict[int, Pairs] = {}
    for step in reversed(tuple(_there(algorithm, world))):
        back = seen.setdefault(id(step.pairs), step.pairs.back)
        yield Step(back, step.share)


def _two_levels(algorithm: Hierarchical, far: int, near: int) -> Iterator[Step]:
    """Near there, far there and back on a near block, near back; all groups at once."""
    within = np.arange(far)[:, None] * near
    across = np.arange(near)[:, None]
    part = 1 / algorithm.near.blocks(near)
    yield from _in_groups(_there(algorithm.near, near), within, 1, 1)
    yield from _in_groups(_there(algorithm.far, far), across, near, part)
    yield from _in_groups(_back(algorithm.far, far), across, near, part)
    yield from _in_groups(_back(algorithm.near, near), within, 1, 1)


def _in_groups(
    found: Iterator[Step], first: np.ndarray, stride: int, share: float
) -> Iterator[Step]:
    """Steps of one group, for all groups; device r of a group is number first + stride * r."""
    for step in _joined(found):
        sources = (first + stride * step.pairs.sources).ravel()
        pairs = Pairs(sources, (first + stride * step.pairs.targets).ravel())
        yield Step(pairs, share * step.share, step.times)


def _joined(found: Iterator[Step]) -> Iterator[Step]:
    """Steps that are the same as the one before are counted, not repeated."""
    last: Step | None = None
    for step in found:
        if last is not None and (step.pairs, step.share) == (last.pairs, last.share):
            last = dataclasses.replace(last, times=last.times + step.times)
            continue
        if last is not None:
            yield last
        last = step
    if last is not None:
        yield last
