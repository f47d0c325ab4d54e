"""Losses that fail inside `jax.shard_map`: what the error says, and what else takes gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm

N = 8


def loss_fn(params: jax.Array, batch: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(batch @ params) ** 2)


def comparing_types(params: jax.Array, batch: jax.Array) -> jax.Array:
    """As lineax does: the types of what it is given and of what it makes."""
    vector = jax.ShapeDtypeStruct(params.shape, params.dtype)
    if jax.eval_shape(lambda: 2 * params) != vector:
        raise ValueError("Vector and operator structures do not match.")
    return loss_fn(params, batch)


def asserting(params: jax.Array, batch: jax.Array) -> jax.Array:
    """As jax does, for numpyro and diffrax."""
    with jax.ensure_compile_time_eval():
        jnp.tril(jnp.ones((3, 3)))
    return loss_fn(params, batch)


@pytest.mark.parametrize(
    ("loss", "error"), [(comparing_types, ValueError), (asserting, AssertionError)]
)
def test_the_error_says_where_the_loss_runs(mesh8: Any, loss: Any, error: Any) -> None:
    with jax.set_mesh(mesh8):
        params, batch = jaxcomm.replicate(jnp.ones(4)), jnp.ones((2 * N, 4))
        jax.jit(loss)(params, batch)
        with pytest.raises(error) as raised:
            jax.jit(jaxcomm.value_and_grad(loss, "data"))(params, batch)
    assert "runs inside jax.shard_map" in raised.value.__notes__[0]
    assert "jaxcomm.mark_local" in raised.value.__notes__[0]


def of_the_user(params: jax.Array, batch: jax.Array) -> jax.Array:
    if batch.shape[0] != 2 * N:
        raise AssertionError  # as a bare `assert` does, to which pytest adds a text
    return loss_fn(params, batch)


def test_an_assertion_of_the_user_gets_no_note(mesh8: Any) -> None:
    with jax.set_mesh(mesh8):
        with pytest.raises(AssertionError) as raised:
            jax.jit(jaxcomm.value_and_grad(of_the_user, "data"))(jnp.ones(4), jnp.ones((2 * N, 4)))
    assert not any("jaxcomm" in note for note in getattr(raised.value, "__notes__", ()))


def test_gradients_by_vmap_are_those_of_value_and_grad(mesh8: Any) -> None:
    """And nothing more is sent."""

    def by_vmap(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        rows = batch.reshape(N, -1, *batch.shape[1:])
        rows = jax.lax.with_sharding_constraint(rows, jax.P("data"))
        each = jax.vmap(jax.value_and_grad(comparing_types), in_axes=(None, 0))
        losses, grads = each(params, rows)
        return losses.mean(), jaxcomm.mark_local(grads)

    tx = jaxcomm.mean("data", "int8", error_feedback=True)
    found, sent = [], []
    with jax.set_mesh(mesh8):
        params = jaxcomm.replicate(jnp.ones((4, 64)))
        batch = jaxcomm.global_batch(np.random.default_rng(0).standard_normal((2 * N, 4)), "data")
        for gradient in (by_vmap, jaxcomm.value_and_grad(loss_fn, "data")):

            @jax.jit
            def step(params: Any, state: Any, batch: Any, gradient: Any = gradient) -> Any:
                loss, grads = gradient(params, batch)
                updates, state = tx.update(grads, state, params)
                return loss, optax.apply_updates(params, updates), state

            state = tx.init(params)
            sent.append(jaxcomm.wire_report(step.lower(params, state, batch).compile()).bytes_max)
            found.append(step(params, state, batch))
    assert sent[0] == sent[1]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *map(jax.tree.leaves, found)
    )
