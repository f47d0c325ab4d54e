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


@pytest.mark.parametrize("error_feedback", [False, True])
@pytest.mark.parametrize("zeros", ["random", "abstain"])
def test_large_leaves_are_voted_on_as_small_ones_are(zeros: str, error_feedback: bool) -> None:
    """Those whose bits fill whole words are packed apart, the others together, in one bucket."""
    shapes = {"apart": (2**8, 2**8), "half": (2**9, 2**7), "odd": (259, 257), "small": (3, 5)}
    params = {
        name: jnp.zeros(s, "bfloat16" if name == "half" else None) for name, s in shapes.items()
    }
    rng = np.random.default_rng(0)
    values = {name: rng.integers(-1, 2, (3, *s)) for name, s in shapes.items()}
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:3])):
        tx = jaxcomm.majority_vote("data", zeros=zeros, ties="zero", error_feedback=error_feedback)
        state = tx.init(jaxcomm.replicate(params))
        grads = {name: jnp.asarray(x, params[name].dtype) for name, x in values.items()}
        update = jax.jit(tx.update)
        updates, after = update(grads, state)
        spoiled, _ = update({**grads, "small": grads["small"].at[1, 2, 3].set(jnp.nan)}, after)
    for name, x in values.items():
        sign, undecided = np.sign(x.sum(0)), (x == 0).sum(0) if zeros == "random" else 0
        is_known = np.abs(x.sum(0)) >= undecided + (zeros == "random")
        scale = np.abs(x).mean() if error_feedback else 1
        found = np.asarray(updates[name], np.float32)
        np.testing.assert_allclose(found[is_known], scale * sign[is_known], rtol=2e-2)
        assert is_known.mean() > 0.5
        assert updates[name].dtype == params[name].dtype
        assert updates[name].shape == shapes[name]
    assert all(np.isnan(x).all() for x in jax.tree.leaves(spoiled))


def test_large_leaves_are_not_copied_for_a_vote() -> None:
    params = {"a": jnp.zeros((2**9, 2**9)), "b": jnp.zeros((2**10, 2**7))}
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
        tx = jaxcomm.majority_vote("data")
        grads = jax.tree.map(lambda x: jnp.zeros((4, *x.shape)), params)
        lowered = jax.jit(tx.update).lower(grads, tx.init(jaxcomm.replicate(params)))
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < memory.output_size_in_bytes / 4
