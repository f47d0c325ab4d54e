"""The law of error feedback: what is missing in the result is in the errors, on every path."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from algorithm_table import CASES, NAMED
from jaxcomm import codecs, collectives
from jaxcomm.collectives import algorithms
from pairs import every_pair

CODECS: dict[str, codecs.Codec] = {
    "bfloat16": codecs.bfloat16(),
    "float16": codecs.float16(),
    "random_k": codecs.random_k(0.25),
    "random_k of bfloat16": codecs.random_k(0.25, codecs.bfloat16()),
    "int2": codecs.int2(96),
    "scaled_sign": codecs.scaled_sign(96),
}

MakeMesh = Callable[[int], Mesh]


def exchanged(
    x: np.ndarray, mesh: Mesh, algorithm: collectives.algorithms.Algorithm, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The result on every device and its errors, both (world, n), from (world, n)."""
    axis: Any = mesh.axis_names if len(mesh.axis_names) > 1 else "data"
    reduction, _ = collectives.mean_of(algorithm=algorithm, **options)

    def one(x: jax.Array, key: jax.Array) -> Any:
        keyed = dataclasses.replace(reduction, key=key)
        result, errors = collectives.all_reduce_with_residual(x[0], axis, keyed, algorithm)
        assert errors is not None
        return result[None], errors[None]

    spec = PartitionSpec(axis)
    f = jax.shard_map(
        one, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False
    )
    result, errors = jax.jit(f)(x, jax.random.key(7))
    return np.asarray(result), np.asarray(errors)


def normal(world: int, n: int = 1000) -> np.ndarray:
    size = np.float32(2.0) ** np.arange(-world, world, 2, dtype=np.float32)[:, None]
    return np.random.default_rng(world).standard_normal((world, n)).astype(np.float32) * size


def assert_conserved(x: np.ndarray, result: np.ndarray, errors: np.ndarray) -> None:
    assert (result == result[:1]).all()
    world = len(x)
    np.testing.assert_allclose(
        errors.astype(np.float64).sum(0) + world * result[0].astype(np.float64),
        x.astype(np.float64).sum(0),
        atol=1e-6 * np.abs(x).sum(0).max(),
    )


# `random_k` of float32 is in the test of two axes.
@every_pair(
    newest=True,
    world=[1, 3, 4, 5],
    codec=[name for name in CODECS if name != "random_k"],
    algorithm=[*NAMED, "aggregator"],
)
def test_sent_and_kept_is_all(make_mesh: MakeMesh, world: int, codec: str, algorithm: str) -> None:
    x = normal(world)
    result, errors = exchanged(
        x, make_mesh(world), CASES[algorithm].of(world), codec=CODECS[codec], error_feedback=True
    )
    assert_conserved(x, result, errors)
    assert np.abs(errors).max() > 0


@every_pair(
    near=["direct", "halving_doubling", "aggregator"],
    far=["direct", "circulant", "aggregator"],
    shape=[(2, 4), (3, 2), (2, 3)],
    codec=["bfloat16", "random_k"],
)
def test_also_near_links_first(near: str, far: str, shape: tuple[int, int], codec: str) -> None:
    on_far, on_near = shape
    kinds, devices = (AxisType.Auto, AxisType.Auto), jax.devices()[: on_far * on_near]
    mesh = jax.make_mesh(shape, ("far", "near"), kinds, devices=devices)
    x = normal(len(devices))
    algorithm = algorithms.hierarchical(near=CASES[near].of(on_near), far=CASES[far].of(on_far))
    result, errors = exchanged(x, mesh, algorithm, codec=CODECS[codec], error_feedback=True)
    assert_conserved(x, result, errors)


def test_the_first_hop_alone(make_mesh: MakeMesh) -> None:
    options: dict[str, Any] = {"codec": "float32", "second_hop": "bfloat16"}
    mesh, chosen = make_mesh(3), algorithms.direct()
    _, errors = exchanged(normal(3), mesh, chosen, error_feedback="first_hop", **options)
    assert (errors == 0).all()


@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_what_is_owned_is_rounded_on_the_second_hop_only(
    make_mesh: MakeMesh, algorithm: str
) -> None:
    world, n = 3, 1000
    x, mesh, chosen = normal(world, n), make_mesh(world), CASES[algorithm].of(world)
    options: dict[str, Any] = {"codec": "float32", "second_hop": "bfloat16"}
    result, errors = exchanged(x, mesh, chosen, error_feedback=True, **options)
    assert_conserved(x, result, errors)
    # Every value is owned, and so its error is kept, once.
    assert ((errors != 0).sum(0) <= 1).all()
    assert (errors != 0).sum() > 900
    # The owner of a block needs no message about it: its own values are not rounded.
    options = {"codec": "bfloat16", "second_hop": "float32"}
    result, errors = exchanged(x, mesh, chosen, error_feedback=True, **options)
    assert_conserved(x, result, errors)
    block = -(-n // world)
    for device in range(world):
        own = slice(device * block, (device + 1) * block)
        others = np.delete(np.arange(world), device)
        largest = np.abs(x[:, own]).max()
        assert np.abs(errors[device, own]).max() <= 1e-6 * largest
        assert np.abs(errors[others, own]).max() > 1e-4 * largest


@pytest.mark.parametrize(
    ("codec", "even"),
    [(codecs.int4(), 256), (codecs.scaled_sign(512), 512), (codecs.cnat(rounding="nearest"), 256)],
)
@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_long_vectors_travel_in_whole_blocks(
    make_mesh: MakeMesh, codec: codecs.Codec, even: int, algorithm: str
) -> None:
    """Others are slow on CPU. The zeros behind a vector are in no result and in no error."""
    world, mesh, chosen = 4, make_mesh(4), CASES[algorithm].of(4)
    n = 64 * world * even + 37
    whole = n - 37 + world * even
    reduction, _ = collectives.mean_of(codec, algorithm, error_feedback=True)
    assert reduction.padded(n, world) == whole == reduction.padded(whole, world)
    short = n - 38  # too short for it; messages that are filled up are equally long
    equal = -(-short // world) * world
    assert reduction.padded(short, world) == (equal if codec.needs_error_feedback else short)
    x = normal(world, n)
    result, errors = exchanged(x, mesh, chosen, codec=codec, error_feedback=True)
    assert result.shape == errors.shape == x.shape
    assert_conserved(x, result, errors)
    zeros = np.zeros((world, whole - n), np.float32)
    padded, _ = exchanged(
        np.concatenate([x, zeros], 1), mesh, chosen, codec=codec, error_feedback=True
    )
    # The zeros do not fill up the last block of a codec that has no code for them.
    same = n - n % even if codec.needs_error_feedback else n
    np.testing.assert_array_equal(result[:, :same], padded[:, :same])
