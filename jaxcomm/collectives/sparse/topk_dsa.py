"""TopkDSA: the largest values are split by region, added there, and gathered as is cheapest."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxcomm._axes import AxisName
from jaxcomm.codecs.entries import Entries
from jaxcomm.collectives.sparse._sparse import (
    SMALLEST,
    Carried,
    SparseAllReduce,
    SparseResult,
    add_lists,
    take_out,
)
from jaxcomm.kernels import bfloat16, select


@dataclasses.dataclass(frozen=True)
class TopkDsa(SparseAllReduce):
    """A sparse reduce-scatter over N equal regions, then an all-gather of what they hold.

    The owner of a region adds the entries that arrive. Its sums go back as entries, or as the whole
    region if that is fewer bytes. A message has room for `slack` times an equal share of k entries;
    an entry without room stays with its device.

    Wire: (N-1) * c entries to the owners, c = ceil(slack k / N); then (N-1) * min(N c entries, the
    ceil(n/N) values of a region) back: 2 collective operations.

    References:
      C. Renggli et al., "SparCML: High-Performance Sparse Communication for Machine Learning",
      SC 2019, arXiv:1802.08021 (dynamic sparse all-reduce: split, then sparse or dense).

    Differs from the paper: sparse or dense is decided for a shape, not for the data.
    """

    name = "topk_dsa"
    operations = ("select.compact", "select.compact_regions", "select.count_at_least")

    def exchange(
        self, x: jax.Array, carried: Carried, step: jax.Array, axis_name: AxisName
    ) -> tuple[SparseResult, Carried]:
        """See `SparseAllReduce.exchange`."""
        world, me = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
        n, k, room = x.size, self.k(x.size), self.room(x.size, world)
        width = region_width(n, world)
        boundaries = jnp.minimum(jnp.arange(world + 1, dtype=jnp.int32) * width, n)
        threshold = self.local_threshold(x, step, carried.local)

        entries = Entries(self.values, width)
        found = self.largest_in_regions(x, threshold, boundaries, room)
        offsets = jnp.where(found.indices < n, found.indices - boundaries[:-1, None], 0)
        payload = entries.encode(found.values, offsets)
        arrived = jax.lax.all_to_all(payload, axis_name, 0, 0, tiled=True)
        values, offsets = entries.decode(arrived)
        offsets = jnp.where(values == 0, width, offsets)
        region = add_lists(jnp.zeros(width), values, offsets)
        sent = entries.rounded(found.values)
        errors = take_out(x, sent, found.indices, jnp.ones(sent.shape, bool))

        sums, rounded = self._gather(region, min(world * room, width), entries, axis_name)
        places = me * width + jnp.arange(width, dtype=jnp.int32)
        errors = errors.at[places].add(region - rounded, mode="drop")
        mean = sums[:n] / world
        delivered = jnp.sum(jnp.minimum(found.count, room))
        applied = jnp.sum(mean != 0, dtype=jnp.int32)
        outcome = SparseResult(mean, errors, jnp.sum(found.count), delivered, applied, applied)
        local = self.scaled(threshold, outcome.selected, k)
        return outcome, carried._replace(local=local)

    def _gather(
        self, region: jax.Array, filled: int, entries: Entries, axis_name: AxisName
    ) -> tuple[jax.Array, jax.Array]:
        """All regions in a row, and this device's own as the others get it."""
        dense_bytes = region.size * 2 * entries.value_words
        if filled * entries.entry_bytes < dense_bytes:
            found = self.compact(region, jnp.float32(SMALLEST), filled)
            offsets = jnp.where(found.indices < region.size, found.indices, 0)
            arrived = jax.lax.all_gather(entries.encode(found.values, offsets), axis_name)
            values, offsets = entries.decode(arrived)
            offsets = jnp.where(values == 0, region.size, offsets)
            rows = jax.vmap(lambda v, o: jnp.zeros(region.size).at[o].add(v, mode="drop"))(
                values, offsets
            )
            own = jnp.where(jnp.abs(region) < SMALLEST, 0.0, entries.rounded(region))
            return rows.reshape(-1), own
        if self.values == "float32":
            return jax.lax.all_gather(region, axis_name, tiled=True), region
        bits = bfloat16.round_to_bits(region)
        rows = jax.lax.all_gather(bits, axis_name, tiled=True)
        return bfloat16.widen_bits(rows), bfloat16.widen_bits(bits)


def region_width(n: int, world: int) -> int:
    """The length of N equal regions in whole chunks, the last ones shorter or empty."""
    return -(-n // (world * select.CHUNK)) * select.CHUNK


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
