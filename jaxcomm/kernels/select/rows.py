"""The largest entries of every row of a matrix, as many of each."""

import functools

import jax
import jax.numpy as jnp

from jaxcomm.kernels.reductions import running_sum


def largest_of_rows(x: jax.Array, k: int, least: float) -> jax.Array:
    """Where the k largest entries of every row are, by magnitude.

    Entries of less than `least` are not selected. Of those that tie for the last place, the first
    are taken. Every backend selects the same: CPUs sort out the largest, others find the k-th
    magnitude bit by bit.

    Args:
      x: float32 array `(rows, n)`, without NaN.
      k: 1 to n.
      least: the smallest magnitude that is selected, positive.

    Returns:
      int32 array `(rows, k)` of columns in ascending order, with n in the last slots of a row that
      has fewer entries.

    Raises:
      TypeError: for another dtype.
      ValueError: if x is not a matrix or k is not in its range.
    """
    if x.dtype != jnp.float32:
        raise TypeError(f"largest_of_rows takes float32, got {x.dtype}.")
    if x.ndim != 2 or not 1 <= k <= x.shape[1]:
        raise ValueError(f"largest_of_rows takes a matrix and 1 <= k <= n, got {x.shape}, k={k}.")
    magnitudes = jnp.abs(x)
    magnitudes = jnp.where(magnitudes >= least, magnitudes, 0)
    return jax.lax.platform_dependent(
        magnitudes, cpu=functools.partial(_sorted_out, k=k), default=functools.partial(_found, k=k)
    )


def _sorted_out(magnitudes: jax.Array, k: int) -> jax.Array:
    """By XLA's selection of the largest."""
    values, columns = jax.lax.top_k(magnitudes, k)
    return jnp.sort(jnp.where(values > 0, columns, magnitudes.shape[1]), axis=1)


def _found(magnitudes: jax.Array, k: int) -> jax.Array:
    """By the k-th magnitude of every row, whose bits are found from the highest to the lowest."""
    rows, n = magnitudes.shape
    patterns = jax.lax.bitcast_convert_type(magnitudes, jnp.int32)

    def with_bit(number: jax.Array, kth: jax.Array) -> jax.Array:
        tried = kth | (jnp.int32(1 << 30) >> number)
        count = jnp.sum(patterns >= tried[:, None], axis=1, dtype=jnp.int32)
        return jnp.where(count >= k, tried, kth)

    kth = jax.lax.fori_loop(0, 31, with_bit, jnp.zeros(rows, jnp.int32))[:, None]
    above, ties = patterns > kth, (patterns == kth) & (kth > 0)
    room = k - jnp.sum(above, axis=1, keepdims=True, dtype=jnp.int32)
    chosen = above | (ties & (running_sum(ties.astype(jnp.int32), axis=1) <= room))
    slot = jnp.where(chosen, running_sum(chosen.astype(jnp.int32), axis=1) - 1, k)
    row, columns = (jax.lax.broadcasted_iota(jnp.int32, (rows, n), axis) for axis in (0, 1))
    return jnp.full((rows, k), n, jnp.int32).at[row, slot].set(columns, mode="drop")
