"""An order of what is sent that XLA on CPU keeps.

It drops barriers before it schedules, so the order is one of data.
"""

import jax
import jax.numpy as jnp

from jaxcomm import _axes


def zero_of(x: jax.Array) -> jax.Array:
    """int32 zero, computed from the first of real numbers; XLA cannot know that it is zero."""
    return (x.reshape(-1)[0].astype(jnp.float32) * 0.0).astype(jnp.int32)


def tied(x: jax.Array, zero: jax.Array) -> jax.Array:
    """x, which cannot be used before a zero of `zero_of` is computed."""
    if x.size == 0:
        return x
    x, zero = _axes.varying_alike([x, zero])
    if any(jax.typeof(x).sharding.spec):  # split in its type, so that no slice of one can be taken
        return jnp.where(zero > 1, jnp.zeros_like(x), x)
    if x.size == 1:  # XLA knows that an update of everything is the update
        of_two = jnp.concatenate([x.reshape(1), jnp.zeros_like(x, shape=(1,))])
        return jax.lax.dynamic_slice(of_two, (zero,), (1,)).reshape(x.shape)
    return jax.lax.dynamic_update_slice(x, x[(slice(1),) * x.ndim], (zero,) * x.ndim)
