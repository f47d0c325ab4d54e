"""The largest magnitude along the last axis, and the sum of squares.

There are two plain versions of each, one per platform. XLA on CPU reduces the last axis one element
after the other. So there the axis is folded for a maximum: 8 rows of 32 neighbours into one, in a
loop of vector instructions, then these into one number, until little is left; and a sum of squares
is a product of matrices. Elsewhere both are plain reductions.
"""

import jax
import jax.numpy as jnp

_ROWS, _LANES = 8, 32
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
    return jax.lax.platform_dependent(
        patterns,
        cpu=_fold,
        default=lambda patterns: jax.lax.reduce_max(patterns, axes=(x.ndim - 1,)),
    )


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
    return jax.lax.platform_dependent(
        x,
        cpu=lambda x: jnp.einsum("...i,...i->...", x, x, precision=jax.lax.Precision.HIGHEST),
        default=lambda x: jnp.sum(jnp.square(x), axis=-1),
    )


def _fold(x: jax.Array) -> jax.Array:
    """The maxima along the last axis."""
    *lead, n = x.shape
    axis, tile = len(lead), _ROWS * _LANES
    whole = n // tile * tile
    rest = jax.lax.reduce_max(x[..., whole:], axes=(axis,))
    if whole == 0:
        return rest
    # Without the barriers XLA makes one reduction of all of them, as slow as before.
    tiles = x[..., :whole].reshape(*lead, whole // tile, _ROWS, _LANES)
    lanes = jax.lax.optimization_barrier(jax.lax.reduce_max(tiles, axes=(axis + 1,)))
    tops = _fold(jax.lax.optimization_barrier(jax.lax.reduce_max(lanes, axes=(axis + 1,))))
    return jnp.maximum(tops, rest) if whole < n else tops


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
