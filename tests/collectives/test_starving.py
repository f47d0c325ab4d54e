"""Nothing waits for ever, wherever the large values lie; laws of conservation do not see that."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxcomm
from jaxcomm import sparse
from jaxcomm.kernels.select.threshold import _RUN, _stride
from sparse_table import exchanged

N, DENSITY, LARGE = 4096, 0.02, 82


@pytest.mark.parametrize("name", sparse.BY_NAME)
def test_nothing_waits_for_ever(make_mesh: Callable[[int], Mesh], name: str) -> None:
    """The same gradient in every step: a residual over it is for how many steps it has waited."""
    algorithm = dataclasses.replace(sparse.BY_NAME[name](), density=DENSITY)
    mesh, large = make_mesh(4), slice(N - LARGE, N)
    gradient = np.random.default_rng(0).uniform(0.5, 1.0, (4, N)).astype(np.float32)
    gradient[:, large] *= 10
    x, thresholds = gradient, None
    for step in range(60):
        outcome, thresholds = exchanged(x, mesh, algorithm, step, thresholds)
        x = outcome.errors + gradient
    # As many values as are sent in a step are ten times larger than the others.
    assert np.max((outcome.errors / gradient)[:, large]) < 20


@pytest.mark.parametrize("name", ["oktopk", "gaussiank"])
def test_nothing_waits_that_is_not_in_a_sample(make_mesh: Callable[[int], Mesh], name: str) -> None:
    """The large values of a long vector, five steps' worth, are all left out of four samples."""
    n, k = 2**18, round(2**18 * DENSITY)
    algorithm = dataclasses.replace(sparse.BY_NAME[name](), density=DENSITY)
    stride = _stride(n, 1000 * n // k)
    large = (np.arange(n) // _RUN % stride == 1) & (np.arange(n) > n // 2)
    gradient = np.random.default_rng(0).uniform(0.5, 1.0, (2, n)).astype(np.float32)
    gradient[:, large] *= 10
    x, thresholds = gradient, None
    for step in range(60):
        outcome, thresholds = exchanged(x, make_mesh(2), algorithm, step, thresholds)
        x = outcome.errors + gradient
    assert stride == 5 and large.sum() > 4.9 * k
    assert np.max((outcome.errors / gradient)[:, large]) < 45


@pytest.mark.parametrize("name", ["oktopk", "topk_dsa"])
def test_a_small_leaf_of_large_values(make_mesh: Callable[[int], Mesh], name: str) -> None:
    """All of the largest values lie in one region, whose message has room for a part of them."""
    tx, shapes = jaxcomm.sparse_mean("data", 0.01, name), {"a": (20, 20), "z": (396, 100)}
    rng = np.random.default_rng(0)
    with jax.set_mesh(make_mesh(4)):
        params = jaxcomm.replicate({key: jnp.zeros(shape) for key, shape in shapes.items()})
        state, update = tx.init(params), jax.jit(tx.update)
        updated = np.zeros(shapes["a"], bool)
        for _ in range(40):
            grads = {key: rng.standard_normal((4, *shape)) for key, shape in shapes.items()}
            grads = {"a": np.float32(10 * grads["a"]), "z": np.float32(grads["z"])}
            updates, state = update(grads, state)
            updated |= np.asarray(updates["a"]) != 0
    assert updated.all()
