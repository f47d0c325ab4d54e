"""The option `implementation` reaches every operation of the kernels that has a choice."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxcomm
from jaxcomm import codecs
from jaxcomm.kernels import _implementations

Method = Callable[..., optax.GradientTransformation]
METHODS: dict[str, tuple[Method, set[str]]] = {
    "int8": (
        lambda **option: jaxcomm.mean("data", "int8", **option),
        {"integers.encode"},
    ),
    "int8, then float32": (
        lambda **option: jaxcomm.mean("data", "int8", second_hop="float32", **option),
        {"integers.encode"},
    ),
    "random_k of int4": (
        lambda **o: jaxcomm.mean("data", codecs.random_k(0.5, codecs.int4()), **o),
        {"integers.encode"},
    ),
    "fp8": (
        lambda **option: jaxcomm.mean("data", "fp8_e4m3", **option),
        {"fp8.encode"},
    ),
    "cnat": (
        lambda **option: jaxcomm.mean("data", "cnat", **option),
        {"cnat.encode"},
    ),
    "cnat in 9 bits": (
        lambda **option: jaxcomm.mean("data", codecs.cnat("all"), **option),
        {"nine_bits.encode", "nine_bits.decode_and_sum"},
    ),
    "low rank in int8": (
        lambda **option: jaxcomm.low_rank_mean("data", 1, "int8", **option),
        {"integers.encode"},
    ),
    "gaussiank": (
        lambda **option: jaxcomm.sparse_mean("data", algorithm="gaussiank", **option),
        {"select.compact"},
    ),
    "Ok-Topk": (
        lambda **option: jaxcomm.sparse_mean("data", **option),
        {"select.compact"},
    ),
}


def reached(tx: optax.GradientTransformation, mesh: Mesh, monkeypatch: Any) -> dict[str, Any]:
    """The operations that a step calls, and with which options; nothing is compiled."""
    found: dict[str, Any] = {}

    def choose(operation: str, option: Any, elements: int) -> str:
        assert elements > 0
        found[operation] = option
        return "xla"

    monkeypatch.setattr(_implementations, "choose", choose)
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    with jax.set_mesh(mesh):
        state = tx.init({"w": jnp.zeros((600, 8))})
        grads = {"w": jax.ShapeDtypeStruct((4, 600, 8), jnp.float32, sharding=sharding)}
        jax.eval_shape(tx.update, grads, state)
    return found


@pytest.mark.parametrize("name", METHODS)
def test_the_option_reaches_the_kernels(name: str, make_mesh: Any, monkeypatch: Any) -> None:
    make, operations = METHODS[name]
    tx = make(implementation="measure")
    assert reached(tx, make_mesh(4), monkeypatch) == dict.fromkeys(operations, "measure")


def test_one_for_each_operation(make_mesh: Any, monkeypatch: Any) -> None:
    chosen = {"nine_bits.encode": "mosaic", "nine_bits.decode_and_sum": "xla"}
    tx = jaxcomm.mean("data", codecs.cnat("all"), implementation=chosen)
    pairs = tuple(sorted(chosen.items()))
    assert reached(tx, make_mesh(4), monkeypatch) == dict.fromkeys(chosen, pairs)


def test_every_operation_is_reached_by_some_method() -> None:
    assert set.union(*(operations for _, operations in METHODS.values())) == set(
        _implementations.OPERATIONS
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jaxcomm.mean("data", implementation="mosaic"), "float32 has only the plain"),
        (lambda: jaxcomm.sparse_mean("data", implementation="cuda"), "unknown implementation"),
        (lambda: jaxcomm.mean("data", "int8", implementation="triton"), 'has "xla", "mosaic"'),
        (
            lambda: jaxcomm.sparse_mean("data", 0.01, "gaussiank", implementation="mosaic"),
            r'Name one for each: implementation=\{"select.compact": "xla"',
        ),
        (
            lambda: jaxcomm.mean("data", "int4", implementation={"nine_bits.encode": "mosaic"}),
            'names "nine_bits.encode", which a mean in int4 does not use',
        ),
    ],
)
def test_what_a_method_does_not_have_is_refused_at_once(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_device_that_cannot_is_an_error_and_no_fallback(make_mesh: Any) -> None:
    tx = jaxcomm.mean("data", "int8", implementation="mosaic")
    with jax.set_mesh(make_mesh(4)):
        state = tx.init(jnp.zeros((8, 8)))
        with pytest.raises(NotImplementedError, match="there is no NVIDIA GPU"):
            jax.eval_shape(tx.update, jax.ShapeDtypeStruct((4, 8, 8), jnp.float32), state)


def test_the_operations_of_the_second_hop_have_implementations_too() -> None:
    made = {"integers.encode": "xla"}
    assert jaxcomm.mean("data", "bfloat16", second_hop="int8", implementation=made)
