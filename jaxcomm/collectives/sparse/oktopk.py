"""Ok-Topk: split and reduce by balanced regions, then a balanced all-gather of the largest sums."""

import dataclasses
from typing import NamedTuple

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
    check_interval,
    take,
    take_out,
)
from jaxcomm.kernels import select


class _Gathered(NamedTuple):
    """What all devices have after the balanced all-gather, but for `lost`.

    Attributes:
      total: float32[n], the large sums that found room; zero elsewhere.
      wanted: int32, how many sums were large.
      lost: float32[n], the rounding errors of this device's own sums.
    """

    total: jax.Array
    wanted: jax.Array
    lost: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class OkTopk(SparseAllReduce):
    """An O(k) sparse all-reduce: what every device sends does not grow with their number.

    1. Split and reduce: the values above a local threshold go to the owners of N regions, whose
       boundaries are such that all get about equally many; an owner adds what arrives.
    2. Balanced all-gather: the sums above a common threshold go to everyone. If one region holds
       more than a message has room for, its owner first hands some to the others.

    Both thresholds aim at k values. They are exact every `recompute_every` steps and re-used in
    between: scaled a little if the count of values is off, and computed anew if it is far off. A
    value that is not in the mean, because it is too small or has no room, stays in its device's
    residual.

    Wire, in entries of 8 bytes (6 or 4 in bfloat16, or where n <= 2^16 N, so that regions can be
    kept within 2^16 places): (N-1) c to the owners, (N-1) c' back, and as much again in steps that
    hand over, with c = ceil(slack k / N) and c' = ceil(common_slack k / N): with no slack at most
    6 k (N-1)/N words of 4 bytes. Then N counts of 4 bytes; in steps that recompute, 8 all-reduces
    of at most 15 counts; in those that move the boundaries, an all-reduce of N + 1 numbers.

    If all selected values lie in one region, only 1/N of the room is there for them: at least
    min(1, slack / N) of them is delivered, the largest, until the boundaries move. What waits
    grows, and is among the largest in a later step.

    Attributes:
      common_slack: as `slack`, of the messages of step 2.
      rebalance_every: steps between new boundaries.

    References:
      S. Li and T. Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP
      2022, arXiv:2201.07598, algorithm 1.

    Differs from the paper: messages have static sizes. Boundaries are multiples of a chunk of
    values. The common threshold is the k-th largest of all sums, found by counting them, not by
    gathering them. A threshold that is far off, or lets pass more than messages have room for, is
    computed anew at once (with `tolerance=None` it waits, as in the paper).
    Balancing is an all-to-all, and runs if a message would lack room, not if one device has four
    times the average. The published program does not run the balanced all-gather.
    """

    common_slack: float
    rebalance_every: int
    name = "oktopk"
    operations = ("select.compact", "select.compact_regions", "select.count_at_least")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_interval("rebalance_every", self.rebalance_every)
        if not self.common_slack >= 1:
            raise ValueError(f"common_slack must be at least 1, got {self.common_slack!r}.")

    def exchange(
        self, x: jax.Array, carried: Carried, step: jax.Array, axis_name: AxisName
    ) -> tuple[SparseResult, Carried]:
        """See `SparseAllReduce.exchange`."""
        k, world = self.k(x.size), jax.lax.axis_size(axis_name)
        local = self.local_threshold(x, step, carried.local)
        boundaries = jax.lax.cond(
            step % self.rebalance_every == 0,
            lambda: self._boundaries(x, local, axis_name),
            lambda: carried.boundaries,
        )
        sums, sent = self._split_and_reduce(x, local, boundaries, axis_name)
        common = jax.lax.cond(
            (step % self.recompute_every == 0) | (carried.common == 0),
            lambda: self._common_threshold(sums, k, axis_name),
            lambda: carried.common,
        )
        gathered = self._balanced_all_gather(sums, common, boundaries, axis_name)

        # Line 6 of the algorithm: only what is in the mean leaves the residual.
        errors = take_out(x, sent.values, sent.indices, take(gathered.total, sent.indices) != 0)
        selected = jnp.sum(sent.count)
        outcome = SparseResult(
            mean=gathered.total / world,
            errors=errors + gathered.lost,
            selected=selected,
            delivered=jnp.sum(jnp.minimum(sent.count, sent.values.shape[-1])),
            wanted=gathered.wanted,
            applied=jnp.sum(gathered.total != 0, dtype=jnp.int32),
        )
        # Counting the sums beforehand would take one more exchange. If the threshold was far off,
        # it is computed anew in the next step.
        off = self.is_off(gathered.wanted, k)
        if self.tolerance is not None:
            off |= gathered.wanted > world * self._common_room(x.size, world)
        common = jnp.where(off, 0.0, self.scaled(common, gathered.wanted, k))
        return outcome, Carried(self.scaled(local, selected, k), common, boundaries)

    def _boundaries(self, x: jax.Array, threshold: jax.Array, axis_name: AxisName) -> jax.Array:
        """The mean over devices of where each would like the boundaries to be."""
        n, world = x.size, jax.lax.axis_size(axis_name)
        wanted = select.boundaries_for(x, threshold, world) // select.CHUNK
        wanted = jax.lax.psum(wanted, axis_name) // world * select.CHUNK
        widest = 2**16 if _is_narrow(n, world) else n
        ends = [jnp.int32(0)]
        for i in range(1, world):
            rest = -(-max(0, n - (world - i) * widest) // select.CHUNK) * select.CHUNK
            lowest, highest = jnp.maximum(ends[-1], rest), jnp.minimum(ends[-1] + widest, n)
            ends.append(jnp.clip(wanted[i], jnp.minimum(lowest, n), highest))
        return jnp.stack([*ends, jnp.int32(n)])

    def _split_and_reduce(
        self, x: jax.Array, threshold: jax.Array, boundaries: jax.Array, axis_name: AxisName
    ) -> tuple[jax.Array, select.Selected]:
        """Sends every region's entries to its owner, who adds them.

        Returns:
          The sums, float32[n] and zero outside of this device's region; and its own entries as
          they arrived at the owners, `(N, c)`.
        """
        n, world = x.size, jax.lax.axis_size(axis_name)
        entries, me = _region_entries(self.values, n, world), jax.lax.axis_index(axis_name)
        found = self.largest_in_regions(x, threshold, boundaries, self.room(n, world))
        offsets = jnp.where(found.indices < n, found.indices - boundaries[:-1, None], 0)
        payload = entries.encode(found.values, offsets)
        arrived = jax.lax.all_to_all(payload, axis_name, 0, 0, tiled=True)
        values, offsets = entries.decode(arrived)
        places = jnp.where(values == 0, n, offsets + boundaries[me])
        sums = add_lists(jnp.zeros_like(x), values, places)
        return sums, found._replace(values=entries.rounded(found.values))

    def _common_threshold(self, sums: jax.Array, k: int, axis_name: AxisName) -> jax.Array:
        """The k-th largest of all sums, found four bits at a time; 0 if there are fewer."""
        world = jax.lax.axis_size(axis_name)
        arrived = min(sums.size, world * self.room(sums.size, world))
        own = self.compact(sums, jnp.float32(SMALLEST), arrived).values
        # Magnitudes are ordered as their bit patterns are.
        patterns = jax.lax.bitcast_convert_type(jnp.abs(own), jnp.int32)[:, None]
        found = jnp.int32(0)
        for shift in range(28, -1, -4):
            digits = jnp.arange(1, 8 if shift == 28 else 16, dtype=jnp.int32)[None]
            counts = jnp.sum(patterns >= found + (digits << shift), axis=0, dtype=jnp.int32)
            reached = jax.lax.psum(counts, axis_name) >= k
            found += jnp.sum(reached, dtype=jnp.int32) << shift
        return jax.lax.bitcast_convert_type(found, jnp.float32)

    def _balanced_all_gather(
        self, sums: jax.Array, threshold: jax.Array, boundaries: jax.Array, axis_name: AxisName
    ) -> _Gathered:
        """Sends the large sums to everyone, from their owners if they have room for all."""
        world, me, n = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name), sums.size
        room = self._common_room(n, world)
        found = self.compact(sums, threshold, min(n, world * room))
        counts = jax.lax.all_gather(found.count, axis_name)
        ends = jnp.cumsum(counts)
        # Each sum's number among all large sums. Sums beyond the room of all messages have to wait.
        rank = ends[me] - counts[me] + jnp.arange(found.values.size, dtype=jnp.int32)
        fits = (found.indices < n) & (rank < world * room)
        entries = _region_entries(self.values, n, world)
        rounded = jnp.where(fits, entries.rounded(found.values), 0.0)
        offsets = jnp.where(fits, found.indices - boundaries[me], 0)

        is_balanced = jnp.max(counts) <= room
        values, offsets = jax.lax.cond(
            is_balanced,
            lambda: (rounded[:room], offsets[:room]),
            lambda: _handed_over(rounded, offsets, rank, room, entries, axis_name),
        )
        # Not in the conditional, so that it travels while something else is computed.
        everyones = jax.lax.all_gather(entries.encode(values, offsets), axis_name)
        values, offsets = entries.decode(everyones)
        # The number of an entry says in which region it lies.
        first = jnp.where(is_balanced, ends - counts, jnp.arange(world) * room)
        number = jnp.add.outer(first, jnp.arange(room))
        region = jnp.searchsorted(ends[:-1], number, side="right", method="compare_all")
        places = jnp.where(values == 0, n, offsets + boundaries[region])
        total = add_lists(jnp.zeros_like(sums), values, places)
        left = jnp.where(fits, found.values - rounded, 0.0)
        lost = jnp.zeros_like(sums).at[found.indices].add(left, mode="drop")
        return _Gathered(total, jnp.sum(counts), lost)

    def _common_room(self, n: int, world: int) -> int:
        """The capacity of a message of the balanced all-gather."""
        return min(n, max(1, -int(-self.common_slack * self.k(n) // world)))


def _handed_over(
    values: jax.Array,
    offsets: jax.Array,
    rank: jax.Array,
    room: int,
    entries: Entries,
    axis_name: AxisName,
) -> tuple[jax.Array, jax.Array]:
    """The entries of this device after handing over: entry number r goes to device r // room."""
    world = jax.lax.axis_size(axis_name)
    slot = jnp.where(values == 0, world * room, rank)
    slots = jnp.zeros(world * room).at[slot].set(values, mode="drop").reshape(world, room)
    places = jnp.zeros(world * room, jnp.int32).at[slot].set(offsets, mode="drop")
    payload = entries.encode(slots, places.reshape(world, room))
    values, offsets = entries.decode(jax.lax.all_to_all(payload, axis_name, 0, 0, tiled=True))
    # A slot is filled by one device, and zero from all others.
    return jnp.sum(values, axis=0), jnp.sum(jnp.where(values == 0, 0, offsets), axis=0)


def _is_narrow(n: int, world: int) -> bool:
    """Whether every region can be kept within 2^16 places."""
    return n <= world * 2**16


def _region_entries(values: str, n: int, world: int) -> Entries:
    """Entries whose offsets are relative to their region."""
    return Entries(values, min(n, 2**16) if _is_narrow(n, world) else n)


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
      tolerance: likewise; the threshold of the sums is computed anew in the next step.

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
