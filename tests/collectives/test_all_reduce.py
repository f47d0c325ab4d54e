"""The table of properties of every algorithm with every codec, on simulated devices."""

import collections
import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jaxcomm
import oracles
from algorithm_table import CASES, NAMED, SCHEDULED, bytes_sent, mean_on_all, mean_program
from jaxcomm.collectives import algorithms
from pairs import every_pair

WORLDS = [1, 2, 3, 4, 5, 8]
LENGTHS = [1, 7, 37, 1000]
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}

MakeMesh = Callable[[int], Mesh]


def vectors(world: int, n: int) -> np.ndarray:
    """A vector for every device, of very different sizes on each."""
    rng = np.random.default_rng(n)
    size = np.float32(10.0) ** rng.integers(-3, 4, (world, 1)).astype(np.float32)
    return rng.standard_normal((world, n)).astype(np.float32) * size


def assert_not_finite_reaches_all(program: jax.stages.Compiled, world: int, n: int) -> None:
    """A NaN or an infinity of one device comes to all of them."""
    for bad in (np.nan, np.inf):
        x = np.ones((world, n), np.float32)
        x[world - 1, n // 3] = bad
        y = np.asarray(program(x, jax.random.key(0)))
        assert not np.isfinite(y[:, n // 3]).any()


@every_pair(newest=True, algorithm=SCHEDULED, world=WORLDS, codec=ITEMSIZE, n=LENGTHS)
def test_oracle_bits_on_every_device_bytes_operations_and_what_is_not_finite(
    make_mesh: MakeMesh, algorithm: str, world: int, codec: str, n: int
) -> None:
    case = CASES[algorithm]
    program = mean_program(make_mesh(world), n, codec=codec, algorithm=case.of(world))
    x = vectors(world, n)
    assert case.oracle is not None
    expected = oracles.scaled(case.oracle, x, codec)
    np.testing.assert_array_equal(mean_on_all(program, x), expected)
    assert_not_finite_reaches_all(program, world, n)

    report = jaxcomm.wire_report(program)
    exchange = report.only("collective-permute", "all-to-all", "all-gather")
    size = ITEMSIZE[codec]
    assert exchange.bytes_max == bytes_sent(case, n, lambda length: length * size, world)
    moving = [c for c in exchange.collectives if any(c.sent)]
    assert collections.Counter(c.op for c in moving) == case.program_operations(world)
    assert exchange.rounds == len(moving)
    # float16 agrees on an exponent first: one int32. Nothing else, and no silent psum.
    agreed = 8 * (world - 1) / world if codec == "float16" else 0
    others = [c for c in report.collectives if c not in exchange.collectives]
    assert sum(float(max(c.sent)) for c in others) == agreed


@every_pair(world=[1, 3, 8], codec=ITEMSIZE, n=LENGTHS)
def test_native_is_the_mean_within_rounding(
    make_mesh: MakeMesh, world: int, codec: str, n: int
) -> None:
    program = mean_program(make_mesh(world), n, codec=codec, algorithm="native")
    x = vectors(world, n)
    tolerance = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 2e-3}[codec]
    y = mean_on_all(program, x)
    np.testing.assert_allclose(y, x.mean(0), atol=tolerance * np.abs(x).max())
    assert_not_finite_reaches_all(program, world, n)
    size = 2 if codec == "float16" else 4  # XLA promotes bfloat16 on CPU.
    sent = jaxcomm.wire_report(program).only("all-reduce").bytes_max
    exponent = 4 if codec == "float16" else 0
    assert sent == Fraction(2 * (world - 1), world) * (n * size + exponent)


@pytest.mark.parametrize("order", [("shifted", 2), ("shifted", 2, (2, 2)), ("shifted", 4)])
def test_means_in_the_shifted_order(mesh8: Mesh, order: tuple) -> None:
    algorithm = jaxcomm.algorithms.halving_doubling(*order)
    x = np.random.default_rng(0).integers(-64, 64, (8, 37)).astype(np.float32) * 8
    program = mean_program(mesh8, 37, codec="float32", algorithm=algorithm)
    np.testing.assert_array_equal(mean_on_all(program, x), x.mean(0))


@pytest.mark.newest
@pytest.mark.parametrize("algorithm", CASES)
def test_the_result_is_typed_as_equal_under_the_checks(mesh8: Mesh, algorithm: str) -> None:
    mean = functools.partial(
        jaxcomm.pmean, axis_name="data", codec="bfloat16", algorithm=CASES[algorithm].of(8)
    )
    f = jax.shard_map(mean, mesh=mesh8, in_specs=PartitionSpec("data"), out_specs=PartitionSpec())
    x = np.arange(8 * 5, dtype=np.float32).reshape(8, 5)
    np.testing.assert_array_equal(jax.jit(f)(x), x.mean(0, keepdims=True))


@every_pair(axis=["data", "model"], algorithm=NAMED)
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


@pytest.mark.parametrize("algorithm", NAMED)
def test_axes_in_another_order_than_the_mesh_has(mesh4x2: Mesh, algorithm: str) -> None:
    x = np.random.default_rng(0).integers(-64, 64, (8, 37)).astype(np.float32) * 8
    spec = PartitionSpec(("model", "data"))
    f = jax.shard_map(
        lambda x: jaxcomm.pmean(x, ("model", "data"), algorithm=algorithm),
        mesh=mesh4x2,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    np.testing.assert_array_equal(jax.jit(f)(x), np.broadcast_to(x.mean(0), x.shape))


@pytest.mark.parametrize(("codec", "second_hop"), [("float16", None), ("float32", "float16")])
def test_float16_neither_overflows_nor_vanishes(
    mesh8: Mesh, codec: str, second_hop: str | None
) -> None:
    program = mean_program(mesh8, 3, codec=codec, second_hop=second_hop, algorithm="ring")
    for size in (1e30, 1e-30, 60000.0):
        x = np.float32(size) * np.arange(1, 9, dtype=np.float32)[:, None] * np.ones(3, np.float32)
        np.testing.assert_allclose(mean_on_all(program, x), x.mean(0), rtol=2e-3)
        x[0] = 0.0  # which needs no range
        np.testing.assert_allclose(mean_on_all(program, x), x.mean(0), rtol=2e-3)
        x[1, 0] = np.inf  # which hides no range of the others
        np.testing.assert_allclose(mean_on_all(program, x), x.mean(0), rtol=2e-3)


def test_a_pytree_keeps_its_dtypes_and_shapes_and_empty_arrays(mesh4x2: Mesh) -> None:
    x = {
        "empty": jnp.zeros((8, 0)),
        "flat": jnp.zeros((0,)),
        "matrix": jnp.ones((8, 3, 5), jnp.bfloat16),
    }
    spec = PartitionSpec(("data", "model"))
    for algorithm in NAMED:
        mean = functools.partial(jaxcomm.pmean, axis_name=("data", "model"), algorithm=algorithm)
        f = jax.shard_map(mean, mesh=mesh4x2, in_specs=spec, out_specs=PartitionSpec())
        y = jax.eval_shape(f, x)
        assert y["empty"].shape == (1, 0) and y["flat"].shape == (0,)
        assert y["matrix"].shape == (1, 3, 5) and y["matrix"].dtype == jnp.bfloat16
    y = jax.jit(f)(x)
    np.testing.assert_array_equal(y["matrix"].astype(jnp.float32), np.ones((1, 3, 5)))


@every_pair(codec=["float32", "bfloat16", "cnat"], checks=[True, False])
def test_it_is_differentiated_as_the_mean(make_mesh: MakeMesh, codec: str, checks: bool) -> None:
    def gradient(mean: Callable[[jax.Array], jax.Array]) -> jax.Array:
        own = jax.grad(lambda x: mean(x[0]) @ jnp.arange(3.0))
        f = jax.shard_map(
            own,
            mesh=make_mesh(4),
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec("data"),
            check_vma=checks,
        )
        return jax.jit(f)(x)

    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 3)), jnp.float32)
    key = jax.random.key(0) if codec == "cnat" else None
    ours = gradient(lambda x: jaxcomm.pmean(x, "data", codec, key=key))
    expected = gradient(lambda x: jax.lax.pmean(x, "data"))
    assert np.abs(expected).max() > 0
    np.testing.assert_array_equal(ours, expected)


