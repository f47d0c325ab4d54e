"""Accumulation over steps: the same mean, one exchange in k."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from transforms.both_views import VIEWS, gradients, jit_update, place

GLOBAL = VIEWS[0]


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
def test_k_steps_are_one_step_on_the_mean(view: Any, codec: str) -> None:
    k, steps = 3, 7
    inner = optax.chain(jaxcomm.mean("data", codec), optax.sgd(1.0, momentum=0.9))
    tx = jaxcomm.multi_steps(inner, k)
    batches = [gradients(4, seed) for seed in range(steps)]
    with jax.set_mesh(view.mesh(4)):
        params = place(view, {name: jnp.zeros(g.shape[1:]) for name, g in batches[0].items()})
        step, state = jit_update(view, tx, params), tx.init(params)
        reference = jit_update(view, inner, params)
        inner_state = inner.init(params)
        for i, grads in enumerate(batches):
            updates, state = step(place(view, grads, "data"), state)
            if (i + 1) % k:
                assert all((np.asarray(u) == 0).all() for u in updates.values())
                continue
            mean = {n: np.mean([b[n] for b in batches[i + 1 - k : i + 1]], 0) for n in grads}
            expected, inner_state = reference(place(view, mean, "data"), inner_state)
            for name in grads:
                tolerance = 1e-5 if codec == "float32" else 2e-2
                np.testing.assert_allclose(updates[name], expected[name], atol=tolerance)
        assert step._cache_size() == 1
    assert state.mini_step == steps % k


@pytest.mark.newest
@pytest.mark.parametrize("view", VIEWS[:2], ids=lambda view: view.name)
def test_bytes_over_k_steps(view: Any) -> None:
    inner = jaxcomm.mean("data", "bfloat16")
    with jax.set_mesh(view.mesh(4)):
        grads = place(view, gradients(4), "data")
        params = place(view, {name: jnp.zeros(g.shape[1:]) for name, g in grads.items()})

        def report(tx: Any) -> jaxcomm.WireReport:
            step = jit_update(view, tx, params).lower(grads, tx.init(params))
            return jaxcomm.wire_report(step.compile())

        every, once_in_k = report(inner), report(jaxcomm.multi_steps(inner, 5))
    waiting, exchanging = (
        sum(max(c.sent) for c in once_in_k.collectives if c.branch[-1][1] == taken)
        for taken in (0, 1)
    )
    assert waiting == 0
    assert exchanging == every.bytes_max
    assert all(c.branch for c in once_in_k.collectives)


def test_a_bad_gradient_spoils_its_k_steps_and_no_further() -> None:
    tx = jaxcomm.multi_steps(jaxcomm.mean("data"), 2)
    good, bad = gradients(4), gradients(4)
    bad["kernel"][1, 0, 0] = np.nan
    with jax.set_mesh(GLOBAL.mesh(4)):
        state = tx.init({name: jnp.zeros(g.shape[1:]) for name, g in good.items()})
        step = jax.jit(tx.update)
        for grads, expected in [(bad, 0.0), (good, np.nan), (good, 0.0)]:
            updates, state = step(grads, state)
            np.testing.assert_array_equal(updates["bias"], np.full(6, expected))
        updates, _ = step(good, state)
    np.testing.assert_allclose(updates["bias"], good["bias"].mean(0), atol=1e-6)


def test_the_accumulator_is_sharded_and_its_spec_says_so(mesh8: Any) -> None:
    tx = jaxcomm.multi_steps(optax.chain(jaxcomm.mean("data"), optax.adam(1e-3)), 2)
    params = {"w": jnp.zeros((4, 2)), "b": jnp.zeros(2)}
    with jax.set_mesh(mesh8):
        state = tx.init(params)
    spec = jaxcomm.state_spec(tx, params, mesh8)
    assert jax.tree.structure(spec) == jax.tree.structure(state)
    assert spec.accumulated.values == [jax.sharding.PartitionSpec("data")] * 2
    assert spec.mini_step == jax.sharding.PartitionSpec()
    for array in state.accumulated.values:
        assert array.shape[0] == 8
        assert all(shard.data.shape[0] == 1 for shard in array.addressable_shards)


@pytest.mark.parametrize("k", [0, -2, 1.0])
def test_k_must_be_a_positive_integer(k: Any) -> None:
    with pytest.raises(ValueError, match="positive number of steps"):
        jaxcomm.multi_steps(jaxcomm.mean("data"), k)


def test_an_inner_transformation_without_an_exchange_is_refused(mesh8: Any) -> None:
    with jax.set_mesh(mesh8), pytest.raises(ValueError, match="put jaxcomm.mean into it"):
        jaxcomm.multi_steps(optax.sgd(0.1), 2).init({"w": jnp.zeros(3)})
