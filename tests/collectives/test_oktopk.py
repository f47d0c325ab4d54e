"""Ok-Topk: thresholds and boundaries that are re-used, and sums that are handed over."""

from collections.abc import Callable

import numpy as np
import pytest
from jax.sharding import Mesh

import sparse_oracles
from jaxcomm import sparse
from sparse_table import K, N, exchanged, normal

MakeMesh = Callable[[int], Mesh]


@pytest.mark.parametrize("world", [2, 4])
def test_all_that_is_selected_in_one_region(make_mesh: MakeMesh, world: int) -> None:
    """With boundaries from another distribution, min(1, slack / N) is delivered all the same."""
    mesh, slack = make_mesh(world), 2.0
    algorithm = sparse.oktopk(slack=slack, common_slack=1.0)
    _, carried = exchanged(normal(world), mesh, algorithm)
    x = np.zeros((world, N), np.float32)
    x[:, -N // (2 * world) :] = normal(world, N // (2 * world)) + np.float32(5)
    outcome, carried = exchanged(x, mesh, algorithm, 1, carried)
    assert (
        outcome.delivered >= np.minimum(1, slack / world) * np.minimum(K, outcome.selected)
    ).all()
    # The owner of that region has all large sums: it hands them over, so all find room.
    assert (outcome.applied == np.minimum(outcome.wanted, world * -(-K // world))).all()
    assert (outcome.applied > -(-K // world)).all() or world == 1
    # New boundaries give everyone a part of it.
    outcome, _ = exchanged(x, mesh, algorithm, 64, carried)
    if world * 256 <= N // (2 * world):
        assert (outcome.delivered == outcome.selected).all()


def test_what_is_handed_over_comes_to_its_place(make_mesh: MakeMesh) -> None:
    """Owners of several regions have large sums, the last more than its message has room for."""
    world = 3
    mesh = make_mesh(world)
    algorithm = sparse.oktopk(slack=20.0, common_slack=world / 2, recompute_every=1)
    _, carried = exchanged(normal(world), mesh, algorithm)
    x = normal(world, seed=1) * np.linspace(1, 3, N, dtype=np.float32)
    outcome, _ = exchanged(x, mesh, algorithm, 1, carried)
    assert (outcome.delivered == outcome.selected).all()
    applied = outcome.mean[0] != 0
    per_region = np.add.reduceat(applied, np.arange(world) * N // world)
    assert per_region[-1] > K // 2 and (per_region > 0).sum() > 1
    wanted, _ = sparse_oracles.topk(x, outcome.delivered)
    np.testing.assert_allclose(world * outcome.mean[0][applied], wanted[applied], rtol=1e-5)


def test_thresholds_are_reused_and_follow_the_count(make_mesh: MakeMesh) -> None:
    """Both thresholds: that of the values, and that of the sums."""
    algorithm = sparse.oktopk(recompute_every=4, tolerance=None)
    mesh, x = make_mesh(3), normal(3)
    _, first = exchanged(x, mesh, algorithm, 0)
    outcome, second = exchanged(2 * x, mesh, algorithm, 1, first)
    assert (outcome.selected > 2 * K).all() and (4 * outcome.wanted > 5 * K).all()
    np.testing.assert_allclose(second[:, :2], first[:, :2] * 1.012, rtol=1e-6)
    outcome, third = exchanged(0.5 * x, mesh, algorithm, 2, first)
    assert (outcome.selected < K).all() and (3 * outcome.wanted < 2 * K).all()
    np.testing.assert_allclose(third[:, :2], first[:, :2] / 1.012, rtol=1e-6)
    outcome, _ = exchanged(2 * x, mesh, algorithm, 4, first)
    assert (outcome.selected == K).all()


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_thresholds_far_off_are_found_anew(make_mesh: MakeMesh, factor: float) -> None:
    algorithm = sparse.oktopk(recompute_every=100, tolerance=1.5)
    mesh, x = make_mesh(3), normal(3)
    _, first = exchanged(x, mesh, algorithm, 0)
    outcome, second = exchanged(factor * x, mesh, algorithm, 1, first)
    assert (outcome.selected == K).all()
    np.testing.assert_allclose(second[:, 0], factor * first[:, 0], rtol=1e-6)
    assert (outcome.wanted != K).all() and (second[:, 1] == 0).all()  # the sums, a step later
    outcome, third = exchanged(factor * x, mesh, algorithm, 2, second)
    assert (outcome.wanted == K).all()
    np.testing.assert_allclose(third[:, 1], factor * first[:, 1], rtol=1e-6)
    outcome, _ = exchanged(1.01 * x, mesh, algorithm, 1, first)  # close enough
    assert (outcome.selected != K).all()
