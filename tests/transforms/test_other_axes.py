"""Chains without an exchange, and exchanges over another axis than that of the gradients."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm

PARAMS = {"w": jnp.ones((8, 8)), "v": jnp.ones((8, 8))}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch @ params["w"] @ params["v"]) ** 2)


LOCAL, MEAN = jaxcomm.local("data", optax.trace(0.9)), jaxcomm.mean("data")
WITHOUT_EXCHANGE: list[tuple[optax.GradientTransformation, str]] = [
    (jaxcomm.control_variates(LOCAL), "control_variates needs inner.*found none"),
    (jaxcomm.control_variates(jaxcomm.control_variates(MEAN)), "found none; put jaxcomm.mean"),
    (jaxcomm.factored_adam(LOCAL, 0.1), "factored_adam.*found none"),
    (jaxcomm.local_steps(optax.sgd(1.0), 2, optax.sgd(1.0), LOCAL), "local_steps.*found none"),
    (jaxcomm.multi_steps(optax.chain(LOCAL, optax.sgd(0.1)), 2), "multi_steps.*found none"),
]


@pytest.mark.parametrize(("tx", "message"), WITHOUT_EXCHANGE, ids=lambda x: str(x)[:20])
def test_what_changes_local_gradients_does_not_exchange_them(
    mesh8: Any, tx: optax.GradientTransformation, message: str
) -> None:
    with jax.set_mesh(mesh8):
        params = jaxcomm.replicate(PARAMS)
        with pytest.raises(ValueError, match=message):
            tx.init(params)
        with pytest.raises(ValueError, match="nothing in this chain exchanges"):
            jaxcomm.explain(optax.chain(LOCAL, optax.sgd(0.1)), params)


OVER_M: dict[str, Callable[[], optax.GradientTransformation]] = {
    "mean": lambda: optax.chain(jaxcomm.mean("m"), optax.sgd(0.1)),
    "local": lambda: optax.chain(jaxcomm.local("m", optax.trace(0.9)), MEAN),
    "after local": lambda: optax.chain(LOCAL, jaxcomm.mean("m", "int8")),
    "control variates": lambda: optax.chain(
        jaxcomm.control_variates(MEAN), jaxcomm.majority_vote(("data", "m"))
    ),
    "multi_steps": lambda: jaxcomm.multi_steps(jaxcomm.mean("m"), 2),
    "local_steps": lambda: jaxcomm.local_steps(
        optax.sgd(0.1), 2, optax.sgd(1.0), jaxcomm.mean("m")
    ),
}


@pytest.mark.parametrize("name", OVER_M)
@pytest.mark.parametrize("manual", [False, True])
def test_gradients_over_one_axis_are_not_exchanged_over_another(name: str, manual: bool) -> None:
    """The axes are equally long, so shapes do not tell."""
    with jax.set_mesh(mesh := square()):
        params, tx = jaxcomm.replicate(PARAMS), OVER_M[name]()
        state, batch = tx.init(params), jaxcomm.global_batch(np.ones((4, 8), np.float32), "data")

        def step(params: Any, state: Any, batch: Any) -> Any:
            at = jaxcomm.local_params(state) if name == "local_steps" else params
            _, grads = jaxcomm.value_and_grad(loss_fn, "data")(at, batch)
            return tx.update(grads, state, params)[0]

        if manual:
            specs = jax.P(), jaxcomm.state_spec(tx, params, mesh), jax.P("data")
            step = jax.shard_map(step, in_specs=specs, out_specs=jax.P(), check_vma=False)
        said = "own over m, and" if name == "local_steps" else "local over 'data', and the trans"
        with pytest.raises(ValueError, match=said):
            jax.jit(step)(params, state, batch)


def square() -> jax.sharding.Mesh:
    kinds = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((2, 2), ("data", "m"), kinds, devices=jax.devices()[:4])


def test_two_axes_are_named_in_one_order() -> None:
    with jax.set_mesh(square()):
        params, tx = jaxcomm.replicate(PARAMS), jaxcomm.mean(("data", "m"))
        batch = jaxcomm.global_batch(np.eye(8, dtype=np.float32), ("data", "m"))
        gradient = jaxcomm.value_and_grad(loss_fn, ("data", "m"))
        with pytest.raises(ValueError, match=r"local over \('data', 'm'\), and"):
            other = jaxcomm.mean(("m", "data"))
            other.update(gradient(params, batch)[1], other.init(params))
        means, _ = jax.jit(lambda s, b: tx.update(gradient(params, b)[1], s))(
            tx.init(params), batch
        )
    wanted = jax.grad(loss_fn)(PARAMS, np.eye(8, dtype=np.float32))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), means, wanted)


@pytest.mark.parametrize("make", [jaxcomm.mean, jaxcomm.majority_vote, jaxcomm.shard])
def test_a_leaf_that_is_no_array_has_a_name(mesh8: Any, make: Any) -> None:
    model = {"w": jnp.ones((8, 8)), "activation": jax.nn.relu}
    with (
        jax.set_mesh(mesh8),
        pytest.raises(TypeError, match="parameter activation is .*not an array"),
    ):
        make(model, "data") if make is jaxcomm.shard else make("data").init(model)


@pytest.mark.parametrize("reduced", ["data", "model"])
def test_a_loss_that_is_reduced_over_one_of_two_axes(mesh4x2: Any, reduced: str) -> None:
    loss = lambda w, x: jax.lax.pmean(jnp.mean(w * x), reduced)  # noqa: E731
    f = jaxcomm.value_and_grad(loss, ("data", "model"))
    with jax.set_mesh(mesh4x2), pytest.raises(ValueError, match="the loss is already reduced over"):
        jax.jit(f)(jnp.float32(1), jnp.arange(8.0))
