"""A variable that has a value while some code runs, and its former one afterwards."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def holding(variable: contextvars.ContextVar[T], value: T) -> Iterator[None]:
    """Inside, the variable has this value; nothing of this is on the call stack there."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
