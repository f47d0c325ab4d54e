"""The line of the user's program that a warning is about."""

import functools
import importlib.util
import sys
from pathlib import Path

_LIBRARIES = ("jaxcomm", "jax", "optax", "flax")


def users_line() -> int:
    """The `stacklevel` with which the caller's `warnings.warn` names a line outside libraries."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_folders()):
        frame, level = frame.f_back, level + 1
    return level


@functools.cache
def _folders() -> tuple[str, ...]:
    specs = map(importlib.util.find_spec, _LIBRARIES)
    return tuple(f"{Path(spec.origin).parent}/" for spec in specs if spec and spec.origin)