def test_it_is_differentiated_in_a_loop_whose_steps_have_keys(make_mesh: MakeMesh) -> None:
    def loss(x: jax.Array, step: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(0), step)
        return jaxcomm.pmean(x, "data", "cnat", key=key).sum()

    def summed(x: jax.Array) -> jax.Array:
        def add(total: jax.Array, step: jax.Array) -> tuple[jax.Array, None]:
            return total + jax.checkpoint(loss)(x, step), None

        return jax.lax.scan(add, jnp.float32(0), jnp.arange(3))[0]

    spec = PartitionSpec("data")
    f = jax.shard_map(
        jax.grad(summed), mesh=make_mesh(2), in_specs=spec, out_specs=spec, check_vma=False
    )
    np.testing.assert_array_equal(jax.jit(f)(jnp.ones((2, 40))), 3)


def test_names() -> None:
    with pytest.raises(ValueError, match="unknown algorithm 'tree'; choose one of native, direct"):
        algorithms.from_name("tree")
    with pytest.raises(TypeError, match="must be called"):
        algorithms.from_name(jaxcomm.algorithms.ring)  # pyright: ignore[reportArgumentType]


def test_integers_are_refused(mesh8: Mesh) -> None:
    f = jax.shard_map(
        lambda x: jaxcomm.pmean([x], "data"),
        mesh=mesh8,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec(),
    )
    with pytest.raises(TypeError, match="pmean needs float arrays of at most 32 bits, got int32"):
        jax.eval_shape(f, jnp.ones((8, 3), jnp.int32))


