"""The two halves of an all-reduce: row r of all devices for device r, and the rows of all."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from algorithm_table import CASES
from jaxcomm import codecs, collectives, wire_report
from jaxcomm.collectives import algorithms
from jaxcomm.collectives.algorithms import _scheduled
from jaxcomm.collectives.reductions import Majority, Reduction
from jaxcomm.kernels import _device

P = PartitionSpec
N = 37  # values of a row: codes, blocks and words are padded
MakeMesh = Callable[[int], Mesh]
# halving_doubling has a block for each device at powers of two only.
EACH = [
    (name, world) for name in ("direct", "ring", "two_way_ring", "circulant") for world in (3, 4)
]
EACH += [("native", 3), ("halving_doubling", 4)]


def scattered(
    x: np.ndarray, mesh: Mesh, reduction: Reduction, algorithm: Any
) -> tuple[np.ndarray, np.ndarray | None]:
    """Each device's row, (N, n), and the residuals, (N, N, n), of x, (N, N, n)."""
    axis: Any = mesh.axis_names if len(mesh.axis_names) > 1 else "data"

    def one(x: jax.Array) -> Any:
        found = collectives.reduce_scatter_with_residual(x[0], axis, reduction, algorithm)
        return jax.tree.map(lambda y: y[None], found)

    f = jax.shard_map(one, mesh=mesh, in_specs=P(axis), out_specs=P(axis), check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(f)(x))


def normal(world: int) -> np.ndarray:
    return np.random.default_rng(world).standard_normal((world, world, N)).astype(np.float32)


@pytest.mark.parametrize(("name", "world"), EACH)
def test_integers_are_added_exactly(make_mesh: MakeMesh, name: str, world: int) -> None:
    x = np.round(normal(world) * 8) * world
    reduction, _ = collectives.mean_of("float32", "direct")
    rows, _ = scattered(x, make_mesh(world), reduction, CASES[name].of(world))
    np.testing.assert_array_equal(rows, x.mean(0))


@pytest.mark.parametrize(("name", "world"), [case for case in EACH if case[0] != "native"])
def test_sent_and_kept_is_all(make_mesh: MakeMesh, name: str, world: int) -> None:
    reduction, _ = collectives.mean_of(codecs.cnat(), "direct", error_feedback=True)
    reduction = dataclasses.replace(reduction, key=jax.random.key(3))
    x = normal(world)
    rows, kept = scattered(x, make_mesh(world), reduction, CASES[name].of(world))
    assert kept is not None and np.abs(kept).max() > 0
    np.testing.assert_allclose(world * rows + kept.sum(0), x.sum(0), atol=1e-5)


