"""Leaves and vectors beyond the sizes where means take another way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_large_leaf_of_a_plain_mean_is_added_in_32_bits(dtype: str) -> None:
    """It is an operand of its own, not joined with others."""
    values = jnp.asarray([256, 1, 1, 1], dtype)  # in bfloat16, 256 + 1 is 256
    params = {"large": jnp.ones((2**9, 2**9), dtype), "small": jnp.ones((3, 5), dtype)}
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
        tx = jaxcomm.mean("data")
        grads = jax.tree.map(lambda x: jnp.multiply.outer(values, x), params)
        updates, _ = jax.jit(tx.update)(grads, tx.init(jaxcomm.replicate(params)))
    for name, x in params.items():
        np.testing.assert_array_equal(updates[name], jnp.full(x.shape, 259 / 4, dtype))


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8"])
def test_one_bad_value_of_a_long_vector_is_seen(codec: str) -> None:
    """It makes every update NaN and leaves residuals as they are, also beside short vectors."""
    params = {"long": jnp.ones((2**7, 2**8)), "short": jnp.ones((3, 5))}
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
        tx = jaxcomm.mean("data", codec, bucket_mib=0.01, error_feedback=codec != "float32")
        state = tx.init(jaxcomm.replicate(params))
        grads = {name: jnp.ones((4, *x.shape)) for name, x in params.items()}
        grads["long"] = grads["long"].at[2, 100, 200].set(jnp.nan)
        updates, after = jax.jit(tx.update)(grads, state)
    assert all(np.isnan(u).all() for u in updates.values())
    jax.tree.map(np.testing.assert_array_equal, after.residual, state.residual)
