"""Layers that are exchanged inside the backward pass, against the exchange after it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxcomm
from transforms.scanned_layers import (
    INT8,
    LAYERS,
    METHODS,
    QUICK,
    ROUNDED,
    STEPS,
    WIDTH,
    WORLD,
    After,
    P,
    Params,
    Run,
    apply_layer,
    assert_equal,
    batch,
    block,
    initial,
    mesh_of,
    placed,
    program,
    run,
    scanned,
)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(
            m, marks=[pytest.mark.newest] * (m == INT8) + [pytest.mark.slow] * (m not in QUICK)
        )
        for m in METHODS
    ],
)
def test_the_same_bits_as_after_the_backward_pass(method: str) -> None:
    """One program takes both ways from the same gradients."""
    rounding = 2e-6 if method in ROUNDED else 0.0
    exchange, after = jaxcomm.in_backward(METHODS[method](), ["blocks"]), After(METHODS[method]())

    @jax.jit
    def step(params: Params, inside: Any, behind: Any, batch: Any) -> Any:
        updates, inside, _ = program(exchange)(params, inside, batch)
        _, grads = jaxcomm.value_and_grad(scanned, "data")(params, batch)
        expected, behind = after.update(grads, behind, params)
        return (updates, inside), (expected, behind)

    with jax.set_mesh(mesh_of()):
        params = placed(mesh_of())
        inside, behind = exchange.init(params), after.init(params)
        for seed in range(STEPS):
            data = jaxcomm.global_batch(batch(seed), "data")
            (updates, inside), (expected, behind) = step(params, inside, behind, data)
            assert_equal(updates, expected, rounding)
    assert all(np.any(np.asarray(x)) for x in jax.tree.leaves(updates))
    layers, rest = behind
    stacks = [jnp.stack(leaves) for leaves in zip(*map(jax.tree.leaves, layers), strict=True)]
    assert_equal(inside.layers, stacks, rounding)
    assert_equal(inside.rest, rest, rounding)


@functools.cache
def reference() -> Run:
    """Steps of int8 with errors fed back, in the global view."""
    with jax.set_mesh(mesh_of()):
        return run(jaxcomm.in_backward(METHODS[INT8](), ["blocks"]))


@pytest.mark.parametrize("checks", [False, True])
def test_the_manual_view(checks: bool) -> None:
    exchange, mesh = jaxcomm.in_backward(METHODS[INT8](), ["blocks"]), mesh_of()
    with jax.set_mesh(mesh):
        params = placed(mesh)
        spec, state = jaxcomm.state_spec(exchange, params, mesh), exchange.init(params)
        step = jax.jit(
            jax.shard_map(
                program(exchange),
                in_specs=(P(), spec, P("data")),
                out_specs=(P(), spec, P()),
                check_vma=checks,
            )
        )
        for seed, expected in enumerate(reference().updates):
            updates, state, _ = step(params, state, batch(seed))
            assert_equal(updates, expected)
    assert_equal(state, reference().state)


def test_further_and_explicit_axes() -> None:
    """Kernels sharded over "model" round block by block; then the mesh of `jax.make_mesh`."""
    exchange = jaxcomm.in_backward(jaxcomm.mean("data", error_feedback=True), ["blocks"])
    with jax.set_mesh(mesh_of(2)):
        on_two = run(exchange)
        specs = [x.sharding.spec for x in on_two.state.layers[0].residual.values]
        assert specs == [P(None, "data", None, "model")]
    with jax.set_mesh(jax.make_mesh((WORLD,), ("data",), devices=jax.devices()[:WORLD])):
        explicit = run(exchange)
    with jax.set_mesh(mesh_of()):
        expected = run(exchange)
    assert_equal(on_two.updates, expected.updates, 1e-6)
    assert_equal(explicit.updates, expected.updates, 1e-6)


class Block(nnx.Module):
    """A layer whose parameters are exchanged where they are used."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(jnp.zeros((WIDTH, WIDTH)))
        self.b = nnx.Param(jnp.zeros(WIDTH))

    def __call__(self, x: jax.Array) -> jax.Array:
        return apply_layer(x, nnx.to_pure_dict(jaxcomm.exchanged(nnx.state(self))))


def in_nnx(params: Params, batch: Any) -> jax.Array:
    """`scanned` through `nnx.scan`, of a module that holds the parameters as they are attached."""

    @nnx.vmap(axis_size=LAYERS)
    def make(rngs: nnx.Rngs) -> Block:
        return Block(rngs)

    graph, _ = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0).split(LAYERS))))
    blocks = nnx.merge(graph, nnx.State(params["blocks"]))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x: jax.Array, block: Block) -> jax.Array:
        return block(x)

    return jnp.mean((forward(batch[0] @ params["embed"], blocks) - batch[1]) ** 2)


