"""Programs grow with the number of leaves, not with its square, nor with microbatches or keys."""

import functools
import re
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
    "low_rank_mean": lambda: jaxcomm.low_rank_mean("data", 2),
    "sparse_mean": lambda: jaxcomm.sparse_mean("data", 0.1),
}


def compiled(tx: optax.GradientTransformation, leaves: int) -> str:
    """The program of an update of leaves of one shape, whose numbers of values are odd."""
    params = {f"p{i:02}": jnp.zeros((33, 35)) for i in range(leaves)}
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct((2, *p.shape), p.dtype), params)
        state = jax.eval_shape(tx.init, params)
        return str(jax.jit(tx.update).lower(grads, state, params).compile().as_text())


def loops(program: str) -> set[str]:
    """The bodies of its loops, with numbers in place of names: XLA compiles equal ones once."""
    found = set()
    for body in re.findall(r"^%?fused_computation[^\n]*{\n(.*?)^}", program, re.M | re.S):
        names: dict[str, str] = {}
        bare = re.sub(r", metadata={[^}]*}", "", body)
        number = lambda name, names=names: names.setdefault(name[0], f"%{len(names)}")  # noqa: E731
        found.add(re.sub(r"%[\w.\-]+", number, bare))
    return found


@pytest.mark.parametrize("name", METHODS)
def test_a_leaf_adds_as_much_to_many_as_to_few(name: str) -> None:
    programs = [compiled(METHODS[name](), leaves) for leaves in (4, 20, 36)]
    few, more, many = (program.count("\n") for program in programs)
    assert many - more < 1.3 * (more - few)
    assert many < 500 * 36  # random draws of every leaf's own would be 600 lines each
    # Of leaves of one shape, whatever their number: a loop of its own takes 15 ms to compile.
    kinds = [len(loops(program)) for program in programs]
    assert 0 < kinds[2] < kinds[1] + 8


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
