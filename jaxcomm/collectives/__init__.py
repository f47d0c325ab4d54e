"""Collectives for the manual view: who talks to whom, and what a message means."""

from jaxcomm.collectives._algorithm import Algorithm
from jaxcomm.collectives._reduction import Reduction
from jaxcomm.collectives._sparse import Carried, Sparse, SparseMean
from jaxcomm.collectives.all_reduce import (
    BY_NAME,
    all_reduce,
    exchange,
    from_name,
    mean_of,
    pmean,
    require_axis,
)
from jaxcomm.collectives.circulant import Circulant, circulant
from jaxcomm.collectives.direct import Aggregator, Direct, direct
from jaxcomm.collectives.halving_doubling import HalvingDoubling, halving_doubling
from jaxcomm.collectives.hierarchical import Hierarchical, hierarchical
from jaxcomm.collectives.majority import Majority, check_majority
from jaxcomm.collectives.mean import Mean
from jaxcomm.collectives.native import Native, native
from jaxcomm.collectives.ring import Ring, ring
from jaxcomm.collectives.schedule import Round, Schedule
from jaxcomm.collectives.sparse import (
    SPARSE_BY_NAME,
    gaussiank,
    gtopk,
    oktopk,
    sparse_from_name,
    topk_allgather,
    topk_dsa,
)

__all__ = [
    "BY_NAME",
    "SPARSE_BY_NAME",
    "Aggregator",
    "Algorithm",
    "Carried",
    "Circulant",
    "Direct",
    "HalvingDoubling",
    "Hierarchical",
    "Majority",
    "Mean",
    "Native",
    "Reduction",
    "Ring",
    "Round",
    "Schedule",
    "Sparse",
    "SparseMean",
    "all_reduce",
    "check_majority",
    "circulant",
    "direct",
    "exchange",
    "from_name",
    "gaussiank",
    "gtopk",
    "halving_doubling",
    "hierarchical",
    "mean_of",
    "native",
    "oktopk",
    "pmean",
    "require_axis",
    "ring",
    "sparse_from_name",
    "topk_allgather",
    "topk_dsa",
]
