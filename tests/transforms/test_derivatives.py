"""What is differentiated, and how often: gradients that nothing covers are refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm


def test_a_second_derivative_is_refused(mesh8: Any) -> None:
    """It would be zero: gradients are opaque bits."""
    f = jaxcomm.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 4), "data")
    w, x = jnp.ones(3), jnp.ones((8, 3))

    def gradients(w: jax.Array) -> jax.Array:
        return jaxcomm.unmark_local(f(w, x)[1])

    with jax.set_mesh(mesh8):
        with pytest.raises(TypeError, match="local gradients cannot be differentiated"):
            jax.jit(lambda w: jax.jvp(gradients, (w,), (w,)))(w)
        # What is not differentiated is as ever.
        step = jax.checkpoint(lambda w, _: (w - gradients(w).mean(0), None))
        scanned = jax.lax.scan(step, w, length=2)
    assert np.isfinite(scanned[0]).all()


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8"])
def test_the_derivative_of_an_exchange_is_refused(mesh8: Any, codec: str) -> None:
    """Of unmarked gradients too: that of rounding would be zero."""
    tx = jaxcomm.mean("data", codec)
    with jax.set_mesh(mesh8):
        state = tx.init(jnp.zeros((2, 3)))
        for f in (lambda g: tx.update(g, state)[0].sum(), lambda g: tx.update(g, state)[0][0, 0]):
            with pytest.raises(TypeError, match="local gradients cannot be differentiated"):
                jax.jit(jax.grad(f))(jnp.ones((8, 2, 3)))


@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.int32, jnp.float8_e4m3fn])
def test_parameters_whose_gradients_no_mark_covers_are_refused(mesh8: Any, dtype: Any) -> None:
    f = jaxcomm.value_and_grad(lambda p, x: jnp.mean(x), "data")
    params = {"w": jnp.ones(3), "s": jnp.ones(2, dtype)}
    with jax.set_mesh(mesh8), pytest.raises(TypeError, match=f"parameter s is {dtype.__name__}"):
        f(params, jnp.ones((8, 3)))
