"""TopkDSA: the largest values are split among owners, added, and gathered the cheaper way."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxcomm import _axes
from jaxcomm._axes import Axis
from jaxcomm.codecs.entries import Entries
from jaxcomm.collectives._sending import all_gather
from jaxcomm.collectives.sparse._by_threshold import ByThreshold
from jaxcomm.collectives.sparse._owners import Owners
from jaxcomm.collectives.sparse._sparse import SMALLEST, SparseResult, take_out
from jaxcomm.kernels import bfloat16


@dataclasses.dataclass(frozen=True)
class TopkDsa(ByThreshold):
    """A sparse reduce-scatter over N owners, then an all-gather of what they hold.

    The owner of a place adds the entries that arrive. Its sums go back as entries, or as the values
    of all its places if those are fewer bytes. A message has room for `slack` times an equal share
    of k entries; an entry without room stays with its device, and has another owner in the next
    step.

    Wire: (N-1) * c entries to the owners, c = ceil(slack k / N); then (N-1) * min(N c entries, the
    values of ceil(n/N) places) back: 2 collective operations. Entries are those of Ok-Topk.

    References:
      C. Renggli et al., "SparCML: High-Performance Sparse Communication for Machine Learning",
      SC 2019, arXiv:1802.08021 (dynamic sparse all-reduce: split, then sparse or dense).
    """

    name = "topk_dsa"

    def exchange(
        self, x: jax.Array, threshold: jax.Array, step: jax.Array, axis: Axis
    ) -> tuple[SparseResult, jax.Array]:
        """See `SparseAllReduce.exchange`."""
        n, world = x.size, _axes.world_of(axis)
        me, owners = _axes.place_on(axis), Owners(n, world, step)
        entries, room = Entries(self.values, owners.width), self.room(n, world)

        found, threshold = self.about_k(x, threshold, step, min(n, world * room))
        sums, sent = owners.split_and_reduce(found, room, entries, axis)
        errors, taken = take_out(x, sent.values, sent.places)
        rows, rounded = self._gather(sums, min(world * room, owners.width), entries, axis)
        owned = owners.places(me, jnp.arange(owners.width, dtype=jnp.int32))
        errors = errors.at[owned].add(sums - rounded, mode="drop")
        places = jnp.arange(n, dtype=jnp.int32)
        mean = rows[owners.of(places), places // world] / world
        delivered = jnp.sum(sent.places < n, dtype=jnp.int32)
        applied = jnp.sum(mean != 0, dtype=jnp.int32)
        counts = found.count, delivered, applied
        outcome = SparseResult(mean, errors, taken, *counts, witnesses=[mean, errors])
        return outcome, self.scaled(threshold, found.count, self.k(n))

    def _gather(
        self, sums: jax.Array, filled: int, entries: Entries, axis: Axis
    ) -> tuple[jax.Array, jax.Array]:
        """The sums of all owners, a row for each, and this device's own as the others get them."""
        if entries.bytes_of(filled) < 2 * sums.size * entries.value_words:
            found = self.compact(sums, jnp.float32(SMALLEST), filled)
            payload = entries.encode(found.values, found.indices)
            values, offsets = entries.decode(all_gather(payload, axis))
            rows = jax.vmap(
                lambda v, o: jnp.zeros(sums.size, jnp.float32).at[o].set(v, mode="drop")
            )(values, offsets)
            own = jnp.where(jnp.abs(sums) < SMALLEST, 0.0, entries.rounded(sums))
            return rows, own
        if self.values == "float32":
            return all_gather(sums, axis), sums
        bits = bfloat16.round_to_bits(sums)
        rows = all_gather(bits, axis)
        return bfloat16.widen_bits(rows), bfloat16.widen_bits(bits)


def topk_dsa(
    values: str = "float32",
    slack: float = 1.4,
    recompute_every: int = 1,
    scaling: float = 1.012,
    tolerance: float | None = 2.0,
) -> TopkDsa:
    """TopkDSA: the k largest go to the owners of their places, are added, and all sums come back.

    Args:
      values: "float32" or "bfloat16", on the wire.
      slack: how many times an equal share of k entries a message to an owner has room for.
      recompute_every: as for `topk_allgather`.
      scaling: likewise.
      tolerance: likewise.

    Returns:
      The sparse all-reduce, for `jaxcomm.sparse_mean`.

    Raises:
      ValueError: for any other arguments.

    Wire: (N-1) c entries of 6 bytes, or 4 in bfloat16, to the owners, with c = ceil(slack k / N).
    Back come (N-1) N c entries, or all sums if these are fewer bytes. Where n > 2^16 N, a message
    has 4 bytes more for every 2^16 N values.

    References:
      C. Renggli et al., "SparCML: High-Performance Sparse Communication for Machine Learning",
      SC 2019, arXiv:1802.08021.

    Differs from the paper: the choice of sparse or dense depends on the shape, not on the data.
    Owners take places in turn, not regions, so that their messages are about equally long.
    """
    return TopkDsa(
        values=values,
        slack=slack,
        recompute_every=recompute_every,
        scaling=scaling,
        tolerance=tolerance,
    )
