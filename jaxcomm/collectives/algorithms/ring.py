"""The ring: every device talks to its two neighbours only."""

import dataclasses

from jaxcomm.collectives.algorithms._scheduled import Order, Scheduled
from jaxcomm.collectives.algorithms.schedule import Round, rotations, shift


@dataclasses.dataclass(frozen=True)
class Ring(Scheduled):
    """Reduce-scatter and all-gather around a ring, one block a round.

    Wire: 2(N-1)/N of the vector in 2(N-1) rounds; partial results are encoded at every hop.

    References:
      P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
      workstations", Journal of Parallel and Distributed Computing 69(2), 2009.
    """

    name = "ring"

    def rounds(self, world: int) -> tuple[Round, ...]:
        """Device r sends block r - 1 to r + 1 first, and what it has just merged from then on."""
        neighbours = shift(world, 1)
        return tuple(Round(neighbours, (i, i + 1), i - 1) for i in range(world - 1, 0, -1))

    def positions(self, world: int) -> Order:
        """See `Scheduled.positions`."""
        return rotations(world)


def ring() -> Ring:
    """The ring: every device sends to its right neighbour alone.

    Returns:
      The algorithm. A partial result is decoded, added to and encoded again N-1 times.

    Wire: of a mean 2(N-1)/N of the vector, in 2(N-1) rounds. Of a vote log2 N bits a coordinate at
    powers of two.

    References:
      P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
      workstations", Journal of Parallel and Distributed Computing 69(2), 2009.
    """
    return Ring()