def by_a_python_loop(params: Params, batch: Any) -> jax.Array:
    x = batch[0] @ params["embed"]
    for i in range(LAYERS):
        x, _ = block(x, jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"]))
    return jnp.mean((x - batch[1]) ** 2)


FORMS: dict[str, Callable[[Params, Any], jax.Array]] = {
    "jax.checkpoint": lambda p, b: scanned(p, b, jax.checkpoint(block)),
    "checkpoint of the loop": jax.checkpoint(scanned),
    "nnx.scan": in_nnx,
    "a Python loop": by_a_python_loop,
}


@pytest.mark.parametrize("form", FORMS)
def test_loops_and_recomputation(form: str) -> None:
    """The same bits, and one exchange of each layer however often it is computed."""
    with jax.set_mesh(mesh_of()):
        found = run(jaxcomm.in_backward(METHODS[INT8](), ["blocks"]), FORMS[form])
    assert found.sent == reference().sent
    # Written out, the model itself is rounded otherwise.
    rounding = 1e-5 if form == "a Python loop" else 0.0
    assert_equal(found.updates, reference().updates, rounding)
    assert_equal(found.state, reference().state, rounding)


def test_every_layer_sends_what_a_model_of_one_layer_does() -> None:
    with jax.set_mesh(mesh_of()):
        tx = METHODS[INT8]()

        def of(params: Params) -> Any:
            grads = jax.tree.map(lambda x: jnp.zeros((WORLD, *x.shape)), params)
            update = jax.jit(tx.update).lower(grads, tx.init(params)).compile()
            return jaxcomm.wire_report(update).bytes_max

        layer = of({"w": jnp.zeros((WIDTH, WIDTH)), "b": jnp.zeros(WIDTH)})
        rest, loss = of({"embed": jnp.zeros((5, WIDTH))}), 2 * 3 / 4 * 4
    assert reference().sent == LAYERS * layer + rest + loss


def test_microbatches_are_exchanged_in_the_last_one() -> None:
    exchange, after = jaxcomm.in_backward(METHODS[INT8](), ["blocks"]), After(METHODS[INT8]())
    with jax.set_mesh(mesh_of()):
        found = run(exchange, microbatches=2)
        params = placed(mesh_of())
        gradient = jaxcomm.accumulate(jaxcomm.value_and_grad(scanned, "data"), 2)

        @jax.jit
        def step(own: Any, batch: Any) -> Any:
            return after.update(gradient(params, batch)[1], own, params)

        own = after.init(params)
        for seed, updates in enumerate(found.updates):
            expected, own = step(own, jaxcomm.global_batch(batch(seed), "data"))
            assert_equal(updates, expected, 2e-6)
    # Beside it, whether the last microbatch left out a layer, an int32 for each.
    assert found.sent == reference().sent + LAYERS * 2 * (WORLD - 1) / WORLD * 4
    residual = jnp.stack([layer.residual.values[0] for layer in own[0]])
    np.testing.assert_allclose(found.state.layers[0].residual.values[0], residual, 1e-5, 1e-6)


def odd_layers(params: Params, batch: Any) -> jax.Array:
    """The first layer twice, by one call; the second times zero; of the third nothing."""
    layers = [jax.tree.map(lambda x, i=i: x[i], params["blocks"]) for i in range(LAYERS)]
    first, second = jaxcomm.exchanged(layers[0]), jaxcomm.exchanged(layers[1])
    x = apply_layer(apply_layer(batch[0] @ params["embed"], first), first)
    x += 0.0 * apply_layer(x, second)
    return jnp.mean((x - batch[1]) ** 2)


def test_a_layer_that_is_used_twice_one_times_zero_and_one_not_at_all() -> None:
    exchange = jaxcomm.in_backward(METHODS[INT8](), ["blocks"])
    with jax.set_mesh(mesh_of()):
        state = run(exchange, steps=1).state
        before = np.asarray(state.layers[0].residual.values[0])
        (updates,), state, _ = run(exchange, odd_layers, steps=1, state=state)
        data = jaxcomm.global_batch(batch(), "data")
        gradient = jax.jit(jaxcomm.value_and_grad(odd_layers, "data"))
        grads = jaxcomm.unmark_local(gradient(placed(mesh_of()), data)[1])
    mean = np.asarray(grads["blocks"]["w"]).mean(0)
    residual = np.asarray(state.layers[0].residual.values[0])
    # What is sent and what is left add up to the sum of both uses, and to what was left before.
    sums = updates["blocks"]["w"] + residual.mean(1)
    np.testing.assert_allclose(sums, mean + before.mean(1), atol=1e-6)
    assert np.any(updates["blocks"]["w"][1]) and np.all(mean[1] == 0)  # it takes part
    assert not np.any(updates["blocks"]["w"][2])  # no gradient reaches it
    np.testing.assert_array_equal(residual[2], before[2])
    assert list(state.layers[0].step) == [2, 2, 1]


def in_two_loops(params: Params, batch: Any) -> jax.Array:
    x, _ = jax.lax.scan(block, batch[0] @ params["embed"], params["blocks"])
    return jnp.mean(jax.lax.scan(block, x, params["blocks"])[0] ** 2)


def bad_in_one_layer(params: Params, batch: Any) -> jax.Array:
    """The gradient of layer 1 is NaN on the device whose batch says so, and nothing else is."""

    @jax.custom_vjp
    def poisoned(w: jax.Array, flag: jax.Array) -> jax.Array:
        return w

    poisoned.defvjp(
        lambda w, flag: (w, flag),
        lambda flag, g: (g.at[0, 0].add(jnp.where(flag, jnp.nan, 0.0)), jnp.zeros_like(flag)),
    )
    mark = jnp.any(batch[0] > 90)

    def body(x: jax.Array, inputs: Any) -> Any:
        layer, number = inputs
        layer = jaxcomm.exchanged(layer)
        w = poisoned(layer["w"], (mark & (number == 1)).astype(jnp.float32))
        return apply_layer(x, {**layer, "w": w}), None

    x = jnp.clip(batch[0], -9, 9) @ params["embed"]
    x, _ = jax.lax.scan(body, x, (params["blocks"], jnp.arange(LAYERS)))
    return jnp.mean((x - batch[1]) ** 2)


def test_nan_in_one_layer_of_one_device_changes_nothing() -> None:
    exchange = jaxcomm.in_backward(METHODS[INT8](), ["blocks"])
    with jax.set_mesh(mesh_of()):
        params = placed(mesh_of())
        step = jax.jit(program(exchange, bad_in_one_layer))
        bad = batch(1)
        bad[0][-1, 0] = 99.0  # of the last device
        good = jaxcomm.global_batch(batch(), "data")
        first, state, _ = step(params, exchange.init(params), good)
        before = jax.tree.map(np.asarray, state)
        nothing, state, _ = step(params, state, jaxcomm.global_batch(bad, "data"))
        assert all(np.isnan(x).all() for x in jax.tree.leaves(nothing))
        assert_equal(state, before)
        then, _, _ = step(params, state, good)
        twice, state, _ = jax.jit(program(exchange, in_two_loops))(params, state, good)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves([first, then]))
    assert all(np.isnan(x).all() for x in jax.tree.leaves(twice))  # two exchanges of a layer
    assert_equal(state.layers[0].step, before.layers[0].step)


