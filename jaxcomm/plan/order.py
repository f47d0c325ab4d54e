"""In which order devices should have their ranks.

Neighbours of a ring, and the near partners of halving-doubling, are neighbours in rank. Where ranks
were dealt without a look at the network, a ring crosses the same link again and again.
"""

import numpy as np

from jaxcomm.collectives.algorithms import ring
from jaxcomm.plan.simulate import Model, Simulation
from jaxcomm.plan.topology import Topology

_GAIN = 0.99  # an order is changed for a ring that is at least so much faster


def best_order(topology: Topology, model: Model, order: tuple[int, ...]) -> tuple[int, ...]:
    """The given order, or one in which a ring is faster.

    Two orders are tried: by a depth-first walk from a host at the rim, which keeps what is behind a
    switch together, and in the order of the hosts' names.
    """
    tried = [order, tuple(range(len(order))), _walked(topology)]
    seconds = [Simulation(topology, model, o).seconds(ring(), 64e6) for o in tried]
    best = int(np.argmin(seconds))
    return tried[best] if seconds[best] < _GAIN * seconds[0] else order


def _walked(topology: Topology) -> tuple[int, ...]:
    """The hosts as a depth-first walk finds them, from one that is farthest from the others."""
    from scipy.sparse import csgraph  # here, as importing it takes long

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
            found.append(node)
        beside = [n for n in joined.indices[joined.indptr[node] : joined.indptr[node + 1]]]
        # What is nearest to the start comes first, and so is on top of the stack.
        stack += sorted((n for n in beside if not seen[n]), key=lambda n: (-away[n], -n))
    return tuple(found)
