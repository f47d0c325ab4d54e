"""Functions that XLA compiles by themselves."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
from jax.experimental.xla_metadata import set_xla_metadata

P = ParamSpec("P")
T = TypeVar("T")


def apart(f: Callable[P, T], static_argnames: str | tuple[str, ...] = ()) -> Callable[P, T]:
    """f, compiled so that XLA fuses none of it with what comes before or after.

    On CPU, XLA fuses cheap operations into each of their uses. This computes them once per use, and
    in the order of the use's elements, which may be slow to access. Barriers do not prevent this:
    they are removed before XLA decides. A call that must not be inlined does.

    Args:
      f: of arrays.
      static_argnames: keyword arguments that are none.
    """

    def inside(*args: P.args, **kwargs: P.kwargs) -> T:
        with set_xla_metadata(inlineable="true"):  # functions that f calls, such as jnp.where
            return f(*args, **kwargs)

    compiled = jax.jit(inside, static_argnames=static_argnames)

    @functools.wraps(f)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with set_xla_metadata(inlineable="false"):
            return compiled(*args, **kwargs)

    return call


def once(f: Callable[..., T]) -> Callable[..., T]:
    """f of arrays; on CPU apart, so that its result is computed once for all uses."""
    return lambda *args: jax.lax.platform_dependent(*args, cpu=apart(f), default=f)
