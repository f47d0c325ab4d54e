"""The best order for the ranks of devices and for the dimensions of halving-doubling.

Neighbours of a ring, and the near partners of halving-doubling, are neighbours in rank. Where ranks
were assigned without regard to the network, a ring crosses the same link again and again.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from jaxcomm.collectives.algorithms import halving_doubling, ring
from jaxcomm.plan.families import Dimensions
from jaxcomm.plan.simulate import Model, Simulation
from jaxcomm.plan.topology import Topology

_GAIN = 0.99  # a new order must take at most this share of the time
_BYTES = 64e6


def best_order(topology: Topology, model: Model, order: tuple[int, ...]) -> tuple[int, ...]:
    """The given order, or one in which a ring is faster, or else only halving-doubling.

    Two orders are tried: by a depth-first walk from a host farthest from the others, which keeps
    the hosts of a switch together, and in the order of the hosts' names.
    """
    tried = [order, tuple(range(len(order))), _walked(topology)]

    def of_ring(order: tuple[int, ...]) -> float:
        return Simulation(topology, model, order).seconds(ring(), _BYTES)

    def of_halving_doubling(order: tuple[int, ...]) -> float:
        return min(seconds for _, seconds in _halving_doublings(topology, model, order))

    of_rings = [of_ring(o) for o in tried]
    best = int(np.argmin(of_rings))
    if of_rings[best] < _GAIN * of_rings[0]:
        return tried[best]
    tried = [o for o, seconds in zip(tried, of_rings, strict=True) if seconds <= of_rings[0]]
    of_others = [of_halving_doubling(o) for o in tried]
    best = int(np.argmin(of_others))
    return tried[best] if of_others[best] < _GAIN * of_others[0] else order


def best_dimensions(topology: Topology, model: Model, order: tuple[int, ...]) -> Dimensions:
    """The fastest arguments of `jaxcomm.algorithms.halving_doubling`; none for its defaults.

    Candidates are the nearest and the farthest devices first and, where equally many devices of
    neighbouring ranks are on each switch, the shifted and spread orders for a ring and for every
    grid of the switches.

    Args:
      topology: the network.
      model: what messages cost.
      order: the devices in the order of their ranks.
    """
    found = _halving_doublings(topology, model, order)
    best, seconds = min(found, key=lambda pair: pair[1])
    return best if seconds < _GAIN * found[0][1] else ()


def _halving_doublings(
    topology: Topology, model: Model, order: tuple[int, ...]
) -> list[tuple[Dimensions, float]]:
    """The candidates of `best_dimensions`, the defaults first, and their seconds."""
    simulation = Simulation(topology, model, order)
    tried: list[Dimensions] = [(), (("order", "far_first"),)]
    if per_switch := _per_switch(topology, order):
        tried += [
            (("order", name), ("devices_per_switch", per_switch), *grid)
            for grid in _grids(len(order) // per_switch)
            for name in ("shifted", "spread")
        ]
    return [(d, simulation.seconds(halving_doubling(**dict(d)), _BYTES)) for d in tried]


def _per_switch(topology: Topology, order: tuple[int, ...]) -> int | None:
    """How many devices of neighbouring ranks each switch has, if both numbers are powers of two."""
    joined, hosts = topology.joined, len(topology.hosts)
    if not joined.nnz:  # a host by itself
        return None
    switches = [int(joined.indices[joined.indptr[host]]) for host in order]
    runs = [len(list(group)) for _, group in itertools.groupby(switches)]
    fits = len(set(runs)) == 1 and len(set(switches)) == len(runs) > 2 and min(switches) >= hosts
    return runs[0] if fits and not hosts & (hosts - 1) and not runs[0] & (runs[0] - 1) else None


def _grids(switches: int) -> Iterator[Dimensions]:
    """One ring of the switches, then each grid of two dimensions."""
    yield ()
    for bits in range(1, switches.bit_length() - 1):
        yield (("grid", (1 << bits, switches >> bits)),)


def _walked(topology: Topology) -> tuple[int, ...]:
    """The hosts as a depth-first walk finds them, from one that is farthest from the others."""
    from scipy.sparse import csgraph  # here because importing it takes long

    hosts = len(topology.hosts)
    joined = topology.joined
    far = csgraph.shortest_path(joined, unweighted=True, indices=0)[:hosts]
    start = int(np.argmax(far))
    away = csgraph.shortest_path(joined, unweighted=True, indices=start)
    found: list[int] = []
    seen = np.zeros(joined.shape[0], bool)
    stack = [start]
    while stack:
        node = stack.pop()
        if seen[node]:
            continue
        seen[node] = True
        if node < hosts:
            found.append(int(node))
        beside = [n for n in joined.indices[joined.indptr[node] : joined.indptr[node + 1]]]
        # The nodes nearest to the start come first, and so must be on top of the stack.
        stack += sorted((n for n in beside if not seen[n]), key=lambda n: (-away[n], -n))
    return tuple(found)
