"""Carries out a schedule with any reduction: a reduce-scatter, and its mirror image."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._compat import AxisName
from jaxcomm.collectives._algorithm import Algorithm, hop_number
from jaxcomm.collectives._reduction import Reduction
from jaxcomm.collectives.schedule import Schedule

Order = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Scheduled(Algorithm):
    """An algorithm that is a schedule, carried out by one `ppermute` a round and array."""

    def schedule(self, world: int) -> Schedule:
        """Who sends which blocks to whom, for that many devices."""
        raise NotImplementedError

    def blocks(self, world: int) -> int:
        """See `Algorithm.blocks`."""
        return self.schedule(world).blocks

    def owned(self, axis_name: AxisName) -> jax.Array:
        """See `Algorithm.owned`; the block that stands first in this device's order."""
        order = self.schedule(jax.lax.axis_size(axis_name)).order
        return jnp.asarray([row[0] for row in order])[jax.lax.axis_index(axis_name)]

    def is_owner(self, axis_name: AxisName) -> Any:
        """See `Algorithm.is_owner`."""
        owners = self.schedule(jax.lax.axis_size(axis_name)).owners
        return True if all(owners) else jnp.asarray(owners)[jax.lax.axis_index(axis_name)]

    def reduce_scatter(
        self, partial: Any, axis_name: AxisName, reduction: Reduction, each: int
    ) -> tuple[Any, Any]:
        """See `Algorithm.reduce_scatter`."""
        schedule = self.schedule(jax.lax.axis_size(axis_name))
        me = jax.lax.axis_index(axis_name)
        partial = _reorder(partial, schedule.order, me)
        unsaid = jax.tree.map(jnp.zeros_like, partial) if reduction.keeps_errors else None
        for number, (step, counts) in enumerate(zip(schedule.rounds, schedule.counts, strict=True)):
            counts, said = tuple(each * count for count in counts), _take(partial, *step.send)
            message = reduction.encode(said, counts, hop_number(each, number))
            if reduction.keeps_errors:
                left, before = reduction.unsaid(said, message), _take(unsaid, *step.send)
                left = _where_among([s for s, _ in step.pairs], left, before, schedule.world, me)
                unsaid = _put(unsaid, step.send[0], left)
            arrived = _permute(message, axis_name, step.pairs)
            mine = _take(partial, step.into, step.into + step.size)
            merged = reduction.merge(mine, reduction.decode(arrived, counts, mine))
            merged = _where_among([t for _, t in step.pairs], merged, mine, schedule.world, me)
            partial = _put(partial, step.into, merged)
        return _take(partial, 0, 1), _reorder(unsaid, _inverse(schedule.order), me)

    def all_gather(self, value: Any, axis_name: AxisName) -> Any:
        """See `Algorithm.all_gather`; what was merged is complete, and goes back where it came."""
        schedule = self.schedule(jax.lax.axis_size(axis_name))
        me = jax.lax.axis_index(axis_name)
        empty = [(0, schedule.blocks - 1)]
        values = jax.tree.map(lambda v: jnp.pad(v, empty + [(0, 0)] * (v.ndim - 1)), value)
        for step in reversed(schedule.rounds):
            back = [(target, source) for source, target in step.pairs]
            complete = _take(values, step.into, step.into + step.size)
            arrived = _permute(complete, axis_name, back)
            mine = _take(values, *step.send)
            arrived = _where_among([t for _, t in back], arrived, mine, schedule.world, me)
            values = _put(values, step.send[0], arrived)
        return _reorder(values, _inverse(schedule.order), me)


def _reorder(blocks: Any, order: Order, me: jax.Array) -> Any:
    """The blocks in this device's own order."""
    if len(order[0]) == 1:
        return blocks
    mine = jnp.asarray(order)[me]

    def one(x: jax.Array) -> jax.Array:
        rows = [jax.lax.dynamic_index_in_dim(x, mine[i]) for i in range(len(order[0]))]
        return jnp.concatenate(rows)

    return jax.tree.map(one, blocks)


def _inverse(order: Order) -> Order:
    return tuple(tuple(int(i) for i in np.argsort(row)) for row in order)


def _permute(message: Any, axis_name: AxisName, pairs: Any) -> Any:
    return jax.tree.map(lambda m: jax.lax.ppermute(m, axis_name, pairs), message)


def _take(blocks: Any, start: int, stop: int) -> Any:
    return jax.tree.map(lambda b: b[start:stop], blocks)


def _put(blocks: Any, start: int, new: Any) -> Any:
    return jax.tree.map(
        lambda b, n: jax.lax.dynamic_update_slice_in_dim(b, n, start, axis=0), blocks, new
    )


def _where_among(devices: list[int], new: Any, old: Any, world: int, me: jax.Array) -> Any:
    """`new` on these devices, such as those that a message reached, `old` on all others."""
    if len(devices) == world:
        return new
    among = jnp.isin(me, jnp.asarray(devices))
    return jax.tree.map(lambda a, b: jnp.where(among, a, b), new, old)