def test_outside_of_shard_map_says_where_to_call_it(mesh8: Mesh) -> None:
    with jax.set_mesh(mesh8), pytest.raises(NameError, match="inside jax.shard_map"):
        jaxcomm.pmean(jnp.ones(3), "data")


def test_a_region_that_is_manual_over_some_axes_is_refused(mesh4x2: Mesh) -> None:
    """It would gather what is sharded over the others."""
    far, near = mesh4x2.axis_names
    mean = functools.partial(jaxcomm.pmean, axis_name=far, codec="bfloat16")
    spec = PartitionSpec(far, near)
    own = PartitionSpec(far)
    f = jax.shard_map(mean, mesh=mesh4x2, in_specs=own, out_specs=PartitionSpec(), axis_names={far})
    x = jax.device_put(jnp.ones((4, 2)), jax.NamedSharding(mesh4x2, spec))
    with jax.set_mesh(mesh4x2), pytest.raises(NameError, match=f"axis '{near}' is not manual here"):
        jax.jit(f)(x)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"second_hop": "cnat"}, "cnat"),
        ({"codec": "random_k"}, "random_k"),
        ({"codec": "qsgd"}, "qsgd"),
    ],
)
def test_a_missing_key_names_the_codec(mesh8: Mesh, options: Any, name: str) -> None:
    mean = functools.partial(jaxcomm.pmean, axis_name="data", **options)
    f = jax.shard_map(mean, mesh=mesh8, in_specs=PartitionSpec("data"), out_specs=PartitionSpec())
    with pytest.raises(ValueError, match=f"^{name} rounds at random and needs a key"):
        jax.jit(f)(jnp.ones(8))


@pytest.mark.parametrize("algorithm", ["native", "ring", "halving_doubling"])
def test_float16_holds_the_sum_of_what_all_devices_have_alike(mesh8: Mesh, algorithm: str) -> None:
    """Just below a power of two, a sum of eight needs all of the head room."""
    x = np.full((8, 5), np.float32(2 - 2**-12))
    program = mean_program(mesh8, 5, codec="float16", algorithm=algorithm)
    np.testing.assert_allclose(mean_on_all(program, x), x[0], rtol=2**-10)
