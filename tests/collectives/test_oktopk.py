"""Ok-Topk: what is delivered, applied and sent, its owners, and a threshold that is re-used."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxcomm
import sparse_oracles
from jaxcomm import sparse
from jaxcomm.collectives.sparse._owners import Owners
from jaxcomm.kernels import select
from sparse_table import DENSITY, K, N, compiled, exchanged, normal

MakeMesh = Callable[[int], Mesh]
WORLDS = [pytest.param(2, marks=pytest.mark.slow), 4, 8]


def hard_to_divide(world: int) -> list[np.ndarray]:
    """Steps whose large values move, gather in one place, or lie in columns."""
    moving = []
    for step in range(world):
        x = normal(world, seed=step)
        x[:, step * N // world : (step + 1) * N // world] *= 100
        moving.append(x)
    first = normal(world)
    first[:, :300] *= 100
    apart = normal(world)
    for r, row in enumerate(apart):
        row[r * N // world : (r + 1) * N // world] *= 100
    columns = normal(world)
    columns.reshape(world, -1, 64)[:, :, 5] *= 100
    return [*moving, first, apart, columns]


@pytest.mark.parametrize("world", WORLDS)
def test_what_is_selected_is_delivered(make_mesh: MakeMesh, world: int) -> None:
    """With the defaults, in steps that re-use the threshold and in those that do not."""
    thresholds = None
    for step, x in enumerate(hard_to_divide(world)):
        outcome, thresholds = exchanged(x, make_mesh(world), sparse.oktopk(), step, thresholds)
        assert (outcome.selected >= 0.8 * K).all() and (outcome.selected <= 1.25 * K).all()
        assert outcome.delivered.sum() >= 0.95 * outcome.selected.sum(), step


@pytest.mark.parametrize("world", WORLDS)
def test_equal_values_fill_the_messages(make_mesh: MakeMesh, world: int) -> None:
    """Everyone chooses the same of them, and those that had to wait are then the largest."""
    x, thresholds, sent = np.ones((world, N), np.float32), None, 0
    for step in range(2):
        outcome, thresholds = exchanged(x, make_mesh(world), sparse.oktopk(), step, thresholds)
        assert outcome.delivered.sum() >= 0.95 * world * K
        assert (np.unique(outcome.mean[0]) == [0, 1 + step]).all()
        sent, x = sent + (outcome.mean[0] != 0), outcome.errors + 1
    assert sent.max() == 1


@pytest.mark.parametrize("world", WORLDS)
def test_about_the_largest_sums_are_applied(make_mesh: MakeMesh, world: int) -> None:
    """Of those close to the k-th sum, the deal decides; all that are far above it arrive."""
    x = normal(world) * np.linspace(0.1, 2, N, dtype=np.float32)
    outcome, _ = exchanged(x, make_mesh(world), sparse.oktopk(slack=20.0))
    sums = np.abs(sum(sparse_oracles.largest(row, K) for row in x))
    ranks = np.argsort(np.argsort(-sums))
    applied = outcome.mean[0] != 0
    assert applied.sum() == world * -(-K // world)
    assert applied[ranks < 0.5 * K].all() and not applied[ranks > 1.7 * K].any()


@pytest.mark.parametrize("world", WORLDS)
def test_bytes_beside_the_paper(make_mesh: MakeMesh, world: int) -> None:
    """In every step 0.6 of 6 k (N-1)/N words of 4 bytes, and nothing in conditionals."""
    n = 2**18
    k = round(DENSITY * n)
    program = compiled(make_mesh(world), sparse.oktopk(), n)
    collectives = jaxcomm.wire_report(program).collectives
    assert [c.op for c in collectives] == ["all-to-all", "all-gather"]
    assert sum(max(c.sent) for c in collectives) <= 0.601 * 24 * k * (world - 1) / world


@pytest.mark.parametrize(("n", "world"), [(1, 3), (4096, 1), (4096, 8), (5000, 7), (2**19, 6)])
def test_owners(n: int, world: int) -> None:
    places = jnp.arange(n, dtype=jnp.int32)
    hits = []
    for step in range(3):
        owners = Owners(n, world, jnp.int32(step))
        owner = np.asarray(owners.of(places))
        np.testing.assert_array_equal(owners.places(owner, places // world), places)
        assert owner.min() >= 0 and owner.max() < world
        # Every N places in a row have N owners, and so has what lies N places apart.
        for row in owner[: n // world * world].reshape(-1, world):
            assert len(np.unique(row)) == world
        counts = np.bincount(owner[::world], minlength=world)
        mean = len(owner[::world]) / world
        assert np.abs(counts - mean).max() <= 5 * np.sqrt(mean) + 1
        hits.append(owner)
    # Another step deals anew: a place keeps its owner in one of N steps.
    same = np.mean(hits[1] == hits[0])
    assert abs(same - 1 / world) <= 5 * np.sqrt(1 / n)


def test_what_has_no_room_is_kept_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row has the first entries of its owner, and the others are in no row."""
    n, world, room = 3000, 3, 40
    owners = Owners(n, world, jnp.int32(5))
    x = jnp.asarray(normal(1, n)[0])
    found = select.compact(x, jnp.float32(1.8), 300)
    dealt = owners.deal(found, room)
    owner = np.asarray(owners.of(found.indices))
    for r in range(world):
        wanted = np.asarray(found.indices)[(owner == r) & (np.asarray(found.indices) < n)]
        assert len(wanted) > room
        np.testing.assert_array_equal(dealt.places[r], wanted[:room])
        np.testing.assert_array_equal(dealt.values[r], x[wanted[:room]])
    np.testing.assert_array_equal(owners.deal(found, 100).places[0][-1:], [n])
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **_: default(*args))
    jax.tree.map(np.testing.assert_array_equal, owners.deal(found, room), dealt)


