"""Whether an argument is a number (Python's or numpy's, no bool and no array), a seed, or keys."""

import numbers
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp


def is_integer(x: Any) -> TypeGuard[int]:
    """Whether this is a whole number."""
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def is_real(x: Any) -> TypeGuard[float]:
    """Whether this is a number."""
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def are_keys(x: Any) -> bool:
    """Whether this is an array of random keys."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def check_seed(seed: Any) -> None:
    """Raises a TypeError or a ValueError unless a seed is an int64, or an array of one integer."""
    is_array = isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jnp.integer)
    if not (is_integer(seed) or (is_array and seed.ndim == 0)):
        raise TypeError(f"seed must be an integer, got {seed!r}; the keys are made from it.")
    if not is_array and not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must be an integer that int64 holds, got {seed!r}.")
