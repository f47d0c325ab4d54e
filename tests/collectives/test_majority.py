"""The majority vote: one result for every algorithm, and the bits of the closed forms."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxcomm
import oracles
from jaxcomm import collectives
from jaxcomm.collectives.algorithms import Algorithm
from jaxcomm.collectives.reductions import Majority
from processes import run_processes

LENGTHS = [1, 1000]
TIES = ["random", "zero", "positive", "negative"]
KEY = 7


def algorithms(world: int) -> dict[str, Algorithm]:
    return {
        "ring": jaxcomm.algorithms.ring(),
        "near_first": jaxcomm.algorithms.halving_doubling(),
        "far_first": jaxcomm.algorithms.halving_doubling("far_first"),
        "circulant": jaxcomm.algorithms.circulant(),
        "direct": jaxcomm.algorithms.direct(),
        "aggregator": jaxcomm.algorithms.direct(aggregator=world // 2),
    }


def compiled_vote(
    mesh: Any, algorithm: Algorithm, tie: str, zero: str, lengths: list[int], axis: Any = "data"
) -> Any:
    """A compiled program from rows of every device to what each ends with, in rows."""
    reduction = Majority(tie, zero, jax.random.key(KEY))

    def vote(xs: list[jax.Array]) -> list[jax.Array]:
        return [collectives.all_reduce(x[0], axis, reduction, algorithm)[None] for x in xs]

    spec = PartitionSpec(axis)
    f = jax.shard_map(vote, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    world = mesh.size
    return jax.jit(f).lower([jnp.zeros((world, n)) for n in lengths]).compile()


@functools.cache
def problem(world: int, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values of which a fifth are zero, and the coins that fall."""
    x = np.random.default_rng(n).integers(-2, 3, (world, n)).astype(np.float32)
    shared, own = jax.random.split(jax.random.key(KEY))
    words = -(-n // 32)

    def coins(key: jax.Array) -> np.ndarray:
        """Bit b of word j is coordinate b * words + j."""
        drawn = np.asarray(jax.random.bits(key, (words,), jnp.uint32))
        return ((drawn[None, :] >> np.arange(32)[:, None]) & 1).astype(bool).reshape(-1)[:n]

    return x, coins(shared), np.stack([coins(jax.random.fold_in(own, r)) for r in range(world)])


def check(mesh: Any, names: list[str], tie: str, zero: str, lengths: list[int]) -> None:
    """Every device must end with the oracle's vote, whatever the algorithm."""
    world = mesh.size
    problems = [problem(world, n) for n in lengths]
    for name in names:
        vote = compiled_vote(mesh, algorithms(world)[name], tie, zero, lengths)
        for (x, shared, own), y in zip(problems, vote([x for x, _, _ in problems]), strict=True):
            expected = oracles.majority(x, tie, zero, shared, own)
            np.testing.assert_array_equal(y, np.broadcast_to(expected, x.shape), err_msg=name)


@pytest.mark.newest
@pytest.mark.parametrize("world", range(1, 9))
def test_every_algorithm_gives_the_oracle(make_mesh: Any, world: int) -> None:
    check(make_mesh(world), list(algorithms(world)), "random", "random", LENGTHS)


@pytest.mark.parametrize(("tie", "zero"), list(itertools.product(TIES, ("random", "abstain"))))
@pytest.mark.parametrize("world", [3, 4])
def test_every_rule_gives_the_oracle(make_mesh: Any, world: int, tie: str, zero: str) -> None:
    check(make_mesh(world), ["circulant", "direct"], tie, zero, [33])


SIXTEEN = """
import json, sys
sys.path[:0] = {path!r}
import jax, numpy as np
import jaxcomm
from jax.sharding import AxisType
from collectives.test_majority import KEY, algorithms, compiled_vote, problem
import oracles

checked = 0
for world in (9, 12, 16):
    mesh = jaxcomm.data_mesh(devices=jax.devices()[:world])
    x, shared, own = problem(world, 1000)
    expected = np.broadcast_to(oracles.majority(x, "random", "random", shared, own), x.shape)
    for algorithm in algorithms(world).values():
        (y,) = compiled_vote(mesh, algorithm, "random", "random", [1000])([x])
        np.testing.assert_array_equal(y, expected)
        checked += 1
mesh = jax.make_mesh((4, 4), ("far", "near"), (AxisType.Auto,) * 2)
shifted = [jaxcomm.algorithms.halving_doubling("shifted", 4, grid) for grid in (None, (2, 2))]
a = jaxcomm.algorithms
pairs = [(a.direct(), a.circulant()), (a.ring(), a.halving_doubling())]
for algorithm in [*shifted, *(a.hierarchical(near, far) for near, far in pairs)]:
    (y,) = compiled_vote(mesh, algorithm, "random", "random", [1000], ("far", "near"))([x])
    np.testing.assert_array_equal(y, expected)
    checked += 1
print(json.dumps(checked))
"""


@pytest.mark.multiprocess
def test_up_to_sixteen_devices_and_two_axes() -> None:
    from processes import ROOT

    script = SIXTEEN.format(path=[str(ROOT), str(ROOT / "tests")])
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=16"}
    (finished,) = run_processes(1, script, join=False, env=flags, timeout=280)
    assert finished.stdout.split()[-1] == "22"


def sent(mesh: Any, algorithm: Algorithm, tie: str, zero: str, n: int, axis: Any = "data") -> Any:
    report = jaxcomm.wire_report(compiled_vote(mesh, algorithm, tie, zero, [n], axis))
    return report.bytes_max


@pytest.mark.parametrize("world", range(2, 9))
def test_bits_are_those_of_the_closed_forms(make_mesh: Any, world: int) -> None:
    n = 32 * 2 * 3 * 4 * 5 * 7  # divides into words and blocks for every world
    found = {
        name: sent(make_mesh(world), algorithm, "random", "random", n) * 8 / n
        for name, algorithm in algorithms(world).items()
    }
    assert found["ring"] == pytest.approx(oracles.majority_bits(world, "ring"))
    assert found["direct"] == pytest.approx(oracles.majority_bits(world, "direct"))
    assert found["circulant"] < 3 and found["circulant"] <= found["ring"]
    assert found["aggregator"] == world - 1
    if world & (world - 1) == 0:
        expected = pytest.approx(oracles.majority_bits(world, "halving_doubling"))
        assert found["near_first"] == found["far_first"] == found["circulant"] == expected
    else:  # each pair folds once more: a bit there, and the finished bit back
        q = world.bit_length() - 1
        folded = 1 + sum((j + 1) / 2**j for j in range(1, q + 1)) + 1 - 2.0**-q
        assert found["near_first"] <= folded


@pytest.mark.parametrize("world", [4, 5])
def test_padding_is_to_words_and_blocks(make_mesh: Any, world: int) -> None:
    words = -(-1000 // 32)
    block = 4 * -(-words // world)
    assert sent(make_mesh(world), jaxcomm.algorithms.direct(), "random", "random", 1000) == (
        2 * (world - 1) * block
    )


@pytest.mark.parametrize("world", [4, 5])
def test_a_result_that_can_be_zero_has_a_second_plane(make_mesh: Any, world: int) -> None:
    n, mesh = 32 * 20, make_mesh(world)
    plain = sent(mesh, jaxcomm.algorithms.ring(), "random", "random", n)
    plane = (world - 1) / world * n / 8
    # An odd number of votes is never tied.
    second = plane if world % 2 == 0 else 0
    assert sent(mesh, jaxcomm.algorithms.ring(), "zero", "random", n) == plain + second
    assert sent(mesh, jaxcomm.algorithms.ring(), "random", "abstain", n) == 2 * plain


def test_hierarchical_sends_little_on_the_far_axis(mesh4x2: Any) -> None:
    """Far: circulant over 4 of the half that a device owns; its votes are of 2 devices each."""
    n = 32 * 64
    algorithm = jaxcomm.algorithms.hierarchical(
        near=jaxcomm.algorithms.direct(), far=jaxcomm.algorithms.circulant()
    )
    vote = compiled_vote(mesh4x2, algorithm, "random", "random", [n], ("data", "model"))
    report = jaxcomm.wire_report(vote)
    far = report.only("collective-permute").bytes_max
    near = report.only("all-to-all", "all-gather").bytes_max
    owned = n / 8 / 2
    # Half of it with the count of 2 devices (2 bits), a quarter with that of 4 (3 bits); and back.
    assert far == owned * (2 / 2 + 3 / 4 + 3 / 4)
    assert near == n / 8 * (1 / 2 + 1 / 2)


@pytest.mark.parametrize(
    "near",
    [jaxcomm.algorithms.ring(), jaxcomm.algorithms.halving_doubling(), jaxcomm.algorithms.direct()],
)
def test_means_are_hierarchical_too(mesh4x2: Any, near: Algorithm) -> None:
    x = np.random.default_rng(0).integers(-64, 64, (8, 37)).astype(np.float32) * 8
    algorithm = jaxcomm.algorithms.hierarchical(near=near, far=jaxcomm.algorithms.circulant())
    axes = ("data", "model")
    f = jax.shard_map(
        lambda x: jaxcomm.pmean(x[0], axes, "float32", algorithm),
        mesh=mesh4x2,
        in_specs=PartitionSpec(axes),
        out_specs=PartitionSpec(),
    )
    np.testing.assert_array_equal(jax.jit(f)(x), x.mean(0))


@pytest.mark.parametrize("order", [("shifted", 2), ("shifted", 2, (2, 2)), ("shifted", 4)])
def test_means_in_the_shifted_order(mesh8: Any, order: tuple) -> None:
    x = np.random.default_rng(0).integers(-64, 64, (8, 37)).astype(np.float32) * 8
    f = jax.shard_map(
        lambda x: jaxcomm.pmean(
            x[0], "data", "float32", jaxcomm.algorithms.halving_doubling(*order)
        ),
        mesh=mesh8,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec(),
    )
    np.testing.assert_array_equal(jax.jit(f)(x), x.mean(0))


def test_bad_input(mesh8: Any) -> None:
    with pytest.raises(ValueError, match="unknown tie 'coin'; choose one of random, zero"):
        Majority("coin", "random", jax.random.key(0))
    with pytest.raises(ValueError, match="unknown zero 'skip'; choose one of random, abstain"):
        Majority("random", "skip", jax.random.key(0))
    with pytest.raises(TypeError, match="for each axis, got Native"):
        jaxcomm.algorithms.hierarchical(jaxcomm.algorithms.native(), jaxcomm.algorithms.ring())
    hierarchical = jaxcomm.algorithms.hierarchical(
        jaxcomm.algorithms.ring(), jaxcomm.algorithms.ring()
    )
    with pytest.raises(ValueError, match="needs two different mesh axes"):
        compiled_vote(mesh8, hierarchical, "random", "random", [8])