def test_a_threshold_is_reused_and_follows_the_count(make_mesh: MakeMesh) -> None:
    algorithm = sparse.oktopk(slack=6.0, recompute_every=4, tolerance=None)
    mesh, x = make_mesh(3), normal(3)
    _, first = exchanged(x, mesh, algorithm, 0)
    outcome, second = exchanged(1.2 * x, mesh, algorithm, 1, first)
    assert (4 * outcome.selected > 5 * K).all()
    np.testing.assert_allclose(second, first * 1.012, rtol=1e-6)
    outcome, third = exchanged(0.5 * x, mesh, algorithm, 2, first)
    assert (3 * outcome.selected < 2 * K).all()
    np.testing.assert_allclose(third, first / 1.012, rtol=1e-6)
    outcome, fourth = exchanged(1.2 * x, mesh, algorithm, 4, first)
    assert (outcome.selected == K).all()
    np.testing.assert_allclose(fourth, first * 1.2, rtol=1e-6)


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_threshold_far_off_is_found_anew(make_mesh: MakeMesh, factor: float) -> None:
    algorithm = sparse.oktopk(slack=20.0, recompute_every=100, tolerance=1.5)
    mesh, x = make_mesh(3), normal(3)
    _, first = exchanged(x, mesh, algorithm, 0)
    outcome, second = exchanged(factor * x, mesh, algorithm, 1, first)
    assert (outcome.selected == K).all()
    np.testing.assert_allclose(second, factor * first, rtol=1e-6)
    outcome, _ = exchanged(1.01 * x, mesh, algorithm, 1, first)  # close enough
    assert (outcome.selected != K).all()
    # Without a tolerance it waits, unless messages lack room.
    waiting = dataclasses.replace(algorithm, tolerance=None)
    outcome, _ = exchanged(factor * x, mesh, waiting, 1, first)
    assert (outcome.selected != K).all()
    tight = dataclasses.replace(waiting, slack=1.4)
    outcome, _ = exchanged(factor * x, mesh, tight, 1, first)
    assert ((outcome.selected == K) == (factor > 1)).all()


@pytest.mark.parametrize("factor", [0.0, 0.98, 1.0, 1.5])
@pytest.mark.parametrize("step", [0, 5])
def test_gpus_find_what_cpus_find(
    monkeypatch: pytest.MonkeyPatch, step: int, factor: float
) -> None:
    """They look for a threshold in every step, in place of a branch."""
    x = np.random.default_rng(1).standard_normal(5000).astype(np.float32)
    ties = x.copy()
    ties[::7] = 2.5  # more than there is room for
    method, exact = sparse.oktopk(), np.sort(np.abs(x))[-50]
    vectors = [jnp.asarray(values) for values in (x, ties)]

    def found() -> list:
        return [method.about_k(v, jnp.float32(factor * exact), step, 70) for v in vectors]

    wanted = found()
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **_: default(*args))
    jax.tree.map(np.testing.assert_array_equal, found(), wanted)


def test_the_threshold_of_a_long_vector_is_that_of_a_sample(make_mesh: MakeMesh) -> None:
    """About k values are selected, and sent, though nothing of x is sorted."""
    n, k = 2**20, round(2**20 * DENSITY)
    x = normal(2, n)
    for cubed in (x, x**3, np.where(x > 0, x, 0)):
        outcome, _ = exchanged(cubed, make_mesh(2), sparse.oktopk())
        assert (outcome.selected > 0.9 * k).all() and (outcome.selected < 1.2 * k).all()
        assert outcome.delivered.sum() > 0.99 * outcome.selected.sum()
