"""The table of properties of every algorithm with every codec, on simulated devices."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jaxcomm
import oracles
from jaxcomm import collectives

WORLDS = [1, 2, 3, 4, 5, 8]
LENGTHS = [0, 1, 7, 37, 1000]
CODECS = ["float32", "bfloat16", "float16"]
ALGORITHMS = list(oracles.ALGORITHMS)
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}

MakeMesh = Callable[[int], Mesh]


def vectors(world: int, seed: int = 0) -> list[np.ndarray]:
    """A vector of every length for every device, of very different sizes on each."""
    rng = np.random.default_rng(seed)
    size = np.float32(10.0) ** rng.integers(-3, 4, (world, 1)).astype(np.float32)
    return [rng.standard_normal((world, n)).astype(np.float32) * size for n in LENGTHS]


def all_devices(mesh: Mesh, **options: Any) -> Callable[..., Any]:
    """From (world, n) to (world, n): what each device ends with, in rows."""
    mean = functools.partial(jaxcomm.pmean, axis_name="data", **options)
    return jax.jit(
        jax.shard_map(
            lambda xs: jax.tree.map(lambda x: mean(x[0])[None], xs),
            mesh=mesh,
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec("data"),
            check_vma=False,
        )
    )


@pytest.mark.newest
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("world", WORLDS)
def test_every_device_has_the_oracle_bits(
    make_mesh: MakeMesh, world: int, codec: str, algorithm: str
) -> None:
    inputs = vectors(world)
    outputs = all_devices(make_mesh(world), codec=codec, algorithm=algorithm)(inputs)
    for x, y in zip(inputs, outputs, strict=True):
        expected = oracles.mean(x, codec, algorithm)
        np.testing.assert_array_equal(y, np.broadcast_to(expected, x.shape))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("world", WORLDS)
def test_native_is_the_mean_within_rounding(make_mesh: MakeMesh, world: int, codec: str) -> None:
    for x, y in zip(
        inputs := vectors(world),
        all_devices(make_mesh(world), codec=codec, algorithm="native")(inputs),
        strict=True,
    ):
        assert (np.asarray(y) == np.asarray(y)[:1]).all()
        tolerance = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 2e-3}[codec]
        np.testing.assert_allclose(y[0], x.mean(0), atol=tolerance * np.abs(x).max(initial=1e-9))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("world", WORLDS)
def test_bytes_and_operations_of_the_compiled_program(
    make_mesh: MakeMesh, world: int, codec: str, algorithm: str
) -> None:
    n = 1000
    f = all_devices(make_mesh(world), codec=codec, algorithm=algorithm)
    report = jaxcomm.wire_report(f.lower(jnp.ones((world, n))).compile())
    exchange = report.only("collective-permute", "all-to-all", "all-gather")
    assert exchange.bytes_max == oracles.bytes_sent(n, ITEMSIZE[codec], world, algorithm)
    operations = sorted({c.op for c in exchange.collectives})
    if world == 1:
        assert report.bytes_max == 0
    elif algorithm == "direct":
        assert operations == ["all-gather", "all-to-all"]
    else:
        assert operations == ["collective-permute"]
        assert exchange.rounds == oracles.rounds(world, algorithm)
    others = [c for c in report.collectives if c not in exchange.collectives]
    # float16 agrees on an exponent first: one int32. Nothing else, and no silent psum.
    agreed = 8 * (world - 1) / world if codec == "float16" else 0
    assert sum(float(max(c.sent)) for c in others) == agreed


@pytest.mark.parametrize("order", ["near_first", "far_first"])
@pytest.mark.parametrize("world", WORLDS)
def test_orders_of_halving_doubling(make_mesh: MakeMesh, world: int, order: str) -> None:
    algorithm = jaxcomm.algorithms.halving_doubling(order)
    inputs = vectors(world)
    outputs = all_devices(make_mesh(world), codec="bfloat16", algorithm=algorithm)(inputs)
    for x, y in zip(inputs, outputs, strict=True):
        expected = oracles.halving_doubling(x, oracles.round_bfloat16, order)
        np.testing.assert_array_equal(y, np.broadcast_to(expected, x.shape))


@pytest.mark.newest
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "native"])
def test_the_result_is_typed_as_equal_under_the_checks(mesh8: Mesh, algorithm: str) -> None:
    mean = functools.partial(jaxcomm.pmean, axis_name="data", codec="bfloat16", algorithm=algorithm)
    f = jax.shard_map(mean, mesh=mesh8, in_specs=PartitionSpec("data"), out_specs=PartitionSpec())
    x = np.arange(8 * 5, dtype=np.float32).reshape(8, 5)
    np.testing.assert_array_equal(jax.jit(f)(x), x.mean(0, keepdims=True))


@pytest.mark.parametrize("axis", ["data", "model"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_axis_of_two(mesh4x2: Mesh, axis: str, algorithm: str) -> None:
    """Each row, or column, of the mesh has a mean of its own."""
    x = np.random.default_rng(0).integers(-8, 8, (4, 2, 16)).astype(np.float32) * 4
    spec = PartitionSpec("data", "model")
    f = jax.shard_map(
        lambda x: jaxcomm.pmean(x, axis, algorithm=algorithm),
        mesh=mesh4x2,
        in_specs=spec,
        out_specs=PartitionSpec(None, "model") if axis == "data" else PartitionSpec("data"),
    )
    expected = x.mean(0 if axis == "data" else 1, keepdims=True)
    np.testing.assert_array_equal(jax.jit(f)(x), expected)


def test_float16_neither_overflows_nor_vanishes(mesh8: Mesh) -> None:
    f = all_devices(mesh8, codec="float16", algorithm="ring")
    for size in (1e30, 1e-30, 60000.0):
        x = np.float32(size) * np.arange(1, 9, dtype=np.float32)[:, None] * np.ones(3, np.float32)
        np.testing.assert_allclose(f([x])[0][0], x.mean(0), rtol=2e-3)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_reaches_every_device(
    mesh8: Mesh, algorithm: str, codec: str, bad: float
) -> None:
    x = np.ones((8, 37), np.float32)
    x[5, 11] = bad
    y = np.asarray(all_devices(mesh8, codec=codec, algorithm=algorithm)([x])[0])
    assert not np.isfinite(y[:, 11]).any()


def test_dtype_and_shape_are_kept(mesh8: Mesh) -> None:
    x = jnp.ones((8, 3, 5), jnp.bfloat16)
    (y,) = all_devices(mesh8, codec="float32")([x])
    assert y.shape == x.shape and y.dtype == x.dtype


def test_bfloat16_moves_half_of_float32_and_native_on_cpu_does_not(mesh8: Mesh) -> None:
    def sent(**options: Any) -> float:
        f = all_devices(mesh8, **options)
        return float(jaxcomm.wire_report(f.lower(jnp.ones((8, 4096))).compile()).bytes_max)

    assert sent(codec="bfloat16") == sent(codec="float32") / 2
    assert sent(codec="bfloat16", algorithm="native") == sent(codec="float32")  # promoted by XLA


def test_names() -> None:
    assert sorted(collectives.algorithms.BY_NAME) == sorted([*ALGORITHMS, "native"])
    with pytest.raises(ValueError, match="unknown algorithm 'tree'; choose one of native, direct"):
        collectives.algorithms.from_name("tree")
    with pytest.raises(TypeError, match="must be called"):
        collectives.algorithms.from_name(jaxcomm.algorithms.ring)  # pyright: ignore[reportArgumentType]


def test_integers_are_refused(mesh8: Mesh) -> None:
    with pytest.raises(TypeError, match="pmean needs float arrays, got int32"):
        all_devices(mesh8)([jnp.ones((8, 3), jnp.int32)])


def test_outside_of_shard_map_says_where_to_call_it(mesh8: Mesh) -> None:
    with jax.set_mesh(mesh8), pytest.raises(NameError, match="inside jax.shard_map"):
        jaxcomm.pmean(jnp.ones(3), "data")
