"""Ok-Topk: split among owners and reduce there, then an all-gather of the largest sums."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxcomm import _axes
from jaxcomm._axes import Axis
from jaxcomm.codecs.entries import Entries
from jaxcomm.collectives._behind import behind_next
from jaxcomm.collectives._sending import all_gather
from jaxcomm.collectives.sparse._by_threshold import ByThreshold
from jaxcomm.collectives.sparse._owners import Owners
from jaxcomm.collectives.sparse._sparse import SMALLEST, SparseResult, take, take_out
from jaxcomm.kernels import select


@dataclasses.dataclass(frozen=True, kw_only=True)
class OkTopk(ByThreshold):
    """An O(k) sparse all-reduce: what a device sends does not grow with the number of devices.

    1. Split and reduce: the values above a local threshold go to the owners of their places, which
       add what arrives.
    2. All-gather: each owner sends the k/N largest of its sums to everyone.

    The threshold aims at k values. It is found at least every `recompute_every` steps, and reused
    in between unless the number of values above it is off by more than `tolerance`. In a long
    vector both are those of a sample: a few percent more or fewer than k values reach the
    threshold. With a `tolerance` above 5/4, or None, it is scaled a little before it is found anew.
    A value that is not in the mean, because it is too small or has no room, stays in its device's
    residual.

    Every N places in a row have N owners, which change from step to step. So an owner gets about
    k/N of each device's values, give or take the square root of that, wherever they lie. From
    k = 16 N on, more than 0.96 of the selected values have room on average, and 0.8 of a device's
    in its worst steps. For smaller k a message has few slots and more values wait, a tenth of them
    at k = N; they have another owner in the next step. For the same reason the owners' largest sums
    are the largest of all, except near the k-th.

    Wire, in entries of 6 bytes (4 in bfloat16): (N-1) ceil(slack k / N) to the owners and (N-1)
    ceil(k / N) back, in 2 collective operations. With the defaults this is 0.6 of the paper's
    bound, 6 k (N-1)/N words of 4 bytes. Where n > 2^16 N, a message has 4 bytes more for every 2^16
    N values.

    References:
      S. Li and T. Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP
      2022, arXiv:2201.07598, algorithm 1.
    """

    name = "oktopk"

    def exchange(
        self, x: jax.Array, threshold: jax.Array, step: jax.Array, axis: Axis
    ) -> tuple[SparseResult, jax.Array]:
        """See `SparseAllReduce.exchange`."""
        n, k, world = x.size, self.k(x.size), _axes.world_of(axis)
        me, owners = _axes.place_on(axis), Owners(n, world, step)
        entries, room = Entries(self.values, owners.width), self.room(n, world)

        found, threshold = self.about_k(x, threshold, step, min(n, world * room))
        sums, sent = owners.split_and_reduce(found, room, entries, axis)

        large = self._largest_sums(sums, min(world * room, owners.width), -(-k // world))
        payload = entries.encode(large.values, large.indices)
        arrived = behind_next(all_gather(payload, axis))
        values, offsets = entries.decode(arrived)
        places = owners.places(jnp.arange(world, dtype=jnp.int32)[:, None], offsets)
        mean = jnp.zeros(n, jnp.float32).at[places].set(values / world, mode="drop")

        # Line 6 of the algorithm: only what is in the mean leaves the residual.
        is_applied = take(mean, sent.places) != 0
        errors, taken = take_out(x, sent.values, sent.places, is_applied)
        rounding = large.values - entries.rounded(large.values)
        owned = owners.places(me, large.indices)
        errors = errors.at[owned].add(rounding, mode="drop")
        delivered = jnp.sum(sent.places < n, dtype=jnp.int32)
        applied = jnp.sum(values != 0, dtype=jnp.int32)
        witnesses = [jnp.concatenate([values.reshape(-1), take(errors, owned)])]
        outcome = SparseResult(mean, errors, taken, found.count, delivered, applied, witnesses)
        return outcome, self.scaled(threshold, found.count, k)

    def _largest_sums(self, sums: jax.Array, filled: int, share: int) -> select.Selected:
        """The largest of an owner's sums, of which at most `filled` are not zero."""
        # Searching in a list of the sums that are not zero saves most passes over all sums.
        listed = self.compact(sums, jnp.float32(SMALLEST), filled)
        share = min(filled, share)
        return select.narrow(listed, self.threshold_for(listed.values, share), share, sums.size)


def oktopk(
    values: str = "float32",
    slack: float = 1.4,
    recompute_every: int = 32,
    scaling: float = 1.012,
    tolerance: float | None = 1.25,
) -> OkTopk:
    """Ok-Topk: O(k) bytes for any number of devices.

    Args:
      values: "float32" or "bfloat16", on the wire.
      slack: how many times an equal share of k entries a message to an owner has room for.
      recompute_every: as for `topk_allgather`; tau' in the paper.
      scaling: as for `topk_allgather`; with a `tolerance` of at most 5/4 it is rarely used.
      tolerance: likewise.

    Returns:
      The sparse all-reduce, for `jaxcomm.sparse_mean`.

    Raises:
      ValueError: for any other arguments.

    Wire: (N-1) ceil(slack k / N) entries of 6 bytes, or 4 in bfloat16, to the owners of their
    places, and (N-1) ceil(k / N) back. Where n > 2^16 N, each message has 4 bytes more for every
    2^16 N values.

    References:
      S. Li and T. Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP
      2022, arXiv:2201.07598, algorithm 1.
      Z. Wang et al., "ZEN: Empowering Distributed Training with Sparsity-driven Data
      Synchronization", OSDI 2025, arXiv:2309.13254 (owners chosen by a hash).

    Differs from the paper: messages have static sizes. Places are dealt to owners by a hash; the
    paper has contiguous regions, moves their boundaries every 64 steps, and hands over sums before
    the all-gather where they are unbalanced. Each owner sends its own k/N largest sums, not those
    above a common threshold. A threshold that is far off, or lets more values pass than messages
    have room for, is replaced in the same step (with `tolerance=None`, only in the latter case).
    The threshold of a long vector is that of a sample, not the exact one.
    """
    return OkTopk(
        values=values,
        slack=slack,
        recompute_every=recompute_every,
        scaling=scaling,
        tolerance=tolerance,
    )
