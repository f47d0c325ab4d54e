"""A variable that has a value while some code runs, and its former one afterwards."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def holding(variable: contextvars.ContextVar[T], value: T) -> Iterator[None]:
    """Inside, the variable has this value. No frame of this is on the call stack there.

    Others look at the stack for the user's line and for optax's chains.
    """
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
