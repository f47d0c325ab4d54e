"""Whether the arrays of a checkpoint fit those of a run, and where each of them goes."""

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax

import jaxcomm
from train.errors import UserError
from train.models.transformer import SPLIT
from train.sync import AXIS


class Part(NamedTuple):
    """The layout of an array that differs from device to device.

    Attributes:
      axis: which axis counts the devices.
      is_share: whether each device has a part of a vector, whose length depends on the number of
        devices.
      shards: for a vector of several parameters, over how many devices of `config.sync.fsdp` these
        are split; None for others.
    """

    axis: int
    is_share: bool
    shards: int | None


def check(where: str, found: Mapping[str, Any], state: Any) -> None:
    """Raises a UserError that names the first array that does not fit.

    Args:
      where: the beginning of the message.
      found: the arrays of the checkpoint, by name.
      state: the state of the run, on the current mesh.
    """
    wanted, parts = leaves(state), own(state)
    # Parameters come first: they say more than what the optimizer keeps for each of them.
    for name in sorted(found.keys() | wanted.keys(), key=lambda n: (n.startswith("opt"), n)):
        there, here, part = found.get(name), wanted.get(name), parts.get(name)
        if there is not None and part is not None:
            _check_shards(where, name, there, part.shards)
        if there is None or here is None or not _fits(there, here, part):
            reason = _of_one_device(found, state) if there is None or here is None else ""
            raise UserError(
                f"{where}: {name} is {_shown(there)} there and {_shown(here)} here{reason}"
            )


def check_exempt(changed: Iterable[str], state: Any) -> None:
    """Raises a UserError if residuals would go to other parameters, in places of equal shapes.

    Args:
      changed: the fields that differ from the config of the checkpoint, see `workdir.changes`.
      state: the state of the run.
    """
    if _has_residuals(state) and any(change.startswith("sync.exempt") for change in changed):
        raise UserError(
            "config.sync.exempt decides which parameters have residuals, and those of the "
            "checkpoint would go to others: set it back, or choose another --workdir"
        )


def _has_residuals(state: Any) -> bool:
    """Whether an exchange in it keeps errors, by parameter or, in 1-bit Adam, by bucket."""

    def keeps(node: Any) -> bool:
        kept = (getattr(node, name, None) for name in ("residual", "worker_error"))
        return any(getattr(own, "values", ()) for own in kept)

    return any(map(keeps, jax.tree.leaves(state, is_leaf=keeps)))


def _of_one_device(found: Mapping[str, Any], state: Any) -> str:
    """A hint for runs with `config.sync.gather`, which keep other arrays on a single device."""
    is_split = lambda node: isinstance(node, jaxcomm.ShardedState)  # noqa: E731
    before = max(math.prod(_mesh_of(leaf).values()) for leaf in found.values())
    devices = before, jax.sharding.get_mesh().size
    if min(devices) > 1 or max(devices) == 1:
        return ""
    if not any(map(is_split, jax.tree.leaves(state, is_leaf=is_split))):
        return ""
    return (
        "; with config.sync.gather a run cannot go from several devices to one, or back: "
        f"continue with as many as before, {before}, or choose another --workdir"
    )


def _check_shards(where: str, name: str, there: Any, shards: int | None) -> None:
    """Raises if a vector was of parameters that `config.sync.fsdp` split in another way.

    Its values are in the order of their shards, so they would belong to other parameters.
    """
    mesh = _mesh_of(there)
    axes = jax.tree.leaves(list(getattr(there.sharding, "partition_spec", ())))
    before = math.prod(mesh[axis] for axis in axes if axis != AXIS)
    if shards is not None and before != shards:
        fsdp = mesh.get(SPLIT, 1)
        raise UserError(
            f"{where}: {name} depends on config.sync.fsdp, which was {fsdp}; continue with "
            f"--config.sync.fsdp={fsdp}, or choose another --workdir"
        )


def _mesh_of(there: Any) -> dict[str, int]:
    """The axes of the mesh that a saved array was on, and how many devices are along each."""
    sharding = getattr(there, "sharding", None)  # A single device may have none.
    names: tuple[str, ...] = getattr(sharding, "axis_names", ())
    lengths = map(int, getattr(sharding, "shape", ()))
    return dict(zip(names, lengths, strict=True))


def leaves(tree: Any) -> dict[str, Any]:
    """The arrays of a tree by their names."""
    return {name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def name_of(path: Any) -> str:
    """The name of a leaf, as orbax writes it."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _shown(leaf: Any) -> str:
    return "absent" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"


def own(tree: Any) -> dict[str, Part]:
    """The leaves that differ from device to device, by name; their nodes give the layout."""
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, "specs"))
    found = {}
    for path, node in nodes:
        if hasattr(node, "specs"):
            shards = node.shards or [None] * len(node.specs)
            for name, spec, over in zip(leaves(node), node.specs, shards, strict=True):
                axis = next(i for i, entry in enumerate(spec) if entry is not None)
                found[f"{name_of(path)}.{name}"] = Part(axis, node.are_shares, over)
    return found


def _fits(there: Any, here: jax.Array, part: Part | None) -> bool:
    """Whether a saved leaf can become this one: equal, or with a part for each device."""
    if there.dtype != here.dtype or len(there.shape) != len(here.shape):
        return False
    if part is None or there.shape[part.axis] == here.shape[part.axis]:
        return there.shape == here.shape
    shapes = ([n for i, n in enumerate(x.shape) if i != part.axis] for x in (there, here))
    return part.is_share or operator.eq(*shapes)


def like(there: Any, here: jax.Array) -> Any:
    """Where to put a saved leaf: as here, or in parts on all devices to be resized.

    A device need not have room for what each of the old devices kept.
    """
    if there.shape == here.shape:
        return jax.ShapeDtypeStruct(here.shape, here.dtype, sharding=here.sharding)
    mesh = jax.sharding.get_mesh()
    even = [i for i, length in enumerate(there.shape) if length % mesh.size == 0][-1:]
    spec = jax.P(*(mesh.axis_names if i in even else None for i in range(len(there.shape))))
    sharding = jax.sharding.NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(there.shape, there.dtype, sharding=sharding)
