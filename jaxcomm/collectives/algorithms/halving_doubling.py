"""Recursive halving and doubling: messages halve from round to round."""

import dataclasses
import math
from collections.abc import Callable

from jaxcomm.collectives.algorithms._scheduled import Scheduled
from jaxcomm.collectives.algorithms.schedule import Round, Schedule

ORDERS = ("near_first", "far_first", "shifted")

Bits = list[int]


@dataclasses.dataclass(frozen=True)
class HalvingDoubling(Scheduled):
    """Reduce-scatter by recursive halving, all-gather by recursive doubling.

    In each round a device exchanges with the one whose number differs from its own in one bit. The
    order of the bits decides how far the large messages of the first rounds travel.

    Wire, N = 2^q: 2(N-1)/N of the vector in 2q rounds. N = 2^q + r: before and after, each of r
    pairs of neighbours folds two devices into one, so the busiest device sends the whole vector
    once more, and there are two more rounds; `circulant` is then the better choice.

    Attributes:
      order: "near_first" begins with distance 1, so the largest messages stay between neighbours;
        "far_first" begins with distance 2^(q-1); "shifted" is near first inside a switch, and then
        takes the shortcuts between switches in an order that differs from device to device, so that
        the devices of a switch use different shortcuts in the same round.
      devices_per_switch: for "shifted": neighbouring devices are on one switch.
      grid: for "shifted": the switches along each dimension; None is a ring of all of them.

    References:
      R. Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004.
      R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective Communication
      Operations in MPICH", International Journal of High Performance Computing Applications
      19(1), 2005 (the fold for other than powers of two).
      T. T. Nguyen and M. Wahib, "An Allreduce Algorithm and Network Co-design for Large-Scale
      Training of Distributed Deep Learning", CCGrid 2021 (the shifted order, and its networks).
    """

    order: str = "near_first"
    devices_per_switch: int | None = None
    grid: tuple[int, ...] | None = None
    name = "halving_doubling"

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"unknown order {self.order!r}; choose one of {', '.join(ORDERS)}.")
        if (self.order == "shifted") != (self.devices_per_switch is not None):
            raise ValueError(
                'devices_per_switch belongs to order="shifted", and only to it; got '
                f"order={self.order!r}, devices_per_switch={self.devices_per_switch}."
            )
        if self.grid is not None and self.order != "shifted":
            raise ValueError(f'grid belongs to order="shifted", got order={self.order!r}.')

    def schedule(self, world: int) -> Schedule:
        """Position i of a device is the block whose number differs from its own in i's bits.

        The top bit of a position is the bit of the first partner, and so on downwards: what is
        left after a round is the lower half of the positions. Over the shortcuts, the order of
        the bits is that of the devices which will own the blocks, at their place in the switch.
        """
        q = world.bit_length() - 1
        core, extra = 2**q, world - 2**q
        inside, across = self._bits(world)
        # Device 2e folds into 2e + 1 for e < extra; `devices` are the 2^q that go on.
        devices = [2 * e + 1 for e in range(extra)] + list(range(2 * extra, world))
        order: dict[int, tuple[int, ...]] = {}
        for rank, device in enumerate(devices):
            order[device] = tuple(_block(rank, i, q, inside, across) for i in range(core))
            if rank < extra:
                order[device - 1] = order[device]
        rounds = [Round(tuple((2 * e, 2 * e + 1) for e in range(extra)), (0, core), 0)]
        for j in range(q):
            bits = [(inside + across(r))[j] for r in range(core)]
            pairs = tuple((devices[r], devices[r ^ (1 << bits[r])]) for r in range(core))
            rounds.append(Round(pairs, (core >> (j + 1), core >> j), 0))
        rounds = rounds if extra else rounds[1:]
        return Schedule(world, core, tuple(order[r] for r in range(world)), tuple(rounds))

    def _bits(self, world: int) -> tuple[Bits, Callable[[int], Bits]]:
        """The bits met in order: first the same for all devices, then as each has its own."""
        q = world.bit_length() - 1
        if self.order != "shifted":
            bits = list(range(q))
            return (bits if self.order == "near_first" else bits[::-1]), lambda rank: []
        per_switch = self.devices_per_switch or 0
        grid = self.grid or (world // max(per_switch, 1),)
        sizes = (per_switch, *grid)
        if math.prod(sizes) != world or any(s < 1 or s & (s - 1) for s in sizes):
            raise ValueError(
                f"the shifted order needs devices_per_switch x switches to be the {world} devices "
                f"of the axis, all powers of two; got {per_switch} x {' x '.join(map(str, grid))}."
            )
        low = per_switch.bit_length() - 1

        def across(rank: int) -> Bits:
            bits, base = [], low
            for size in grid:
                width = size.bit_length() - 1
                bits += [base + (rank % per_switch + j) % width for j in range(width)]
                base += width
            return bits

        return list(range(low)), across


def _block(rank: int, position: int, q: int, inside: Bits, across: Callable[[int], Bits]) -> int:
    """The block at a position of the device with this rank."""
    taken = [(position >> (q - 1 - j)) & 1 for j in range(q)]
    block = rank ^ sum(bit << b for bit, b in zip(taken, inside, strict=False))
    # `block` is now at the place in the switch of the device that will own it.
    return block ^ sum(
        bit << b for bit, b in zip(taken[len(inside) :], across(block), strict=False)
    )


def halving_doubling(
    order: str = "near_first",
    devices_per_switch: int | None = None,
    grid: tuple[int, ...] | None = None,
) -> HalvingDoubling:
    """Recursive halving and doubling: 2 log2 N rounds at powers of two.

    Args:
      order: "near_first", "far_first" or "shifted", see `HalvingDoubling`.
      devices_per_switch: for "shifted": how many neighbouring devices are on a switch.
      grid: for "shifted": the switches along each dimension, such as (4, 4); None is one ring.

    Raises:
      ValueError: for an unknown order, or one that the other arguments do not fit; when used,
        for an axis that they do not fit.
    """
    return HalvingDoubling(order, devices_per_switch, grid)
