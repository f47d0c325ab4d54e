"""One tree whose parameters are exchanged in three ways: in the backward pass, split, and plain."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm.transforms.per_device import PerDevice
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
        expected, _ = jax.jit(whole.update)(grads, whole.init(plain))
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
        start = {"blocks": {"w": jnp.ones((3, 8, 8))}}
        params = jaxcomm.shard(start, "data", layers=["blocks/w"])
        own = jaxcomm.with_layer_axis(split, ["blocks/w"]).init(params)
        stacked = exchange.init(jaxcomm.replicate(start))
        with pytest.raises(ValueError, match="blocks/w is exchanged by jaxcomm.in_backward and by"):
            jaxcomm.sharded_params(exchange.attach(params, stacked), own)
        with pytest.raises(ValueError, match="blocks/w is exchanged by jaxcomm.sharded and by jax"):
            exchange.attach(jaxcomm.sharded_params(params, own), stacked)
        plain = jaxcomm.mean("data").init(jaxcomm.replicate(start))
        with pytest.raises(ValueError, match="found none"):
            jaxcomm.sharded_params(params, plain)


@pytest.mark.standard_promotion  # optax promotes
@pytest.mark.parametrize("micro", [1, 4])
def test_microbatches_keep_the_residuals_of_shards_beside_the_backward_pass(micro: int) -> None:
    """Updates and residuals add up to the gradients, and each microbatch rounds differently."""
    mean = jaxcomm.mean("data", "int8", error_feedback=True)
    exchange, split = jaxcomm.in_backward(mean, ["blocks"]), jaxcomm.sharded(mean)
    ways = {"layers": exchange, "split": split, "whole": jaxcomm.mean("data")}
    tx, steps = optax.partition(ways, LABELS), 3
    with jax.set_mesh(mesh_of()):
        params = jaxcomm.replicate(weights())
        params["table"] = jaxcomm.shard({"t": params["table"]}, "data")["t"]
        state, data = tx.init(params), jaxcomm.global_batch(batch(), "data")
        gradient = jaxcomm.accumulate(jaxcomm.value_and_grad(loss_fn, "data"), micro)

        @jax.jit
        def step(params: Params, state: Any) -> Any:
            at = jaxcomm.sharded_params(exchange.attach(params, state), state)
            return tx.update(gradient(at, data)[1], state, params)

        total: Any = jax.tree.map(jnp.zeros_like, params)
        for _ in range(steps):
            updates, state = step(params, state)
            total = jax.tree.map(jnp.add, total, updates)
        plain = jaxcomm.replicate(weights())
        _, grads = jax.jit(jaxcomm.value_and_grad(loss_fn, "data"))(plain, data)
        whole = jaxcomm.mean("data")
        expected, _ = jax.jit(whole.update)(grads, whole.init(plain))
    is_own = lambda x: isinstance(x, PerDevice)  # noqa: E731
    kept = [x for x in jax.tree.leaves(state, is_leaf=is_own) if is_own(x)]
    left = [np.asarray(v).mean(0) for x in kept for v in x.values if v.shape[-2:] == TABLE]
    assert len(left) == 1 and np.abs(left[0]).max() > 0
    np.testing.assert_allclose(total["table"] + left[0], steps * expected["table"], atol=1e-4)
