"""Paths in pytrees, in readable form."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
_NUMBERS = (bool, int, float, complex)


def path_name(path: Any) -> str:
    """A path in a pytree such as `layers/0/kernel`.

    The `.value` of a Flax variable is left out, and the number of the array in a named array of
    haliax, so that a parameter has one name in all frameworks.
    """
    if len(path) > 1 and path[-1] == FlattenedIndexKey(0):
        if isinstance(path[-2], GetAttrKey | DictKey):
            path = path[:-1]
    if path and isinstance(path[-1], GetAttrKey) and path[-1].name == "value":
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator="/")


def require_float(name: str, dtype: Any) -> None:
    """Raises a TypeError for the dtype of a parameter whose gradient cannot be exchanged."""
    if dtype not in FLOATS:
        raise TypeError(
            f"parameter {name or 'tree'} is {dtype}; gradients are exchanged for float32, "
            "bfloat16 and float16. Keep other leaves out of the tree that is differentiated, as "
            "eqx.partition(model, eqx.is_inexact_array) does, or cast them."
        )


def require_arrays(tree: Any, what: str) -> None:
    """Raises a TypeError for a leaf that is neither an array nor a number.

    Args:
      tree: a pytree.
      what: what it holds, for the message.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not isinstance(leaf, _NUMBERS) and not hasattr(leaf, "dtype"):
            name = path_name(path) or "tree"
            raise TypeError(
                f"{what} {name} is {leaf!r}, which is not an array. Keep the arrays in a separate "
                "tree, as nnx.split or eqx.partition(model, eqx.is_inexact_array) do, and join "
                "both inside the loss."
            )


def require_distinct(names: Sequence[str]) -> None:
    """Raises a ValueError for two paths that read the same."""
    if twice := [name for name, n in Counter(names).items() if n > 1]:
        raise ValueError(
            f"two parameters are called {twice[0]}: a name with a slash looks like a path; rename "
            "one of them."
        )
