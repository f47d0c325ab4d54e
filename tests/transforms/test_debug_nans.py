"""`jax.debug_nans` around a step: the error names the line of the loss, as the recipe says."""

import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm

N = 4


def loss_fn(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    return jnp.mean(jnp.log(batch @ params["w"]))


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize(
    "exchange",
    [
        jaxcomm.mean("data", "bfloat16"),
        jaxcomm.mean("data", "scaled_sign", error_feedback=True),
        jaxcomm.majority_vote("data"),
    ],
)
def test_the_error_names_the_line_of_the_loss(
    exchange: optax.GradientTransformationExtraArgs, late: int
) -> None:
    tx = optax.chain(exchange, optax.sgd(0.01))

    @jax.jit
    def step(params, state, batch):
        loss, grads = jaxcomm.value_and_grad(loss_fn, "data")(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:N])):
        params = jaxcomm.replicate({"w": jnp.ones((4, 1))})
        state = tx.init(params)
        rows = np.ones((2 * N, 4), np.float32)
        for _ in range(late):
            with jax.debug_nans(True):
                params, state, _ = step(params, state, jaxcomm.global_batch(rows, "data"))
        rows[3] = -1  # on one device
        with pytest.raises(FloatingPointError) as raised, jax.debug_nans(True):
            step(params, state, jaxcomm.global_batch(rows, "data"))
    lines = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert "loss_fn" in lines
