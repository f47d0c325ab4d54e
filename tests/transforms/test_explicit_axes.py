"""Meshes whose types show shardings, axes of one device, and parameters split over further axes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxcomm

MEAN = jaxcomm.mean("data", "int8", error_feedback=True)
METHODS = {
    "mean": MEAN,
    "local": optax.chain(jaxcomm.local("data", optax.trace(0.9)), MEAN),
    "multi_steps": jaxcomm.multi_steps(optax.chain(MEAN, optax.adam(0.1)), 2),
    "local_steps": jaxcomm.local_steps(optax.adam(0.1), 2, optax.sgd(1.0, 0.9), MEAN),
    "control_variates": optax.chain(jaxcomm.control_variates(MEAN, 2), MEAN),
}
TYPES = [AxisType.Auto, AxisType.Explicit]
SPECS = {"w": jax.P(None, "fsdp"), "gain": jax.P(), "row": jax.P(), "b": jax.P()}
SHAPES = {"w": (4, 6), "gain": (), "row": (1, 6), "b": (6,)}


def mesh_of(data: int, fsdp: int, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    devices = jax.devices()[: data * fsdp]
    return jax.make_mesh((data, fsdp), ("data", "fsdp"), (kind, kind), devices=devices)


def placed(mesh: jax.sharding.Mesh) -> Any:
    values = np.random.default_rng(0)
    arrays = {name: values.standard_normal(s, np.float32) for name, s in SHAPES.items()}
    return {
        name: jax.device_put(x, jax.NamedSharding(mesh, SPECS[name])) for name, x in arrays.items()
    }


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(x) * sum(jnp.sum(p**2) for p in jax.tree.leaves(params))


def two_steps(tx: optax.GradientTransformation, mesh: jax.sharding.Mesh) -> Any:
    with jax.set_mesh(mesh):
        params = placed(mesh)
        state, batch = tx.init(params), jaxcomm.global_batch(np.arange(4.0) ** 2, "data")

        @jax.jit
        def step(params: Any, state: Any) -> Any:
            at = jaxcomm.local_params(state) if "LocalSteps" in type(state).__name__ else params
            _, grads = jaxcomm.value_and_grad(loss_fn, "data")(at, batch)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        jaxcomm.wire_report(step.lower(params, state).compile())  # warns of nothing
        sent = jaxcomm.explain(tx, params).bytes_max
        for _ in range(2):
            params, state = step(params, state)
    return jax.tree.map(np.asarray, params), sent


@pytest.mark.standard_promotion  # of optax.adam
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
def test_both_kinds_of_axes_give_the_same(name: str, sizes: tuple[int, int]) -> None:
    auto, explicit = (two_steps(METHODS[name], mesh_of(*sizes, kind)) for kind in TYPES)
    for leaf in SHAPES:
        np.testing.assert_allclose(auto[0][leaf], explicit[0][leaf], 1e-6, 1e-6, err_msg=leaf)
    assert auto[1] == explicit[1]  # what `explain` says


@pytest.mark.standard_promotion
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("sizes", [(2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["mean", "local", "multi_steps", "control_variates"])
def test_the_manual_view_of_split_parameters(
    name: str, sizes: tuple[int, int], check: bool
) -> None:
    mesh, tx = mesh_of(*sizes), METHODS[name]
    with jax.set_mesh(mesh):
        params = placed(mesh)
        spec = jaxcomm.state_spec(tx, params, mesh)

        def step(params: Any, state: Any, x: jax.Array) -> Any:
            def own(p: jax.Array) -> jax.Array:
                return jax.lax.pcast(jnp.ones_like(p), "data", to="varying") * x[0]

            return tx.update(jaxcomm.mark_local(jax.tree.map(own, params)), state, params)

        both = {"in_specs": (SPECS, spec, jax.P("data")), "out_specs": (SPECS, spec)}
        update = jax.jit(jax.shard_map(step, check_vma=check, **both))
        state, x = tx.init(params), jaxcomm.global_batch(np.array([1, 3], np.float32), "data")
        for _ in range(2):  # two exchanges of most, one of multi_steps
            updates, state = update(params, state, x)
    for leaf in SHAPES:
        expected = {"local": 3.8, "multi_steps": -0.1}.get(name, 2.0)
        np.testing.assert_allclose(updates[leaf], expected, rtol=1e-2, err_msg=leaf)


@pytest.mark.parametrize("name", ["mean", "one_bit_adam", "sparse_mean"])
def test_an_axis_of_one_device_changes_no_state_and_no_message(name: str) -> None:
    """Checkpoints are read on a mesh with and without it, and what is made in a jit fits."""
    tx = {
        "mean": MEAN,
        "one_bit_adam": jaxcomm.one_bit_adam("data", 0.1, dense_steps=1),
        "sparse_mean": jaxcomm.sparse_mean("data", 0.1),
    }[name]
    batch, found = np.ones(4, np.float32), []
    for mesh in (jaxcomm.data_mesh(devices=jax.devices()[:4]), mesh_of(4, 1)):
        with jax.set_mesh(mesh):
            specs = SPECS if "fsdp" in mesh.axis_names else dict.fromkeys(SPECS, jax.P())
            values = {name: np.ones((*s[:-1], 64 * (s or (1,))[-1])) for name, s in SHAPES.items()}
            params = {
                name: jax.device_put(x.astype(np.float32), jax.NamedSharding(mesh, specs[name]))
                for name, x in values.items()
            }
            state = tx.init(params)
            made = [jax.jit(tx.init)(params), jax.eval_shape(tx.init, params)]
            made.append(jax.jit(jaxcomm.with_param_specs(tx, specs).init)(params))
            for other in made:
                assert jax.tree.structure(other) == jax.tree.structure(state)
                assert jax.tree.map(jnp.shape, other) == jax.tree.map(jnp.shape, state)

            def step(params: Any, state: Any, x: jax.Array, tx: Any = tx) -> Any:
                loss, grads = jaxcomm.value_and_grad(loss_fn, "data")(params, x)
                return loss, *tx.update(grads, state, params)

            args = params, state, jaxcomm.global_batch(batch, "data")
            report = jaxcomm.wire_report(jax.jit(step).lower(*args).compile())
            sent = [(c.op, c.shapes) for c in report.collectives if c.group_size > 1]
            found.append((jax.tree.map(jnp.shape, jax.tree.leaves(state)), sorted(sent)))
    assert found[0] == found[1]


@pytest.mark.parametrize("spec", [jax.P("fsdp"), jax.P(None, "fsdp"), jax.P()], ids=str)
def test_in_backward_beside_a_split_parameter(spec: jax.P) -> None:
    found = []
    for kind in TYPES:
        mesh = mesh_of(2, 2, kind)
        exchange = jaxcomm.in_backward(jaxcomm.mean("data", "int8"), ["blocks"])
        with jax.set_mesh(mesh):
            blocks = jaxcomm.replicate(jnp.ones((3, 4, 4)))
            embed = jax.device_put(np.ones((4, 4)), jax.NamedSharding(mesh, spec))
            params = {"blocks": blocks, "embed": embed}
            state, x = exchange.init(params), jaxcomm.global_batch(np.arange(4.0), "data")

            def loss(params: Any, x: jax.Array) -> jax.Array:
                def body(total: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
                    return total + jnp.sum(jaxcomm.exchanged(w)) * jnp.mean(x), None

                start = jnp.sum(params["embed"]) * jnp.mean(x)
                return jax.lax.scan(body, start, params["blocks"])[0]

            @jax.jit
            def step(params: Any, state: Any, x: jax.Array, of: Any = (exchange, loss)) -> Any:
                exchange, loss = of
                at = exchange.attach(params, state)
                return exchange.update(jaxcomm.value_and_grad(loss, "data")(at, x)[1], state)[0]

            found.append(jax.tree.map(np.asarray, step(params, state, x)))
    for leaf in found[0]:
        np.testing.assert_array_equal(found[0][leaf], found[1][leaf])
        np.testing.assert_allclose(found[0][leaf], 1.5, rtol=1e-2)


def test_rows_of_a_microbatch_that_explicit_axes_do_not_divide() -> None:
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), kinds, devices=jax.devices()[:8])
    f = jaxcomm.accumulate(jaxcomm.value_and_grad(lambda w, x: jnp.mean(w * x), "data"), 2)
    rows = jax.NamedSharding(mesh, jax.P(("data", "fsdp")))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="6 rows of a microbatch do not div"):
        jax.jit(f)(jnp.float32(1), jax.device_put(np.zeros(24, np.float32), rows))
