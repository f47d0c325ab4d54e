"""Who talks to whom: all-reduce algorithms, each of which carries out any reduction.

The names in `BY_NAME` are the strings that `algorithm=` accepts. To add an algorithm, write its
file and add its row here.
"""

from collections.abc import Callable

from jaxcomm._names import from_table
from jaxcomm.collectives.algorithms._algorithm import Algorithm
from jaxcomm.collectives.algorithms.circulant import circulant
from jaxcomm.collectives.algorithms.direct import direct
from jaxcomm.collectives.algorithms.halving_doubling import halving_doubling
from jaxcomm.collectives.algorithms.hierarchical import hierarchical
from jaxcomm.collectives.algorithms.native import native
from jaxcomm.collectives.algorithms.ring import ring, two_way_ring
from jaxcomm.collectives.algorithms.two_clusters import two_clusters

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

# `hierarchical` has no name: it needs two algorithms.
#: The factory of each algorithm, by the name that `algorithm=` accepts.
BY_NAME: dict[str, Callable[..., Algorithm]] = {
    "native": native,
    "direct": direct,
    "ring": ring,
    "two_way_ring": two_way_ring,
    "halving_doubling": halving_doubling,
    "circulant": circulant,
    "two_clusters": two_clusters,
}


def from_name(algorithm: str | Algorithm) -> Algorithm:
    """The algorithm of a name.

    Args:
      algorithm: a name in `BY_NAME`, such as "ring", or an algorithm, which is returned as it is.

    Returns:
      The algorithm, with its defaults.

    Raises:
      TypeError: for anything else, such as a factory that was not called.
      ValueError: for an unknown name; the message has the known ones.
    """
    if algorithm == "hierarchical":
        raise ValueError(
            "'hierarchical' goes over two axes, each with its own algorithm; write "
            "jaxcomm.algorithms.hierarchical(near=jaxcomm.algorithms.ring(), "
            "far=jaxcomm.algorithms.ring())."
        )
    return from_table(algorithm, BY_NAME, Algorithm, "algorithm", "jaxcomm.algorithms.ring()")
