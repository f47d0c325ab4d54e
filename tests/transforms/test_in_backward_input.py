"""What must not be done with layers that are exchanged inside the backward pass."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from transforms.scanned_layers import (
    Params,
    apply_layer,
    batch,
    mesh_of,
    placed,
    run,
    scanned,
)


def twice_in_a_body(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
    return apply_layer(x, jaxcomm.exchanged(layer)) + jaxcomm.exchanged(layer)["b"], None


def unsliced(params: Params, batch: Any) -> jax.Array:
    return jnp.mean(jaxcomm.exchanged(params["blocks"])["w"]) + jnp.mean(batch[0])


BAD_LOSS = {
    r"parameter blocks/w is to be exchanged in the backward pass; begin the body": lambda p, b: (
        scanned(p, b, lambda x, layer: (x @ layer["w"], None))
    ),
    r"parameter blocks/b is to be exchanged in the backward pass; begin the body": lambda p, b: (
        jnp.mean(p["blocks"]["b"][0] * b[0])
    ),
    "went through jaxcomm.exchanged already": lambda p, b: scanned(p, b, twice_in_a_body),
    r"blocks/b has shape \(3, 6\) in jaxcomm.exchanged, but in one layer it is": unsliced,
    "without parameter blocks/b": lambda p, b: scanned(
        p, b, lambda x, layer: (x @ jaxcomm.exchanged({"w": layer["w"]})["w"], None)
    ),
    "cast and scale parameters after jaxcomm.exchanged": lambda p, b: scanned(
        {**p, "blocks": jax.tree.map(lambda x: x.astype(jnp.bfloat16), p["blocks"])}, b
    ),
    "blocks/b has 2; give it one layer at a time": lambda p, b: scanned(
        p, b, lambda x, layer: (x @ jaxcomm.exchanged([layer, layer])[0]["w"], None)
    ),
}


@pytest.mark.parametrize("message", BAD_LOSS)
def test_bad_losses(message: str) -> None:
    exchange = jaxcomm.in_backward(jaxcomm.mean("data"), ["blocks"])
    with jax.set_mesh(mesh_of()), pytest.raises((TypeError, ValueError), match=message):
        run(exchange, BAD_LOSS[message], steps=1)


@pytest.mark.parametrize("order", ["bw", "wb"])
def test_the_leaves_of_a_layer_in_another_order(order: str) -> None:
    """What an exchange knows of a leaf goes by its path, not by its place in a layer."""

    def loss(params: Params, batch: Any) -> jax.Array:
        def block(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
            parts = jaxcomm.exchanged(tuple(layer[name] for name in order))
            return apply_layer(x, dict(zip(order, parts, strict=True))), None

        return scanned(params, batch, block)

    exchange = jaxcomm.in_backward(jaxcomm.mean("data", "int8"), ["blocks"])
    with jax.set_mesh(mesh_of()):
        usual, found = (run(exchange, f, steps=1).updates[0] for f in (scanned, loss))
    jax.tree.map(np.testing.assert_array_equal, usual, found)


def test_a_parameter_exchanged_both_ways_or_neither() -> None:
    exchange = jaxcomm.in_backward(jaxcomm.mean("data"), ["blocks"])
    plain = jaxcomm.mean("data")
    with jax.set_mesh(mesh_of()):
        params, data = placed(mesh_of()), jaxcomm.global_batch(batch(), "data")
        state, gradient = exchange.init(params), jaxcomm.value_and_grad(scanned, "data")
        _, local = jax.eval_shape(gradient, params, data)
        with pytest.raises(ValueError, match="gradient of blocks/b was not exchanged in the back"):
            jax.eval_shape(exchange.update, local, state)
        _, done = jax.eval_shape(gradient, exchange.attach(params, state), data)
        with pytest.raises(ValueError, match="of blocks/b was exchanged in the backward pass. Ex"):
            jax.eval_shape(plain.update, done, plain.init(params))
        other = jaxcomm.in_backward(plain, ["embed"])
        with pytest.raises(ValueError, match="of blocks/b was exchanged in the .* by another"):
            jax.eval_shape(other.update, done, other.init(params))
        # Neither an optimizer nor a clip in front takes what the exchange has not finished.
        for tx in (optax.sgd(0.1), optax.clip(1.0)):
            with pytest.raises(TypeError, match="jaxcomm.in_backward that attached it comes first"):
                jax.eval_shape(tx.update, done, tx.init(params))
        behind = optax.chain(exchange, plain)
        with pytest.raises(ValueError, match="Exchange once in a chain"):
            jax.eval_shape(behind.update, done, behind.init(params))


def test_bad_arguments_and_states() -> None:
    exchange = jaxcomm.in_backward(jaxcomm.mean("data"), ["blocks"])
    with pytest.raises(TypeError, match="must be a list of paths"):
        jaxcomm.in_backward(jaxcomm.mean("data"), "blocks")
    with jax.set_mesh(mesh_of()):
        params = placed(mesh_of())
        with pytest.raises(ValueError, match="'layers', which is not a subtree of the parameters"):
            jaxcomm.in_backward(jaxcomm.mean("data"), ["layers"]).init(params)
        with pytest.raises(ValueError, match="need the same leading axis of layers"):
            exchange.init({"blocks": {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}})
        with pytest.raises(ValueError, match="bucket_order names 'x', which is not a parameter"):
            jaxcomm.in_backward(jaxcomm.mean("data", bucket_order=["x"]), ["blocks"]).init(params)
        own = jaxcomm.local("data", optax.inject_hyperparams(optax.trace)(decay=0.9))
        reading = jaxcomm.in_backward(optax.chain(own, jaxcomm.mean("data")), ["blocks"])
        with pytest.raises(TypeError, match="knows only the shapes of a layer in `init`"):
            reading.init(params)
        state = exchange.init(params)
        with pytest.raises(ValueError, match="blocks/b is exchanged where its gradient is each"):
            jax.eval_shape(jax.grad(scanned), exchange.attach(params, state), batch())
        fewer = {**params, "blocks": jax.tree.map(lambda x: x[:2], params["blocks"])}
        with pytest.raises(ValueError, match=r"blocks/b has shape \(2, 6\), and the .* for 3"):
            exchange.attach(fewer, state)
        with pytest.raises(ValueError, match="found 0; pass what tx.init"):
            exchange.attach(params, optax.sgd(0.1).init(params))
        with pytest.raises(ValueError, match="blocks/b is attached already"):
            exchange.attach(exchange.attach(params, state), state)
    with jax.set_mesh(mesh_of(2)):
        params = placed(mesh_of(2))
        attached = exchange.attach(params, exchange.init(params))
        with pytest.raises(ValueError, match="exchanged over 'data' in the .* over 'model'"):
            jax.eval_shape(jaxcomm.value_and_grad(scanned, "model"), attached, batch())


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "int16", "key", "bfloat16"])
def test_states_of_every_dtype_are_carried_in_floats(dtype: str) -> None:
    from jaxcomm._attached import from_floats, to_floats

    if dtype == "key":
        x = jax.random.split(jax.random.key(3), 4)
    else:
        x = jnp.asarray(np.array([0, 1, 255, 2**31 - 1, -(2**31)]).astype(np.int64)).astype(dtype)
    floats = to_floats([x])
    assert all(jnp.issubdtype(f.dtype, jnp.floating) for f in floats)
    (again,) = from_floats([0.0 + f for f in floats], [x])
    assert again.dtype == x.dtype and bool(jnp.all(again == x))


def test_frozen_leaves_of_a_layer() -> None:
    """What `optax.partition` gives to `set_to_zero` is not attached, and comes back as it is."""
    exchange = jaxcomm.in_backward(jaxcomm.mean("data", "int8"), ["blocks"])
    labels = {"blocks": {"b": "frozen", "w": "trained"}, "embed": "trained"}
    tx = optax.partition({"trained": exchange, "frozen": jaxcomm.set_to_zero("data")}, labels)
    with jax.set_mesh(mesh_of()):
        params, data = placed(mesh_of()), jaxcomm.global_batch(batch(), "data")

        @jax.jit
        def step(state: Any) -> Any:
            attached = exchange.attach(params, state)
            _, grads = jaxcomm.value_and_grad(scanned, "data")(attached, data)
            return tx.update(grads, state, params)[0]

        updates = step(tx.init(params))
        alone = run(exchange, steps=1).updates[0]
    np.testing.assert_array_equal(updates["blocks"]["w"], alone["blocks"]["w"])
    assert not np.any(updates["blocks"]["b"])


def test_stacks_that_are_none(mesh4x2: Any) -> None:
    """Without layers, or with layers on different devices; a name that begins alike is another."""
    tx = jaxcomm.in_backward(jaxcomm.mean("data", "int8"), ["block"])
    with jax.set_mesh(mesh4x2):
        with pytest.raises(ValueError, match=r"block/w has shape \(0, 8, 8\).*axis of layers"):
            tx.init({"block": {"w": jnp.zeros((0, 8, 8))}})
        split = jax.NamedSharding(mesh4x2, jax.P("model"))
        with pytest.raises(ValueError, match="block/w is sharded by .*layers lie on different dev"):
            tx.init({"block": {"w": jax.device_put(jnp.zeros((2, 8, 8)), split)}})
        state = tx.init({"block": {"w": jnp.zeros((2, 8, 8))}, "blocks": {"w": jnp.zeros((8, 8))}})
        stack, rest = (x.layout.leaves for x in (*state.layers, state.rest))
        assert [leaf.path for leaf in (*stack, *rest)] == ["block/w", "blocks/w"]
