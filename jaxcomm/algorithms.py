"""Who talks to whom in an all-reduce: what `algorithm=` of means and votes takes."""

from jaxcomm.collectives.algorithms import (
    BY_NAME,
    Algorithm,
    circulant,
    direct,
    from_name,
    halving_doubling,
    hierarchical,
    native,
    ring,
    two_clusters,
    two_way_ring,
)

__all__ = [
    "Algorithm",
    "BY_NAME",
    "circulant",
    "direct",
    "from_name",
    "halving_doubling",
    "hierarchical",
    "native",
    "ring",
    "two_clusters",
    "two_way_ring",
]
