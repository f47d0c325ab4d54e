"""What a message means: reductions that every algorithm can carry out."""

from jaxcomm.collectives.reductions._reduction import Prepared, Reduction
from jaxcomm.collectives.reductions.coded_mean import CodedMean
from jaxcomm.collectives.reductions.majority import Majority, check_majority
from jaxcomm.collectives.reductions.random_k_mean import RandomKMean

__all__ = [
    "CodedMean",
    "Majority",
    "Prepared",
    "RandomKMean",
    "Reduction",
    "check_majority",
]
