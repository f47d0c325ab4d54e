"""What cannot be is refused by the call that gets it, in words of jaxcomm."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm

untyped: Any = jaxcomm  # a type checker would refuse these calls, too
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a set of devices": (
        lambda: untyped.data_mesh(devices=set(jax.devices())),
        TypeError,
        "takes a sequence of devices",
    ),
    "a matrix of devices": (
        lambda: untyped.data_mesh(devices=np.reshape(jax.devices(), (2, -1))),
        TypeError,
        "takes a sequence of devices",
    ),
    "load": (lambda: untyped.plan.load(3), TypeError, "load takes a file"),
    "costs": (lambda: untyped.plan.read_costs(3), TypeError, "takes the path"),
    "overrides": (
        lambda: untyped.plan.load_cluster("star", "rate=1Gbit"),
        TypeError,
        'overrides are settings by name, such as {"rate": "1Gbit"}',
    ),
    "simulation": (
        lambda: untyped.plan.Simulation(untyped.plan.load_cluster("star")),
        TypeError,
        "Simulation takes a topology",
    ),
    "chosen": (
        lambda: untyped.plan.plan(
            untyped.plan.load_cluster("star"),
            untyped.plan.workload(1e6, 10),
            chosen=untyped.plan.Method("int8", "ring"),
        ),
        TypeError,
        r"write chosen=\[plan.Method",
    ),
    "skips": (lambda: untyped.algorithms.circulant(3), TypeError, "skips are numbers"),
    "grid": (
        lambda: untyped.algorithms.halving_doubling("spread", 2, grid=4),
        TypeError,
        "grid has the switches",
    ),
    "no grid": (
        lambda: untyped.algorithms.halving_doubling("spread", 2, grid=()),
        TypeError,
        "grid has the switches",
    ),
    "no devices of a switch": (
        lambda: untyped.algorithms.halving_doubling("spread", 0),
        ValueError,
        "are positive, got 0",
    ),
    "devices of a switch": (
        lambda: untyped.algorithms.halving_doubling("spread", "a"),
        ValueError,
        "are positive, got 'a'",
    ),
    "resize": (
        lambda: untyped.resize_state("x", (), ()),
        TypeError,
        "resize_state needs an optax transformation",
    ),
    "dense_first": (
        lambda: untyped.dense_first("x", 3),
        TypeError,
        "dense_first needs an optax transformation as inner",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_type_is_a_line(name: str) -> None:
    call, kind, words = WRONG[name]
    with pytest.raises(kind, match=words):
        call()


def params() -> Any:
    return jaxcomm.replicate({"w": jnp.ones((4, 8, 8)), "v": jnp.ones((8, 4))})


SCHEDULE = optax.constant_schedule(1.0)
MASKED = optax.masked(optax.sgd(1.0), True)


@pytest.mark.parametrize("behind", [optax.sgd(1.0), optax.sgd(SCHEDULE), MASKED])
def test_sgd_behind_an_optimizer_would_climb(mesh8: Any, behind: Any) -> None:
    adam = jaxcomm.factored_adam(jaxcomm.mean("data"), 0.1)
    with jax.set_mesh(mesh8):
        with pytest.raises(ValueError, match="which would reverse the sign of its updates"):
            optax.chain(adam, behind).init(params())
        with pytest.raises(ValueError, match="one_bit_adam is an optimizer, and another"):
            optax.chain(jaxcomm.one_bit_adam("data", 0.1, dense_steps=2), behind).init(params())
        optax.chain(adam, optax.apply_if_finite(optax.identity(), 3), optax.scale(0.5)).init(
            params()
        )


def test_a_stage_that_exchanges_nothing(mesh8: Any) -> None:
    with jax.set_mesh(mesh8), pytest.raises(ValueError, match="a stage exchanges nothing"):
        jaxcomm.stages((0, jaxcomm.mean("data")), (5, optax.sgd(1.0))).init(params())


def test_attach_needs_the_parameters_of_its_state(mesh8: Any) -> None:
    exchange = jaxcomm.in_backward(jaxcomm.mean("data"), ["w"])
    with jax.set_mesh(mesh8):
        state = exchange.init(params())
        with pytest.raises(ValueError, match="the state is that of a parameter w, which"):
            exchange.attach({"u": jnp.ones((4, 8, 8)), "v": jnp.ones((8, 4))}, state)


def test_whole_leaves_of_a_mesh_with_both_kinds_of_axes_compile_once() -> None:
    types = (jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto)
    mesh = jax.sharding.Mesh(np.reshape(jax.devices()[:4], (2, 2)), ("data", "fsdp"), types)
    tx = optax.chain(jaxcomm.mean("data"), optax.sgd(0.1))

    @jax.jit
    def step(p: Any, s: Any, x: Any) -> Any:
        def loss(p: Any, x: Any) -> Any:
            p = jaxcomm.gather(p, within="fsdp")
            return jnp.mean((x @ p["w"] + p["b"][None]) ** 2)

        _, grads = jaxcomm.value_and_grad(loss, "data")(p, x)
        updates, s = tx.update(grads, s, p)
        return optax.apply_updates(p, updates), s

    with jax.set_mesh(mesh):
        p = jaxcomm.shard({"w": jnp.ones((8, 8)), "b": jnp.zeros(8)}, "fsdp")
        s, x = tx.init(p), jaxcomm.global_batch(np.ones((16, 8), np.float32), ("data", "fsdp"))
        for _ in range(3):
            p, s = step(p, s, x)
    assert step._cache_size() == 1
