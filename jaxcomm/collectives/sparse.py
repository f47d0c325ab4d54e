"""The sparse all-reduces by name, and their factories."""

from collections.abc import Callable

from jaxcomm.collectives._sparse import Sparse
from jaxcomm.collectives.gaussiank import Gaussiank
from jaxcomm.collectives.gtopk import Gtopk
from jaxcomm.collectives.oktopk import OkTopk
from jaxcomm.collectives.topk_allgather import TopkAllGather
from jaxcomm.collectives.topk_dsa import TopkDsa


def topk_allgather(
    values: str = "float32",
    slack: float = 1.25,
    recompute_every: int = 1,
    scaling: float = 1.012,
    tolerance: float | None = 2.0,
) -> TopkAllGather:
    """TopkA: everyone sends its k largest values to everyone.

    Args:
      values: "float32" or "bfloat16", on the wire.
      slack: how many times k entries a message has room for, at least 1.
      recompute_every: steps between exact thresholds; in between, the last one is re-used.
      scaling: what a re-used threshold is multiplied or divided by after a step in which more than
        5/4 k or fewer than 2/3 k values were above it.
      tolerance: a threshold that would let pass more than so many times k values, or fewer than k
        over it, is found anew; None waits for `recompute_every`.

    Raises:
      ValueError: for anything else.
    """
    return TopkAllGather(
        values=values,
        slack=slack,
        recompute_every=recompute_every,
        scaling=scaling,
        tolerance=tolerance,
    )


def topk_dsa(
    values: str = "float32",
    slack: float = 2.0,
    recompute_every: int = 1,
    scaling: float = 1.012,
    tolerance: float | None = 2.0,
) -> TopkDsa:
    """TopkDSA: split by region and add there, then gather as is cheapest; see `topk_allgather`."""
    return TopkDsa(
        values=values,
        slack=slack,
        recompute_every=recompute_every,
        scaling=scaling,
        tolerance=tolerance,
    )


def gtopk(recompute_every: int = 1, scaling: float = 1.012, tolerance: float | None = 2.0) -> Gtopk:
    """gTopk: pairs merge their lists and keep the k largest; see `topk_allgather`."""
    return Gtopk(recompute_every=recompute_every, scaling=scaling, tolerance=tolerance)


def gaussiank(values: str = "float32", slack: float = 1.5) -> Gaussiank:
    """Gaussiank: TopkA with the threshold of a normal distribution; see `topk_allgather`."""
    return Gaussiank(values=values, slack=slack)


def oktopk(
    values: str = "float32",
    slack: float = 2.0,
    recompute_every: int = 32,
    common_slack: float = 1.5,
    rebalance_every: int = 64,
    scaling: float = 1.012,
    tolerance: float | None = 2.0,
) -> OkTopk:
    """Ok-Topk: O(k) bytes for any number of devices.

    Args:
      values: "float32" or "bfloat16", on the wire.
      slack: how many times an equal share of k entries a message to a region's owner has room for.
      recompute_every: steps between exact thresholds, tau' in the paper.
      common_slack: as `slack`, for the messages that bring the large sums back.
      rebalance_every: steps between new boundaries of the regions, tau in the paper.
      scaling: as of `topk_allgather`, of both thresholds.
      tolerance: likewise; that for the sums is found anew in the next step.

    Raises:
      ValueError: for anything else.
    """
    return OkTopk(
        values=values,
        slack=slack,
        recompute_every=recompute_every,
        common_slack=common_slack,
        rebalance_every=rebalance_every,
        scaling=scaling,
        tolerance=tolerance,
    )


SPARSE_BY_NAME: dict[str, Callable[[], Sparse]] = {
    "oktopk": oktopk,
    "topk_allgather": topk_allgather,
    "topk_dsa": topk_dsa,
    "gtopk": gtopk,
    "gaussiank": gaussiank,
}


def sparse_from_name(algorithm: str | Sparse) -> Sparse:
    """The sparse all-reduce that a string is short for, with its defaults.

    Raises:
      ValueError: for an unknown name.
      TypeError: for anything that is neither a name nor a sparse all-reduce.
    """
    if isinstance(algorithm, Sparse):
        return algorithm
    names = ", ".join(SPARSE_BY_NAME)
    if not isinstance(algorithm, str):
        raise TypeError(
            f"algorithm must be a name ({names}) or a sparse all-reduce, got {algorithm!r}; "
            "a factory must be called: jaxcomm.oktopk()."
        )
    if algorithm not in SPARSE_BY_NAME:
        raise ValueError(f"unknown sparse algorithm {algorithm!r}; choose one of {names}.")
    return SPARSE_BY_NAME[algorithm]()
