"""Sparse all-reduces: which of its largest values a device sends, and to whom.

The names in `BY_NAME` are the strings that `algorithm=` of `jaxcomm.sparse_mean` accepts. To add a
sparse all-reduce, write its file and add its row here.
"""

from collections.abc import Callable

from jaxcomm._names import from_table
from jaxcomm.collectives.sparse._sparse import SparseAllReduce, SparseResult
from jaxcomm.collectives.sparse.gaussiank import gaussiank
from jaxcomm.collectives.sparse.gtopk import gtopk
from jaxcomm.collectives.sparse.oktopk import oktopk
from jaxcomm.collectives.sparse.topk_allgather import topk_allgather
from jaxcomm.collectives.sparse.topk_chunks import topk_chunks
from jaxcomm.collectives.sparse.topk_dsa import topk_dsa

__all__ = [
    "BY_NAME",
    "SparseAllReduce",
    "SparseResult",
    "from_name",
    "gaussiank",
    "gtopk",
    "oktopk",
    "topk_allgather",
    "topk_chunks",
    "topk_dsa",
]

#: The factory of each sparse all-reduce, by the name that `algorithm=` accepts.
BY_NAME: dict[str, Callable[..., SparseAllReduce]] = {
    "oktopk": oktopk,
    "topk_allgather": topk_allgather,
    "topk_chunks": topk_chunks,
    "topk_dsa": topk_dsa,
    "gtopk": gtopk,
    "gaussiank": gaussiank,
}


def from_name(algorithm: str | SparseAllReduce) -> SparseAllReduce:
    """The sparse all-reduce of a name.

    Args:
      algorithm: a name in `BY_NAME`, such as "oktopk", or a sparse all-reduce, which is returned
        as it is.

    Returns:
      The sparse all-reduce, with its defaults.

    Raises:
      TypeError: for anything else, such as a factory that was not called.
      ValueError: for an unknown name; the message has the known ones.
    """
    example = "jaxcomm.sparse.oktopk()"
    return from_table(algorithm, BY_NAME, SparseAllReduce, "sparse algorithm", example)
