"""Numbers that look random, from an index and a step; the same on all devices and backends."""

import jax
import jax.numpy as jnp

MOST = 2**16


def hashed(indices: jax.Array, step: jax.Array, below: int) -> jax.Array:
    """For each index a number from 0 to `below` - 1, a different one in each step.

    Args:
      indices: int32 array of any shape.
      step: int32 scalar.
      below: 1 to `MOST`.

    Returns:
      int32 array of that shape.
    """
    x = indices.astype(jnp.uint32) * jnp.uint32(0x9E3779B1)
    x += step.astype(jnp.uint32) * jnp.uint32(0x85EBCA77)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return ((x >> 16) * below >> 16).astype(jnp.int32)
