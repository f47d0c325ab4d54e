"""Pieces of an array, such that XLA on CPU compiles the loops over them once.

XLA on CPU compiles loops with equal bodies once. A slice with a constant start is part of a loop's
body, so each loop over a piece would be compiled apart: hundreds of leaves would take many seconds.
"""

import itertools
from collections.abc import Sequence

import jax
import numpy as np


def cut(array: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Pieces of an array along its leading axis, from its start on."""

    def apart(array: jax.Array) -> list[jax.Array]:
        stops = itertools.accumulate(sizes)
        return [array[stop - n : stop] for n, stop in zip(sizes, stops, strict=True)]

    def alike(array: jax.Array) -> list[jax.Array]:
        pairs = zip(starts_of(sizes), sizes, strict=True)
        return [jax.lax.dynamic_slice_in_dim(array, start, n) for start, n in pairs]

    if len(set(sizes)) == len(sizes):
        return apart(array)  # their loops differ anyway
    return jax.lax.platform_dependent(array, cpu=alike, default=apart)


def starts_of(sizes: Sequence[int]) -> list[jax.Array]:
    """Where the pieces of these sizes start, int32 each, which XLA on CPU takes for unknown.

    They come from a conditional, whichever way it goes: XLA removes barriers only after it has
    simplified conditionals.
    """
    starts = list(itertools.accumulate(sizes, initial=0))[:-1]
    known = lambda: [np.int32(start) for start in starts]  # noqa: E731
    return jax.lax.cond(jax.lax.optimization_barrier(np.bool_(True)), known, known)
