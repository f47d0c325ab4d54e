"""Gaussiank: TopkA with a threshold estimated from a normal distribution."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm._axes import Axis
from jaxcomm.collectives.sparse._by_threshold import ByThreshold
from jaxcomm.collectives.sparse._sparse import SMALLEST, SparseResult
from jaxcomm.collectives.sparse.topk_allgather import gathered
from jaxcomm.kernels import select

ROUNDS = 4


@dataclasses.dataclass(frozen=True)
class Gaussiank(ByThreshold):
    """TopkA with a threshold that is estimated in every step, and never exact.

    The first guess is right for normally distributed values: k of n are above the mean plus z
    standard deviations. Then the threshold is halved or raised by half, up to four times, until
    between 2k/3 and 4k/3 values are above it. Each try is one count. If in the end fewer than 2k/3
    are above it, or more than there is room for, the threshold is that of `select.threshold_near`.

    Wire: that of `topk_allgather`.

    References:
      S. Shi et al., "Understanding Top-k Sparsification in Distributed Deep Learning", 2019,
      arXiv:1911.08772, algorithm 1.
    """

    name = "gaussiank"

    def exchange(
        self, x: jax.Array, threshold: jax.Array, step: jax.Array, axis: Axis
    ) -> tuple[SparseResult, jax.Array]:
        """See `SparseAllReduce.exchange`."""
        del threshold
        guess, k, capacity = self.gaussian_threshold(x), self.k(x.size), self.room(x.size)
        count = select.count_at_least(x, guess)
        is_off = (count > capacity) | (count < math.ceil(2 * k / 3))
        threshold = self.replaced_if(is_off, x, k, guess, step)
        return gathered(self, x, self.compact(x, threshold, capacity), axis), threshold

    def gaussian_threshold(self, x: jax.Array) -> jax.Array:
        """A magnitude that about k values of x exceed, if they are roughly normally distributed."""
        k = self.k(x.size)
        largest = jnp.max(jnp.abs(x))
        unit = jnp.where(largest > 0, largest, 1.0)  # Squares of large values are infinite.
        scaled = x / unit
        mean = jnp.mean(scaled)
        deviation = jnp.sqrt(jnp.mean(jnp.square(scaled - mean)))
        # |x| > t on both sides: the share above t on one side is half of k / n.
        z = jax.scipy.special.ndtri(jnp.float32(1 - k / (2 * x.size)))
        threshold = jnp.clip((jnp.abs(mean) + z * deviation) * unit, SMALLEST, largest)

        def adjust(before: tuple[jax.Array, jax.Array, jax.Array]) -> Any:
            number, _, threshold = before
            count = select.count_at_least(x, threshold)
            few, many = count < math.ceil(2 * k / 3), count > 4 * k // 3
            factor = jnp.where(few, 0.5, jnp.where(many, 1.5, 1.0)).astype(jnp.float32)
            return number + 1, ~(few | many), jnp.maximum(threshold * factor, SMALLEST)

        def until_good(start: Any) -> jax.Array:
            return jax.lax.while_loop(lambda at: (at[0] < ROUNDS) & ~at[1], adjust, start)[2]

        def all_rounds(start: Any) -> jax.Array:
            """For GPUs, where checking whether to continue takes longer than counting once more."""
            return jax.lax.fori_loop(0, ROUNDS, lambda _, at: adjust(at), start)[2]

        start = jnp.int32(0), jnp.bool_(False), threshold
        return jax.lax.platform_dependent(start, cpu=until_good, default=all_rounds)


def gaussiank(values: str = "float32", slack: float = 1.5) -> Gaussiank:
    """Gaussiank: TopkA, with a threshold estimated from a normal distribution in every step.

    Args:
      values: "float32" or "bfloat16", on the wire.
      slack: how many times k entries a message has room for, at least 1.

    Returns:
      The sparse all-reduce, for `jaxcomm.sparse_mean`.

    Raises:
      ValueError: for any other arguments.

    Wire: (N-1) ceil(slack k) entries of 6 bytes, or 4 in bfloat16; for a vector of more than 2^16
    values, 4 bytes more for every 2^16 of them.

    References:
      S. Shi et al., "Understanding Top-k Sparsification in Distributed Deep Learning", 2019,
      arXiv:1911.08772, algorithm 1.

    Differs from the paper: if more values are above the threshold than the message has room for, or
    fewer than 2k/3, another threshold is found in a sample. A static message cannot grow, and where
    values have only a few magnitudes, the threshold of a normal distribution could be above all of
    them in every step.
    """
    # No threshold is reused, so the rules for reused ones do not matter.
    return Gaussiank(values=values, slack=slack, recompute_every=1, scaling=1.0, tolerance=None)
