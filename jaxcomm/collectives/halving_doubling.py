"""Recursive halving and doubling: messages halve from round to round."""

import dataclasses

from jaxcomm.collectives._scheduled import Scheduled
from jaxcomm.collectives.schedule import Round, Schedule

ORDERS = ("near_first", "far_first")


@dataclasses.dataclass(frozen=True)
class HalvingDoubling(Scheduled):
    """Reduce-scatter by recursive halving, all-gather by recursive doubling.

    Wire, N = 2^q: 2(N-1)/N of the vector in 2q rounds. N = 2^q + r: before and after, each of r
    pairs of neighbours folds two devices into one, so the busiest device sends the whole vector
    once more, and there are two more rounds; `circulant` is then the better choice.

    Attributes:
      order: "near_first" meets the device at distance 1 first, so the largest messages stay
        between neighbours; "far_first" meets the one at distance 2^(q-1) first.

    References:
      R. Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004.
      R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective Communication
      Operations in MPICH", International Journal of High Performance Computing Applications
      19(1), 2005 (the fold for other than powers of two).
    """

    order: str = "near_first"
    name = "halving_doubling"

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"unknown order {self.order!r}; choose one of {', '.join(ORDERS)}.")

    def schedule(self, world: int) -> Schedule:
        """Position i of a device is the block whose number differs from its own in i's bits.

        The top bit of a position is the bit of the first partner, and so on downwards: what is
        left after a round is the lower half of the positions.
        """
        q = world.bit_length() - 1
        core, extra = 2**q, world - 2**q
        # Device 2e folds into 2e + 1 for e < extra; `devices` are the 2^q that go on.
        devices = [2 * e + 1 for e in range(extra)] + list(range(2 * extra, world))
        bits = [j if self.order == "near_first" else q - 1 - j for j in range(q)]
        relative = [
            sum(((i >> (q - 1 - j)) & 1) << bit for j, bit in enumerate(bits)) for i in range(core)
        ]
        order: dict[int, tuple[int, ...]] = {}
        for rank, device in enumerate(devices):
            order[device] = tuple(rank ^ block for block in relative)
            if rank < extra:
                order[device - 1] = order[device]
        fold = (Round(tuple((2 * e, 2 * e + 1) for e in range(extra)), (0, core), 0),)
        halving = tuple(
            Round(
                tuple((devices[r], devices[r ^ (1 << bit)]) for r in range(core)),
                (core >> (j + 1), core >> j),
                0,
            )
            for j, bit in enumerate(bits)
        )
        rounds = (fold if extra else ()) + halving
        return Schedule(world, core, tuple(order[r] for r in range(world)), rounds)


def halving_doubling(order: str = "near_first") -> HalvingDoubling:
    """Recursive halving and doubling: 2 log2 N rounds at powers of two.

    Args:
      order: "near_first" or "far_first", see `HalvingDoubling`.

    Raises:
      ValueError: for an unknown order.
    """
    return HalvingDoubling(order)
