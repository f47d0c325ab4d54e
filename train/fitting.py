"""Whether the arrays of a checkpoint fit those of a run, and where each of them goes."""

from typing import Any

import jax

from train.errors import UserError


def check(where: str, found: dict[str, Any], wanted: dict[str, Any], own: set[str]) -> None:
    """Raises a UserError that names the first array which does not fit.

    Args:
      where: the beginning of the line.
      found: arrays of the checkpoint, by name.
      wanted: those of the run.
      own: the names of `own`.
    """
    # Parameters first: they say more than what the optimizer keeps for each of them.
    for name in sorted(found.keys() | wanted.keys(), key=lambda n: (n.startswith("opt"), n)):
        there, here = found.get(name), wanted.get(name)
        if there is None or here is None or not _fits(there, here, name in own):
            raise UserError(f"{where}: {name} is {_shown(there)} there and {_shown(here)} here")


def leaves(tree: Any) -> dict[str, Any]:
    """The arrays of a tree by their names."""
    return {name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def name_of(path: Any) -> str:
    """The name of a leaf, as orbax writes it."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _shown(leaf: Any) -> str:
    return "absent" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"


def own(tree: Any) -> set[str]:
    """The names of the leaves that differ from device to device: their nodes say how they lie."""
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, "specs"))
    return {
        f"{name_of(path)}.{name}"
        for path, node in nodes
        if hasattr(node, "specs")
        for name in leaves(node)
    }


def _fits(there: Any, here: jax.Array, is_own: bool) -> bool:
    """Whether a saved leaf can become this one: equal, or one that has a part for each device."""
    if there.dtype != here.dtype or len(there.shape) != len(here.shape):
        return False
    if not is_own:
        return there.shape == here.shape
    # A part of two dimensions in all may be a device's share of a bucket.
    return there.shape[1:] == here.shape[1:] or (
        len(there.shape) == 2 and there.shape[0] != here.shape[0]
    )


def like(there: Any, here: jax.Array) -> Any:
    """Where to put a saved leaf: as it is here, or whole on every device to be resized."""
    if there.shape == here.shape:
        return jax.ShapeDtypeStruct(here.shape, here.dtype, sharding=here.sharding)
    everywhere = jax.sharding.NamedSharding(jax.sharding.get_mesh(), jax.P())
    return jax.ShapeDtypeStruct(there.shape, there.dtype, sharding=everywhere)
