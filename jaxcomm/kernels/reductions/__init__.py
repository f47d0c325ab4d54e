"""The largest magnitude along the last axis, and the sum of squares.

There are two plain versions, one per platform. XLA on CPU reduces the last axis one element after
the other. So there the axis is folded first: 16 rows of 32 neighbours into one, whose loop has
vector instructions, until little is left. Elsewhere it is a plain reduction.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

_ROWS, _LANES = 16, 32
_MAGNITUDE = 0x7FFFFFFF


def largest(x: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """The bit patterns of the largest magnitudes, which are in the order of the magnitudes.

    In integers no denormal is taken for zero, infinity is above all that is finite, and NaN above
    infinity, on every backend.

    Args:
      x: float32 array `(..., n)`.
      implementation: "xla", or None for the best on this device.

    Returns:
      uint32 array `(...)`; 0 where n is.

    Raises:
      TypeError: for another dtype.
      NotImplementedError: for an implementation that does not exist here.
    """
    _require("largest", x, implementation)
    patterns = jax.lax.bitcast_convert_type(x, jnp.uint32) & _MAGNITUDE
    return _reduce(jax.lax.reduce_max, jnp.maximum, patterns)


def sum_of_squares(x: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """The sums of squares; how they are ordered differs between platforms.

    Args:
      x: float32 array `(..., n)`.
      implementation: "xla", or None for the best on this device.

    Returns:
      float32 array `(...)`.

    Raises:
      TypeError: for another dtype.
      NotImplementedError: for an implementation that does not exist here.
    """
    _require("sum_of_squares", x, implementation)
    return _reduce(jax.lax.reduce_sum, jnp.add, jnp.square(x))


def _reduce(reduce: Callable, combine: Callable, x: jax.Array) -> jax.Array:
    last = (x.ndim - 1,)
    return jax.lax.platform_dependent(
        x,
        cpu=lambda x: _fold(reduce, combine, x),
        default=lambda x: reduce(x, axes=last),
    )


def _fold(reduce: Callable, combine: Callable, x: jax.Array) -> jax.Array:
    *lead, n = x.shape
    rows = min(_ROWS, n // _LANES)
    if rows < 2:
        return reduce(x, axes=(len(lead),))
    tiles = n // (rows * _LANES)
    whole = tiles * rows * _LANES
    folded = x[..., :whole].reshape(*lead, tiles, rows, _LANES)
    # Without the barrier XLA makes one reduction of all of them, as slow as before.
    folded = jax.lax.optimization_barrier(reduce(folded, axes=(len(lead) + 1,)))
    folded = _fold(reduce, combine, folded.reshape(*lead, tiles * _LANES))
    return combine(folded, reduce(x[..., whole:], axes=(len(lead),))) if whole < n else folded


def _require(name: str, x: jax.Array, implementation: str | None) -> None:
    if implementation not in (None, "xla"):
        raise NotImplementedError(
            f'{name} has no implementation {implementation!r}; use "xla" or None.'
        )
    if x.dtype != jnp.float32 or x.ndim == 0:
        raise TypeError(
            f"{name} takes float32 with an axis to reduce, got {x.dtype} of shape {x.shape}; "
            "write x.astype(jnp.float32).reshape(-1)."
        )
