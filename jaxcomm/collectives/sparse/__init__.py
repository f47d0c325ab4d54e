"""Sparse all-reduces: which of its largest values a device sends, and to whom.

A name in `BY_NAME` is what the `algorithm=` of `jaxcomm.sparse_mean` takes as a string. To add a
sparse all-reduce, write its file and add its row here.
"""

from collections.abc import Callable

from jaxcomm.collectives.sparse._sparse import Carried as Carried
from jaxcomm.collectives.sparse._sparse import SparseAllReduce as SparseAllReduce
from jaxcomm.collectives.sparse._sparse import SparseResult as SparseResult
from jaxcomm.collectives.sparse.gaussiank import gaussiank
from jaxcomm.collectives.sparse.gtopk import gtopk
from jaxcomm.collectives.sparse.oktopk import oktopk
from jaxcomm.collectives.sparse.topk_allgather import topk_allgather
from jaxcomm.collectives.sparse.topk_dsa import topk_dsa

BY_NAME: dict[str, Callable[..., SparseAllReduce]] = {
    "oktopk": oktopk,
    "topk_allgather": topk_allgather,
    "topk_dsa": topk_dsa,
    "gtopk": gtopk,
    "gaussiank": gaussiank,
}


def from_name(algorithm: str | SparseAllReduce) -> SparseAllReduce:
    """The sparse all-reduce with that name and its defaults.

    Raises:
      ValueError: for an unknown name.
      TypeError: for anything that is neither a name nor a sparse all-reduce.
    """
    if isinstance(algorithm, SparseAllReduce):
        return algorithm
    names = ", ".join(BY_NAME)
    if not isinstance(algorithm, str):
        raise TypeError(
            f"algorithm must be a name ({names}) or a sparse all-reduce, got {algorithm!r}; "
            "a factory must be called: jaxcomm.sparse.oktopk()."
        )
    if algorithm not in BY_NAME:
        raise ValueError(f"unknown sparse algorithm {algorithm!r}; choose one of {names}.")
    return BY_NAME[algorithm]()
