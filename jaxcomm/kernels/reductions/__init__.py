"""The largest magnitude along the last axis, and the sum of squares.

Each has two formulations, one per platform, because XLA on CPU reduces the last axis one element
after the other. On CPU the maximum folds the axis instead. In a loop of vector instructions, 8 rows
of 32 neighbours become one row of maxima; the row becomes one number; and this repeats until few
numbers are left. The sum of squares on CPU is a matrix product. On other platforms both are plain
reductions.
"""

import jax
import jax.numpy as jnp

_ROWS, _LANES = 8, 32
_MAGNITUDE = 0x7FFFFFFF


def largest(x: jax.Array) -> jax.Array:
    """The bit patterns of the largest magnitudes.

    Bit patterns have the order of the magnitudes on every backend: denormals are not taken for
    zero, infinity is above all finite values, and NaN is above infinity.

    Args:
      x: float32 array `(..., n)`.

    Returns:
      uint32 array `(...)`; zeros if n is 0.

    Raises:
      TypeError: for another dtype.
    """
    _require("largest", x)
    patterns = jax.lax.bitcast_convert_type(x, jnp.uint32) & _MAGNITUDE
    return jax.lax.platform_dependent(
        patterns,
        cpu=_fold,
        default=lambda patterns: jax.lax.reduce_max(patterns, axes=(x.ndim - 1,)),
    )


def sum_of_squares(x: jax.Array) -> jax.Array:
    """The sums of squares; the order of summation differs between platforms.

    Args:
      x: float32 array `(..., n)`.

    Returns:
      float32 array `(...)`.

    Raises:
      TypeError: for another dtype.
    """
    _require("sum_of_squares", x)
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
    # The barriers keep XLA from merging the steps into one reduction, as slow as a plain one.
    tiles = x[..., :whole].reshape(*lead, whole // tile, _ROWS, _LANES)
    lanes = jax.lax.optimization_barrier(jax.lax.reduce_max(tiles, axes=(axis + 1,)))
    tops = _fold(jax.lax.optimization_barrier(jax.lax.reduce_max(lanes, axes=(axis + 1,))))
    return jnp.maximum(tops, rest) if whole < n else tops


def _require(name: str, x: jax.Array) -> None:
    if x.dtype != jnp.float32 or x.ndim == 0:
        raise TypeError(
            f"{name} takes float32 with an axis to reduce, got {x.dtype} of shape {x.shape}; "
            "write x.astype(jnp.float32).reshape(-1)."
        )
