"""Split parameters with the state of their exchange, for the loss."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import _axes, _paths
from jaxcomm._attached import is_attached
from jaxcomm._shards import Place, ShardedParam
from jaxcomm.transforms import _roles
from jaxcomm.transforms._layout import Layout, leaf_paths
from jaxcomm.transforms._scheme import Scheme
from jaxcomm.transforms._shard_layout import keeps_residual, split_dim
from jaxcomm.transforms.per_device import PerDevice, require_own

_LAYERS = 4096  # the most layers of nested scans; a longer axis does not count layers
_STEPS = 2**24  # what float32 counts to


class ShardedState(NamedTuple):
    """The state of `sharded`.

    Attributes:
      layout: what `init` recorded about the parameters.
      scheme: how they are gathered, and their gradients exchanged.
      step: int32, from which the keys are made.
      residual: with error feedback, the part of each device's gradients that is in no update yet,
        as long as the whole parameters on every device; else empty. In `residual_dtype`, with a
        leading device axis, sharded over the axis; inside `jax.shard_map`, this device's only.
    """

    layout: Layout
    scheme: Scheme
    step: jax.Array
    residual: PerDevice
    roles = frozenset({_roles.IN_BACKWARD})


def sharded_params(params: Any, state: Any) -> Any:
    """Split parameters with the state of their exchange: for the loss, which gathers them.

    Args:
      params: the parameters, split as `tx.init` saw them.
      state: the state of `jaxcomm.sharded`, or of a chain or partition that has one or more.

    Returns:
      The pytree of the parameters, each as a node that only `jaxcomm.gather` accepts. Pass it to
      `jaxcomm.value_and_grad`, and the gradients to `tx.update`. Parameters that belong to another
      exchange of the state, such as one of `optax.partition`, are returned unchanged.

    Raises:
      ValueError: if there is no such state, or a parameter is exchanged twice or not at all.

    Wire: nothing.

    Example:
      A device keeps one row of w, and of its gradient:

      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.sharded(jaxcomm.mean("data"))
      >>> def loss_fn(params, x):
      ...     return jnp.sum(x @ jaxcomm.gather(params)["w"])
      >>> with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
      ...     params = jaxcomm.shard({"w": jnp.ones((2, 3))}, "data")
      ...     state, f = tx.init(params), jaxcomm.value_and_grad(loss_fn, "data")
      ...     _, grads = jax.jit(f)(jaxcomm.sharded_params(params, state), jnp.eye(2))
      ...     updates, state = jax.jit(tx.update)(grads, state)
      >>> updates["w"].addressable_shards[1].data.tolist()
      [[0.5, 0.5, 0.5]]
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, ShardedState))
    found = [node for node in nodes if isinstance(node, ShardedState)]
    if not found:
        raise ValueError(
            "sharded_params needs the state of jaxcomm.sharded, found none; pass what tx.init or "
            "tx.update returned, of a chain with jaxcomm.sharded(jaxcomm.mean(...)) in it."
        )
    known: dict[str, ShardedParam] = {}
    for node in found:
        for leaf in _leaves_of(node):
            if leaf.place.path in known:
                raise ValueError(
                    f"parameter {leaf.place.path} is exchanged twice; give each to one exchange."
                )
            known[leaf.place.path] = leaf

    others = leaf_paths(state)

    def with_state(path: Any, value: Any) -> Any:
        name = _paths.path_name(path)
        if is_attached(value) and name in known:
            raise ValueError(
                f"parameter {name} is exchanged by jaxcomm.in_backward and by jaxcomm.sharded; "
                "give each to one exchange."
            )
        if name not in known:
            if is_attached(value) or name in others:
                return value
            raise ValueError(
                f"no exchange has parameter {name}: tx was initialised on "
                f"{', '.join(list(known)[:10])}. Freeze it with "
                "jaxcomm.sharded(jaxcomm.set_to_zero(axis)), or call tx.init again."
            )
        leaf = known[name]
        return ShardedParam(value, leaf.residual, leaf.tick, leaf.place)

    return jax.tree_util.tree_map_with_path(with_state, params, is_leaf=is_attached)


def _leaves_of(state: ShardedState) -> list[ShardedParam]:
    """All that is known of the parameters of a state, except their values."""
    layout, own = state.layout, state.residual
    if layout.world != _axes.axis_size(layout.axis_name):
        raise ValueError(
            f"the state was made for {layout.world} devices along {layout.axis_name!r}, and the "
            f"mesh now has {_axes.axis_size(layout.axis_name)}; jaxcomm.resize_state converts it."
        )
    require_own(own, layout)
    manual = _axes.is_manual(layout.axis_name)
    residuals = iter([x[0] for x in own.values] if manual else own.values)
    step = (state.step % _STEPS).astype(jnp.float32)
    leaves = []
    for leaf in layout.leaves:
        dim = split_dim(leaf)
        residual = next(residuals) if own.values and keeps_residual(leaf) else None
        place = Place(leaf.path, layout.axis_name, leaf.spec, dim, leaf.exempt, state.scheme)
        tick = None if dim is None else _tick(step, leaf.shape)
        leaves.append(ShardedParam(None, residual, tick, place))
    return leaves


def _tick(step: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The step, the layer and the microbatch, for each index along all axes that a scan may slice.

    The first axis always counts; for nested scans, so do the next ones except the last two, as long
    as their product is at most `_LAYERS`.
    """
    rows = shape[:1] if len(shape) > 1 else ()
    for size in shape[1:-2]:
        if math.prod(rows) * size > _LAYERS:
            break
        rows += (size,)
    steps, layers = np.zeros((*rows, 3), np.float32), np.zeros((*rows, 3), np.float32)
    steps[..., 0] = 1
    layers[..., 1] = np.arange(math.prod(rows)).reshape(rows)
    return step * steps + layers
