"""Carries out a schedule with any reduction: a reduce-scatter, then its mirror image."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.collectives._reduction import Reduction
from jaxcomm.collectives.schedule import Round, Schedule


def run(x: jax.Array, axis_name: str, reduction: Reduction, schedule: Schedule) -> jax.Array:
    """All-reduces the vector `x` of every device; see `Algorithm.all_reduce`.

    Wire: in each direction, the rounds of the schedule, one `ppermute` for each array of a
    message; a block is ceil(n / blocks) elements, rounded up to the reduction's granularity.
    """
    length = x.size
    me = jax.lax.axis_index(axis_name)
    blocks = cut(x, schedule.blocks, reduction.granularity)
    n = blocks.shape[1]

    partial = reduction.lift(_reorder(blocks, schedule.order, me))
    for step, counts in zip(schedule.rounds, schedule.counts, strict=True):
        message = reduction.encode(_take(partial, *step.send), counts)
        arrived = _permute(message, axis_name, step.pairs)
        mine = _take(partial, step.into, step.into + step.size)
        merged = reduction.merge(mine, reduction.decode(arrived, counts, n))
        merged = _where_target(merged, mine, [t for _, t in step.pairs], schedule.world, me)
        partial = _put(partial, step.into, merged)

    value = reduction.finish(partial, schedule.world)
    for step in reversed(schedule.rounds):
        value = _gather_round(value, axis_name, step, schedule.world, me)
    inverse = tuple(tuple(int(i) for i in np.argsort(row)) for row in schedule.order)
    return _reorder(reduction.read(value, n), inverse, me).reshape(-1)[:length]


def cut(x: jax.Array, blocks: int, granularity: int) -> jax.Array:
    """The vector `x` as `(blocks, n)`, padded with zeros."""
    n = -(-x.size // (blocks * granularity)) * granularity
    return jnp.pad(x, (0, blocks * n - x.size)).reshape(blocks, n)


def _gather_round(value: Any, axis_name: str, step: Round, world: int, me: jax.Array) -> Any:
    """The round backwards: what was merged at `into` is complete, and returns to `send`."""
    back = [(target, source) for source, target in step.pairs]
    arrived = _permute(_take(value, step.into, step.into + step.size), axis_name, back)
    mine = _take(value, *step.send)
    arrived = _where_target(arrived, mine, [t for _, t in back], world, me)
    return _put(value, step.send[0], arrived)


def _reorder(blocks: jax.Array, order: tuple[tuple[int, ...], ...], me: jax.Array) -> jax.Array:
    """The rows of `blocks` in this device's own order."""
    if all(row == tuple(range(len(row))) for row in order):
        return blocks
    mine = jnp.asarray(order)[me]
    rows = [jax.lax.dynamic_index_in_dim(blocks, mine[i]) for i in range(len(order[0]))]
    return jnp.concatenate(rows)


def _permute(message: Any, axis_name: str, pairs: Any) -> Any:
    return jax.tree.map(lambda m: jax.lax.ppermute(m, axis_name, pairs), message)


def _take(blocks: Any, start: int, stop: int) -> Any:
    return jax.tree.map(lambda b: b[start:stop], blocks)


def _put(blocks: Any, start: int, new: Any) -> Any:
    return jax.tree.map(
        lambda b, n: jax.lax.dynamic_update_slice_in_dim(b, n, start, axis=0), blocks, new
    )


def _where_target(new: Any, old: Any, targets: list[int], world: int, me: jax.Array) -> Any:
    """`new` on the devices that a message reached, `old` on those it did not."""
    if len(targets) == world:
        return new
    reached = jnp.isin(me, jnp.asarray(targets))
    return jax.tree.map(lambda a, b: jnp.where(reached, a, b), new, old)
