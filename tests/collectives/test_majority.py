"""The majority vote: one result for every algorithm, and the bits of the closed forms."""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jaxcomm
import oracles
from algorithm_table import CASES, NAMED, SCHEDULED, block_length, vote_planes
from jaxcomm import collectives
from jaxcomm.collectives.algorithms import Algorithm
from jaxcomm.collectives.reductions import Majority
from jaxcomm.kernels.random_bits import own_key, random_bits
from pairs import every_pair
from processes import ROOT, run_processes

LENGTHS = [1, 33, 1000]
TIES = ["random", "zero", "positive", "negative"]
ZEROS = ["random", "abstain"]
KEY = 7

MakeMesh = Callable[[int], Mesh]


def compiled_vote(
    mesh: Mesh, algorithm: Algorithm, tie: str, zero: str, n: int, axis: Any = "data"
) -> jax.stages.Compiled:
    """A compiled program from rows of every device to what each ends with, in rows."""
    reduction = Majority(tie, zero, jax.random.key(KEY))

    def vote(x: jax.Array) -> jax.Array:
        return collectives.all_reduce(x[0], axis, reduction, algorithm)[None]

    spec = PartitionSpec(axis)
    f = jax.shard_map(vote, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(f).lower(jnp.zeros((mesh.size, n))).compile()


@functools.cache
def problem(world: int, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values of which a fifth are zero, and the coins that fall."""
    x = np.random.default_rng(n).integers(-2, 3, (world, n)).astype(np.float32)
    key = jax.random.key(KEY)
    words = -(-n // 32)

    def coins(key: jax.Array) -> np.ndarray:
        """Bit b of word j is coordinate b * words + j."""
        drawn = np.asarray(random_bits(key, (words,)))
        return ((drawn[None, :] >> np.arange(32)[:, None]) & 1).astype(bool).reshape(-1)[:n]

    return x, coins(own_key(key, 0, 1)), np.stack([coins(own_key(key, r, 2)) for r in range(world)])


def check(mesh: Mesh, name: str, tie: str, zero: str, n: int) -> None:
    """Every device ends with the oracle's vote, and sends the planes that it needs."""
    world, case = mesh.size, CASES[name]
    program = compiled_vote(mesh, case.of(world), tie, zero, n)
    x, shared, own = problem(world, n)
    expected = oracles.majority(x, tie, zero, shared, own)
    np.testing.assert_array_equal(program(x), np.broadcast_to(expected, x.shape))
    # Votes against are counted too if some abstain. A result that can be zero has a second plane;
    # an odd number of votes is never tied.
    there = 2 if zero == "abstain" else 1
    back = 2 if zero == "abstain" or (tie == "zero" and world % 2 == 0) else 1
    block = 4 * block_length(case, -(-n // 32), world)
    sent = jaxcomm.wire_report(program).bytes_max
    assert sent == vote_planes(case.schedule(world), there, back) * block


# At 7 devices, messages of circulant hold blocks of different counts.
@every_pair(newest=True, name=SCHEDULED, world=[3, 7, 8], tie=TIES, zero=ZEROS, n=LENGTHS)
def test_every_algorithm_gives_the_oracle_and_sends_its_planes(
    make_mesh: MakeMesh, name: str, world: int, tie: str, zero: str, n: int
) -> None:
    check(make_mesh(world), name, tie, zero, n)


# Who abstains has no say in whether the number of votes is even.
RULES = [(tie, zero, world) for tie in TIES for zero in ZEROS for world in (3, 4)]
RULES = [rule for rule in RULES if rule[1:] != ("abstain", 3)]


@pytest.mark.parametrize(("tie", "zero", "world"), [*RULES, ("random", "random", 1)])
def test_every_rule_gives_the_oracle(make_mesh: MakeMesh, tie: str, zero: str, world: int) -> None:
    check(make_mesh(world), "direct", tie, zero, 33)


SIXTEEN = """
import sys
sys.path[:0] = {path!r}
import jax, numpy as np
import jaxcomm
from jax.sharding import AxisType
from algorithm_table import NAMED
from collectives.test_majority import check, compiled_vote, problem
import oracles

for i, name in enumerate(NAMED):
    world = (9, 12, 16)[i % 3]
    check(jaxcomm.data_mesh(devices=jax.devices()[:world]), name, "random", "random", 1000)
    print(name, world)
x, shared, own = problem(16, 1000)
expected = np.broadcast_to(oracles.majority(x, "random", "random", shared, own), x.shape)
mesh = jax.make_mesh((4, 4), ("far", "near"), (AxisType.Auto,) * 2)
a = jaxcomm.algorithms
across = [("shifted", None), ("shifted", (2, 2)), ("spread", None)]
switched = [a.halving_doubling(order, 4, grid) for order, grid in across]
pairs = [(a.direct(), a.circulant()), (a.ring(), a.halving_doubling())]
for algorithm in [*switched, *(a.hierarchical(near=near, far=far) for near, far in pairs)]:
    vote = compiled_vote(mesh, algorithm, "random", "random", 1000, ("far", "near"))
    np.testing.assert_array_equal(vote(x), expected)
    print(algorithm)
"""


def test_up_to_sixteen_devices_and_two_axes() -> None:
    script = SIXTEEN.format(path=[str(ROOT), str(ROOT / "tests")])
    quick = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=16")
    flags = {"XLA_FLAGS": quick}
    (finished,) = run_processes(1, script, join=False, env=flags, timeout=280)
    assert len(finished.stdout.splitlines()) == len(NAMED) + 5


def test_hierarchical_sends_little_on_the_far_axis(mesh4x2: Mesh) -> None:
    """Far: circulant over 4 of the half that a device owns; its votes are of 2 devices each."""
    n = 32 * 64
    algorithm = jaxcomm.algorithms.hierarchical(
        near=jaxcomm.algorithms.direct(), far=jaxcomm.algorithms.circulant()
    )
    vote = compiled_vote(mesh4x2, algorithm, "random", "random", n, ("data", "model"))
    x, shared, own = problem(8, n)
    expected = oracles.majority(x, "random", "random", shared, own)
    np.testing.assert_array_equal(vote(x), np.broadcast_to(expected, x.shape))
    report = jaxcomm.wire_report(vote)
    far = report.only("collective-permute").bytes_max
    near = report.only("all-to-all", "all-gather").bytes_max
    owned = n / 8 / 2
    # Three quarters of it with the count of 2 devices (2 bits), each in a round; and back.
    assert far == owned * (3 * 2 / 4 + 3 / 4)
    assert near == n / 8 * (1 / 2 + 1 / 2)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="ties must be one of random, zero.*, got 'coin'"):
        Majority("coin", "random", jax.random.key(0))
    with pytest.raises(ValueError, match="zeros must be one of random, abstain, got 'skip'"):
        Majority("random", "skip", jax.random.key(0))


def test_many_counts_are_added_by_halves() -> None:
    """A chain of them would be a program that compiles for minutes."""
    reduction = Majority("random", "random", None)

    def merged(votes: jax.Array) -> Any:
        return reduction.merge_all(reduction.start((votes,), len(votes)))

    lines = {}
    for world in (33, 300):
        votes = np.random.default_rng(world).integers(0, 2**32, (world, 3), np.uint32)
        (planes,) = jax.jit(merged)(votes)
        bits = [np.asarray(plane[0])[:, None] >> np.arange(32) & 1 for plane in planes]
        counts = sum(row.astype(int) << i for i, row in enumerate(bits))
        np.testing.assert_array_equal(counts, (votes[:, :, None] >> np.arange(32) & 1).sum(0))
        lines[world] = len(jax.make_jaxpr(merged)(votes).eqns)
    assert lines[300] < 3 * lines[33], lines
