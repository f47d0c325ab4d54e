"""One tree whose parameters are exchanged in three ways: in the backward pass, split, and plain."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from transforms.scanned_layers import WIDTH, Params, assert_equal, batch, initial, mesh_of

LABELS = {"blocks": "layers", "embed": "whole", "table": "split"}
TABLE = (8, WIDTH)


def weights() -> Params:
    table = np.random.default_rng(5).standard_normal(TABLE).astype(np.float32)
    return {**initial(), "table": table}


def loss_fn(params: Params, batch: Any) -> jax.Array:
    def block(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        own = jaxcomm.exchanged(layer)
        return jnp.tanh(x @ own["w"] + own["b"][None]) + x, None

    x, _ = jax.lax.scan(block, batch[0] @ params["embed"], params["blocks"])
    table = jaxcomm.gather({"table": params["table"]})["table"]
    return jnp.mean((x @ table.T @ table - batch[1]) ** 2)


@pytest.mark.standard_promotion  # optax promotes
def test_a_tree_with_all_three() -> None:
    exchange = jaxcomm.in_backward(jaxcomm.mean("data"), ["blocks"])
    split = jaxcomm.sharded(jaxcomm.mean("data"))
    ways = {"layers": exchange, "split": split, "whole": jaxcomm.mean("data")}
    tx = optax.partition(ways, LABELS)
    with jax.set_mesh(mesh_of()):
        params = jaxcomm.replicate(weights())
        whole, gradient = jaxcomm.mean("data"), jaxcomm.value_and_grad(loss_fn, "data")
        params["table"] = jaxcomm.shard({"t": params["table"]}, "data")["t"]
        state, data = tx.init(params), jaxcomm.global_batch(batch(), "data")

        @jax.jit
        def step(params: Params, state: Any) -> Any:
            at = jaxcomm.sharded_params(exchange.attach(params, state), state)
            return tx.update(gradient(at, data)[1], state, params)

        updates, state = step(params, state)
        plain = jaxcomm.replicate(weights())
        _, grads = jax.jit(gradient)(plain, data)
        expected, _ = whole.update(grads, whole.init(plain))
        assert_equal(updates, expected, 1e-6)
        assert updates["table"].addressable_shards[0].data.size == np.prod(TABLE) / 4
        # The other order of the two is the same; both for one parameter is an error.
        other = jax.eval_shape(
            lambda: exchange.attach(jaxcomm.sharded_params(params, state), state)
        )
        mine = jax.eval_shape(lambda: jaxcomm.sharded_params(exchange.attach(params, state), state))
        assert jax.tree.leaves(other) == jax.tree.leaves(mine)


def test_a_parameter_that_two_exchange() -> None:
    exchange = jaxcomm.in_backward(jaxcomm.mean("data"), ["blocks"])
    split = jaxcomm.sharded(jaxcomm.mean("data"))
    with jax.set_mesh(mesh_of()):
        params = jaxcomm.shard({"blocks": {"w": jnp.ones((3, 8, 8))}}, "data", layers=["blocks/w"])
        own = jaxcomm.with_layer_axis(split, ["blocks/w"]).init(params)
        stacked = exchange.init(jaxcomm.replicate(params))
        with pytest.raises(ValueError, match="blocks/w is exchanged by jaxcomm.in_backward and by"):
            jaxcomm.sharded_params(exchange.attach(params, stacked), own)
        with pytest.raises(ValueError, match="blocks/w is exchanged by jaxcomm.sharded and by jax"):
            exchange.attach(jaxcomm.sharded_params(params, own), stacked)
        plain = jaxcomm.mean("data").init(jaxcomm.replicate(params))
        with pytest.raises(ValueError, match="found none"):
            jaxcomm.sharded_params(params, plain)
