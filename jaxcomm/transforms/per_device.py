"""State that differs from device to device, and the sharding specs of a whole state."""

import dataclasses
import math
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxcomm import _axes
from jaxcomm._context import holding
from jaxcomm.transforms._layout import Layout, Leaf, split_over
from jaxcomm.transforms._shapes import shapes_of
from jaxcomm.transforms._specs import ALL_AXES, names_in, restrict


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class PerDevice:
    """Arrays with a leading device axis, sharded over the mesh axis.

    In the manual view the leading axis is 1: each device sees its own.

    Attributes:
      values: the arrays; none of them is empty, because XLA does not keep those sharded.
      specs: how they are sharded, the leading axis included.
      are_shares: whether each device has a part of a vector, as owners of blocks do.
      shards: for vectors of buckets, over how many further devices the leaves of each are split.
    """

    values: list[jax.Array]
    specs: tuple[PartitionSpec, ...] = dataclasses.field(metadata={"static": True})
    are_shares: bool = dataclasses.field(default=False, metadata={"static": True})
    shards: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})
    is_of_each_device = True  # for `wire_report` and `replicate`, which know no transformations


NOTHING = PerDevice([], ())


def is_own(node: Any) -> bool:
    """Whether a node of a state is per-device state."""
    return isinstance(node, PerDevice)


def next_of(own: PerDevice, values: Sequence[jax.Array]) -> PerDevice:
    """The next per-device state, sharded as it was: in the global view XLA may choose otherwise."""
    mesh = _axes.current_mesh()
    if all(kind == AxisType.Auto for kind in mesh.axis_types):
        pairs = zip(values, own.specs, strict=True)
        values = [jax.lax.with_sharding_constraint(x, spec) for x, spec in pairs]
    return dataclasses.replace(own, values=list(values))


def sharded_as_before(state: Any) -> Any:
    """A state whose per-device parts are sharded as they were, behind a conditional too.

    XLA for GPUs would gather what a branch passes on, in float32, on every device.
    """
    return jax.tree.map(lambda x: next_of(x, x.values) if is_own(x) else x, state, is_leaf=is_own)


def require_own(own: PerDevice, layout: Layout) -> None:
    """Raises a ValueError unless each device sees its own part of per-device state.

    If it were passed to `jax.shard_map` as replicated, one device's state would be used for all,
    and that of the others would be lost.
    """
    is_manual = _axes.is_manual(layout.axis_name)
    expected = 1 if is_manual else layout.world
    for x in own.values:
        if x.shape[0] != expected:
            raise ValueError(
                f"per-device state has a leading axis of {x.shape[0]} here, expected "
                f"{expected}: it differs from device to device and cannot be replicated. "
                "Give jax.shard_map the specs of jaxcomm.state_spec(tx, params, mesh), in in_specs "
                "and out_specs, in place of PartitionSpec(); in jax.pmap make the state inside, by "
                "jax.pmap(tx.init, axis_name=...)(params)."
            )
        names = set(_axes.names_of(layout.axis_name))
        spread = names_in(PartitionSpec(*jax.typeof(x).sharding.spec[:1]))
        if not is_manual and not names & _axes.explicit_axes() <= spread:
            raise ValueError(
                "per-device state was replicated, but it differs from device to device. Pass what "
                "tx.init returned as it is, without jaxcomm.replicate or jax.device_put. Place "
                "arrays that were read from a file by the specs of jaxcomm.state_spec(tx, params, "
                "mesh), as docs/recipes.md shows under Checkpoints."
            )


def zeros_per_device(
    layout: Layout, params: Any, which: Sequence[int], dtype: str = "float32"
) -> PerDevice:
    """Zeros shaped like some parameters, none of them empty; one copy per device."""
    specs = tuple(PartitionSpec(layout.axis_name, *layout.leaves[i].spec) for i in which)
    if _axes.is_manual(layout.axis_name):
        axes = _axes.checked_names(layout.axis_name)
        leaves = jax.tree.leaves(params)
        values = [
            _axes.as_varying(
                jnp.zeros((1, *jnp.shape(leaves[i])), dtype),
                axes | _axes.varying_axes(leaves[i]),
            )
            for i in which
        ]
        return PerDevice(values, specs)
    shapes = [(layout.world, *layout.leaves[i].shape) for i in which]
    return PerDevice(
        made_sharded(lambda: [jnp.zeros(shape, dtype) for shape in shapes], specs), specs
    )


