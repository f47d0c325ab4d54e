"""`init` and gradients inside a `jax.shard_map` that is manual over further axes, or over some."""

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm

SHAPES = {"down": (32, 16), "r": (16, 8), "up": (16, 32)}
SPECS = {"down": P("model", None), "r": P(), "up": P(None, "model")}  # of a Megatron MLP


def loss_fn(params: Any, batch: Any) -> jax.Array:
    hidden = jax.nn.gelu(batch @ params["up"]) @ params["down"]
    return jnp.mean((jax.lax.psum(hidden, "model") @ params["r"] - 1) ** 2)


def whole_loss(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((jax.nn.gelu(batch @ params["up"]) @ params["down"] @ params["r"] - 1) ** 2)


@pytest.fixture
def mesh() -> Iterator[jax.sharding.Mesh]:
    kinds = (jax.sharding.AxisType.Auto,) * 2
    made = jax.make_mesh((4, 2), ("data", "model"), kinds, devices=jax.devices()[:8])
    with jax.set_mesh(made):
        yield made


def initial() -> Any:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(s).astype(np.float32) / 4 for name, s in SHAPES.items()}


def placed() -> Any:
    mesh = jax.sharding.get_mesh()
    return {
        name: jax.device_put(x, NamedSharding(mesh, SPECS[name])) for name, x in initial().items()
    }


BATCH = np.random.default_rng(1).standard_normal((8, 16)).astype(np.float32)


METHODS = {
    "int8": lambda: jaxcomm.mean("data", "int8"),
    "sparse": lambda: jaxcomm.sparse_mean("data", 0.1),
    "specs": lambda: jaxcomm.with_param_specs(jaxcomm.mean("data", "int8"), SPECS),
}


def updates_of(params: Any, inside: Any, checks: bool, **axes: Any) -> Any:
    """The updates of a region over "model", and over "data" where no axes are named."""
    rows = P() if axes else P("data")
    run = jax.shard_map(inside, in_specs=(SPECS, rows), out_specs=SPECS, check_vma=checks, **axes)
    return jax.jit(run)(params, jnp.asarray(BATCH) if axes else BATCH)


@pytest.mark.parametrize("axes", [{}, {"axis_names": {"model"}}], ids=["all", "model"])
@pytest.mark.parametrize(("method", "checks"), [*((m, True) for m in METHODS), ("specs", False)])
def test_init_inside_rounds_what_is_equal_apart_from_what_is_split(
    mesh: Any, method: str, checks: bool, axes: Any
) -> None:
    """Rounded in one bucket, copies of `r` would drift apart between the devices of "model"."""
    tx = METHODS[method]()

    def inside(params: Any, batch: Any) -> Any:
        state = tx.init(params)
        return tx.update(jaxcomm.value_and_grad(loss_fn, "data")(params, batch)[1], state)[0]

    updates = updates_of(placed(), inside, checks, **axes)
    copies = [np.asarray(shard.data) for shard in updates["r"].addressable_shards]
    assert all(np.array_equal(copies[0], other) for other in copies)
    if method == "specs" or (method == "int8" and checks):
        outside, state = METHODS[method](), METHODS[method]().init(placed())
        grads = jaxcomm.value_and_grad(whole_loss, "data")
        step = jax.jit(lambda p, s, b: outside.update(grads(p, b)[1], s)[0])
        expected = step(placed(), state, jaxcomm.global_batch(BATCH, "data"))
        # Without checks, jax adds up the gradients of `up` and `down` over "model" once more.
        for name in updates if checks else ("r",):
            scale = float(jnp.abs(expected[name]).max())
            np.testing.assert_allclose(updates[name], expected[name], atol=0.02 * scale)


def test_without_checks_init_inside_says_that_it_sees_no_split(mesh: Any) -> None:
    """Buckets and the structure of the state are then as for parameters that are equal."""

    def state_of(params: Any) -> Any:
        return jaxcomm.mean("data", "int8", error_feedback=True).init(params)

    params = jaxcomm.replicate({"v": jnp.ones((8, 8)), "w": jnp.ones((8, 8))})
    tx = jaxcomm.mean("data", "int8", error_feedback=True)
    spec = jaxcomm.state_spec(tx, params, mesh)
    run = jax.shard_map(state_of, in_specs=P(), out_specs=spec, check_vma=False)
    with pytest.warns(UserWarning, match="cannot see .* split over 'model'.*with_param_specs"):
        state = jax.jit(run)(params)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))


