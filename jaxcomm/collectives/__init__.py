"""Collectives for the manual view: who talks to whom, and what a message means."""

from jaxcomm.collectives._algorithm import Algorithm
from jaxcomm.collectives._reduction import Reduction
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

__all__ = [
    "BY_NAME",
    "Aggregator",
    "Algorithm",
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
    "all_reduce",
    "check_majority",
    "circulant",
    "direct",
    "exchange",
    "from_name",
    "halving_doubling",
    "hierarchical",
    "mean_of",
    "native",
    "pmean",
    "require_axis",
    "ring",
]