def made_sharded(
    make: Callable[..., Sequence[jax.Array]], specs: Sequence[PartitionSpec], *args: Any
) -> list[jax.Array]:
    """Arrays of the global view, made where they belong; no device makes the others' part.

    Their shardings are spelled as a compiled step returns them, or its second call would compile
    again: by types on a mesh of Explicit axes, elsewhere without axes of one device.
    """
    mesh, explicit = _axes.current_mesh(), _axes.explicit_axes()

    def typed(*args: Any) -> list[jax.Array]:
        pairs = zip(make(*args), specs, strict=True)
        return [jax.reshard(x, restrict(s, explicit)) if explicit else x for x, s in pairs]

    if explicit.issuperset(mesh.axis_names):
        return jax.jit(typed)(*args)
    several = frozenset(axis for axis in mesh.axis_names if mesh.shape[axis] > 1)
    return jax.jit(typed, out_shardings=[restrict(s, several | explicit) for s in specs])(*args)


def values_of(layout: Layout, bucket: Sequence[int]) -> int:
    """How many values of a bucket one device has."""
    leaves = [layout.leaves[i] for i in bucket]
    return sum(math.prod(leaf.shape) for leaf in leaves) // _shards(leaves[0])


def zeros_per_group(
    layout: Layout, params: Any, groups: Sequence[Sequence[int]], sizes: Sequence[int]
) -> PerDevice:
    """A float32 vector of zeros on every device for each group of leaves.

    Args:
      layout: what `init` recorded about the parameters.
      params: the parameters.
      groups: indices of leaves; those of a group are sharded over the same axes, and every shard
        has its own vector.
      sizes: the length of each vector on one device.
    """
    leaves, flat, zeros = jax.tree.leaves(params), [], []
    for number, (group, size) in enumerate(zip(groups, sizes, strict=True)):
        axes = tuple(sorted(split_over(layout.leaves[group[0]]) - _axes.manual_axes()))
        length = _shards(layout.leaves[group[0]]) * size
        spec = PartitionSpec(axes) if axes else PartitionSpec()
        flat.append(Leaf(f"group {number}", (length,), jnp.float32, spec))
        like = frozenset().union(*(_axes.varying_axes(leaves[i]) for i in group))
        zeros.append(_axes.as_varying(jnp.zeros(length, jnp.float32), like))
    made = dataclasses.replace(layout, leaves=tuple(flat))
    own = zeros_per_device(made, zeros, range(len(flat)))
    shards = tuple(_shards(layout.leaves[group[0]]) for group in groups)
    return dataclasses.replace(own, shards=shards)


def _shards(leaf: Leaf) -> int:
    """The number of parts into which other axes split a leaf."""
    return math.prod(_axes.axis_size(axis) for axis in names_in(leaf.spec))


def state_spec(
    tx: optax.GradientTransformation,
    params: Any,
    mesh: jax.sharding.Mesh,
    axis_names: Set[str] | None = None,
) -> Any:
    """The specs of a transformation's state, to pass to `jax.shard_map`.

    Args:
      tx: a transformation, alone or in a chain.
      params: placed parameters, or `jax.ShapeDtypeStruct`s with shardings.
      mesh: the mesh of the `jax.shard_map` that the state is passed to.
      axis_names: its axes that are manual, as in `jax.shard_map`; None means all.

    Returns:
      The pytree of `tx.init(params)` with a `PartitionSpec` for each array. Per-device state has
      its leading axis sharded over the mesh axis. An array that mirrors a parameter, such as a
      momentum (its path ends in the parameter's path, and the shapes are equal), is sharded like
      the parameter. The rest is replicated.

    Raises:
      TypeError, ValueError: as for `tx.init`, for example if the mesh lacks the axis.

    Wire: nothing.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm, optax
      >>> tx = optax.chain(jaxcomm.mean("data"), optax.sgd(0.1, momentum=0.9))
      >>> mesh = jaxcomm.data_mesh()
      >>> spec = jaxcomm.state_spec(tx, {"w": jnp.zeros(3)}, mesh)
      >>> jax.tree.leaves(spec) == [jax.sharding.PartitionSpec()] * 2  # a counter, the momentum
      True
    """
    if not hasattr(tx, "init"):
        raise TypeError(f"state_spec takes an optax transformation, got a {type(tx).__name__}.")
    with jax.set_mesh(mesh):
        state = shapes_of(tx.init, params)
        with holding(ALL_AXES, True):
            wide = jax.tree.leaves(shapes_of(tx.init, params), is_leaf=is_own)
    own = iter([node for node in wide if is_own(node)])
    specs = {
        (jax.tree_util.keystr(path), jnp.shape(leaf)): leaf.sharding.spec
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if isinstance(getattr(leaf, "sharding", None), NamedSharding)
    }

    manual = frozenset(mesh.axis_names if axis_names is None else axis_names)

    def spec_of(path: Any, x: Any) -> Any:
        if isinstance(x, PerDevice):
            return dataclasses.replace(x, values=[restrict(s, manual) for s in next(own).specs])
        endings = (jax.tree_util.keystr(path[i:]) for i in range(len(path) + 1))
        found = (specs[e, x.shape] for e in endings if (e, x.shape) in specs)
        return restrict(next(found, PartitionSpec()), manual)

    return jax.tree_util.tree_map_with_path(spec_of, state, is_leaf=is_own)
