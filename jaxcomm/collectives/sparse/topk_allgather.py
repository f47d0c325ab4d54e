"""TopkA: everyone sends its largest values to everyone."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxcomm import _axes
from jaxcomm._axes import Axis
from jaxcomm.codecs.entries import Entries
from jaxcomm.collectives._sending import all_gather
from jaxcomm.collectives.sparse._by_threshold import ByThreshold
from jaxcomm.collectives.sparse._sparse import SparseResult, add_lists, take, take_out
from jaxcomm.kernels import select


@dataclasses.dataclass(frozen=True)
class TopkAllGather(ByThreshold):
    """An all-gather of every device's k largest values, and a local sum.

    The mean has up to N k values. A value that has no room in a message stays with its device.

    Wire: (N-1) * ceil(slack k) entries of 6 bytes (4 in bfloat16), and 4 bytes for every 2^16
    values where n > 2^16, in one all-gather: linear in N.

    References:
      C. Renggli et al., "SparCML: High-Performance Sparse Communication for Machine Learning",
      SC 2019, arXiv:1802.08021 (the sparse all-gather).
      A. F. Aji and K. Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP
      2017, arXiv:1704.05021 (top-k with a residual).
    """

    name = "topk_allgather"

    def exchange(
        self, x: jax.Array, threshold: jax.Array, step: jax.Array, axis: Axis
    ) -> tuple[SparseResult, jax.Array]:
        """See `SparseAllReduce.exchange`."""
        found, threshold = self.about_k(x, threshold, step, self.room(x.size))
        outcome = gathered(self, x, found, axis)
        return outcome, self.scaled(threshold, found.count, self.k(x.size))


def gathered(
    algorithm: ByThreshold, x: jax.Array, found: select.Selected, axis: Axis
) -> SparseResult:
    """The mean of what the devices selected for their messages."""
    entries, room = Entries(algorithm.values, x.size), algorithm.room(x.size)
    rounded = entries.rounded(found.values)
    payload = entries.encode(found.values, found.indices)
    arrived, places = entries.decode(all_gather(payload, axis))
    world = _axes.world_of(axis)
    mean = add_lists(jnp.zeros_like(x), arrived, places) / world
    errors, taken = take_out(x, rounded, found.indices)
    claimed = jnp.zeros(x.shape, bool).at[places.reshape(-1)].set(True, mode="drop")
    delivered, applied = jnp.minimum(found.count, room), jnp.sum(claimed, dtype=jnp.int32)
    witnesses = [take(mean, places.reshape(-1))]
    return SparseResult(mean, errors, taken, found.count, delivered, applied, witnesses)


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
      recompute_every: steps between new thresholds, which about k values reach; in between, the
        last one is reused. With 1 the k largest values are selected in every step.
      scaling: what a reused threshold is multiplied or divided by after a step in which more than
        5/4 k or fewer than 2/3 k values were above it.
      tolerance: a new threshold is found if the number of values above the reused one is more
        than `tolerance` times k, or less than k over `tolerance`; with None, only if there are more
        than messages have room for.

    Returns:
      The sparse all-reduce, for `jaxcomm.sparse_mean`.

    Raises:
      ValueError: for any other arguments.

    Wire: (N-1) ceil(slack k) entries of 6 bytes, or 4 in bfloat16; for a vector of more than 2^16
    values, 4 bytes more for every 2^16 of them.

    References:
      C. Renggli et al., "SparCML: High-Performance Sparse Communication for Machine Learning",
      SC 2019, arXiv:1802.08021.
    """
    return TopkAllGather(
        values=values,
        slack=slack,
        recompute_every=recompute_every,
        scaling=scaling,
        tolerance=tolerance,
    )
