"""The majority of signs over devices, counted in bit planes."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxcomm._axes import AxisName
from jaxcomm.collectives.reductions._reduction import Prepared, Reduction
from jaxcomm.kernels import bitplanes
from jaxcomm.kernels.bitplanes import Planes
from jaxcomm.kernels.random_bits import own_key, random_bits

TIES = ("random", "zero", "positive", "negative")
ZEROS = ("random", "abstain")

_CHAIN = 16  # counts that are added one after the other


@dataclasses.dataclass(frozen=True)
class Majority(Reduction):
    """Every device votes with the signs of its values; the result is the sign of most votes.

    A partial is a bit-sliced count of positive votes for each coordinate: plane p holds bit p of
    the counts, 32 coordinates to a word. Partials are added plane by plane and never unpacked. A
    message of k devices has ceil(log2(k+1)) planes. The result has one plane, or two where it can
    be zero.

    With zeros="abstain" a partial has a second count, of negative votes, and messages are twice as
    long.

    Attributes:
      ties: what an equal number of votes gives: "random" (a fair coin that all devices share),
        "zero", "positive" or "negative".
      zeros: what a value of zero votes: "random" (a fair coin of each device) or "abstain".
      key: for the coins; equal on all devices.
    """

    ties: str
    zeros: str
    key: jax.Array | None
    packed: ClassVar[int] = 32

    def __post_init__(self) -> None:
        check_majority(self.ties, self.zeros)

    def prepare(self, x: jax.Array, axis_name: AxisName) -> Prepared:
        """`ballot` of one vector."""
        return self.ballot([x], axis_name)

    def ballot(self, vectors: Sequence[jax.Array], axis_name: AxisName) -> Prepared:
        """Packs the signs into one plane of votes, or two; draws the coins for ties.

        Args:
          vectors: float32 or bfloat16 each, packed one by one, so that they need not be joined. All
            but the last have multiples of 32 values.
          axis_name: the mesh axis.
        """
        # Without the barrier, XLA on CPU would fuse this and what follows into one slow loop.
        packed = jax.lax.optimization_barrier([bitplanes.pack_both(x) for x in vectors])
        votes, against = (jnp.concatenate(words) for words in zip(*packed, strict=True))
        assert self.key is not None  # set in every reduction that runs
        shared = own_key(self.key, 0, 1)
        if self.zeros == "abstain":
            vector = (votes, against)
        else:
            own = own_key(self.key, jax.lax.axis_index(axis_name), 2)
            # Neither positive nor negative: a zero or NaN. Each device tosses its own coin.
            vector = (votes | (~against & random_bits(own, votes.shape)),)
        return Prepared(vector, random_bits(shared, votes.shape) if self.ties == "random" else None)

    def start(self, blocks: Planes, world: int) -> tuple[Planes, ...]:
        """Counts of 0 or 1, with as many planes as the count of all devices needs."""
        empty = bitplanes.planes_for(world) - 1
        return tuple((votes, *[jnp.zeros_like(votes)] * empty) for votes in blocks)

    def merge(self, a: tuple[Planes, ...], b: tuple[Planes, ...]) -> tuple[Planes, ...]:
        """The sums of the counts."""
        return tuple(bitplanes.add(x, y, len(x)) for x, y in zip(a, b, strict=True))

    def merge_all(self, partials: tuple[Planes, ...]) -> tuple[Planes, ...]:
        """The sums of many counts by halves: a chain of additions would compile for minutes."""
        while (count := len(partials[0][0])) > _CHAIN:
            half = count // 2
            first, second, odd = (
                jax.tree.map(lambda rows, part=part: rows[part], partials)
                for part in (slice(half), slice(half, 2 * half), slice(2 * half, count))
            )
            sums = self.merge(first, second)
            partials = jax.tree.map(lambda *rows: jnp.concatenate(rows), sums, odd)
        return super().merge_all(partials)

    def encode(
        self, partial: tuple[Planes, ...], counts: tuple[int, ...], message_id: int
    ) -> jax.Array:
        """One row of words for each plane that a count of that many devices needs."""
        del message_id
        rows = []
        for used, start, stop in _runs(counts):
            planes = [plane[start:stop, None] for stack in partial for plane in stack[:used]]
            rows.append(jnp.concatenate(planes, axis=1).reshape(-1, planes[0].shape[-1]))
        return jnp.concatenate(rows)

    def decode(
        self, message: jax.Array, counts: tuple[int, ...], like: tuple[Planes, ...]
    ) -> tuple[Planes, ...]:
        """The planes in a message, and zeros for the planes that were not sent."""
        at, width = 0, len(like[0])
        parts: list[list[list[jax.Array]]] = [[[] for _ in stack] for stack in like]
        for used, start, stop in _runs(counts):
            blocks, rows = stop - start, used * len(like)
            run = message[at : at + blocks * rows].reshape(blocks, rows, -1)
            at += blocks * rows
            for s, p in itertools.product(range(len(like)), range(width)):
                empty = jnp.zeros((blocks, run.shape[-1]), run.dtype)
                parts[s][p].append(run[:, s * used + p] if p < used else empty)
        return tuple(tuple(jnp.concatenate(runs) for runs in stack) for stack in parts)

    def finish(self, partial: tuple[Planes, ...], replicated: Any, world: int) -> jax.Array:
        """The plane of signs and, where the result can be zero, the plane of what is not zero."""
        if self.zeros == "abstain":
            positive, negative = partial
            won = bitplanes.greater(positive, negative)
            tied = ~(won | bitplanes.greater(negative, positive))
            voted = ~bitplanes.equals(positive, 0) | ~tied
        else:
            (positive,) = partial
            won = bitplanes.exceeds(positive, world // 2)
            tied = bitplanes.equals(positive, world // 2) if world % 2 == 0 else None
            voted = None
        signs = won
        if tied is not None and self.ties in ("random", "positive"):
            signs = won | (tied & replicated if self.ties == "random" else tied)
        if tied is not None and self.ties == "zero":
            voted = ~tied
        planes = (signs,) if voted is None else (signs, voted)
        return jnp.concatenate([plane[:, None] for plane in planes], axis=1)

    def decode_result(self, result: jax.Array, n: int) -> Planes:
        """The planes apart."""
        del n
        return tuple(result[:, p] for p in range(result.shape[1]))

    def restore(self, vector: Planes, shared_scale: None, n: int) -> jax.Array:
        """+1 and -1, and 0 where neither sign won."""
        del shared_scale
        return bitplanes.signs(vector[0], n, *vector[1:])


def check_majority(ties: str, zeros: str) -> None:
    """Raises a ValueError for an unknown rule."""
    for name, rule, known in (("ties", ties, TIES), ("zeros", zeros, ZEROS)):
        if rule not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {rule!r}.")


def _runs(counts: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Neighbouring blocks of equally many planes: (planes, start, stop)."""
    runs, start = [], 0
    for used, group in itertools.groupby(counts, key=bitplanes.planes_for):
        stop = start + len(list(group))
        runs.append((used, start, stop))
        start = stop
    return runs
