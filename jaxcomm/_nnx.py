"""Models of Flax NNX: what jax's pytrees would lose of them, and is refused."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from jaxcomm._jaxprs import needed_for, origin_of
from jaxcomm._paths import path_name


class Held(NamedTuple):
    """What a variable of a model holds.

    Attributes:
      kind: the name of its type.
      values: its arrays.
    """

    kind: str
    values: list[Any]


def refuse_shared(tree: Any) -> None:
    """Raises for a model with a variable in two places: a pytree would have two, and untie them."""
    for _, model in _objects(tree):
        seen: dict[int, str] = {}
        for path, variable in _variables(model):
            first = seen.setdefault(id(variable), path)
            if first != path:
                raise ValueError(
                    f"{first} and {path} of the model are one {type(variable).__name__}, and would "
                    "become two. Split the model: graph, params, rest = nnx.split(model, "
                    "nnx.Param, ...); place and exchange `params`, and use nnx.merge(graph, "
                    "params, rest) in the loss."
                )


def refuse_statistics(params: Any) -> None:
    """Raises for variables among the parameters that the loss changes, not a gradient."""
    if (nnx := sys.modules.get("flax.nnx")) is None:
        return
    for _, variable in _variables(params):
        if isinstance(variable, nnx.BatchStat | nnx.RngState | nnx.Cache):
            where = "return what changes as aux (has_aux=True)."
            if isinstance(variable, nnx.RngState):
                where = "a key of the step too, for nnx.reseed(model, default=key) after nnx.merge."
            raise ValueError(
                f"the parameters hold a {type(variable).__name__}, whose new value would be lost. "
                "Split the model: graph, params, rest = nnx.split(model, nnx.Param, ...). Give "
                f"`rest` as a further argument, and {where}"
            )


def held_by(params: Any, further: Any) -> dict[str, Held]:
    """What the variables hold that a loss is given, by path.

    Parameters are left out: layers that write them, such as `nnx.WeightNorm`, do so in every call.
    So is a state among the further arguments: who splits a model keeps what changes.
    """
    if (nnx := sys.modules.get("flax.nnx")) is None:
        return {}
    found = dict(_variables(params))
    states = (nnx.State, nnx.FlatState)
    is_one = lambda x: isinstance(x, (nnx.Pytree, nnx.Variable, *states))  # noqa: E731
    for place, node in jax.tree_util.tree_leaves_with_path(further, is_leaf=is_one):
        inside = [] if isinstance(node, states) else _variables(node)
        where = f"further argument {path_name(place)}"
        found |= {f"{where}/{path}" if path else where: x for path, x in inside}
    return {
        path: Held(type(x).__name__, jax.tree.leaves(x))
        for path, x in found.items()
        if not isinstance(x, nnx.Param)
    }


def changed(before: Mapping[str, Held], after: Mapping[str, Held]) -> list[str]:
    """The paths of variables that hold other arrays, which may have the same values.

    What the loss has added or keeps for looking at, an `nnx.Intermediate`, nobody misses in
    silence. A stream of random numbers with a new key was seeded by the loss.
    """
    other = [
        path
        for path, (kind, old) in before.items()
        if path in after and kind != "Intermediate" and _differ(old, after[path].values)
    ]
    seeded = {path.rpartition("/")[0] for path in other if before[path].kind == "RngKey"}
    return [path for path in other if path.rpartition("/")[0] not in seeded]


def refuse_changes(paths: list[str], kinds: Mapping[str, Held], retrace: Callable[[], Any]) -> None:
    """Raises if a loss has changed variables: the new values would be lost.

    Transformations such as `nnx.remat` write all variables back as new arrays. So the loss is
    traced again, and in its jaxpr a value that comes from the old one is unchanged, and one that
    aux was made of is not lost.

    Args:
      paths: what `changed` returned.
      kinds: what `held_by` returned.
      retrace: returns the arrays of these variables before and after the loss, and aux.
    """
    traced, (old, new, aux) = jax.make_jaxpr(retrace, return_shape=True)()
    jaxpr = traced.jaxpr
    n, m = len(jax.tree.leaves(old)), len(jax.tree.leaves(new))
    kept = needed_for(jaxpr, jaxpr.outvars[n + m :])
    place = 0
    for path, values in zip(paths, new, strict=True):
        outs = range(place, place + len(jax.tree.leaves(values)))
        place = outs.stop
        pairs = [(jaxpr.outvars[i], jaxpr.outvars[n + i]) for i in outs]
        if all(origin_of(jaxpr, b) is a or id(b) in kept for a, b in pairs):
            continue
        cure = "Return what changes as aux (has_aux=True), as docs/recipes.md does with statistics"
        if kinds[path].kind.startswith("Rng"):
            cure = (
                "Given again, the stream would draw the same numbers: pass a key of the step, and "
                "make nnx.Rngs(jax.random.fold_in(key, jax.lax.axis_index(axis))) in the loss"
            )
        raise ValueError(
            f"the loss changes {path} of type {kinds[path].kind}, of Flax NNX, and its new value "
            f"would be lost: gradients are taken on every device apart. {cure}; or, if nothing is "
            "lost, give a state of nnx.split in place of the object."
        )


def _differ(old: list[Any], new: list[Any]) -> bool:
    return list(map(id, old)) != list(map(id, new))


def _objects(tree: Any) -> list[tuple[str, Any]]:
    """The outermost models, metrics and the like in a tree, and their paths."""
    if (nnx := sys.modules.get("flax.nnx")) is None:
        return []
    is_object = lambda x: isinstance(x, nnx.Pytree)  # noqa: E731
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_object)
    return [(path_name(path), node) for path, node in nodes if is_object(node)]


def _variables(tree: Any) -> list[tuple[str, Any]]:
    """The variables in a tree, and their paths; none where Flax NNX is not in use."""
    if (nnx := sys.modules.get("flax.nnx")) is None:
        return []
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return [(path_name(path), node) for path, node in nodes if isinstance(node, nnx.Variable)]
