"""The mean of matrices over devices by their products with thin bases (PowerSGD).

Device w holds a matrix M_w of n rows and m columns, and all devices hold the same m x r start Q.

    P = orthonormal(mean of M_w Q)      n x r, the first message of r n values
    Q = mean of M_w^T P                 m x r, the second message of r m values
    mean = P Q^T = P P^T (mean of M_w)  the mean, projected to the r columns of P
    lack_w = M_w - P (M_w^T P)^T        what the projection drops of this device's matrix

This is one step of a power iteration on the mean matrix; its Q is the next start, so the iteration
continues from step to step. P and Q have the same bits on all devices, because they are computed
from the results of an all-reduce. Their product is written as sums and products of single values,
and lengths of columns are XLA's own reductions, which devices of one kind add in one order. A
library's matrix product may choose different orders on different devices. Only each device's own
two products, which the residual corrects, are left to the library.

What a device lacks is known before the second message, unless that message has its own errors. A
device on which the lack is not finite, because its matrix is not or because of overflow, sends NaN.
So the mean is NaN on all devices, without another message.

Matrices are stored transposed, as in layers: x[b, m, n] with the outputs last, b of them at once, P
as [b, r, n] and Q as [b, r, m].
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm._axes import AxisName
from jaxcomm._pieces import cut
from jaxcomm.collectives.algorithms import Algorithm
from jaxcomm.collectives.all_reduce import all_reduce, all_reduce_with_residual
from jaxcomm.collectives.reductions import Reduction
from jaxcomm.kernels.random_bits import own_key, random_bits
from jaxcomm.kernels.reductions import all_finite, computed_once, sums_of

Arrays = list[jax.Array]
# A column of which projection leaves no more than this share is nothing but rounding.
_ROUNDING = 1e-6
_TINY = jnp.finfo(jnp.float32).tiny
_EXACT = jax.lax.Precision.HIGHEST
# On GPUs: columns that are made orthonormal without a loop, and values of bases that are padded.
_UNROLLED, _PADDED = 8, 2**21


class LowRankResult(NamedTuple):
    """What `projected_mean` ends with, for each stack of matrices.

    Attributes:
      means: float32[b, m, n], of rank r, equal on all devices.
      factors: float32[b, r, m], Q, equal on all devices: the start of the next step.
      lacks: float32[b, m, n], the part of this device's matrices that the mean lacks: the means of
        the matrices are `means` plus the mean of `lacks` over devices.
      bounded: bool, equal on all devices: if it is true, the means are finite.
    """

    means: Arrays
    factors: Arrays
    lacks: Arrays
    bounded: jax.Array


def projected_mean(
    matrices: Sequence[jax.Array],
    starts: Sequence[jax.Array],
    axis_name: AxisName,
    bases: Reduction,
    factors: Reduction,
    algorithm: Algorithm,
) -> LowRankResult:
    """The mean over a mesh axis, projected to as many columns as the starts have.

    Args:
      matrices: float32[b, m, n], different on every device, where the checks of `jax.shard_map` are
        off; every axis of the mesh must be manual here.
      starts: float32[b, r, m], equal on all devices, with one r for all.
      axis_name: the mesh axis.
      bases: how the mean of P is computed; its errors change the basis, and lose nothing.
      factors: how the mean of Q is computed. If it keeps errors, they are in `lacks`. If it does
        not, `bounded` is false where `lacks` is not finite on one of the devices.
      algorithm: who talks to whom, in both means.

    Wire: that of two means by the algorithm, of sum(b r n) and of sum(b r m) values.
    """
    products = [
        jnp.einsum("bmn,brm->brn", x, q, precision=_EXACT)
        for x, q in zip(matrices, starts, strict=True)
    ]
    mean = all_reduce(_joined(products), axis_name, bases, algorithm)
    ps = orthonormal(_split(mean, products))
    own = [
        jnp.einsum("bmn,brn->brm", x, p, precision=_EXACT)
        for x, p in zip(matrices, ps, strict=True)
    ]

    def lacks_of(sent: Sequence[jax.Array]) -> Arrays:
        return [x - _product(q, p) for x, q, p in zip(matrices, sent, ps, strict=True)]

    lacks, message = lacks_of(own), _joined(own)
    if not factors.keeps_errors:
        message = jnp.where(all_finite([x.reshape(-1) for x in lacks]), message, jnp.nan)
    mean, errors = all_reduce_with_residual(message, axis_name, factors, algorithm)
    if errors is not None:
        lacks = lacks_of(_split(message - errors, own))
    qs = _split(mean, own)
    means = [_product(q, p) for q, p in zip(qs, ps, strict=True)]
    # Instead of the means, which are many values: P is at most 1, so no sum of r products is more.
    most = jnp.finfo(jnp.float32).max / (2 * starts[0].shape[1])
    bounded = jnp.all(jnp.abs(mean) <= most)
    return LowRankResult(means, qs, lacks, bounded)


def sides(shape: Sequence[int]) -> tuple[int, int]:
    """(m, n): an array of two axes or more as a matrix of m inputs and n outputs."""
    k = inputs_of(shape)
    return math.prod(shape[:k]), math.prod(shape[k:])


def inputs_of(shape: Sequence[int]) -> int:
    """How many axes of an array of two or more are inputs; the others are outputs.

    The axes are split where rows and columns together are fewest, at the last such place.
    """
    cuts = range(len(shape) - 1, 0, -1)
    return min(cuts, key=lambda k: math.prod(shape[:k]) + math.prod(shape[k:]))


def orthonormal(bases: Sequence[jax.Array]) -> Arrays:
    """Orthonormal columns that span what those of each basis do, float32[b, r, n] each.

    Gram-Schmidt with every projection done twice. The result is as orthogonal as that of a QR
    decomposition (L. Giraud et al., 2005), and needs no library. A column in the span of earlier
    ones becomes zero, and a zero column stays zero. Bases of similar length are padded with zeros
    and handled at once: on CPU those of about one length, in one loop; on GPUs, where each kernel
    takes microseconds, as many as need little memory, and few columns without a loop.
    """
    alike = functools.partial(_in_groups, f=_by_columns, groups_of=_of_one_length)
    few = functools.partial(_in_groups, f=_by_columns_at_once, groups_of=_of_little_padding)
    is_short = bases[0].shape[1] <= _UNROLLED
    return jax.lax.platform_dependent(list(bases), cpu=alike, default=few if is_short else alike)


def _in_groups(
    bases: Sequence[jax.Array],
    f: Callable[[int, jax.Array], jax.Array],
    groups_of: Callable[[Sequence[jax.Array]], list[list[int]]],
) -> Arrays:
    """Applies f to the number of each group and its bases, padded to the longest of them."""
    found = {}
    for number, group in enumerate(groups_of(bases)):
        n = max(bases[i].shape[-1] for i in group)
        wide = [jnp.pad(bases[i], ((0, 0), (0, 0), (0, n - bases[i].shape[-1]))) for i in group]
        done = f(number, jnp.concatenate(wide))
        pieces = cut(done, [bases[i].shape[0] for i in group])
        short = [x[..., : bases[i].shape[-1]] for i, x in zip(group, pieces, strict=True)]
        found |= dict(zip(group, computed_once(short), strict=True))
    return [found[i] for i in range(len(bases))]


def _of_one_length(bases: Sequence[jax.Array]) -> list[list[int]]:
    """Groups whose lengths differ by less than a factor of two."""
    groups: dict[int, list[int]] = {}
    for i, p in enumerate(bases):
        groups.setdefault(p.shape[-1].bit_length(), []).append(i)
    return list(groups.values())


def _of_little_padding(bases: Sequence[jax.Array]) -> list[list[int]]:
    """Few groups: each has few values when padded, or at most twice those of its bases."""
    groups: list[list[int]] = []
    padded = size = longest = 0
    for i in sorted(range(len(bases)), key=lambda i: -bases[i].shape[-1]):
        p = bases[i]
        padded, size = padded + p.size // max(p.shape[-1], 1) * longest, size + p.size
        if groups and padded <= max(_PADDED, 2 * size):
            groups[-1].append(i)
        else:
            groups.append([i])
            padded, size, longest = p.size, p.size, p.shape[-1]
    return groups


def _by_columns(_: int, p: jax.Array) -> jax.Array:
    """Gram-Schmidt in a loop over columns, float32[b, r, n]."""
    p = _scaled(p)  # squares of very small or very large columns would leave float32's range

    def column(j: jax.Array, done: jax.Array) -> jax.Array:
        v = jax.lax.dynamic_index_in_dim(p, j, axis=1, keepdims=False)
        before = _norm(v)
        for _ in range(2):
            along = jnp.sum(done * v[:, None], axis=-1, keepdims=True)
            v = v - jnp.sum(done * along, axis=1)
        return jax.lax.dynamic_update_index_in_dim(done, _unit(v, before), j, axis=1)

    return jax.lax.fori_loop(0, p.shape[1], column, jnp.zeros_like(p))


def _by_columns_at_once(_: int, p: jax.Array) -> jax.Array:
    """The same without a loop, in few kernels a column."""
    p = _scaled(p)
    done: Arrays = []
    for j in range(p.shape[1]):
        v = p[:, j]
        before, *along = _sums([v * v, *(d * v for d in done)])
        for i in range(2 if done else 0):
            along = _sums([d * v for d in done]) if i else along
            v = v - sum(d * a for d, a in zip(done, along, strict=True))
        done.append(_unit(v, jnp.sqrt(before)))
    return jnp.stack(done, axis=1)


def _sums(rows: Sequence[jax.Array]) -> Arrays:
    """The sums along the last axis, `(..., 1)`."""
    return [x[..., None] for x in sums_of(rows, axis=rows[0].ndim - 1)]


def _unit(v: jax.Array, before: jax.Array) -> jax.Array:
    """A column of length 1, or zeros if projections left nothing of its length `before`."""
    after = _norm(v)
    # NaN is not dropped: it compares as false.
    return jnp.where(after <= _ROUNDING * before, 0.0, v / after)


def with_new_columns(factors: Sequence[jax.Array], key: jax.Array) -> Arrays:
    """The starts of a step: the last step's Q, with zero columns drawn anew from a normal.

    Columns are zero at first, and where a matrix had fewer than r directions; they would stay zero.
    All columns are scaled, which does not change their span, so that products stay in float32's
    range.

    Args:
      factors: float32[b, r, m], equal on all devices.
      key: equal on all devices.
    """
    drawn_if_any = functools.partial(_drawn_if_any, key=key)
    drawn = functools.partial(_drawn, key=key)
    return jax.lax.platform_dependent(list(factors), cpu=drawn_if_any, default=drawn)


def _drawn_if_any(factors: Sequence[jax.Array], key: jax.Array) -> Arrays:
    flat = [_scaled(q) for q in factors]
    dead = [jnp.max(jnp.abs(q), axis=-1, keepdims=True) <= 0 for q in flat]

    def draw() -> Arrays:
        normal = _split(jax.random.normal(key, (sum(q.size for q in flat),), jnp.float32), flat)
        return [jnp.where(d, x, q) for d, x, q in zip(dead, normal, flat, strict=True)]

    any_dead = jnp.any(jnp.concatenate([d.reshape(-1) for d in dead]))
    return jax.lax.cond(any_dead, draw, lambda: flat)


def _drawn(factors: Sequence[jax.Array], key: jax.Array) -> Arrays:
    """The same for GPUs, where a branch takes longer than drawing all of them."""

    def in_group(number: int, q: jax.Array) -> jax.Array:
        scaled = _scaled(q)
        is_dead = jnp.max(jnp.abs(scaled), axis=-1, keepdims=True) <= 0
        bits = random_bits(own_key(key, 0, number), q.shape) >> 9
        odds = 2.0**-22 * (bits.astype(jnp.float32) + 0.5) - 1  # never -1 or 1
        normal = math.sqrt(2) * jax.lax.erf_inv(odds)
        return jnp.where(is_dead, normal, scaled)

    return _in_groups(factors, in_group, _of_little_padding)


def _scaled(x: jax.Array) -> jax.Array:
    """Columns whose largest magnitude is from 1 to 4, or zeros where it is not a normal number.

    XLA multiplies by the reciprocal of the divisor, which is infinite on GPUs for a smaller
    divisor, and zero on CPU for one above 2^126.
    """
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    divisor = jnp.minimum(largest, jnp.float32(2.0**126))
    return jnp.where(largest < _TINY, 0.0, x) / jnp.where(largest < _TINY, 1.0, divisor)


def _norm(v: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(v * v, axis=-1, keepdims=True))


def _product(q: jax.Array, p: jax.Array) -> jax.Array:
    """Q P^T by single products in one order, float32[b, m, n]: the same bits on all devices."""
    terms = [q[:, j, :, None] * p[:, j, None, :] for j in range(q.shape[1])]
    return sum(terms[1:], terms[0])


def _joined(parts: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate([part.reshape(-1) for part in parts])


def _split(vector: jax.Array, parts: Sequence[jax.Array]) -> Arrays:
    pieces = computed_once(cut(vector, [part.size for part in parts]))
    return [piece.reshape(part.shape) for piece, part in zip(pieces, parts, strict=True)]
