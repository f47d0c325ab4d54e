"""Paths in pytrees, as people write them."""

from typing import Any

import jax
from jax.tree_util import GetAttrKey


def path_name(path: Any) -> str:
    """A path in a pytree such as `layers/0/kernel`.

    The `.value` of a Flax variable is left out, so that a parameter has one name in all frameworks.
    """
    if path and isinstance(path[-1], GetAttrKey) and path[-1].name == "value":
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator="/")
