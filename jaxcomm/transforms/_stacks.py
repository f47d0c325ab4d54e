"""Stacks of layers in a pytree of parameters, and the states of their layers."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from jaxcomm import _axes, _paths
from jaxcomm._attached import is_attached
from jaxcomm._axes import AxisName
from jaxcomm._shards import is_sharded
from jaxcomm.transforms._specs import names_in, restrict
from jaxcomm.transforms.per_device import PerDevice, is_own, made_sharded, next_of


def is_parameter(node: Any) -> bool:
    """Whether a node is a parameter together with the state of its exchange."""
    return is_attached(node) or is_sharded(node)


def paths_of(tree: Any) -> list[str]:
    """The paths of the leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_parameter)
    return [_paths.path_name(path) for path, _ in leaves]


def places(paths: Sequence[str], stacks: Sequence[str]) -> list[int | None]:
    """The number of the stack that each path lies in; None for none."""

    def of(path: str) -> int | None:
        found = (i for i, stack in enumerate(stacks) if f"{path}/".startswith(f"{stack}/"))
        return next(found, None)

    return [of(path) for path in paths]


def part_of(tree: Any, chosen: Sequence[bool]) -> Any:
    """The tree with these leaves only, as `optax.partition` passes a part of it."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_parameter)
    pairs = zip(leaves, chosen, strict=True)
    return treedef.unflatten([x if is_chosen else optax.MaskedNode() for x, is_chosen in pairs])


def layers_in(params: Any, of: Sequence[int | None], stacks: Sequence[str]) -> tuple[int, ...]:
    """The number of layers of each stack.

    Raises:
      ValueError: for a path that is not a subtree, and for leaves that are not stacks of equally
        many layers.
    """
    leaves, paths, sizes = jax.tree.leaves(params), paths_of(params), []
    for number, stack in enumerate(stacks):
        own = {paths[i]: jnp.shape(leaves[i]) for i, x in enumerate(of) if x == number}
        if not own:
            raise ValueError(
                f"in_backward names {stack!r}, which is not a subtree of the parameters, or lies "
                f"in one that was named before it; the paths are {', '.join(paths[:10])}"
                f"{', ...' if len(paths) > 10 else ''}."
            )
        size = next(iter(own.values()))[:1]
        for path, shape in own.items():
            if not shape or not shape[0] or shape[:1] != size:
                raise ValueError(
                    f"parameter {path} has shape {shape}; all leaves of {stack!r} need the same "
                    "leading axis of layers, as jax.lax.scan takes them."
                )
        sizes.append(size[0])
    return tuple(sizes)


def first_layer(leaf: Any, path: str) -> Any:
    """One layer of a parameter, as the `init` of an exchange should see it.

    Raises:
      ValueError: for layers that lie on different devices.
    """
    if isinstance(leaf, Tracer):
        return leaf[0]
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding):
        first, *rest = (*sharding.spec, None)
        if first is not None:
            raise ValueError(
                f"parameter {path} is sharded by {sharding.spec}, so its layers lie on different "
                "devices, but each device goes through all of them; shard another of its axes."
            )
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*rest[: leaf.ndim - 1]))
    else:
        sharding = None
    return jax.ShapeDtypeStruct(jnp.shape(leaf)[1:], jnp.result_type(leaf), sharding=sharding)


def stacked(node: Any, size: int) -> Any:
    """The state of `size` layers, from that of one."""

    def broadcast(arrays: Sequence[Any]) -> list[jax.Array]:
        return [jnp.broadcast_to(x, (size, *jnp.shape(x))) for x in arrays]

    if isinstance(node, PerDevice):
        specs = tuple(PartitionSpec(None, *spec) for spec in node.specs)
        if not specs or names_in(PartitionSpec(specs[0][1])) & _axes.manual_axes():
            return dataclasses.replace(node, values=broadcast(node.values), specs=specs)
        values = made_sharded(broadcast, specs, node.values)
        return dataclasses.replace(node, values=values, specs=specs)
    sharding = getattr(node, "sharding", None)
    if isinstance(node, Tracer) or not isinstance(sharding, NamedSharding):
        return broadcast([node])[0]
    spec = restrict(PartitionSpec(None, *sharding.spec), names_in(sharding.spec))
    return made_sharded(broadcast, [spec], [node])[0]


def of_one_layer(node: Any) -> Any:
    """The shapes of one layer's state, from that of a stack."""

    def one(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

    if isinstance(node, PerDevice):
        specs = tuple(PartitionSpec(*spec[1:]) for spec in node.specs)
        return dataclasses.replace(node, values=[one(x) for x in node.values], specs=specs)
    return one(node)


def specs_of(state: Any, axis_name: AxisName) -> list[PartitionSpec]:
    """How the arrays of a stack's state are sharded over the axis."""
    axes, specs = frozenset(_axes.names_of(axis_name)), []
    for node in jax.tree.leaves(state, is_leaf=is_own):
        own = isinstance(node, PerDevice)
        specs += [restrict(spec, axes) for spec in node.specs] if own else [PartitionSpec()]
    return specs


def is_nan(update: jax.Array) -> jax.Array:
    """Whether an exchange made an update NaN; then all its elements are."""
    if update.size == 0:
        return jnp.bool_(False)
    # Along Explicit axes a dimension that is sharded cannot be indexed, so all elements are read.
    return jnp.any(jnp.isnan(update if _axes.explicit_axes() else update[(0,) * update.ndim]))


def none_of(flags: Sequence[jax.Array]) -> jax.Array:
    """Whether no flag is set; typed as equal on all devices, which it is."""
    none = ~jnp.any(jnp.stack(_axes.varying_alike([jnp.any(flag) for flag in flags])))
    return _axes.on_all(none, _axes.varying_axes(none))


def kept(takes: jax.Array, new: Any, old: Any) -> Any:
    """The next state, or the old one; `takes` is a flag, or one for each layer."""

    def select(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(takes.reshape(takes.shape + (1,) * (new.ndim - takes.ndim)), new, old)

    if not isinstance(old, PerDevice):
        return select(new, old)
    return next_of(old, [select(*pair) for pair in zip(new.values, old.values, strict=True)])
