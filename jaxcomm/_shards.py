"""Parameters that are split over the axis of their exchange, on their way into a loss.

A `ShardedParam` holds what the exchange of a parameter needs where the parameter is gathered. Its
gradient has the same structure: `residual` holds the next residual, and `tick` how often the
parameter was gathered. So new state leaves the backward pass as the gradient of the old state.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxcomm._axes import AxisName
from jaxcomm._unready import Unready


@dataclasses.dataclass(frozen=True)
class Place:
    """What is known of a parameter before anything runs.

    Attributes:
      path: its path in the tree.
      axis_name: the axis that it is split over.
      spec: how it is sharded.
      dim: the dimension that is split, counted from the end, so that the slices of a stack have the
        same one; None if every device holds all of it.
      exempt: whether it travels in float32.
      scheme: how it is gathered, and its gradient exchanged.
      weight: what its residual is multiplied by before it is added to a gradient.
    """

    path: str
    axis_name: AxisName
    spec: PartitionSpec
    dim: int | None
    exempt: bool
    scheme: Any
    weight: int = 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShardedParam(Unready):
    """A parameter, or a stack of them, and the state of its exchange; `jaxcomm.gather` takes it.

    Attributes:
      value: the shard; in the global view all of it.
      residual: this device's residual, as long as the whole parameter, or None. In the global view
        it has a leading device axis.
      tick: float32[..., 3]: the step, the layer and the microbatch, from which keys are made; None
        where nothing is split. Its leading axis is that of the value, for `jax.lax.scan`.
      place: what is known of it.
    """

    value: Any
    residual: Any
    tick: Any
    place: Place = dataclasses.field(metadata={"static": True})

    def _cure(self) -> str:
        return (
            f"parameter {self.place.path} is a shard; compute with what jaxcomm.gather(params) "
            "returns, in the loss."
        )


def is_sharded(x: Any) -> bool:
    """Whether this is a `ShardedParam`."""
    return isinstance(x, ShardedParam)


def in_specs(params: Any, default: PartitionSpec) -> Any:
    """How `jax.shard_map` splits parameters; those that are not sharded, by `default`."""

    def of(x: ShardedParam) -> ShardedParam:
        own = PartitionSpec(x.place.axis_name)
        return _each(x, lambda _: x.place.spec, lambda _: own, lambda _: PartitionSpec())

    return _map(of, lambda _: default, params)


def out_specs(params: Any, default: PartitionSpec) -> Any:
    """How `jax.shard_map` joins the gradients of parameters, as `leaving` returns them."""

    def of(x: ShardedParam) -> ShardedParam:
        own = PartitionSpec(x.place.axis_name)
        value = own if x.place.dim is None else x.place.spec
        return _each(x, lambda _: value, lambda _: own, lambda _: own)

    return _map(of, lambda _: default, params)


def entering(params: Any) -> Any:
    """What one device sees of the parameters of the global view: its own residuals only."""
    return _map(lambda x: _each(x, _same, _first, _same), _same, params)


def leaving(grads: Any) -> Any:
    """What one device has of the gradients, with a device axis on all but shards."""

    def one(x: ShardedParam) -> ShardedParam:
        return _each(x, _with_axis if x.place.dim is None else _same, _with_axis, _with_axis)

    return _map(one, _with_axis, grads)


def arriving(grads: Any) -> Any:
    """The reverse of `leaving`."""

    def one(x: ShardedParam) -> ShardedParam:
        return _each(x, _first if x.place.dim is None else _same, _first, _first)

    return _map(one, _first, grads)


def whole(params: Any) -> Any:
    """The types of all of every parameter, in the global view."""
    return _map(lambda x: x.value, _same, params)


State = list[tuple[Any, Any]]  # residual and tick of every sharded parameter


def state_of(params: Any) -> State:
    """The state of all sharded parameters."""
    leaves = jax.tree.leaves(params, is_leaf=is_sharded)
    return [(x.residual, x.tick) for x in leaves if is_sharded(x)]


def with_state(params: Any, state: State) -> Any:
    """The parameters with another state."""
    pairs = iter(state)

    def of(x: ShardedParam) -> ShardedParam:
        residual, tick = next(pairs)
        return dataclasses.replace(x, residual=residual, tick=tick)

    return _map(of, _same, params)


def next_state(state: State, grads: Any) -> State:
    """The state for the next microbatch: the residuals that this one left.

    A layer that the microbatch did not gather keeps its residual; for one that it gathered twice,
    the residual is NaN.
    """

    def next_tick(tick: jax.Array) -> jax.Array:
        return tick + np.broadcast_to(np.array([0, 0, 1], np.float32), tick.shape)

    def next_residual(old: jax.Array, left: jax.Array, tick: jax.Array) -> jax.Array:
        count = tick[..., 0].reshape(*tick.shape[:-1], *[1] * (left.ndim - tick.ndim + 1))
        return jnp.where(count == 0, old, jnp.where(count > 1, jnp.nan, left))

    return [
        (
            None if left is None else next_residual(old, left, count),
            None if tick is None else next_tick(tick),
        )
        for (old, tick), (left, count) in zip(state, state_of(grads), strict=True)
    ]


def without_residuals(tree: Any) -> Any:
    """Sharded parameters or gradients, without their residuals."""
    return _map(lambda x: dataclasses.replace(x, residual=None), _same, tree)


def with_residuals(tree: Any, state: State) -> Any:
    """Undoes `without_residuals`, with the residuals of a state."""
    ticks = [tick for _, tick in state_of(tree)]
    left = [residual for residual, _ in state]
    return with_state(tree, list(zip(left, ticks, strict=True)))


def with_weights(tree: Any, weight: int) -> Any:
    """Sharded parameters whose residuals are added to the gradients of so many microbatches.

    They are multiplied now, or in bfloat16, where that would round them in every step, at their
    use.
    """

    def of(x: ShardedParam) -> ShardedParam:
        if _is_wide(x):
            return _each(x, _same, lambda r: weight * r, _same)
        return dataclasses.replace(x, place=dataclasses.replace(x.place, weight=weight))

    return _map(of, _same, tree)


def without_weights(tree: Any, weight: int) -> Any:
    """Undoes `with_weights`, for parameters or gradients."""

    def of(x: ShardedParam) -> ShardedParam:
        if _is_wide(x):
            return _each(x, _same, lambda r: (1 / weight) * r, _same)
        return dataclasses.replace(x, place=dataclasses.replace(x.place, weight=1))

    return _map(of, _same, tree)


def _is_wide(x: ShardedParam) -> bool:
    return x.residual is None or x.residual.dtype == jnp.float32


def _map(
    of_sharded: Callable[[ShardedParam], Any], of_array: Callable[[Any], Any], tree: Any
) -> Any:
    return jax.tree.map(
        lambda x: of_sharded(x) if is_sharded(x) else of_array(x), tree, is_leaf=is_sharded
    )


def _each(
    x: ShardedParam,
    value: Callable[[Any], Any],
    residual: Callable[[Any], Any],
    tick: Callable[[Any], Any],
) -> ShardedParam:
    """Applies a function to each part that is not None."""
    return ShardedParam(
        value(x.value),
        None if x.residual is None else residual(x.residual),
        None if x.tick is None else tick(x.tick),
        x.place,
    )


def _same(x: Any) -> Any:
    return x


def _first(x: Any) -> Any:
    return x[0]


def _with_axis(x: Any) -> Any:
    return x[None]
