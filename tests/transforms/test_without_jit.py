"""What works in a region of the user's own also works there without `jax.jit`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomm

WORLD = 2
MEAN = jaxcomm.mean("data", "int8", error_feedback=True)
METHODS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "mean": lambda: MEAN,
    "vote": lambda: jaxcomm.majority_vote("data"),
    "sparse": lambda: jaxcomm.sparse_mean("data", 0.5),
    "low rank": lambda: jaxcomm.low_rank_mean("data", 1),
    "local": lambda: optax.chain(jaxcomm.local("data", optax.trace(0.9)), MEAN),
    "factored Adam": lambda: jaxcomm.factored_adam(MEAN, 0.1),
    "1-bit Adam": lambda: jaxcomm.one_bit_adam("data", 0.1, dense_steps=1),
    "accumulated": lambda: jaxcomm.multi_steps(optax.chain(MEAN, optax.sgd(1.0)), 2),
}


# Each takes seconds to compile, and the checks of `jax.shard_map` are for all methods the same.
CASES = [(name, True) for name in METHODS] + [("mean", False), ("1-bit Adam", False)]


@pytest.mark.standard_promotion
@pytest.mark.parametrize(("name", "checks"), CASES)
def test_updates(name: str, checks: bool) -> None:
    tx = METHODS[name]()

    def updated(x: jax.Array) -> Any:
        params = {"w": jnp.ones((3, 4))}
        loss_fn = lambda params, x: jnp.sum(params["w"] * x[0])  # noqa: E731
        _, grads = jaxcomm.value_and_grad(loss_fn, "data")(params, x)
        return tx.update(grads, tx.init(params), params)[0]["w"]

    x = jnp.asarray(np.random.default_rng(0).standard_normal((WORLD, 3, 4)), jnp.float32)
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:WORLD])):
        f = jax.shard_map(updated, in_specs=P("data"), out_specs=P(), check_vma=checks)
        found = f(x)  # each call of a region without jax.jit compiles it anew
        np.testing.assert_allclose(found, jax.jit(f)(x), rtol=1e-6)
        assert name == "accumulated" or np.abs(found).max() > 0


@pytest.mark.parametrize("checks", [True, False])
def test_pmean(checks: bool) -> None:
    mesh = jaxcomm.data_mesh(devices=jax.devices()[:WORLD])
    pmean = lambda x: jaxcomm.pmean(x, "data", "bfloat16")  # noqa: E731
    f = jax.shard_map(pmean, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=checks)
    np.testing.assert_array_equal(f(jnp.arange(4.0)), [1, 2])
