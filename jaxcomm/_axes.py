"""Mesh axes: what types and the current mesh say about them. It imports nothing of jaxcomm."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec

AxisName = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """Groups of the devices of an axis: an exchange over it stays within each group.

    The place of device r in its group is `r // stride % size`; groups share the rest of r.

    Attributes:
      of: the mesh axis, or axes.
      size: the number of devices in each group.
      stride: how far apart two neighbours in a group are along the axis.
    """

    of: AxisName
    size: int
    stride: int

    def members(self) -> list[list[int]]:
        """The devices of each group, in the order of their places."""
        numbers = np.arange(axis_size(self.of)).reshape(-1, self.size, self.stride)
        return numbers.swapaxes(1, 2).reshape(-1, self.size).tolist()


Axis = AxisName | Part


def levels_of(axis_name: AxisName, near: int) -> tuple[Part, Part]:
    """What hosts of `near` devices in a row exchange over, and what the devices of each do."""
    return Part(axis_name, axis_size(axis_name) // near, near), Part(axis_name, near, 1)


def world_of(axis: Axis) -> int:
    """The number of devices that exchange over it."""
    return axis.size if isinstance(axis, Part) else axis_size(axis)


def place_on(axis: Axis) -> jax.Array:
    """This device's number among those that exchange over it, where it is manual."""
    if not isinstance(axis, Part):
        return jax.lax.axis_index(axis)
    return jax.lax.axis_index(axis.of) // axis.stride % axis.size


def whole_of(axis: Axis) -> AxisName:
    """The axis that it is, or is a part of."""
    return axis.of if isinstance(axis, Part) else axis


def groups_on(axis: Axis) -> list[list[int]] | None:
    """The groups that exchange over it, as `axis_index_groups` of jax; None for one of all."""
    return axis.members() if isinstance(axis, Part) else None


def names_of(axis_name: AxisName) -> tuple[str, ...]:
    """The mesh axes that an axis name stands for: itself, or the members of a tuple.

    Raises:
      TypeError: for anything else.
      ValueError: for a tuple that names an axis twice.
    """
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, tuple) or not names or not all(isinstance(n, str) for n in names):
        raise TypeError(
            f"axis_name must be the name of a mesh axis or a tuple of names, got {axis_name!r}."
        )
    if len(set(names)) < len(names):
        raise ValueError(f"axis_name names an axis twice: {axis_name!r}; each may appear once.")
    return names


def names_in_entry(entry: Any) -> tuple[str, ...]:
    """The mesh axes over which an entry of a `PartitionSpec` splits a dimension."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def platform() -> str:
    """The platform of the current mesh; "cpu" if that is not known."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return getattr(device, "platform", "cpu")


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which `x` is typed as different from device to device.

    Empty where the checks of `jax.shard_map` are off, and outside it.
    """
    return frozenset(jax.typeof(x).mat.varying)


def checks_on(axis_name: AxisName) -> bool:
    """Whether the surrounding `jax.shard_map` tracks what varies over `axis_name`."""
    return varies(jax.lax.axis_index(axis_name), axis_name)


def checked_names(axis_name: AxisName) -> frozenset[str]:
    """The axes over which a result that differs from device to device has to be typed as varying.

    Empty where the surrounding `jax.shard_map` does not check.
    """
    return frozenset(names_of(axis_name) if checks_on(axis_name) else ())


def varies(x: Any, axis_name: AxisName) -> bool:
    """Whether `x` is typed as different along every axis of `axis_name`."""
    return varying_axes(x).issuperset(names_of(axis_name))


def is_manual(axis_name: AxisName) -> bool:
    """Whether this code runs device by device along `axis_name`.

    Raises:
      ValueError: if it does along some axes of a tuple, and not along the others.
    """
    own, manual = frozenset(names_of(axis_name)), manual_axes()
    if (some := own & manual) and some != own:
        raise ValueError(
            f"this is inside a jax.shard_map over {sorted(some)} of {axis_name!r}; make it over "
            "all of these axes (axis_names=), or over none."
        )
    return bool(some)


def as_varying(x: Any, axes: frozenset[str]) -> Any:
    """`x`, typed as varying over `axes` too; nothing moves."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def varying_alike(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays, all typed as varying over every axis over which any of them varies."""
    axes = frozenset().union(*map(varying_axes, arrays))
    return [as_varying(x, axes) for x in arrays]


