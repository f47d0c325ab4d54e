"""What a loss function may take, and what it may return."""

import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"aux{jax.tree_util.keystr(path)} is a random key, of which there is no mean over "
                "devices; give the loss another key in every step, and return only what else "
                "changes, such as nnx.state(model, nnx.BatchStat)."
            )
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
            where = "return what changes as aux (has_aux=True)."
            if isinstance(variable, nnx.RngState):
                where = "a key of the step too: layer(x, rngs=nnx.Rngs(dropout=key))."
            raise ValueError(
                f"the parameters hold a {type(variable).__name__}, whose new value would be lost. "
                "Split the model: graph, params, rest = nnx.split(model, nnx.Param, ...). Give "
                f"`rest` as a further argument, and {where}"
            )


def warn_of_rows(batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any], world: int) -> None:
    """Warns of an array beside the batch that has as many rows: it is not split over devices.

    Trees are left alone: statistics and other states have any number of rows.
    """
    if world == 1:
        return
    rows = {jnp.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf)}
    given = {f"argument {place}": arg for place, arg in enumerate(args, start=3)} | kwargs
    for name, arg in given.items():
        is_array = isinstance(arg, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
        if is_array and arg.shape and arg.shape[0] in rows:
            warnings.warn(
                f"{name} of the loss has as many rows as the batch, {arg.shape[0]}, and goes whole "
                f"to each of the {world} devices: only the batch, argument 2, is split. Give what "
                "belongs to its rows in it, such as loss(params, (x, y)).",
                stacklevel=3,
            )
