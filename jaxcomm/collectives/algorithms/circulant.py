"""The circulant graph: as few rounds as possible, for every number of devices."""

import dataclasses

from jaxcomm.collectives.algorithms._scheduled import Scheduled
from jaxcomm.collectives.algorithms.schedule import Round, Schedule, rotations, shift


@dataclasses.dataclass(frozen=True)
class Circulant(Scheduled):
    """Reduce-scatter and all-gather over skips N, ceil(N/2), ceil(N/4), ..., 1.

    Wire: 2(N-1)/N of the vector in 2 ceil(log2 N) rounds, for every N.

    References:
      J. L. Traeff, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms", 2024,
      arXiv:2410.14234.
    """

    name = "circulant"

    def schedule(self, world: int) -> Schedule:
        """With skip s after s', position s..s'-1 of device r goes to r + s, to positions 0...

        Position i of device r is block r + i, so the blocks agree without an index that depends
        on the device.
        """
        rounds, previous = [], world
        while previous > 1:
            skip = -(-previous // 2)
            rounds.append(Round(shift(world, skip), (skip, previous), 0))
            previous = skip
        return Schedule(world, world, rotations(world), tuple(rounds))


def circulant() -> Circulant:
    """The circulant graph: 2 ceil(log2 N) rounds for every N."""
    return Circulant()