def shape_varying_like(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """The type of a result that varies over the same axes as `x`."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).mat)


def manual_axes() -> frozenset[str]:
    """The axes of the current mesh along which this code runs device by device."""
    return _axes_of(AxisType.Manual)


def explicit_axes() -> frozenset[str]:
    """The axes of the current mesh whose shardings are part of types."""
    return _axes_of(AxisType.Explicit)


def _axes_of(wanted: AxisType) -> frozenset[str]:
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in kinds if kind == wanted)


def on_all(flag: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Whether a flag is set on all devices along these axes, which are manual; itself for none."""
    axes = tuple(sorted(axes))
    return jax.lax.pmin(flag.astype("int32"), axes) == 1 if axes else flag


def as_typed(spec: PartitionSpec, axis_name: AxisName, rank: int) -> PartitionSpec:
    """The spec of an array, spelled as in the type of what a step returns.

    Along Explicit axes every dimension is named, and of a whole array, if any axis of the mesh is
    one. What enters must be spelled the same way, or the second step compiles again.
    """
    of = names_of(axis_name) if any(spec) else ()
    if not explicit_axes() or not explicit_axes().issuperset(of):
        return spec
    return PartitionSpec(*spec, *[None] * (rank - len(spec)))


def current_mesh() -> jax.sharding.AbstractMesh:
    """The mesh that `jax.set_mesh` set.

    Raises:
      ValueError: if none is set.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise ValueError(
            "no mesh is set; call jax.set_mesh(jaxcomm.data_mesh()) first, "
            "or use `with jax.set_mesh(mesh):`. A mesh is set for one thread: each needs its own."
        )
    return mesh


def concrete_mesh() -> jax.sharding.Mesh | None:
    """The mesh that `jax.set_mesh` set, with its devices; None while jax traces.

    Raises:
      ValueError: if none is set, and inside `jax.shard_map`.
    """
    current_mesh()
    if manual := manual_axes():
        raise ValueError(
            f"this is inside a jax.shard_map over {sorted(manual)}, where each device has arrays "
            "of its own; place them outside of it, and pass in_specs."
        )
    try:
        return jax.sharding.get_mesh()
    except ValueError:  # inside jax.jit, jax.vmap, ...
        return None


def axis_size(axis_name: AxisName) -> int:
    """The number of devices along an axis of the current mesh, or along several together.

    Raises:
      ValueError: if no mesh is set, or it has no such axis.
    """
    mesh = current_mesh()
    for name in names_of(axis_name):
        if name not in mesh.axis_names:
            raise ValueError(
                f"axis {name!r} is not in the mesh, whose axes are "
                f"{', '.join(map(repr, mesh.axis_names))}; name one of these, or set another mesh."
            )
    return math.prod(mesh.shape[name] for name in names_of(axis_name))


def pairs_on(axis: Axis, pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Pairs of places as those of devices along the whole axis, in all groups."""
    groups = groups_on(axis)
    if groups is None:
        return list(pairs)
    return [(group[source], group[target]) for group in groups for source, target in pairs]


def ppermute(x: jax.Array, axis_name: AxisName, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """`jax.lax.ppermute` between devices as `jax.lax.axis_index` numbers them.

    Over several axes, `axis_index` counts in the order of their tuple, `ppermute` in that of the
    mesh.

    Args:
      x: what each source sends.
      axis_name: the mesh axis, or axes.
      pairs: (source, target).
    """
    names = names_of(axis_name)
    if len(names) > 1:
        order = jax.sharding.get_abstract_mesh().axis_names
        places = sorted(range(len(names)), key=lambda i: order.index(names[i]))
        sizes = [jax.lax.axis_size(name) for name in names]
        in_mesh = np.arange(math.prod(sizes)).reshape(sizes).transpose(places).ravel()
        number = np.argsort(in_mesh).tolist()
        pairs = [(number[source], number[target]) for source, target in pairs]
        axis_name = tuple(names[i] for i in places)
    return jax.lax.ppermute(x, axis_name, pairs)


def unchecked(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` in the same fully manual region with the checks of `jax.shard_map` off.

    A `shard_map` over no further axis moves nothing. Its results are typed as equal on all
    devices of every axis: the caller ensures that they are, or casts them back with `as_varying`.
    """
    return region(f, PartitionSpec(), PartitionSpec())


def region(f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`f` where all axes are manual, without the checks of `jax.shard_map`.

    Inside another such region jax needs a `jax.jit` around it, which the user may not have.
    """
    made = jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(made, inline=True) if manual_axes() else made
