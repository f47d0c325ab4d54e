"""Paths in pytrees, as people write them."""

from typing import Any

import jax


def path_name(path: Any) -> str:
    """A path in a pytree such as `layers/0/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
