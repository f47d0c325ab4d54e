"""Every all-reduce algorithm as a row of a table: what is true of it for any number of devices."""

import dataclasses
import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import jaxcomm
import oracles
from jaxcomm.collectives.algorithms import (
    Algorithm,
    circulant,
    direct,
    halving_doubling,
    native,
    ring,
    two_way_ring,
)
from jaxcomm.collectives.algorithms.circulant import Circulant, best_skips, near_skips
from jaxcomm.collectives.algorithms.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Case:
    """An algorithm, and what must be true of it.

    Attributes:
      of: from the number of devices to the algorithm.
      oracle: of (N, n) and what rounding makes of a message; None where XLA chooses the order.
      blocks_sent: by the busiest device, there and back.
      rounds: of the schedule of the reduce-scatter.
      messages: rounds of a mean, there and back; None is twice `rounds`.
      operations: how often the compiled program has which; None: `messages` of `ppermute`.
    """

    of: Callable[[int], Algorithm]
    oracle: Callable[[np.ndarray, oracles.Rounding], np.ndarray] | None = None
    blocks_sent: Callable[[int], int] = lambda world: 2 * (world - 1)
    rounds: Callable[[int], int] = lambda world: world - 1
    messages: Callable[[int], int] | None = None
    operations: dict[str, int] | None = None

    def schedule(self, world: int) -> Schedule:
        return self.of(world).schedule(world)

    def program_operations(self, world: int) -> dict[str, int]:
        if world == 1:
            return {}
        rounds = 2 * self.rounds(world) if self.messages is None else self.messages(world)
        return self.operations or {"collective-permute": rounds}


def log2(world: int) -> int:
    """Rounded down."""
    return world.bit_length() - 1


def blocks_of_halving(world: int) -> int:
    """Of P devices; where a pair of neighbours folds, one of it sends a whole vector more."""
    core = 2 ** log2(world)
    return 2 * (core - 1) + (core if world > core else 0)


def rounds_of_halving(world: int) -> int:
    return log2(world) + (world > 2 ** log2(world))


# A name of `BY_NAME` stands for the algorithm with its defaults; the others are variants.
CASES: dict[str, Case] = {
    "native": Case(lambda world: native()),
    "direct": Case(
        lambda world: direct(), oracles.direct, operations={"all-to-all": 1, "all-gather": 1}
    ),
    "ring": Case(lambda world: ring(), oracles.ring),
    "two_way_ring": Case(lambda world: two_way_ring(), oracles.two_way_ring),
    "halving_doubling": Case(
        lambda world: halving_doubling(),
        oracles.halving_doubling,
        blocks_of_halving,
        rounds_of_halving,
    ),
    "circulant": Case(
        lambda world: circulant(),
        oracles.near_circulant,  # a vote by other skips, which are its schedule
        rounds=lambda world: len(best_skips(world)),
        messages=lambda world: 2 * len(near_skips(world)),
    ),
    "rising skips": Case(
        lambda world: circulant().for_means,
        oracles.near_circulant,
        rounds=lambda world: len(near_skips(world)),
    ),
    "falling skips": Case(
        lambda world: Circulant(best_skips(world)),
        oracles.circulant,
        rounds=lambda world: len(best_skips(world)),
        messages=lambda world: len(best_skips(world)) + len(near_skips(world)),
    ),
    "far_first": Case(
        lambda world: halving_doubling("far_first"),
        functools.partial(oracles.halving_doubling, order="far_first"),
        blocks_of_halving,
        rounds_of_halving,
    ),
    "aggregator": Case(
        lambda world: direct(aggregator=world // 2), oracles.aggregator, lambda world: world - 1
    ),
}
SCHEDULED = [name for name, case in CASES.items() if case.oracle]
# Without variants: for what `jaxcomm` offers under a name.
NAMED = [name for name in SCHEDULED if name in jaxcomm.collectives.algorithms.BY_NAME]


def block_length(case: Case, n: int, world: int) -> int:
    return -(-n // case.schedule(world).blocks)


def bytes_sent(case: Case, n: int, message: Callable[[int], int], world: int) -> int:
    """By the busiest device, for n values in messages of `message(length)` bytes a block."""
    return case.blocks_sent(world) * message(block_length(case, n, world))


def vote_planes(schedule: Schedule, there: int = 1, back: int = 1) -> int:
    """Bit planes of a block that the busiest device sends: a count of up to k has log2(k+1).

    A partial has `there` counts, and a result `back` planes.
    """
    sent = [0] * schedule.world
    for step, counts in zip(schedule.rounds, schedule.counts, strict=True):
        for source, target in step.pairs:
            sent[source] += there * sum(math.ceil(math.log2(k + 1)) for k in counts)
            sent[target] += back * step.size
    return max(sent)


def vote_bits(schedule: Schedule) -> Fraction:
    """Bits per coordinate that the busiest device sends."""
    return Fraction(vote_planes(schedule), schedule.blocks)


@functools.cache  # tests are many, programs few
def mean_program(mesh: Mesh, n: int, **options: Any) -> jax.stages.Compiled:
    """`pmean` from (N, n) and a key to (N, n): what each device ends with, in rows."""
    axes = mesh.axis_names if len(mesh.axis_names) > 1 else mesh.axis_names[0]
    spec = PartitionSpec(axes)

    def one(x: jax.Array, key: jax.Array) -> jax.Array:
        return jaxcomm.pmean(x[0], axes, key=key, **options)[None]

    f = jax.shard_map(
        one, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False
    )
    return jax.jit(f).lower(jnp.zeros((mesh.size, n)), jax.random.key(0)).compile()


def mean_on_all(program: jax.stages.Compiled, x: np.ndarray, seed: int = 0) -> np.ndarray:
    """The mean of x, (N, n), that all devices have: the same bits on each of them."""
    y = np.asarray(program(x, jax.random.key(seed)))
    np.testing.assert_array_equal(y, np.broadcast_to(y[0], x.shape))
    return y[0]
