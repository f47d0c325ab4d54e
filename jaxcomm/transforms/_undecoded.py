"""Buckets of a mean that stay encoded until it is known whether the step is taken.

Then each large leaf is decoded into its place, or to NaN, and its next residual is written over the
old one. Otherwise a bucket would be decoded, looked at, and copied out, and its errors written and
read again: on CPU, half of the passes over it.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxcomm import collectives
from jaxcomm._axes import AxisName
from jaxcomm._pieces import cut, starts_of
from jaxcomm.collectives.algorithms import Algorithm
from jaxcomm.collectives.reductions import CodedMean
from jaxcomm.kernels.block_quantization import rows
from jaxcomm.transforms._buckets import alone_or_joined, split

Leaves = Mapping[int, jax.Array]


def in_order(parts: Leaves, reduction: CodedMean) -> dict[int, jax.Array]:
    """The leaves of a bucket in the order in which they are joined."""
    return {i: x for group in _groups(parts, reduction)[0] for i, x in group.items()}


def stays_encoded(
    parts: Leaves,
    residual: Leaves,
    axis_name: AxisName,
    reduction: CodedMean,
    algorithm: Algorithm,
) -> bool:
    """Whether a bucket gains by it: all in float32, with a leaf that can be decoded by itself."""
    both = [x for i in parts if i in residual for x in (parts[i], residual[i])]
    if not both or any(x.dtype != jnp.float32 for x in both) or not _groups(parts, reduction)[1]:
        return False
    n, blocks = sum(x.size for x in parts.values()), algorithm.blocks(jax.lax.axis_size(axis_name))
    return collectives.stays_encoded(reduction.padded(n, blocks), axis_name, reduction, algorithm)


def finished(
    mean: collectives.Undecoded,
    parts: Leaves,
    residual: Leaves,
    reduction: CodedMean,
    finite: jax.Array,
) -> tuple[dict[int, jax.Array], dict[int, jax.Array]]:
    """The updates and the next residuals of a bucket, by leaf.

    Args:
      mean: of the leaves `in_order`, joined and padded.
      parts: the leaves.
      residual: the residuals before the step.
      reduction: the mean.
      finite: whether the step is taken; if not, updates are NaN, and residuals stay.
    """
    groups, alone = _groups(parts, reduction)
    sizes = [sum(x.size for x in group.values()) for group in groups]
    if len(groups) > alone:  # the padding belongs to those that are joined
        sizes[-1] = len(mean.result.units) * mean.result.form.size - sum(sizes[:-1])
    units = jnp.where(finite, mean.result.units, jnp.nan)
    results = _parted(dataclasses.replace(mean.result, units=units), sizes)
    counts = [n // mean.owed.sent.form.size for n in sizes]
    starts = starts_of(counts)
    updates, left = {}, {}
    for number, group in enumerate(groups):
        updates |= split(rows.values(results[number]), group)
        owed = functools.partial(rows.left, mean.owed, starts[number], counts[number])
        if number < alone:
            (i,) = group
            left |= split(owed(residual[i], finite), group)
        else:
            new = split(owed(), group)
            left |= {i: jnp.where(finite, x, residual[i]) for i, x in new.items()}
    return updates, left


def _groups(parts: Leaves, reduction: CodedMean) -> tuple[list[dict[int, jax.Array]], int]:
    """The leaves of a bucket in groups; those that are alone are whole blocks."""
    hops = reduction.codec, reduction.second_hop
    return alone_or_joined(parts, lambda n: all(codec.in_rows(n) for codec in hops))


def _parted(whole: rows.Rows, sizes: list[int]) -> list[rows.Rows]:
    """The blocks of each part of the vector."""
    counts = [n // whole.form.size for n in sizes]
    pairs = zip(cut(whole.codes, counts), cut(whole.units, counts), strict=True)
    return [rows.Rows(codes, units, whole.form) for codes, units in pairs]
