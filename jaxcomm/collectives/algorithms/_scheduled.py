"""Carries out a schedule with any reduction: a reduce-scatter, and its mirror image.

A schedule says for every round t which devices send to which (`pairs`), which positions of their
blocks they send (`send`), and at which positions the target merges them (`into`). Device r keeps
its blocks in its own order, `order[r]`, chosen so that these positions are the same on every
device. So all devices run one program with static slices, and only the two reorderings at the ends
are indexed by the device. Where every message is one block, as in a ring, the blocks are a list,
and the first reordering copies nothing: each block is read in place when it is used.

    reduce-scatter  round 0, 1, ...: encode the blocks at `send`, ppermute, decode, merge at `into`
    all-gather      the same rounds backwards, with the pairs reversed: what was merged at `into` is
                    complete now, and goes back to `send` of the device that it came from; or those
                    of another schedule in which devices own the same blocks, `gathers_as`

A device that no pair names as a target gets zeros from `ppermute`: it must not merge them.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import _axes
from jaxcomm._axes import Axis
from jaxcomm.collectives import _sending
from jaxcomm.collectives.algorithms._algorithm import Algorithm, message_id
from jaxcomm.collectives.algorithms.schedule import Round, Schedule
from jaxcomm.collectives.reductions import Reduction
from jaxcomm.kernels import _device

Order = tuple[tuple[int, ...], ...]
_MANY = 8  # devices beyond which blocks are gathered, instead of one operation for each
_LONG = 64  # devices beyond which no table holds each device's order


@dataclasses.dataclass(frozen=True)
class Scheduled(Algorithm):
    """An algorithm that is a schedule, carried out by one `ppermute` per round and array."""

    def rounds(self, world: int) -> Iterable[Round]:
        """Who sends to whom in each round, for that many devices; see `Round`."""
        raise NotImplementedError

    def positions(self, world: int) -> Order:
        """Which block each device keeps at which position; see `Schedule`."""
        raise NotImplementedError

    def schedule(self, world: int) -> Schedule:
        """Who sends which blocks to whom, for that many devices."""
        return _schedule(self, world)

    @property
    def gathers_as(self) -> "Scheduled":
        """The algorithm whose rounds, backwards, are the all-gather."""
        return self

    def owned(self, axis_name: Axis) -> jax.Array:
        """See `Algorithm.owned`: the first block in this device's order."""
        order = self.schedule(_axes.world_of(axis_name)).order
        return jnp.asarray([row[0] for row in order])[_axes.place_on(axis_name)]

    def require_own_blocks(self, axis_name: Axis) -> None:
        """See `Algorithm.require_own_blocks`."""
        world = _axes.world_of(axis_name)
        schedule = self.schedule(world)
        if [row[0] for row in schedule.order] != list(range(world)) or not all(schedule.owners):
            raise ValueError(
                f"{self!r} leaves {world} devices {schedule.blocks} blocks, so parameters cannot "
                "be split over them; choose jaxcomm.algorithms.direct(), ring() or circulant()."
            )

    def is_owner(self, axis_name: Axis) -> Any:
        """See `Algorithm.is_owner`."""
        owners = self.schedule(_axes.world_of(axis_name)).owners
        return True if all(owners) else jnp.asarray(owners)[_axes.place_on(axis_name)]

    def reduce_scatter(
        self, partial: Any, axis_name: Axis, reduction: Reduction, devices_per_partial: int
    ) -> tuple[Any, Any]:
        """See `Algorithm.reduce_scatter`."""
        schedule = self.schedule(_axes.world_of(axis_name))
        me = _axes.place_on(axis_name)
        partial = _in_order(partial, schedule, me)
        errors = jax.tree.map(jnp.zeros_like, partial) if reduction.keeps_errors else None
        turns = _Turns()
        for number, (step, counts) in enumerate(zip(schedule.rounds, schedule.counts, strict=True)):
            sources, targets = zip(*step.pairs, strict=True)
            counts = tuple(devices_per_partial * count for count in counts)
            sent = _take(partial, *step.send)
            with jax.named_scope("encode"):
                message = reduction.encode(sent, counts, message_id(devices_per_partial, number))
            if reduction.keeps_errors:
                # This device gives away what it sends, so it keeps the error of each message.
                error, before = reduction.first_hop_error(sent, message), _take(errors, *step.send)
                error = _where_among(sources, error, before, schedule.world, me)
                errors = _put(errors, step.send[0], error)
            into = range(step.into, step.into + step.size)
            arrived = turns.permute(message, axis_name, step.pairs, range(*step.send), into)
            mine = _take(partial, step.into, step.into + step.size)
            with jax.named_scope("decode"):
                merged = reduction.merge(mine, reduction.decode(arrived, counts, mine))
            merged = _where_among(targets, merged, mine, schedule.world, me)
            partial = _put(partial, step.into, merged)
        return _take(partial, 0, 1), _by_block(errors, schedule.order, me)

    def all_gather(self, result: Any, axis_name: Axis) -> Any:
        """See `Algorithm.all_gather`."""
        schedule = self.gathers_as.schedule(_axes.world_of(axis_name))
        me = _axes.place_on(axis_name)
        # Position 0 holds this device's own result; the others are filled round by round.
        results = [result, *[jax.tree.map(jnp.zeros_like, result)] * (schedule.blocks - 1)]
        if not _sends_single_blocks(schedule):
            results = jax.tree.map(lambda *rows: jnp.concatenate(rows), *results)
        turns = _Turns()
        for step in reversed(schedule.rounds):
            back = [(target, source) for source, target in step.pairs]
            complete = _take(results, step.into, step.into + step.size)
            into = range(step.into, step.into + step.size)
            arrived = turns.permute(complete, axis_name, back, into, range(*step.send))
            mine = _take(results, *step.send)
            arrived = _where_among([t for _, t in back], arrived, mine, schedule.world, me)
            results = _put(results, step.send[0], arrived)
        return _by_block(results, schedule.order, me)