def test_a_model_that_scans_from_zeros_in_a_checked_region_over_another_axis(mesh: Any) -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        return jax.lax.scan(lambda c, x: (c + jnp.mean(x @ params["w"]), None), 0.0, batch)[0]

    def of(params: Any, batch: Any) -> Any:
        _, grads = jaxcomm.value_and_grad(loss, "data")(params, batch)
        return jaxcomm.unmark_local(grads)["w"].mean(0)

    run = jax.shard_map(of, in_specs=(P(), P()), out_specs=P(), axis_names={"model"})
    params = {"w": jnp.ones((16, 4))}
    found = jax.jit(run)(jaxcomm.replicate(params), jnp.asarray(BATCH))
    expected = jax.grad(lambda p: loss(p, jnp.asarray(BATCH)) / 4)(params)["w"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_state_made_outside_keeps_copies_equal(mesh: Any) -> None:
    tx, params = jaxcomm.mean("data", "int8"), placed()
    spec = jaxcomm.state_spec(tx, params, mesh)

    def step(params: Any, state: Any, batch: Any) -> Any:
        _, grads = jaxcomm.value_and_grad(loss_fn, "data")(params, batch)
        return tx.update(grads, state, params)[0]

    run = jax.shard_map(step, in_specs=(SPECS, spec, P("data")), out_specs=SPECS)
    updates = jax.jit(run)(params, tx.init(params), BATCH)
    expected = jax.grad(whole_loss)(jax.tree.map(jnp.asarray, initial()), BATCH)
    copies = [np.asarray(shard.data) for shard in updates["r"].addressable_shards]
    assert all(np.array_equal(copies[0], other) for other in copies)
    scale = float(jnp.abs(expected["r"]).max())
    np.testing.assert_allclose(updates["r"], expected["r"], atol=0.03 * scale)


def test_leaves_that_are_split_alike_may_be_initialised_inside(mesh: Any) -> None:
    """Nothing is equal along "model" that could be rounded differently there."""
    names = ("down", "up")
    specs = {name: SPECS[name] for name in names}

    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(jax.lax.psum(jax.nn.gelu(batch @ params["up"]) @ params["down"], "model"))

    def step(params: Any, batch: Any) -> Any:
        tx = jaxcomm.mean("data", "int8")
        state = tx.init(params)
        return tx.update(jaxcomm.value_and_grad(loss, "data")(params, batch)[1], state)[0]

    params = {name: placed()[name] for name in names}
    run = jax.jit(jax.shard_map(step, in_specs=(specs, P("data")), out_specs=specs))
    whole = lambda p: jnp.mean(jax.nn.gelu(BATCH @ p["up"]) @ p["down"])  # noqa: E731
    expected = jax.grad(whole)({name: jnp.asarray(initial()[name]) for name in names})
    for name, update in run(params, BATCH).items():
        scale = float(jnp.abs(expected[name]).max())
        np.testing.assert_allclose(update, expected[name], atol=0.03 * scale)


def test_gradients_over_an_automatic_axis_in_a_checked_region_over_another(mesh: Any) -> None:
    def of(params: Any, batch: Any) -> Any:
        loss, grads = jaxcomm.value_and_grad(loss_fn, "data")(params, batch)
        return loss, jax.tree.map(lambda g: g.mean(0), jaxcomm.unmark_local(grads))

    run = jax.shard_map(of, in_specs=(SPECS, P()), out_specs=(P(), SPECS), axis_names={"model"})
    loss, grads = jax.jit(run)(placed(), jnp.asarray(BATCH))
    value, expected = jax.value_and_grad(whole_loss)(jax.tree.map(jnp.asarray, initial()), BATCH)
    np.testing.assert_allclose(loss, value, rtol=1e-5)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("checks", [True, False])
def test_an_exchange_beside_a_region_that_splits_parameters(mesh: Any, checks: bool) -> None:
    tx, params = jaxcomm.mean("data"), placed()
    state = tx.init(params)

    def step(params: Any, state: Any, batch: Any) -> Any:
        _, grads = jaxcomm.value_and_grad(loss_fn, "data")(params, batch)
        return tx.update(grads, state, params)[0]

    spec = jaxcomm.state_spec(tx, params, mesh, {"model"})
    run = jax.shard_map(
        step,
        in_specs=(SPECS, spec, P()),
        out_specs=SPECS,
        axis_names={"model"},
        check_vma=checks,
    )
    message = "inside a jax.shard_map over an axis that splits down, but not over 'data'"
    with pytest.raises(ValueError, match=message):
        jax.jit(run)(params, state, jnp.asarray(BATCH))


def test_some_axes_of_a_tuple_are_manual(mesh: Any) -> None:
    both = ("data", "model")

    def loss_of(params: Any, batch: Any) -> Any:
        return jaxcomm.value_and_grad(lambda p, b: jnp.mean(b @ p["w"]), both)(params, batch)[0]

    run = jax.shard_map(loss_of, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"})
    message = re.escape("inside a jax.shard_map over ['data'] of ('data', 'model')")
    with pytest.raises(ValueError, match=message):
        jax.jit(run)(jaxcomm.replicate({"w": jnp.ones((16, 4))}), BATCH)


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("name", ["local", "local_steps"])
def test_own_steps_over_an_automatic_axis_in_a_region_over_another(
    mesh: Any, name: str, checks: bool
) -> None:
    """Updates and bytes are those without the region, for parameters that are equal along it."""
    mean = jaxcomm.mean("data", "int8")
    own = optax.chain(optax.clip_by_global_norm(0.1), optax.trace(0.9))
    txs = {
        "local": optax.chain(jaxcomm.local("data", own), mean),
        "local_steps": jaxcomm.local_steps(optax.sgd(0.1), 1, optax.sgd(1.0), mean),
    }
    tx, params = txs[name], jaxcomm.replicate({"w": jnp.ones((16, 8)), "b": jnp.zeros(8)})
    state, batch = tx.init(params), jaxcomm.global_batch(BATCH, "data")

    def step(params: Any, state: Any, batch: Any) -> Any:
        at = jaxcomm.local_params(state) if name == "local_steps" else params
        loss = lambda p, b: jnp.mean((b @ p["w"] + p["b"][None]) ** 2)  # noqa: E731
        return tx.update(jaxcomm.value_and_grad(loss, "data")(at, batch)[1], state, params)

    spec = jaxcomm.state_spec(tx, params, mesh, {"model"})
    run = jax.shard_map(
        step,
        in_specs=(P(), spec, P()),
        out_specs=(P(), spec),
        axis_names={"model"},
        check_vma=checks,
    )
    inside, outside = (jax.jit(f).lower(params, state, batch).compile() for f in (run, step))
    sent = [jaxcomm.wire_report(program).bytes_max for program in (inside, outside)]
    assert sent[0] == sent[1]
    found, expected = inside(params, state, batch), outside(params, state, batch)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
