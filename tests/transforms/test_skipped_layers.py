"""Layers that some microbatches leave out, as stochastic depth does: nothing is lost silently."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

WORLD, WIDTH, LAYERS = 4, 8, 2
Tree = dict[str, Any]


def params() -> Tree:
    rng = np.random.default_rng(0)
    return {"w": rng.standard_normal((LAYERS, WIDTH, WIDTH)).astype(np.float32)}


def batch(keeps: list[bool], seed: int = 0) -> Tree:
    """Rows of each device, a microbatch a row, and whether it goes through the first layer."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((WORLD, len(keeps), WIDTH)).astype(np.float32)
    keep = np.broadcast_to(np.array(keeps), (WORLD, len(keeps)))
    return {"x": x.reshape(-1, WIDTH), "keep": keep.reshape(-1)}


def loss_of(take: Any) -> Any:
    """A loss whose first layer a microbatch may leave out."""

    def loss_fn(params: Tree, batch: Tree) -> jax.Array:
        first, second = (jax.tree.map(lambda x, i=i: x[i], params) for i in range(LAYERS))
        x = jax.lax.cond(batch["keep"][0], lambda x: x @ take(first)["w"], lambda x: x, batch["x"])
        return jnp.mean((x @ take(second)["w"]) ** 2)

    return loss_fn


def by_reference(keeps: list[bool], seed: int = 0) -> np.ndarray:
    """The mean gradient over devices and microbatches."""
    rows = batch(keeps, seed)
    singles = [
        jax.grad(loss_of(lambda layer: layer))(
            params(), {"x": rows["x"][i : i + 1], "keep": rows["keep"][i : i + 1]}
        )["w"]
        for i in range(len(rows["x"]))
    ]
    return np.mean(np.asarray(singles), axis=0)


@pytest.mark.parametrize(
    ("keeps", "is_lost"), [([False, True], False), ([True, False], True), ([False, False], False)]
)
def test_in_backward(make_mesh: Any, keeps: list[bool], is_lost: bool) -> None:
    """What only earlier microbatches know is not exchanged by the last one: no update then."""
    exchange = jaxcomm.in_backward(jaxcomm.mean("data"), ["w"])
    with jax.set_mesh(make_mesh(WORLD)):
        at = jaxcomm.replicate(params())
        state = exchange.init(at)
        gradient = jaxcomm.accumulate(jaxcomm.value_and_grad(loss_of(jaxcomm.exchanged), "data"), 2)

        @jax.jit
        def step(at: Tree, state: Any, batch: Tree) -> Any:
            return exchange.update(gradient(exchange.attach(at, state), batch)[1], state, at)

        updates, _ = step(at, state, jaxcomm.global_batch(batch(keeps), "data"))
    if is_lost:
        assert np.isnan(updates["w"]).all()
    else:
        np.testing.assert_allclose(updates["w"], by_reference(keeps), atol=1e-5)


def test_sharded_residuals_stay(make_mesh: Any) -> None:
    """Over steps, updates and the mean of residuals add up to the gradients."""
    tx = jaxcomm.sharded(jaxcomm.mean("data", "int4", error_feedback=True))
    plans = [[True, True], [True, False], [False, True], [False, False]]
    with jax.set_mesh(make_mesh(WORLD)):
        at = jaxcomm.shard(params(), "data", layers=["w"])
        state = tx.init(at)
        gradient = jaxcomm.accumulate(jaxcomm.value_and_grad(loss_of(jaxcomm.gather), "data"), 2)

        @jax.jit
        def step(state: Any, batch: Tree) -> Any:
            return tx.update(gradient(jaxcomm.sharded_params(at, state), batch)[1], state)

        total = np.zeros((LAYERS, WIDTH, WIDTH), np.float64)
        for seed, keeps in enumerate(plans):
            updates, state = step(state, jaxcomm.global_batch(batch(keeps, seed), "data"))
            total += np.asarray(updates["w"], np.float64)
        owed = np.asarray(state.residual.values[0], np.float64).mean(0)
    wanted = sum(by_reference(keeps, seed).astype(np.float64) for seed, keeps in enumerate(plans))
    assert np.abs(owed).max() > 1e-3
    np.testing.assert_allclose(total + owed, wanted, atol=1e-5)


def test_twice_in_one_microbatch_and_never_in_another(make_mesh: Any) -> None:
    def loss_fn(params: Tree, batch: Tree) -> jax.Array:
        def twice(x: jax.Array) -> jax.Array:
            return x @ jaxcomm.gather(params)["w"][0] @ jaxcomm.gather(params)["w"][1]

        return jnp.mean(jax.lax.cond(batch["keep"][0], twice, lambda x: x, batch["x"]) ** 2)

    tx = jaxcomm.sharded(jaxcomm.mean("data", "int8", error_feedback=True))
    with jax.set_mesh(make_mesh(WORLD)):
        at = jaxcomm.shard(params(), "data", layers=["w"])
        state = tx.init(at)
        gradient = jaxcomm.accumulate(jaxcomm.value_and_grad(loss_fn, "data"), 2)
        rows = jaxcomm.global_batch(batch([True, False]), "data")
        grads = jax.jit(lambda at, rows: gradient(at, rows)[1])(
            jaxcomm.sharded_params(at, state), rows
        )
        updates, _ = jax.jit(tx.update)(grads, state)
    assert np.isnan(updates["w"]).all()


def test_a_scan_inside_of_a_scan(make_mesh: Any) -> None:
    """Groups of layers, and the layers of a group."""
    whole = {"w": np.stack([params()["w"]] * 3)}  # of 3 groups
    inputs = np.random.default_rng(1).standard_normal((WORLD, WIDTH)).astype(np.float32)

    def loss_fn(params: Tree, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, own: Tree) -> Any:
            return jnp.tanh(x @ jaxcomm.gather(own)["w"]), None

        def group(x: jax.Array, own: Tree) -> Any:
            return jax.lax.scan(layer, x, own)[0], None

        return jnp.mean(jax.lax.scan(group, x, params)[0] ** 2)

    tx = jaxcomm.sharded(jaxcomm.mean("data"))
    with jax.set_mesh(make_mesh(WORLD)):
        at = jaxcomm.shard(whole, "data", layers=["w"])
        state, rows = tx.init(at), jaxcomm.global_batch(inputs, "data")
        value = jax.jit(jaxcomm.value_and_grad(loss_fn, "data"))
        updates, _ = jax.jit(tx.update)(value(jaxcomm.sharded_params(at, state), rows)[1], state)
    np.testing.assert_allclose(updates["w"], jax.grad(loss_fn)(whole, inputs)["w"], atol=1e-4)
