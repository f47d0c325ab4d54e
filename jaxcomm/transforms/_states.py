"""Checks of states, such as whether one belongs to the transformation that it is passed to."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxcomm.transforms._buckets import split_off_empty, split_off_exempt
from jaxcomm.transforms._layout import Layout, is_exempt
from jaxcomm.transforms._options import Exempt
from jaxcomm.transforms.per_device import PerDevice

_CURE = (
    "Make tx as in the run that saved the state, or start over with tx.init(params); in a chain, "
    "(tx.init(params)[0], *state[1:]) keeps the state of the optimizer."
)
_TARGET = "A checkpoint has the arrays of a state, not its types: restore it into tx.init(params)."


def require_state(
    state: Any,
    kind: type,
    exempt: Exempt,
    kept: dict[str, bool],
    rule: Callable[[Layout], Layout] = lambda layout: layout,
    kept_of_all: dict[str, bool] | None = None,
    *,
    dtype: str = "float32",
) -> None:
    """Raises a ValueError for the state of another transformation, or of one with other options.

    Args:
      state: what `update` was given.
      kind: the class of the transformation's states.
      exempt: the transformation's option.
      kept: for each field of the state, whether it holds one array per compressed leaf; otherwise
        it is empty.
      rule: the layout with what else the transformation exempts.
      kept_of_all: as `kept`, for fields with one array per leaf that has values.
      dtype: that of the field `residual`, if it is kept.
    """
    require_kind(state, kind)
    leaves = [
        dataclasses.replace(leaf, exempt=is_exempt(leaf.path, leaf.shape, leaf.stacked, exempt))
        for leaf in state.layout.leaves
    ]
    expected = rule(dataclasses.replace(state.layout, leaves=tuple(leaves)))
    for old, new in zip(state.layout.leaves, expected.leaves, strict=True):
        if old.exempt != new.exempt:
            raise ValueError(
                f"by the state, {old.path} is {'' if old.exempt else 'not '}exempt from "
                f"compression, and by the options it is{'' if new.exempt else ' not'}. {_CURE}"
            )
    (large, _), (full, _) = split_off_exempt(state.layout), split_off_empty(state.layout)
    leaves = [(large, *item) for item in kept.items()]
    leaves += [(full, *item) for item in (kept_of_all or {}).items()]
    for of, name, is_kept in leaves:
        found, due = len(getattr(state, name).values), len(of) if is_kept else 0
        if found != due:
            raise ValueError(f"the state has {found} arrays of {name}, expected {due}. {_CURE}")
    if kept.get("residual"):
        require_dtype(state.residual, dtype)


def require_dtype(own: PerDevice, dtype: str) -> None:
    """Raises a ValueError for residuals of another dtype."""
    if other := [x.dtype for x in own.values if x.dtype != dtype]:
        raise ValueError(
            f"the state has residuals in {other[0]}, and residual_dtype is {dtype}; write "
            f'residual_dtype="{other[0]}", or convert the state: '
            "jaxcomm.resize_state(tx, state, params) takes the mean of the residuals over devices."
        )


def require_kind(state: Any, kind: type) -> None:
    """Raises a ValueError for the state of another transformation, or what is left of one."""
    if isinstance(state, kind):
        return
    raise ValueError(
        f"expected a {kind.__name__}, got a {type(state).__name__}. {_CURE}"
        + (f" {_TARGET}" if type(state) in (dict, list) else "")
    )


def require_no_exchange(state: Any, who: str, alone: str, place: str, name: str = "inner") -> None:
    """Raises a ValueError if `inner` exchanges.

    Args:
      state: the state of `inner`.
      who: the transformation that `inner` is given to.
      alone: an example of what it may be.
      place: where the exchange belongs.
      name: that of the argument, if it is another.
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Layout))
    if any(isinstance(node, Layout) for node in nodes):
        raise ValueError(
            f"{name} exchanges; give {who} what each device does alone, such as {alone}, and the "
            f"exchange {place}."
        )
