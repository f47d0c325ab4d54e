"""Carries out a schedule with any reduction: a reduce-scatter, and its mirror image."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._compat import AxisName
from jaxcomm.collectives._algorithm import Algorithm
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

    def reduce_scatter(
        self, partial: Any, axis_name: AxisName, reduction: Reduction, each: int
    ) -> Any:
        """See `Algorithm.reduce_scatter`."""
        schedule = self.schedule(jax.lax.axis_size(axis_name))
        me = jax.lax.axis_index(axis_name)
        partial = _reorder(partial, schedule.order, me)
        for step, counts in zip(schedule.rounds, schedule.counts, strict=True):
            counts = tuple(each * count for count in counts)
            message = reduction.encode(_take(partial, *step.send), counts)
            arrived = _permute(message, axis_name, step.pairs)
            mine = _take(partial, step.into, step.into + step.size)
            merged = reduction.merge(mine, reduction.decode(arrived, counts, mine))
            merged = _where_target(merged, mine, [t for _, t in step.pairs], schedule.world, me)
            partial = _put(partial, step.into, merged)
        return _take(partial, 0, 1)

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
            arrived = _where_target(arrived, mine, [t for _, t in back], schedule.world, me)
            values = _put(values, step.send[0], arrived)
        inverse = tuple(tuple(int(i) for i in np.argsort(row)) for row in schedule.order)
        return _reorder(values, inverse, me)


def _reorder(blocks: Any, order: Order, me: jax.Array) -> Any:
    """The blocks in this device's own order."""
    if len(order[0]) == 1:
        return blocks
    mine = jnp.asarray(order)[me]

    def one(x: jax.Array) -> jax.Array:
        rows = [jax.lax.dynamic_index_in_dim(x, mine[i]) for i in range(len(order[0]))]
        return jnp.concatenate(rows)

    return jax.tree.map(one, blocks)


def _permute(message: Any, axis_name: AxisName, pairs: Any) -> Any:
    return jax.tree.map(lambda m: jax.lax.ppermute(m, axis_name, pairs), message)


def _take(blocks: Any, start: int, stop: int) -> Any:
    return jax.tree.map(lambda b: b[start:stop], blocks)


def _put(blocks: Any, start: int, new: Any) -> Any:
    return jax.tree.map(
        lambda b, n: jax.lax.dynamic_update_slice_in_dim(b, n, start, axis=0), blocks, new
    )


def _where_target(new: Any, old: Any, targets: Iterable[int], world: int, me: jax.Array) -> Any:
    """`new` on the devices that a message reached, `old` on those it did not."""
    targets = list(targets)
    if len(targets) == world:
        return new
    reached = jnp.isin(me, jnp.asarray(targets))
    return jax.tree.map(lambda a, b: jnp.where(reached, a, b), new, old)
