"""Recursive halving and doubling: messages halve from round to round."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxcomm._numbers import is_integer
from jaxcomm.collectives.algorithms import _shortcuts
from jaxcomm.collectives.algorithms._scheduled import Order, Scheduled
from jaxcomm.collectives.algorithms._shortcuts import Hop
from jaxcomm.collectives.algorithms.schedule import Round

_ON_SWITCHES = {"shifted": _shortcuts.shifted, "spread": _shortcuts.spread}
ORDERS = ("near_first", "far_first", *_ON_SWITCHES)


@dataclasses.dataclass(frozen=True)
class HalvingDoubling(Scheduled):
    """Reduce-scatter by recursive halving, all-gather by recursive doubling.

    In each round a device exchanges with the one whose number differs from its own in one bit. The
    order of the bits decides how far the large messages of the first rounds travel.

    Wire, P = 2^q devices: 2(P-1)/P of the vector in 2q rounds. P + r devices: each of r pairs of
    neighbours is folded into one device before and unfolded after, so the busiest device sends
    2(P-1)/P + 1 vectors, in two more rounds; `circulant` is then the better choice.

    Attributes:
      order: "near_first" begins with distance 1, so the largest messages stay between neighbours.
        "far_first" begins with distance 2^(q-1). "shifted" is near first inside a switch, and then
        takes the shortcuts between switches in an order that differs from device to device, so that
        the devices of a switch use different shortcuts in the same round. "spread" also sends along
        each ring of switches in both directions, so that every shortcut of a distributed loop
        network carries equally many devices in each round, as nearly as possible.
      devices_per_switch: for "shifted" and "spread": how many neighbouring devices are on a switch.
      grid: for the same two: the number of switches along each dimension; None means one ring of
        all.

    References:
      R. Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004.
      R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective Communication
      Operations in MPICH", International Journal of High Performance Computing Applications
      19(1), 2005 (the fold where N is not a power of two).
      T. T. Nguyen and M. Wahib, "An Allreduce Algorithm and Network Co-design for Large-Scale
      Training of Distributed Deep Learning", CCGrid 2021 (the shifted order, and its networks).

    Differs from the paper: "spread" is new here; see `_shortcuts`.
    """

    order: str = "near_first"
    devices_per_switch: int | None = None
    grid: tuple[int, ...] | None = None
    name = "halving_doubling"

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"unknown order {self.order!r}; choose one of {', '.join(ORDERS)}.")
        if (self.order in _ON_SWITCHES) != (self.devices_per_switch is not None):
            raise ValueError(
                'devices_per_switch belongs to order="shifted" or "spread", and only to them; got '
                f"order={self.order!r}, devices_per_switch={self.devices_per_switch}."
            )
        of_switch = 1 if self.devices_per_switch is None else self.devices_per_switch
        for number in (*(self.grid or ()), of_switch):
            if not is_integer(number) or number < 1:
                raise ValueError(
                    f"devices_per_switch and the numbers of grid are positive, got {number!r}."
                )
        if self.grid is not None and self.order not in _ON_SWITCHES:
            raise ValueError(
                f'grid belongs to order="shifted" or "spread", got order={self.order!r}.'
            )

    def blocks(self, world: int) -> int:
        """See `Algorithm.blocks`: the largest power of two that fits."""
        return 1 << (world.bit_length() - 1)

    def rounds(self, world: int) -> tuple[Round, ...]:
        """The fold of the remainder, then a round for each bit of a position, from the top."""
        core, devices = self.blocks(world), self._devices(world)
        folded = tuple((device - 1, device) for device in devices[: world - core])
        rounds = [Round(folded, (0, core), 0)] if folded else []
        for j, ends in enumerate(self._ends(world)):
            pairs = tuple((devices[rank], devices[end]) for rank, end in enumerate(ends))
            rounds.append(Round(pairs, (core >> (j + 1), core >> j), 0))
        return tuple(rounds)

    def positions(self, world: int) -> Order:
        """The bits of a position, from the top, name the hops that lead to the block stored there.

        What is left after a round is the lower half of the positions. Over the shortcuts, the hops
        are those of the devices which will own the blocks, at their place in the switch.
        """
        held = [(rank,) for rank in range(self.blocks(world))]
        for ends in reversed(self._ends(world)):
            held = [mine + held[end] for mine, end in zip(held, ends, strict=True)]
        by_device = dict(zip(self._devices(world), held, strict=True))
        # A device that folds keeps the order of the device that takes its values.
        return tuple(by_device.get(r) or by_device[r + 1] for r in range(world))

    def _devices(self, world: int) -> list[int]:
        """Device 2e folds into 2e + 1 for e < the remainder; the others, by rank."""
        extra = world - self.blocks(world)
        return [2 * e + 1 for e in range(extra)] + list(range(2 * extra, world))

    def _ends(self, world: int) -> list[list[int]]:
        """For each round, the rank to which each rank sends."""
        q = world.bit_length() - 1
        hops: list[list[Hop]] = [[(bit, 0) for bit in range(q)]]
        sizes: tuple[int, ...] = (1 << q,)
        if self.order == "far_first":
            hops = [hops[0][::-1]]
        elif self.devices_per_switch is not None:
            grid = self.grid or (world // self.devices_per_switch,)
            sizes = (self.devices_per_switch, *grid)
            _shortcuts.require(world, sizes)
            hops = _ON_SWITCHES[self.order](self.devices_per_switch, grid)
        ranks = range(1 << q)
        return [
            [_shortcuts.after(r, hops[r % len(hops)][j], sizes) for r in ranks] for j in range(q)
        ]


def halving_doubling(
    order: str = "near_first",
    devices_per_switch: int | None = None,
    grid: Sequence[int] | np.ndarray | None = None,
) -> HalvingDoubling:
    """Recursive halving and doubling: 2 log2 N rounds at powers of two.

    Args:
      order: "near_first" or "far_first", which partners come first; "shifted", in which each device
        of a switch begins at another dimension, so that messages use all links at once; or
        "spread", which also sends both ways around each ring.
      devices_per_switch: for "shifted" and "spread": how many neighbouring devices are on a switch.
      grid: for the same two: the number of switches along each dimension, such as (4, 4); None is
        one ring.

    Returns:
      The algorithm, for `algorithm=`.

    Raises:
      TypeError: for a grid that is not a sequence.
      ValueError: for an unknown order, or one that the other arguments do not fit; in the first
        step, for arguments that do not fit the axis.

    Wire: 2(N-1)/N of the vector at powers of two. Otherwise the busiest device sends 2(P-1)/P, with
    P the largest power of two below N, and one vector more.

    References:
      R. Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004.
      R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective Communication Operations
      in MPICH", International Journal of High Performance Computing Applications 19(1), 2005 (the
      fold where N is not a power of two).
      T. T. Nguyen and M. Wahib, "An Allreduce Algorithm and Network Co-design for Large-Scale
      Training of Distributed Deep Learning", CCGrid 2021 (the shifted order).

    Differs from the paper: "spread" is ours.
    """
    if grid is not None and not (isinstance(grid, Sequence | np.ndarray) and len(grid)):
        raise TypeError(
            f"grid has the switches along each dimension, such as (4, 4), got {grid!r}."
        )
    return HalvingDoubling(order, devices_per_switch, None if grid is None else tuple(grid))
