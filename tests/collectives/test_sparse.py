"""Sparse all-reduces against their oracles, their laws, and the bytes that they send."""

import collections
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxcomm
from jaxcomm import sparse
from pairs import every_pair
from sparse_table import BY_THRESHOLD, CASES, DENSITY, K, N, compiled, exchanged, normal

MakeMesh = Callable[[int], Mesh]


def unusual(world: int) -> dict[str, np.ndarray]:
    """Vectors that no threshold fits well."""
    one_has_all = normal(world)
    one_has_all[world // 2] = 0
    one_has_all[-1] *= 1e6
    one_region = np.zeros((world, N), np.float32)
    one_region[:, : N // 16] = normal(world, N // 16)
    return {
        "zeros": np.zeros((world, N), np.float32),
        "equal": np.ones((world, N), np.float32),
        "one has nothing, one has all": one_has_all,
        "one region": one_region,
        "a single value": np.eye(world, N, 17, dtype=np.float32),
        "huge": normal(world) * np.float32(1e37),
        "tiny": normal(world) * np.float32(1e-37),
    }


def assert_law_over_steps(x: np.ndarray, mesh: Mesh, algorithm: sparse.SparseAllReduce) -> None:
    """`exchanged` checks the law itself, in each of three steps."""
    thresholds, residual = None, np.zeros_like(x)
    for step in range(3):
        outcome, thresholds = exchanged(x + residual, mesh, algorithm, step, thresholds)
        residual = outcome.errors
        assert np.isfinite(outcome.mean).all()
        assert (outcome.delivered <= outcome.selected).all()
        if not x.any():
            assert (outcome.selected == 0).all()


def assert_bytes(
    program: jax.stages.Compiled, algorithm: sparse.SparseAllReduce, n: int, world: int
) -> None:
    """Every operation sends what the formula says; the sums of counts and boundaries aside."""
    algorithm = dataclasses.replace(algorithm, density=DENSITY)
    expected = CASES[algorithm.name].sent(algorithm, n, world)
    found = collections.defaultdict(list)
    for c in jaxcomm.wire_report(program).collectives:
        if max(c.sent) > 0 and c.op != "all-reduce":
            found[c.op].append(max(c.sent))
    assert {op: sorted(sent) for op, sent in found.items()} == {
        op: sorted(sent) for op, sent in expected.items() if world > 1
    }


@every_pair(
    newest=True,
    # gtopk refuses bfloat16: sums would be rounded at every merge.
    possible=lambda row: row[0] != "gtopk" or row[-1] == "float32",
    name=BY_THRESHOLD,
    world=[1, 2, 5, 8],
    n=[1, 300, N, 2**20 + 5],  # the last: places of an owner that one word cannot tell apart
    values=["float32", "bfloat16"],
)
def test_oracle_law_counts_and_bytes(
    make_mesh: MakeMesh, name: str, world: int, n: int, values: str
) -> None:
    case, mesh, x = CASES[name], make_mesh(world), normal(world, n)
    algorithm = dataclasses.replace(case.roomy, values=values)
    k = max(1, round(n * DENSITY))
    outcome, _ = exchanged(x, mesh, algorithm)
    if case.is_exact:
        assert (outcome.selected == k).all()
    assert (outcome.delivered == outcome.selected).all()
    total, taken = case.oracle(x, outcome.delivered)
    if values == "float32":
        np.testing.assert_allclose(world * outcome.mean[0], total, atol=1e-5)
        np.testing.assert_array_equal(outcome.errors, np.where(taken, 0, x))
        np.testing.assert_array_equal(outcome.taken, taken)
        assert (outcome.applied == (total != 0).sum()).all()
    else:  # Rounding may change which sums are the largest.
        applied = (total != 0) & (outcome.mean[0] != 0)
        assert applied.sum() > 0.9 * (total != 0).sum()
        np.testing.assert_allclose(outcome.mean[0][applied], total[applied] / world, atol=0.02)
        assert np.abs(outcome.errors[taken]).max() > 0

    program = compiled(mesh, algorithm, n)
    assert_bytes(program, algorithm, n, world)
    if not case.sorts:
        assert not re.search(r"\b(sort|topk|top-k|TopK)\b", program.as_text() or "")
    if n == N:
        for vectors in unusual(world).values():
            assert_law_over_steps(vectors, mesh, algorithm)


@pytest.mark.parametrize(("name", "world"), [("oktopk", 2), ("topk_dsa", 4), ("gtopk", 5)])
def test_more_places_than_a_word_tells_apart(make_mesh: MakeMesh, name: str, world: int) -> None:
    """Of an owner, or of the whole vector: every value comes to its own place."""
    case, x = CASES[name], normal(world, 2**19 + 5)
    outcome, _ = exchanged(x, make_mesh(world), case.roomy)
    total, taken = case.oracle(x, outcome.delivered)
    np.testing.assert_allclose(world * outcome.mean[0], total, atol=1e-5)
    np.testing.assert_array_equal(outcome.taken, taken)


@pytest.mark.parametrize("name", ["oktopk", "topk_dsa"])
def test_what_an_owner_keeps_of_a_sum_is_not_taken(make_mesh: MakeMesh, name: str) -> None:
    """It keeps what its sums are rounded by, also where its own value was not selected."""
    world, x = 4, normal(4)
    algorithm = dataclasses.replace(CASES[name].roomy, values="bfloat16")
    outcome, _ = exchanged(x, make_mesh(world), algorithm)
    k = round(N * DENSITY)
    least = np.partition(np.abs(x), -k)[:, -k, None]
    assert (outcome.errors != x)[np.abs(x) < least].any()
    assert not outcome.taken[np.abs(x) < least].any() and outcome.taken.any()


@pytest.mark.parametrize("name", CASES)
def test_the_law_holds_whatever_comes(make_mesh: MakeMesh, name: str) -> None:
    """With the defaults, but room for no more than is selected."""
    tight = sparse.BY_NAME[name]()
    if name in BY_THRESHOLD:
        tight = dataclasses.replace(tight, slack=1.0)
    assert_bytes(compiled(make_mesh(4), tight), tight, N, 4)
    for x in unusual(4).values():
        assert_law_over_steps(x, make_mesh(4), tight)


@pytest.mark.parametrize("values", ["float32", "bfloat16"])
@pytest.mark.parametrize("share", [0.4, 0.6, 0.8])
def test_all_sums_come_back_where_they_are_fewer_bytes(
    make_mesh: MakeMesh, share: float, values: str
) -> None:
    """Than entries for a share of them: 6 bytes instead of 4, or 4 instead of 2."""
    algorithm = sparse.topk_dsa(values=values, slack=share / 4 / DENSITY)
    assert_bytes(compiled(make_mesh(4), algorithm), algorithm, N, 4)


def test_gaussiank_selects_about_k(make_mesh: MakeMesh) -> None:
    k = round(N * DENSITY)
    for x in (normal(3), normal(3) ** 3):
        outcome, _ = exchanged(x, make_mesh(3), CASES["gaussiank"].roomy)
        assert (outcome.selected > k / 2).all()
        assert (outcome.selected < 2 * k).all()


def test_gaussiank_where_no_threshold_that_it_tries_is_of_use(make_mesh: MakeMesh) -> None:
    """Of values of one size it tries those below it, and then one above all."""
    x = np.zeros((2, N), np.float32)
    x[:, :400] = 1
    outcome, _ = exchanged(x, make_mesh(2), CASES["gaussiank"].roomy)
    assert (outcome.selected == 400).all()


def test_gaussiank_tries_the_same_thresholds_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take all rounds, and those behind a good threshold change nothing."""
    ones = np.zeros(N, np.float32)
    ones[:400] = 1
    vectors = [normal(1)[0] ** power for power in (1, 3, 9)] + [ones]
    wanted = [sparse.gaussiank().gaussian_threshold(x) for x in vectors]
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **_: default(*args))
    found = [sparse.gaussiank().gaussian_threshold(x) for x in vectors]
    np.testing.assert_array_equal(found, wanted)


def test_every_name_has_a_row() -> None:
    for name, make in sparse.BY_NAME.items():
        assert name in CASES, f"{name} has no row in tests/sparse_table.py"
        assert type(CASES[name].roomy) is type(make())


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
            lambda: jaxcomm.sparse.oktopk(slack=float("inf")),
            ValueError,
            "slack must be at least 1, got inf",
        ),
        (
            lambda: jaxcomm.sparse.oktopk(tolerance=float("inf")),
            ValueError,
            "tolerance must be more than 1, or None, got inf",
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


@pytest.mark.parametrize("name", ["oktopk", "topk_dsa", "gaussiank"])
def test_so_many_values_that_counts_times_three_are_no_int32(name: str) -> None:
    n, chosen = 2_000_000_000, dataclasses.replace(sparse.from_name(name), density=0.4)

    def exchange(x: jax.Array) -> jax.Array:
        return chosen.exchange(x, jnp.float32(1), jnp.int32(1), "data")[1][None]

    mesh, spec = jaxcomm.data_mesh(devices=jax.devices()[:2]), jax.P("data")
    mapped = jax.shard_map(exchange, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    assert jax.eval_shape(mapped, jax.ShapeDtypeStruct((2 * n,), jnp.float32)).shape == (2,)


def test_thresholds_follow_counts() -> None:
    chosen = sparse.oktopk(scaling=1.5)
    found = [float(chosen.scaled(jnp.float32(1), jnp.int32(c), 100)) for c in (66, 67, 125, 126)]
    assert found == pytest.approx([1 / 1.5, 1, 1, 1.5])


def test_no_more_is_delivered_than_there_is_room_for(make_mesh: MakeMesh) -> None:
    """All equal values reach the threshold."""
    tight = dataclasses.replace(sparse.gaussiank(), slack=1.0)
    outcome, _ = exchanged(np.ones((2, N), np.float32), make_mesh(2), tight)
    assert (outcome.selected == N).all() and (outcome.delivered == K).all()