def test_resume_and_resize() -> None:
    exchange = jaxcomm.in_backward(METHODS[INT8](), ["blocks"])
    with jax.set_mesh(mesh_of()):
        state = run(exchange, steps=2).state
        saved = jax.tree.map(jax.device_get, state)
        fresh = exchange.init(placed(mesh_of()))
        restored = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), saved, fresh)
        for one in (restored, jaxcomm.resize_state(exchange, saved, placed(mesh_of()))):
            assert jax.tree.structure(one) == jax.tree.structure(state)
        found = run(exchange, steps=1, state=restored)
        expected = run(exchange, steps=1, state=state)
        assert_equal(found[:2], expected[:2])
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        params = jaxcomm.replicate(initial())
        (new,) = jaxcomm.resize_state(exchange, saved, params).layers[0].residual.values
        (old,) = saved.layers[0].residual.values
    assert new.shape == (LAYERS, 2, WIDTH, WIDTH)
    np.testing.assert_allclose(new[:, 1], old.mean(1), rtol=1e-6)


def test_attached_outside_of_jit_a_step_is_traced_once() -> None:
    exchange, traces = jaxcomm.in_backward(METHODS[INT8](), ["blocks"]), []

    def loss_fn(params: Params, batch: Any) -> jax.Array:
        traces.append(1)
        return scanned(params, batch)

    with jax.set_mesh(mesh_of()):
        params = placed(mesh_of())
        state, gradient = exchange.init(params), jax.jit(jaxcomm.value_and_grad(loss_fn, "data"))
        data, update = jaxcomm.global_batch(batch(), "data"), jax.jit(exchange.update)
        gradient(exchange.attach(params, state), data)
        once = len(traces)
        for _ in range(2):
            _, grads = gradient(exchange.attach(params, state), data)
            _, state = update(grads, state)
    assert len(traces) == once and gradient._cache_size() == update._cache_size() == 1


def test_what_is_not_finite_beside_the_layers_leaves_them_as_they_are() -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        def body(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ jaxcomm.exchanged(layer)["w"]), None

        x, _ = jax.lax.scan(body, batch[0], params["blocks"])
        return jnp.mean(x) + jnp.sum(params["head"]) * jnp.mean(batch[1])

    exchange = jaxcomm.in_backward(jaxcomm.mean("data", "int8", error_feedback=True), ["blocks"])
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        params = {"blocks": {"w": jnp.full((2, 4, 4), 0.1)}, "head": jnp.ones((4, 4))}
        params = jaxcomm.replicate(params)
        state = exchange.init(params)
        rows = (np.ones((4, 4), np.float32), np.array([1, 1, 1, np.nan], np.float32))

        @jax.jit
        def step(params: Any, state: Any, rows: Any) -> Any:
            _, grads = jaxcomm.value_and_grad(loss, "data")(exchange.attach(params, state), rows)
            return exchange.update(grads, state, params)

        updates, after = step(params, state, jaxcomm.global_batch(rows, "data"))
    assert all(np.isnan(u).all() for u in jax.tree.leaves(updates))
    jax.tree.map(np.testing.assert_array_equal, after, state)
