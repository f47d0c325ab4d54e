"""Functions that XLA compiles by themselves."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
from jax.experimental.xla_metadata import set_xla_metadata

P = ParamSpec("P")
T = TypeVar("T")


def apart(f: Callable[P, T]) -> Callable[P, T]:
    """f, compiled so that XLA fuses none of it with what comes before or after.

    On CPU, XLA fuses cheap operations into each of their uses. This computes them once per use, and
    in the order of the use's elements, which may be slow to access. Barriers do not prevent this:
    they are removed before XLA decides. A call that must not be inlined does.
    """
    compiled = jax.jit(f)

    @functools.wraps(f)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with set_xla_metadata(inlineable="false"):
            return compiled(*args, **kwargs)

    return call
