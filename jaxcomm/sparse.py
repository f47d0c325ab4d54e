"""Sparse all-reduces: what `algorithm=` of `jaxcomm.sparse_mean` takes."""

from jaxcomm.collectives.sparse import (
    BY_NAME,
    SparseAllReduce,
    SparseResult,
    from_name,
    gaussiank,
    gtopk,
    oktopk,
    topk_allgather,
    topk_dsa,
)

__all__ = [
    "BY_NAME",
    "SparseAllReduce",
    "SparseResult",
    "from_name",
    "gaussiank",
    "gtopk",
    "oktopk",
    "topk_allgather",
    "topk_dsa",
]
