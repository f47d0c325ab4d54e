"""Mesh axes that have one device: nothing is split over them, and nothing compiles twice."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm


@pytest.mark.parametrize("shape", [(1, 4), (4, 1)])
def test_an_axis_of_one_device(shape: tuple[int, int]) -> None:
    """What a step returns is split as what it was given, and a next run may start from it."""
    mesh = jax.sharding.Mesh(np.reshape(jax.devices()[:4], shape), ("hosts", "devices"))
    tx = jaxcomm.sharded(jaxcomm.mean(mesh.axis_names, "int8", error_feedback=True))

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((x @ jaxcomm.gather(params)["w"]) ** 2)

    @jax.jit
    def step(params: Any, state: Any, x: jax.Array) -> Any:
        at = jaxcomm.sharded_params(params, state)
        _, grads = jaxcomm.value_and_grad(loss_fn, mesh.axis_names)(at, x)
        updates, state = tx.update(grads, state)
        return jax.tree.map(jnp.add, params, updates), state

    with jax.set_mesh(mesh):
        params = jaxcomm.shard({"w": np.ones((8, 12), np.float32)}, mesh.axis_names)
        state = tx.init(params)
        x = jaxcomm.global_batch(np.eye(8, dtype=np.float32), mesh.axis_names)
        for _ in range(3):
            params, state = step(params, state, x)
        assert step._cache_size() == 1
        jaxcomm.resize_state(tx, jax.tree.map(np.asarray, state), params)


def test_on_one_device_no_argument_lacks_a_split() -> None:
    """Where the batch is not split either, an argument of as many rows is no reason to warn."""
    x, y = jnp.ones((4, 2)), jnp.ones(4)

    def loss(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((x @ w - y) ** 2)

    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:1])):
        jax.jit(jaxcomm.value_and_grad(loss, "data"))(jnp.ones(2), x, y)


def test_a_state_of_one_device_is_not_gathered() -> None:
    tx = jaxcomm.mean("data", "int8", error_feedback=True)
    mesh = jaxcomm.data_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        args = {"w": jnp.ones((1, 8, 8))}, tx.init({"w": jnp.zeros((8, 8))})
        whole = jax.NamedSharding(mesh, jax.P())
        jaxcomm.wire_report(jax.jit(tx.update, out_shardings=whole).lower(*args).compile())


def test_sums_of_a_state_are_not_gathered(mesh8: Any) -> None:
    """They have one row, as the state of one device."""
    tx = jaxcomm.mean("data", "int8", error_feedback=True)
    with jax.set_mesh(mesh8):
        sums = jax.jit(
            lambda state: jax.tree.map(lambda x: jnp.sum(x, 0, keepdims=x.ndim > 0), state),
            out_shardings=jax.NamedSharding(mesh8, jax.P()),
        )
        jaxcomm.wire_report(sums.lower(tx.init({"w": jnp.zeros((8, 8))}).residual).compile())
