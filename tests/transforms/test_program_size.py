"""Programs grow with the number of leaves, not with its square, nor with microbatches or keys."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxcomm

COARSE = {"codec": "scaled_sign", "error_feedback": True}
METHODS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "mean": lambda: jaxcomm.mean("data", "bfloat16"),
    "one_bit_adam": lambda: jaxcomm.one_bit_adam("data", 1e-3, dense_steps=9),
    "factored_adam": lambda: jaxcomm.factored_adam(jaxcomm.mean("data", **COARSE), 1e-3),
    "vote with feedback": lambda: jaxcomm.majority_vote("data", error_feedback=True),
}


def lines_of(tx: optax.GradientTransformation, leaves: int) -> int:
    """Of the compiled program of an update."""
    params = {f"p{i:02}": jnp.zeros((8, 8)) for i in range(leaves)}
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct((2, *p.shape), p.dtype), params)
        state = jax.eval_shape(tx.init, params)
        compiled = jax.jit(tx.update).lower(grads, state, params).compile()
    return str(compiled.as_text()).count("\n")


@pytest.mark.parametrize("name", METHODS)
def test_a_leaf_adds_as_much_to_many_as_to_few(name: str) -> None:
    few, more, many = (lines_of(METHODS[name](), leaves) for leaves in (4, 20, 36))
    assert many - more < 1.3 * (more - few)
    assert many < 400 * 36  # random draws of every leaf's own would be 600 lines each


@pytest.mark.parametrize(
    "method", [jaxcomm.majority_vote, functools.partial(jaxcomm.mean, codec="cnat")]
)
def test_keys_of_all_buckets_are_drawn_at_once(method: Callable[..., Any]) -> None:
    """Each is a program of a cipher, which takes a GPU's compiler longer than the exchange."""
    params = {f"p{i}": jnp.zeros((8, 8)) for i in range(6)}
    draws = []
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct((2, *p.shape), p.dtype), params)
        for kib in (64, 0.25):
            tx = method("data", bucket_mib=kib / 1024)
            program = jax.jit(tx.update).lower(grads, tx.init(params)).as_text()
            draws.append(program.count("call @threefry"))
    assert draws[0] == draws[1] > 0


def test_microbatches_are_one_copy_of_the_model() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        w, x, f = jnp.zeros((4, 4)), jnp.zeros((16, 4)), jaxcomm.value_and_grad(loss, "data")
        programs = [jax.jit(g).lower(w, x).as_text() for g in (f, jaxcomm.accumulate(f, 4))]
    once, accumulated = (program.count("dot_general") for program in programs)
    assert once == accumulated > 0
