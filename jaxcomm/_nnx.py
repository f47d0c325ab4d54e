"""Models of Flax NNX: what jax's pytrees would lose of them, and is refused."""

import sys
from typing import Any

import jax

from jaxcomm._paths import path_name

Values = dict[str, tuple[str, list[Any]]]  # by path: what a variable is, and what it holds


def refuse_shared(tree: Any) -> None:
    """Raises for a model with a variable in two places: a pytree would have two, and untie them."""
    seen: dict[int, str] = {}
    for path, variable in _variables(tree):
        first = seen.setdefault(id(variable), path)
        if first != path:
            raise ValueError(
                f"{first} and {path} of the model are one {type(variable).__name__}, and would "
                "become two. Split the model: graph, params = nnx.split(model, nnx.Param); place "
                "and exchange `params`, and use nnx.merge(graph, params) in the loss."
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


def values_of_variables(params: Any, further: Any) -> Values:
    """What the variables hold that a loss is given, as one object or in a state of parameters.

    A state among the further arguments is left out: who splits a model keeps what changes.
    """
    found = {path: variable for path, variable in _variables(params)}
    if (nnx := sys.modules.get("flax.nnx")) is not None:
        is_object = lambda x: isinstance(x, nnx.Module | nnx.Rngs | nnx.Metric)  # noqa: E731
        nodes = jax.tree_util.tree_leaves_with_path(further, is_leaf=is_object)
        for place, node in nodes:
            if is_object(node):
                inside = _variables(node)
                found |= {f"further argument {path_name(place)}/{p}": x for p, x in inside}
    return {p: (type(x).__name__, jax.tree.leaves(x)) for p, x in found.items()}


def refuse_changes(before: Values, after: Values, out: Any) -> None:
    """Raises if a loss has changed variables: the new values would be lost.

    What it has added, such as an `nnx.Intermediate`, is not there afterwards, which nobody misses
    in silence.

    Args:
      before: what `values_of_variables` returned before the loss was traced.
      after: what it returned afterwards.
      out: what the loss returned; new values that are in there are not lost.
    """
    kept = {id(leaf) for leaf in jax.tree.leaves(out)}
    for path, (kind, old) in before.items():
        _, values = after.get(path, (kind, old))
        if {*map(id, values)} <= {*map(id, old)} | kept:
            continue
        cure = "Return what changes as aux (has_aux=True), as docs/recipes.md does with statistics."
        if kind.startswith("Rng"):
            cure = (
                "Every step would draw the same numbers. Pass a key of the step, and make "
                "nnx.Rngs(jax.random.fold_in(key, jax.lax.axis_index(axis))) in the loss."
            )
        raise ValueError(
            f"the loss changes {path}, a {kind} of Flax NNX, and its new value would be lost: "
            f"gradients are taken on every device apart. {cure}"
        )


def _variables(tree: Any) -> list[tuple[str, Any]]:
    """The variables in a tree, and their paths; none where Flax NNX is not in use."""
    if (nnx := sys.modules.get("flax.nnx")) is None:
        return []
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return [(path_name(path), node) for path, node in nodes if isinstance(node, nnx.Variable)]
