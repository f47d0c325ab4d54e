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
