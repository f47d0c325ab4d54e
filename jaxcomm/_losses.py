"""What a loss function may return."""

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
