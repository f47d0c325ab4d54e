"""Who sends which blocks to whom, in which round.

Programs, byte formulas and simulations read the same plain value. A schedule describes a
reduce-scatter over `world` devices of a vector cut into `blocks` equal blocks; the all-gather that
follows is its mirror image, or that of another schedule. Every device keeps the blocks in its own
order, chosen so that what a round sends, and what it is added to, is the same contiguous range of
positions on every device: shapes are static, and no index depends on the device.
"""

import dataclasses
import functools
from collections.abc import Iterable

import numpy as np


@dataclasses.dataclass(frozen=True)
class Round:
    """One step: every source sends the blocks at `send` to its target, which adds them at `into`.

    Attributes:
      pairs: (source, target) devices; each device is at most once a source and once a target.
      send: the positions sent, as [start, stop).
      into: the first of the equally many positions they are added to at the target.
    """

    pairs: tuple[tuple[int, int], ...]
    send: tuple[int, int]
    into: int

    @property
    def size(self) -> int:
        """The number of blocks in a message."""
        return self.send[1] - self.send[0]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A reduce-scatter: after the last round, the owner of a block holds all of its sum.

    Attributes:
      world: the number of devices.
      blocks: the number of blocks that the vector is cut into.
      order: `order[r][i]` is the block that device r keeps at position i.
      rounds: what is sent, in order.
    """

    world: int
    blocks: int
    order: tuple[tuple[int, ...], ...]
    rounds: tuple[Round, ...]

    @functools.cached_property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        """`counts[t][k]`: how many devices the k-th block of round t's message is a sum of.

        Where senders differ, the largest counts: a message has one shape on all devices.
        """
        return counted(self.world, self.blocks, self.rounds)[0]

    @functools.cached_property
    def owners(self) -> tuple[bool, ...]:
        """Whether a device owns a block in the end: the one it keeps at position 0."""
        held = counted(self.world, self.blocks, self.rounds)[1]
        return tuple((held[:, 0] == self.world).tolist())

    @functools.cached_property
    def blocks_sent(self) -> tuple[int, ...]:
        """The blocks that each device sends in the reduce-scatter and, back, the all-gather."""
        sent = [0] * self.world
        for step in self.rounds:
            for source, target in step.pairs:
                sent[source] += step.size
                sent[target] += step.size
        return tuple(sent)


def counted(
    world: int, blocks: int, rounds: Iterable[Round]
) -> tuple[tuple[tuple[int, ...], ...], np.ndarray]:
    """How many devices blocks are sums of; no device is counted twice, so counts add up.

    Returns:
      `Schedule.counts`, and what each device holds at each position in the end, `(world, blocks)`.
    """
    held = np.ones((world, blocks), np.int32)
    found = []
    for step in rounds:
        sources, targets = np.asarray(step.pairs).T
        sent = held[sources, slice(*step.send)]
        found.append(tuple(sent.max(axis=0).tolist()))
        held[targets, step.into : step.into + step.size] += sent
    return tuple(found), held


def rotations(world: int) -> tuple[tuple[int, ...], ...]:
    """The order in which device r keeps block r + i at position i."""
    return tuple(tuple((r + i) % world for i in range(world)) for r in range(world))


def shift(world: int, distance: int) -> tuple[tuple[int, int], ...]:
    """The pairs in which device r sends to r + distance."""
    return tuple((r, (r + distance) % world) for r in range(world))
