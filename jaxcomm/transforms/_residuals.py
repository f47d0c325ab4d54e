"""The dtype in which residuals wait for the next step."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm.kernels.bfloat16 import round_at_random
from jaxcomm.kernels.random_bits import own_key, random_bits
from jaxcomm.transforms._buckets import Bucket, keys_of
from jaxcomm.transforms._exchange import Arrays
from jaxcomm.transforms._layout import Layout, split_over

_PURPOSE = 3  # of a key: messages and coins have others


def checked_dtype(dtype: Any, error_feedback: Any = True) -> str:
    """The name of a residual's dtype.

    Raises:
      TypeError: for what is not a dtype.
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


def rounded_leaves(
    new: Sequence[jax.Array],
    like: Sequence[jax.Array],
    key: jax.Array,
    layout: Layout,
    which: Bucket,
) -> Arrays:
    """The next residuals of some leaves, in the dtypes of the old ones.

    Args:
      new: float32, by leaf.
      like: those before the step.
      key: of the step; leaves, layers, shards and devices round differently.
      layout: the leaves.
      which: their numbers.
    """
    if all(x.dtype == old.dtype for x, old in zip(new, like, strict=True)):
        return list(new)
    groups: dict[frozenset[str], list[int]] = {}
    for place, i in enumerate(which):
        groups.setdefault(split_over(layout.leaves[i]), []).append(place)
    alike = list(groups.values())
    keys = keys_of(key, layout, [tuple(which[place] for place in group) for group in alike])
    found = {}
    for group, of_all in zip(alike, keys, strict=True):
        own = own_key(of_all, jax.lax.axis_index(layout.axis_name), _PURPOSE)
        found |= zip(
            group, rounded([new[i] for i in group], [like[i] for i in group], own), strict=True
        )
    return [found[place] for place in range(len(new))]


def rounded(new: Sequence[jax.Array], like: Sequence[jax.Array], key: jax.Array) -> Arrays:
    """Float32 arrays in the dtypes of others: in bfloat16, rounded at random.

    Rounded to nearest, what a step adds would be lost wherever it is below 1/256 of a residual, in
    every step anew. Rounded at random, the sum of many steps is kept.

    Args:
      new: float32.
      like: arrays of the same shapes.
      key: of this device.
    """
    return [
        x
        if x.dtype == old.dtype
        else round_at_random(x, random_bits(key, (x.size,), row).reshape(x.shape))
        for row, (x, old) in enumerate(zip(new, like, strict=True))
    ]
