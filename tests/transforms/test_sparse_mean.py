"""`jaxcomm.sparse_mean`: its laws, in both views, for every algorithm."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import collectives
from transforms.both_views import SHAPES, VIEWS, View, gradients, jit_update, place

WORLD = 4
LARGE = ("head", "kernel")
ALGORITHMS = list(collectives.SPARSE_BY_NAME)


def ids(view: View) -> str:
    return view.name


def run(view: View, tx: Any, steps: list[Any]) -> tuple[list[Any], list[Any], Any]:
    """The updates and states of some steps, and the jitted update."""
    with jax.set_mesh(view.mesh(WORLD)):
        params = place(view, {name: jnp.zeros(shape) for name, shape in SHAPES.items()})
        state, update = tx.init(params), jit_update(view, tx, params)
        all_updates, states = [], []
        for grads in steps:
            updates, state = update(place(view, grads, "data"), state)
            all_updates.append({name: np.asarray(u) for name, u in updates.items()})
            states.append(jax.tree.map(np.asarray, state))
    return all_updates, states, update


@pytest.mark.newest
@pytest.mark.parametrize("view", VIEWS, ids=ids)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_updates_and_residuals_add_up_to_the_gradients(view: View, algorithm: str) -> None:
    tx = jaxcomm.sparse_mean("data", 0.1, algorithm, bucket_mib=1e-4)
    steps = [gradients(WORLD, seed) for seed in range(5)]
    all_updates, states, update = run(view, tx, steps)
    assert update._cache_size() == 1
    applied: Any = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    wanted: Any = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for grads, updates, state in zip(steps, all_updates, states, strict=True):
        residual = dict(zip(LARGE, state.residual.values, strict=True))
        for name in SHAPES:
            applied[name] += updates[name].astype(np.float64)
            wanted[name] += grads[name].astype(np.float64).mean(0)
            owed = residual[name].astype(np.float64).mean(0) if name in LARGE else 0
            np.testing.assert_allclose(applied[name] + owed, wanted[name], atol=1e-5)
    assert all(0 < (u["head"] != 0).mean() < 0.9 for u in all_updates)