@pytest.mark.parametrize("limits", [{"_MANY": 1}, {"_MANY": 1, "_LONG": 1}], ids=str)
@pytest.mark.parametrize(("name", "world"), [("circulant", 7), ("halving_doubling", 8)])
def test_blocks_of_many_devices_are_in_the_same_order(
    make_mesh: MakeMesh,
    name: str,
    world: int,
    limits: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From nine devices on they are gathered; so they are here, for few."""
    algorithm, x = CASES[name].of(world), np.round(normal(world) * 64) * world
    means = collectives.mean_of(codecs.bfloat16(), "direct", error_feedback=True)[0]
    votes = Majority("zero", "abstain", jax.random.key(0))

    def all_of() -> list[np.ndarray | None]:
        found = [scattered(x, make_mesh(world), r, algorithm) for r in (means, votes)]
        f = jax.shard_map(
            lambda x: collectives.all_reduce(x[0, 0], "data", means, algorithm)[None],
            mesh=make_mesh(world),
            in_specs=P("data"),
            out_specs=P("data"),
            check_vma=False,
        )
        return [*found[0], found[1][0], np.asarray(jax.jit(f)(x))]

    expected = all_of()
    for limit, devices in limits.items():
        monkeypatch.setattr(_scheduled, limit, devices)
    for one, other in zip(all_of(), expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("name", "world"), [case for case in EACH if case[0] != "native"])
def test_votes_of_rows(make_mesh: MakeMesh, name: str, world: int) -> None:
    x = np.round(normal(world))
    reduction = Majority("zero", "abstain", jax.random.key(0))
    rows, _ = scattered(x, make_mesh(world), reduction, CASES[name].of(world))
    np.testing.assert_array_equal(rows, np.sign(np.sign(x).sum(0)))


def test_votes_of_rows_over_two_levels(mesh4x2: Mesh) -> None:
    x, direct = np.round(normal(8)), algorithms.direct()
    reduction = Majority("zero", "abstain", jax.random.key(0))
    rows, _ = scattered(x, mesh4x2, reduction, algorithms.hierarchical(near=direct, far=direct))
    np.testing.assert_array_equal(rows, np.sign(np.sign(x).sum(0)))


@pytest.mark.parametrize("near_codec", [None, "float32", "bfloat16"])
def test_two_levels_keep_all_that_is_missing(mesh4x2: Mesh, near_codec: str | None) -> None:
    algorithm = algorithms.hierarchical(
        near=algorithms.ring(), far=algorithms.direct(), near_codec=near_codec
    )
    reduction, _ = collectives.mean_of("int4", algorithm, error_feedback=True)
    x = normal(8)
    rows, kept = scattered(x, mesh4x2, reduction, algorithm)
    assert kept is not None
    np.testing.assert_allclose(8 * rows + kept.sum(0), x.sum(0), atol=1e-5)


def test_a_near_codec_in_an_all_reduce(mesh4x2: Mesh) -> None:
    """Only the far hop rounds, and only what bfloat16 cannot hold."""
    algorithm = algorithms.hierarchical(
        near=algorithms.direct(), far=algorithms.direct(), near_codec="float32"
    )
    reduction, _ = collectives.mean_of(codecs.bfloat16(), algorithm, "float32")
    x = np.random.default_rng(0).integers(-64, 64, (8, N)).astype(np.float32) + np.float32(2**-12)

    def one(x: jax.Array) -> jax.Array:
        found, _ = collectives.all_reduce_with_residual(
            x[0], mesh4x2.axis_names, reduction, algorithm
        )
        return found[None]

    spec = P(mesh4x2.axis_names)
    f = jax.shard_map(one, mesh=mesh4x2, in_specs=spec, out_specs=spec, check_vma=False)
    of_hosts = x.reshape(4, 2, N).sum(1)
    rounded = np.stack([codecs.bfloat16().decode(codecs.bfloat16().encode(h), N) for h in of_hosts])
    np.testing.assert_array_equal(np.asarray(jax.jit(f)(x))[0], rounded.sum(0) / np.float32(8))


def test_formats_that_cannot_be_near() -> None:
    direct = algorithms.direct()
    for name in ("float16", "scaled_sign", "random_k"):
        with pytest.raises(ValueError, match=f"near_codec is for fast links and cannot be {name}"):
            algorithms.hierarchical(near=direct, far=direct, near_codec=name)
    mesh = jax.make_mesh((2, 2), ("far", "near"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    votes = Majority("zero", "abstain", jax.random.key(0))
    with pytest.raises(ValueError, match="votes have none"):
        scattered(
            normal(4),
            mesh,
            votes,
            algorithms.hierarchical(near=direct, far=direct, near_codec="bfloat16"),
        )


def test_native_is_direct_between_cpu_processes(
    make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo's own reduce-scatter does not wait for a process that is late."""
    reduction, native = collectives.mean_of("float32", "native")
    f = jax.shard_map(
        lambda x: collectives.reduce_scatter_with_residual(x[0], "data", reduction, native)[0],
        mesh=make_mesh(4),
        in_specs=P("data"),
        out_specs=P("data"),
    )

    def ops() -> set[str]:
        compiled = jax.jit(lambda x: f(x)).lower(normal(4)).compile()
        return {c.op for c in wire_report(compiled).collectives}

    assert ops() == {"reduce-scatter"}
    monkeypatch.setattr(_device, "is_between_cpu_processes", lambda: True)
    assert ops() == {"all-to-all"}


def test_devices_round_independently(make_mesh: MakeMesh) -> None:
    """Equal values become 1 or 2 on each device by itself; one key would make all of them equal."""
    world = 4
    reduction, _ = collectives.mean_of(codecs.cnat(), "direct")
    reduction = dataclasses.replace(reduction, key=jax.random.key(3))
    x = np.full((world, world, 1024), 1.5, np.float32)
    rows, _ = scattered(x, make_mesh(world), reduction, algorithms.direct())
    assert rows.mean() == pytest.approx(1.5, abs=0.02)
    assert 0.2 / world < rows.var() < 0.3 / world
