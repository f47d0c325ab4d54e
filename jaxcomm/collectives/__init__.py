"""Collectives for the manual view: an algorithm (who talks to whom) carries out a reduction."""

from jaxcomm.collectives import algorithms, reductions, sparse
from jaxcomm.collectives._behind import Behind, travelling
from jaxcomm.collectives.all_reduce import (
    all_reduce,
    all_reduce_with_residual,
    float32_mean,
    majority_of,
    mean_of,
    pmean,
)
from jaxcomm.collectives.reduce_scatter import all_gather, reduce_scatter_with_residual
from jaxcomm.collectives.undecoded import Undecoded, stays_encoded, undecoded_mean

__all__ = [
    "Behind",
    "Undecoded",
    "algorithms",
    "all_gather",
    "all_reduce",
    "all_reduce_with_residual",
    "float32_mean",
    "majority_of",
    "mean_of",
    "pmean",
    "reduce_scatter_with_residual",
    "reductions",
    "sparse",
    "stays_encoded",
    "travelling",
    "undecoded_mean",
]
