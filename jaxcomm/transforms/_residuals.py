"""The dtype in which residuals wait for the next step."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm._axes import AxisName
from jaxcomm.kernels.bfloat16 import round_at_random
from jaxcomm.kernels.random_bits import own_key, random_bits
from jaxcomm.transforms._buckets import LAYER
from jaxcomm.transforms._exchange import Arrays, kept_if

_PURPOSE = 3  # of a key: messages and coins have others


def checked_dtype(dtype: Any, error_feedback: Any = True) -> str:
    """The name of a residual's dtype.

    Raises:
      TypeError: for what is no dtype.
      ValueError: for another dtype than float32 and bfloat16, or where no residual is kept.
    """
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        raise TypeError(f'residual_dtype must be "float32" or "bfloat16", got {dtype!r}.') from None
    if dtype is None or name not in ("float32", "bfloat16"):
        raise ValueError(f'residual_dtype must be "float32" or "bfloat16", got {dtype!r}.')
    if name != "float32" and not error_feedback:
        raise ValueError(
            f"residual_dtype={name!r} is for residuals, and without error feedback there are none: "
            "add error_feedback=True, or leave it out."
        )
    return name


def kept_residuals(
    finite: jax.Array, new: Sequence[jax.Array], old: Arrays, key: jax.Array, axis_name: AxisName
) -> Arrays:
    """The next residuals, in the dtypes of the old ones; unchanged if the step is not taken.

    Args:
      finite: whether the step is taken.
      new: float32.
      old: those before the step.
      key: of the step.
      axis_name: the mesh axis; devices along it round differently.
    """
    return kept_if(finite, rounded(new, old, key, axis_name), old)


def rounded(
    new: Sequence[jax.Array], like: Sequence[jax.Array], key: jax.Array, axis_name: AxisName
) -> Arrays:
    """Float32 arrays in the dtypes of others: in bfloat16, rounded at random.

    Rounded to nearest, what a step adds would be lost wherever it is below 1/256 of a residual, in
    every step anew. Rounded at random, the sum of many steps is kept.
    """
    pairs = list(zip(new, like, strict=True))
    if all(x.dtype == old.dtype for x, old in pairs):
        return list(new)
    layer = LAYER.get()
    own = key if layer is None else jax.random.fold_in(key, layer)
    own = own_key(own, jax.lax.axis_index(axis_name), _PURPOSE)
    words = [random_bits(own, (x.size,), i).reshape(x.shape) for i, x in enumerate(new)]
    return [
        x if x.dtype == old.dtype else round_at_random(x, w)
        for (x, old), w in zip(pairs, words, strict=True)
    ]
