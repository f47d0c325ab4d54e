"""What a loss function may take, and what it may return."""

import sys
from typing import Any

import jax
import jax.numpy as jnp

_AVERAGED = (jnp.integer, jnp.floating, jnp.bool_)


def loss_and_aux(out: Any, has_aux: bool) -> tuple[Any, Any]:
    """What a loss function returned, apart; aux is () if there is none.

    Raises:
      TypeError: if it is not what `has_aux` says, or aux is not made of real numbers.
    """
    if has_aux and not (isinstance(out, tuple | list) and len(out) == 2):
        raise TypeError(
            f"with has_aux=True the loss function returns (loss, aux), got {type(out).__name__}."
        )
    if not has_aux and isinstance(out, tuple | list | dict):
        raise TypeError(
            f"the loss function returned a {type(out).__name__}, not a loss alone; if it returns "
            "(loss, aux), pass has_aux=True."
        )
    loss, aux = out if has_aux else (out, ())
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux):
        dtype = getattr(leaf, "dtype", type(leaf))
        if not any(jnp.issubdtype(dtype, kind) for kind in _AVERAGED):
            raise TypeError(
                f"aux{jax.tree_util.keystr(path)} is {dtype}, and the mean over devices is taken "
                "in float32, of real numbers only; leave it out of aux."
            )
    return loss, aux


def refuse_statistics(params: Any) -> None:
    """Raises if Flax NNX variables are among the parameters that a loss changes, not a gradient."""
    if (nnx := sys.modules.get("flax.nnx")) is None:
        return
    changed = (nnx.BatchStat, nnx.RngState, nnx.Cache)
    variables = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, nnx.Variable))
    for variable in variables:
        if isinstance(variable, changed):
            raise ValueError(
                f"the parameters hold a {type(variable).__name__}, whose new value would be lost. "
                "Split the model: graph, params, rest = nnx.split(model, nnx.Param, ...). Give "
                "`rest` as a further argument, and return what changes as aux (has_aux=True)."
            )
