"""State that differs from device to device cannot pass as replicated."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxcomm

METHODS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "residual": lambda: jaxcomm.mean("data", "bfloat16", error_feedback=True),
    "votes": lambda: jaxcomm.majority_vote("data", error_feedback=True),
    "TopkA": lambda: jaxcomm.sparse_mean("data", 0.1, "topk_allgather"),
    "PowerSGD": lambda: jaxcomm.low_rank_mean("data", 1),
    "1-bit Adam": lambda: jaxcomm.one_bit_adam("data", 0.1, dense_steps=1),
    "factored Adam": lambda: jaxcomm.factored_adam(
        jaxcomm.mean("data", "int8", error_feedback=True), 0.1
    ),
    "local": lambda: optax.chain(jaxcomm.local("data", optax.trace(0.9)), jaxcomm.mean("data")),
    "local steps": lambda: jaxcomm.local_steps(
        optax.sgd(0.1), 2, optax.sgd(1.0), jaxcomm.mean("data")
    ),
    "multi_steps": lambda: jaxcomm.multi_steps(jaxcomm.mean("data"), 2),
    "control variates": lambda: optax.chain(
        jaxcomm.control_variates(jaxcomm.mean("data")), jaxcomm.majority_vote("data")
    ),
}


@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_a_wrong_spec_is_refused_with_the_right_one(
    name: str, checks: bool, make_mesh: Any
) -> None:
    tx, P = METHODS[name](), jax.P
    with jax.set_mesh(make_mesh(4)):
        state = tx.init(jnp.zeros((4, 8)))

        def step(grads: Any, state: Any) -> Any:
            return tx.update(jaxcomm.mark_local(grads[0]), state)

        wrong = jax.shard_map(
            step, in_specs=(P("data"), P()), out_specs=(P(), P()), check_vma=checks
        )
        with pytest.raises(ValueError, match=r"leading axis of 4 here, expected 1.*state_spec\(tx"):
            jax.eval_shape(wrong, jnp.zeros((4, 4, 8)), state)


@pytest.mark.parametrize("name", [x for x in METHODS if x != "local steps"])
def test_along_explicit_axes_replicated_state_is_refused(name: str) -> None:
    """Along automatic axes XLA spreads it over the devices, as it was."""
    tx, kinds = METHODS[name](), (AxisType.Explicit,)
    with jax.set_mesh(jax.make_mesh((4,), ("data",), kinds, devices=jax.devices()[:4])):
        params = jaxcomm.replicate(jnp.zeros((4, 8)))
        grads = jaxcomm.mark_local(jaxcomm.global_batch(np.zeros((4, 4, 8), np.float32), "data"))
        jax.eval_shape(tx.update, grads, tx.init(params), params)
        with pytest.raises(ValueError, match="as it is, without jaxcomm.replicate"):
            jax.eval_shape(tx.update, grads, everywhere(tx.init(params)), params)


def everywhere(state: Any) -> Any:
    """Every array on all devices, as plain jax does it; `jaxcomm.replicate` refuses it."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.P(*[None] * x.ndim)), state)
