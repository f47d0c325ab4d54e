"""Sparse all-reduces against their oracles, their laws, and the bytes that they send."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jaxcomm
import sparse_oracles
from jaxcomm import sparse
from jaxcomm.collectives.sparse import Carried, SparseResult

WORLDS = [1, 2, 3, 4, 5, 8]
N, DENSITY = 4096, 0.02
K = round(N * DENSITY)
# With room for all, and thresholds that are exact in every step.
ROOMY: dict[str, sparse.SparseAllReduce] = {
    "topk_allgather": jaxcomm.sparse.topk_allgather(),
    "topk_dsa": jaxcomm.sparse.topk_dsa(slack=20.0),
    "gtopk": jaxcomm.sparse.gtopk(),
    "gaussiank": jaxcomm.sparse.gaussiank(),
    "oktopk": jaxcomm.sparse.oktopk(
        slack=20.0, common_slack=20.0, recompute_every=1, rebalance_every=1
    ),
}

MakeMesh = Callable[[int], Mesh]


@functools.cache  # inputs are many, programs few
def compiled(
    mesh: Mesh, algorithm: sparse.SparseAllReduce, density: float = DENSITY
) -> Callable[..., Any]:
    """From (world, n), packed carried (world, N + 3) and a step to what every device has."""
    algorithm = dataclasses.replace(algorithm, density=density)

    def one(x: jax.Array, carried: jax.Array, step: jax.Array) -> Any:
        before = Carried.unpacked(carried[0], x.shape[1])
        outcome, after = algorithm.exchange(x[0], before, step, "data")
        return jax.tree.map(lambda y: y[None], (outcome, after.packed()))

    spec = PartitionSpec("data")
    return jax.jit(
        jax.shard_map(
            one, mesh=mesh, in_specs=(spec, spec, PartitionSpec()), out_specs=spec, check_vma=False
        )
    )


def exchanged(
    x: np.ndarray,
    mesh: Mesh,
    algorithm: sparse.SparseAllReduce,
    step: int = 0,
    carried: np.ndarray | None = None,
    **options: Any,
) -> tuple[SparseResult, np.ndarray]:
    """One step: the outcome, with a leading device axis, and what is carried on."""
    world = len(x)
    if carried is None:
        carried = np.zeros((world, world + 3), np.float32)
    out = compiled(mesh, algorithm, **options)(x, carried, jnp.int32(step))
    return jax.tree.map(np.asarray, out)


def normal(world: int, n: int = N, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((world, n)).astype(np.float32)


def assert_law(x: np.ndarray, outcome: SparseResult) -> None:
    """What is in the mean and what is kept is all there was, and everyone has the same mean."""
    mean = np.asarray(outcome.mean)
    assert (mean == mean[:1]).all()
    total = np.asarray(outcome.errors, np.float64).sum(0) + len(x) * mean[0].astype(np.float64)
    scale = np.abs(x[np.isfinite(x)]).max(initial=1e-30)
    np.testing.assert_allclose(total, x.astype(np.float64).sum(0), atol=2e-6 * len(x) * scale)


def expected_sum(x: np.ndarray, name: str) -> np.ndarray:
    if name == "gtopk":
        return sparse_oracles.gtopk_sum(x, K)[0]
    return (sparse_oracles.oktopk_sum if name == "oktopk" else sparse_oracles.topk_sum)(x, K)


@pytest.mark.newest
@pytest.mark.parametrize("name", ["topk_allgather", "topk_dsa", "gtopk", "oktopk"])
@pytest.mark.parametrize("world", WORLDS)
def test_the_oracle_and_the_law(make_mesh: MakeMesh, world: int, name: str) -> None:
    x = normal(world)
    outcome, _ = exchanged(x, make_mesh(world), ROOMY[name])
    np.testing.assert_allclose(outcome.mean[0] * world, expected_sum(x, name), atol=1e-5)
    assert_law(x, outcome)
    assert (outcome.selected == K).all()
    assert (outcome.delivered == K).all()
    assert (outcome.applied == (expected_sum(x, name) != 0).sum()).all()


@pytest.mark.parametrize("world", [2, 3, 4, 6, 8])
def test_gtopk_keeps_what_did_not_survive(make_mesh: MakeMesh, world: int) -> None:
    x = normal(world)
    outcome, _ = exchanged(x, make_mesh(world), ROOMY["gtopk"])
    _, alive = sparse_oracles.gtopk_sum(x, K)
    np.testing.assert_array_equal(outcome.errors, np.where(alive, 0, x))


@pytest.mark.parametrize("world", [2, 3, 8])
def test_oktopk_keeps_what_was_not_applied(make_mesh: MakeMesh, world: int) -> None:
    x = normal(world)
    outcome, _ = exchanged(x, make_mesh(world), ROOMY["oktopk"])
    applied = sparse_oracles.oktopk_sum(x, K) != 0
    sent = np.array([sparse_oracles.largest(row, K) != 0 for row in x])
    np.testing.assert_array_equal(outcome.errors, np.where(sent & applied, 0, x))


@pytest.mark.parametrize("world", [1, 3, 4])
def test_gaussiank_selects_about_k(make_mesh: MakeMesh, world: int) -> None:
    for x in (normal(world), normal(world) ** 3):
        outcome, _ = exchanged(x, make_mesh(world), jaxcomm.sparse.gaussiank(slack=2.0))
        assert_law(x, outcome)
        assert (outcome.selected > K / 2).all()
        assert (outcome.selected < 2 * K).all()


@pytest.mark.parametrize("name", ["topk_allgather", "topk_dsa", "gaussiank", "oktopk"])
@pytest.mark.parametrize("n", [N, 2**17 + 5])
def test_bfloat16_values_and_who_keeps_what_rounding_takes(mesh8: Mesh, name: str, n: int) -> None:
    algorithm = dataclasses.replace(ROOMY[name], values="bfloat16")
    x = normal(8, n)
    outcome, _ = exchanged(x, mesh8, algorithm)
    assert_law(x, outcome)
    assert np.abs(outcome.errors).max() > 0
    exact, _ = exchanged(x, mesh8, ROOMY[name])
    applied = (exact.mean[0] != 0) & (outcome.mean[0] != 0)
    assert applied.sum() > 0.9 * (exact.mean[0] != 0).sum()
    np.testing.assert_allclose(outcome.mean[0][applied], exact.mean[0][applied], atol=0.02)


@pytest.mark.parametrize("name", list(ROOMY))
@pytest.mark.parametrize("n", [1, 7, 37, 300])
def test_small_vectors(make_mesh: MakeMesh, name: str, n: int) -> None:
    for world in (1, 3, 4):
        x = normal(world, n)
        outcome, _ = exchanged(x, make_mesh(world), ROOMY[name])
        assert_law(x, outcome)
        assert (outcome.mean[0] != 0).any()


def unusual() -> dict[str, np.ndarray]:
    """Vectors that no threshold fits well."""
    one_has_all = normal(4)
    one_has_all[1] = 0
    one_has_all[2] *= 1e6
    one_region = np.zeros((4, N), np.float32)
    one_region[:, : N // 16] = normal(4, N // 16)
    return {
        "zeros": np.zeros((4, N), np.float32),
        "equal": np.ones((4, N), np.float32),
        "one has nothing, one has all": one_has_all,
        "one region": one_region,
        "a single value": np.eye(4, N, 17, dtype=np.float32),
        "huge": normal(4) * np.float32(1e37),
        "tiny": normal(4) * np.float32(1e-37),
    }


@pytest.mark.parametrize("name", list(ROOMY))
@pytest.mark.parametrize("case", unusual())
def test_the_law_holds_whatever_comes(make_mesh: MakeMesh, case: str, name: str) -> None:
    x, mesh = unusual()[case], make_mesh(4)
    tight = dataclasses.replace(sparse.BY_NAME[name](), slack=1.0)
    for algorithm in (ROOMY[name], tight):
        carried, residual = None, np.zeros_like(x)
        for step in range(3):
            outcome, carried = exchanged(x + residual, mesh, algorithm, step, carried)
            assert_law(x + residual, outcome)
            residual = outcome.errors
            assert np.isfinite(outcome.mean).all()
            assert (outcome.delivered <= outcome.selected).all()
            assert (outcome.applied <= outcome.wanted).all()
        if case == "zeros":
            assert (outcome.selected == 0).all()


@pytest.mark.parametrize("world", [2, 4, 8])
def test_all_that_is_selected_in_one_region(make_mesh: MakeMesh, world: int) -> None:
    """With boundaries from another distribution, min(1, slack / N) is delivered all the same."""
    mesh, slack = make_mesh(world), 2.0
    algorithm = jaxcomm.sparse.oktopk(slack=slack, common_slack=1.0)
    _, carried = exchanged(normal(world), mesh, algorithm)
    x = np.zeros((world, N), np.float32)
    x[:, -N // (2 * world) :] = normal(world, N // (2 * world)) + np.float32(5)
    outcome, carried = exchanged(x, mesh, algorithm, 1, carried)
    assert_law(x, outcome)
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


@pytest.mark.parametrize("world", [3, 8])
def test_what_is_handed_over_comes_to_its_place(make_mesh: MakeMesh, world: int) -> None:
    """Owners of several regions have large sums, the last more than its message has room for."""
    mesh = make_mesh(world)
    algorithm = jaxcomm.sparse.oktopk(slack=20.0, common_slack=world / 2, recompute_every=1)
    _, carried = exchanged(normal(world), mesh, algorithm)
    x = normal(world, seed=1) * np.linspace(1, 3, N, dtype=np.float32)
    outcome, _ = exchanged(x, mesh, algorithm, 1, carried)
    assert_law(x, outcome)
    assert (outcome.delivered == outcome.selected).all()
    applied = outcome.mean[0] != 0
    per_region = np.add.reduceat(applied, np.arange(world) * N // world)
    assert per_region[-1] > K // 2 and (per_region > 0).sum() > 1
    wanted = sparse_oracles.topk_sum(x, K)
    np.testing.assert_allclose(world * outcome.mean[0][applied], wanted[applied], rtol=1e-5)


def test_thresholds_are_reused_and_follow_the_count(mesh8: Mesh) -> None:
    algorithm = jaxcomm.sparse.oktopk(recompute_every=4, tolerance=None)
    x = normal(8)
    _, first = exchanged(x, mesh8, algorithm, 0)
    outcome, second = exchanged(2 * x, mesh8, algorithm, 1, first)
    assert (outcome.selected > 2 * K).all()
    np.testing.assert_allclose(second[:, 0], first[:, 0] * 1.012, rtol=1e-6)
    outcome, third = exchanged(0.5 * x, mesh8, algorithm, 2, first)
    assert (outcome.selected < K).all()
    np.testing.assert_allclose(third[:, 0], first[:, 0] / 1.012, rtol=1e-6)
    outcome, _ = exchanged(2 * x, mesh8, algorithm, 4, first)
    assert (outcome.selected == K).all()


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_thresholds_far_off_are_found_anew(mesh8: Mesh, factor: float) -> None:
    algorithm = jaxcomm.sparse.oktopk(recompute_every=100, tolerance=1.5)
    x = normal(8)
    _, first = exchanged(x, mesh8, algorithm, 0)
    outcome, second = exchanged(factor * x, mesh8, algorithm, 1, first)
    assert (outcome.selected == K).all()
    np.testing.assert_allclose(second[:, 0], factor * first[:, 0], rtol=1e-6)
    assert (outcome.wanted != K).all() and (second[:, 1] == 0).all()  # the sums, a step later
    outcome, third = exchanged(factor * x, mesh8, algorithm, 2, second)
    assert (outcome.wanted == K).all()
    np.testing.assert_allclose(third[:, 1], factor * first[:, 1], rtol=1e-6)
    outcome, _ = exchanged(1.01 * x, mesh8, algorithm, 1, first)  # close enough
    assert (outcome.selected != K).all()


def sent(algorithm: sparse.SparseAllReduce, world: int, n: int, mesh: Mesh) -> jaxcomm.WireReport:
    f = compiled(mesh, algorithm)
    arguments = jnp.zeros((world, n)), jnp.zeros((world, world + 3)), jnp.int32(0)
    return jaxcomm.wire_report(f.lower(*arguments).compile())


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("n", [pytest.param(N, marks=pytest.mark.newest), 2**20])
def test_bytes_are_those_of_the_formulas(make_mesh: MakeMesh, world: int, n: int) -> None:
    k, mesh, others = round(n * DENSITY), make_mesh(world), world - 1
    entry = 6 if n <= 2**16 else 8

    room = int(np.ceil(1.25 * k))
    assert sent(jaxcomm.sparse.topk_allgather(), world, n, mesh).bytes_max == others * room * entry
    room = int(np.ceil(1.5 * k))
    assert sent(jaxcomm.sparse.gaussiank(), world, n, mesh).bytes_max == others * room * entry

    q = int(np.log2(world))
    fold = (k * entry + k) * (world > 2**q)
    assert sent(jaxcomm.sparse.gtopk(), world, n, mesh).bytes_max == q * k * entry + fold

    room, width = int(np.ceil(2 * k / world)), -(-n // (world * 256)) * 256
    entry = 6 if width <= 2**16 else 8
    back = min(min(world * room, width) * entry, 4 * width)
    assert sent(jaxcomm.sparse.topk_dsa(), world, n, mesh).bytes_max == others * (
        room * entry + back
    )

    entry = 6 if n <= world * 2**16 else 8
    common = int(np.ceil(1.5 * k / world))
    report = sent(jaxcomm.sparse.oktopk(), world, n, mesh)
    # The second all-to-all hands over.
    assert report.only("all-to-all").bytes_max == others * (room + common) * entry
    gathered = [max(c.sent) for c in report.only("all-gather").collectives]
    assert sorted(gathered) == sorted(others * x for x in (4, common * 4, common * entry))


@pytest.mark.parametrize("name", ["topk_allgather", "topk_dsa", "gaussiank", "oktopk"])
def test_nothing_is_sorted(make_mesh: MakeMesh, name: str) -> None:
    f = compiled(make_mesh(4), sparse.BY_NAME[name]())
    arguments = jnp.zeros((4, N)), jnp.zeros((4, 7)), jnp.int32(0)
    text = f.lower(*arguments).compile().as_text()
    assert not re.search(r"\b(sort|topk|top-k|TopK)\b", text)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: jaxcomm.sparse.topk_allgather(values="float16"),
            ValueError,
            '"float32" or "bfloat16"',
        ),
        (
            lambda: jaxcomm.sparse.topk_dsa(slack=0.5),
            ValueError,
            "slack must be at least 1, got 0.5",
        ),
        (
            lambda: jaxcomm.sparse.oktopk(common_slack=0),
            ValueError,
            "common_slack must be at least 1",
        ),
        (
            lambda: jaxcomm.sparse.oktopk(recompute_every=0),
            ValueError,
            "recompute_every must be a positive",
        ),
        (
            lambda: jaxcomm.sparse.gtopk(scaling=0.9),
            ValueError,
            "scaling must be at least 1, got 0.9",
        ),
        (
            lambda: jaxcomm.sparse.oktopk(tolerance=1.0),
            ValueError,
            "tolerance must be more than 1, or No",
        ),
        (lambda: jaxcomm.sparse.oktopk(rebalance_every=1.5), ValueError, "rebalance_every must be"),  # pyright: ignore
        (
            lambda: sparse.from_name("topk"),
            ValueError,
            "unknown sparse algorithm 'topk'",
        ),
        (lambda: sparse.from_name(jaxcomm.sparse.oktopk), TypeError, "must be called"),  # pyright: ignore
        (
            lambda: dataclasses.replace(jaxcomm.sparse.gtopk(), values="bfloat16"),
            ValueError,
            'gtopk needs values="float32"',
        ),
    ],
)
def test_bad_arguments_are_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
