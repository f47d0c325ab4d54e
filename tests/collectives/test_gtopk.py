"""gTopk: which of equal values survive, and what the device that answers sends."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from jax.sharding import Mesh

import jaxcomm
import sparse_oracles
from jaxcomm import sparse
from sparse_table import K, N, compiled, exchanged, normal

MakeMesh = Callable[[int], Mesh]


@pytest.mark.parametrize("world", [3, 4])
def test_of_equal_magnitudes_the_lower_place_survives(make_mesh: MakeMesh, world: int) -> None:
    """Every device has K values of magnitude 1, at places of its own and some of all."""
    rng, mesh = np.random.default_rng(world), make_mesh(world)
    x = np.zeros((world, N), np.float32)
    for row in x:
        row[rng.choice(5 * K, K, replace=False)] = rng.choice([-1, 1], K)
    outcome, _ = exchanged(x, mesh, sparse.gtopk())
    total, alive = sparse_oracles.gtopk(x, outcome.delivered)
    assert (np.abs(total) == 1).any() and np.abs(total).max() > 1
    np.testing.assert_array_equal(world * outcome.mean[0], total)
    np.testing.assert_array_equal(outcome.errors, np.where(alive, 0, x))

    entries = 6 * K
    sent = jaxcomm.wire_report(compiled(mesh, sparse.gtopk())).bytes_max
    assert sent == {3: 2 * entries + 4 * math.ceil(K / 32), 4: 2 * entries}[world]


def test_a_threshold_is_used_again(make_mesh: MakeMesh) -> None:
    """Though more than k values reach it; what is sent are the k largest."""
    mesh, algorithm = make_mesh(4), sparse.gtopk(recompute_every=32)
    x = normal(4)
    _, thresholds = exchanged(x, mesh, algorithm)
    outcome, again = exchanged(1.01 * x, mesh, algorithm, 1, thresholds)
    np.testing.assert_array_equal(again, thresholds)
    assert (outcome.selected >= K).all() and (outcome.selected > K).any()
    total, alive = sparse_oracles.gtopk(1.01 * x, outcome.delivered)
    np.testing.assert_allclose(4 * outcome.mean[0], total, atol=1e-5)
    np.testing.assert_array_equal(outcome.taken, alive)