class _Turns:
    """Sends the messages of one round after another.

    XLA's scheduler would mix independent rounds, such as the two directions of a ring. Between CPU
    processes, a device that is ahead would then send over links that others still use for the other
    round, and both rounds would take up to twice the time.
    """

    def __init__(self) -> None:
        self.last: tuple[range, Any] | None = None  # where the last message went, and what arrived

    def permute(self, message: Any, axis_name: Axis, pairs: Any, taken: range, into: range) -> Any:
        """What arrives, sent from the positions `taken` to the positions `into`."""
        if self.last is not None and _device.is_between_cpu_processes():
            positions, before = self.last
            if set(positions).isdisjoint(taken):
                message = _sending.after(before, message)
        with jax.named_scope("exchange"):
            arrived = jax.tree.map(lambda m: _sending.ppermute(m, axis_name, pairs), message)
        self.last = into, arrived
        return arrived


def _sends_single_blocks(schedule: Schedule) -> bool:
    return all(step.size == 1 for step in schedule.rounds)


@functools.lru_cache(maxsize=64)  # takes seconds for thousands of devices, and is called often
def _schedule(algorithm: Scheduled, world: int) -> Schedule:
    rounds = tuple(algorithm.rounds(world))
    return Schedule(world, algorithm.blocks(world), algorithm.positions(world), rounds)


def _in_order(blocks: Any, schedule: Schedule, me: jax.Array) -> Any:
    """The blocks in this device's own order; a list of them if all messages are single blocks."""
    if not _sends_single_blocks(schedule):
        return _reorder(blocks, schedule.order, me)
    mine = _order_of(me, schedule.order)
    return [
        jax.tree.map(lambda b, i=i: jax.lax.dynamic_index_in_dim(b, mine[i]), blocks)
        for i in range(schedule.blocks)
    ]


def _by_block(kept: Any, order: Order, me: jax.Array) -> Any:
    """Undoes `_in_order`."""
    if not isinstance(kept, list):
        if len(order) > _LONG:
            positions = jnp.argsort(_order_of(me, order))
            return jax.tree.map(lambda x: jnp.take(x, positions, axis=0), kept)
        return _reorder(kept, _inverse(order), me)
    mine = _order_of(me, order)

    def one(*rows: jax.Array) -> jax.Array:
        blocks = jnp.zeros((len(rows), *rows[0].shape[1:]), rows[0].dtype)
        for i, row in enumerate(rows):
            blocks = jax.lax.dynamic_update_slice_in_dim(blocks, row, mine[i], axis=0)
        return blocks

    return kept[0] if len(kept) == 1 else jax.tree.map(one, *kept)


def _reorder(blocks: Any, order: Order, me: jax.Array) -> Any:
    """The blocks in this device's own order."""
    if len(order[0]) == 1:
        return blocks
    mine = _order_of(me, order)
    if len(order) > _MANY:
        return jax.tree.map(lambda x: jnp.take(x, mine, axis=0), blocks)

    def one(x: jax.Array) -> jax.Array:
        rows = [jax.lax.dynamic_index_in_dim(x, mine[i]) for i in range(len(order[0]))]
        return jnp.concatenate(rows)

    return jax.tree.map(one, blocks)


def _order_of(me: jax.Array, order: Order) -> jax.Array:
    """This device's row; if all rows have this form, that of device 0 plus the device's number."""
    table = np.asarray(order, np.int32)
    devices, blocks = table.shape
    moved_on = (table[:1] + np.arange(devices)[:, None]) % blocks
    if devices <= _LONG or (table != moved_on).any():
        return jnp.asarray(table)[me]
    return (jnp.asarray(table[0]) + me.astype(jnp.int32)) % blocks


def _inverse(order: Order) -> Order:
    return tuple(tuple(int(i) for i in np.argsort(row)) for row in order)


def _take(blocks: Any, start: int, stop: int) -> Any:
    if isinstance(blocks, list):
        return blocks[start]
    return jax.tree.map(lambda b: b[start:stop], blocks)


def _put(blocks: Any, start: int, new: Any) -> Any:
    if isinstance(blocks, list):
        return [*blocks[:start], new, *blocks[start + 1 :]]
    return jax.tree.map(
        lambda b, n: jax.lax.dynamic_update_slice_in_dim(b, n, start, axis=0), blocks, new
    )


def _where_among(devices: Sequence[int], new: Any, old: Any, world: int, me: jax.Array) -> Any:
    """`new` on these devices, such as the targets of a round, and `old` on all others."""
    if len(devices) == world:
        return new
    among = jnp.isin(me, jnp.asarray(devices))
    return jax.tree.map(lambda a, b: jnp.where(among, a, b), new, old)
