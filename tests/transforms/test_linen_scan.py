"""Layers of Flax linen's `nn.scan`, whose gradients are exchanged inside the backward pass."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm

WIDTH, LAYERS = 8, 3


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x + nn.Dense(WIDTH)(nn.relu(nn.Dense(2 * WIDTH)(x))), None


class Net(nn.Module):
    is_exchanged: bool
    is_recomputed: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layer: Any = nn.remat(Layer, prevent_cse=False) if self.is_recomputed else Layer
        if self.is_exchanged:
            is_new = self.is_initializing()
            layer = nn.map_variables(
                layer, "params", trans_in_fn=jaxcomm.exchanged, init=is_new, mutable=is_new
            )
        axes, keys = {"params": 0}, {"params": True}
        layers = nn.scan(layer, variable_axes=axes, split_rngs=keys, length=LAYERS)
        return layers(name="layers")(x, None)[0]


def losses(exchange: Any, net: Net, batch: jax.Array) -> list[float]:
    tx = optax.chain(exchange, optax.sgd(0.1))
    params = jaxcomm.replicate(net.init(jax.random.key(0), batch)["params"])
    state = tx.init(params)

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(net.apply({"params": params}, x) ** 2)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        at = exchange.attach(params, state) if net.is_exchanged else params
        loss, grads = jaxcomm.value_and_grad(loss_fn, "data")(at, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    found = []
    for _ in range(3):
        params, state, loss = step(params, state)
        found.append(float(loss))
    return found


@pytest.mark.standard_promotion
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_as_docs_methods_says(make_mesh: Any, is_recomputed: bool) -> None:
    x = np.random.default_rng(0).standard_normal((16, WIDTH), np.float32)
    with jax.set_mesh(make_mesh(4)):
        batch = jaxcomm.global_batch(x, "data")
        usual = losses(jaxcomm.mean("data", "bfloat16"), Net(False, is_recomputed), batch)
        exchange = jaxcomm.in_backward(jaxcomm.mean("data", "bfloat16"), ["layers"])
        found = losses(exchange, Net(True, is_recomputed), batch)
    assert found == pytest.approx(usual, rel=1e-4)
    assert found[2] < found[0]
