"""The largest magnitude along the last axis, the sum, running sums, and whether all is finite.

The first two have two formulations each, one per platform. XLA on CPU reduces the last axis one
element after another, and sums by library calls, for which it first materializes the operand. On
CPU the axis is folded instead, in loops of vector instructions that XLA fuses with what makes the
operand: 8 rows of 32 neighbours become one row, the row becomes one number, and this repeats until
few numbers are left. On other platforms both are plain reductions.

XLA on CPU compiles a running sum to six to ten loops, one for each power of 16. On CPU, the version
here adds few values directly, and more in a single loop, which doubles the length of the sums.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm import _axes

_ROWS, _LANES = 8, 32
_FEW_LANES = 8  # for an axis that is shorter than that
_MANY_ROWS = 64
_ROW = 1024  # values that GPUs reduce at once
_PAIRS = 2**23  # values and sums that GPUs add up in one kernel, which makes no use of other sums
_SHORT = 32  # values that XLA on CPU sums in one loop, without loops over parts of them
_FEW = 2**14  # up to this many values are reduced plainly: a fold takes longer to compile
_MAGNITUDE, INFINITY = 0x7FFFFFFF, 0x7F800000
_INFINITIES = {jnp.dtype(jnp.bfloat16): 0x7F80, jnp.dtype(jnp.float16): 0x7C00}

# Two arrays of uint32 patterns to one.
Join = Callable[[jax.Array, jax.Array], jax.Array]


def largest(x: jax.Array) -> jax.Array:
    """The bit patterns of the largest magnitudes.

    Bit patterns have the order of the magnitudes on every backend: denormals do not count as zero,
    infinity is above all finite values, and NaN is above infinity.

    Args:
      x: float32 array `(..., n)`.

    Returns:
      uint32 array `(...)`; zeros if n is 0.

    Raises:
      TypeError: for another dtype.
    """
    _require("largest", x)
    patterns = _patterns(x) & _MAGNITUDE
    if x.size < _FEW:
        return jax.lax.reduce_max(patterns, axes=(x.ndim - 1,))
    return jax.lax.platform_dependent(
        patterns,
        cpu=functools.partial(_fold, join=jnp.maximum, last=_reduced),
        default=lambda patterns: jax.lax.reduce_max(patterns, axes=(x.ndim - 1,)),
    )


def total(x: jax.Array) -> jax.Array:
    """The sums; the order of summation differs between platforms.

    The sum of a row does not depend on how many rows are summed at once, because all devices must
    have the same bits of a block's scale. So short rows are folded too; `largest` does not round,
    and reduces them plainly.

    Args:
      x: float32 array `(..., n)`.

    Returns:
      float32 array `(...)`.

    Raises:
      TypeError: for another dtype.
    """
    _require("total", x)
    return jax.lax.platform_dependent(
        x,
        cpu=lambda x: _floats(_fold(_patterns(x), _sum_of_patterns, _halved)),
        default=lambda x: jnp.sum(x, axis=-1),
    )


def sum_in_order(rows: jax.Array) -> jax.Array:
    """The sum of the rows, `(N, n)` to `(n,)`, added in order.

    Many rows are added in a loop, so that programs do not grow with the number of devices.
    """
    if len(rows) <= _MANY_ROWS:
        return functools.reduce(jnp.add, [rows[r] for r in range(len(rows))])

    def add(r: jax.Array, before: jax.Array) -> jax.Array:
        return before + jax.lax.dynamic_index_in_dim(rows, r, keepdims=False)

    return jax.lax.fori_loop(1, len(rows), add, rows[0])


def sums_of(arrays: Sequence[jax.Array], axis: int) -> list[jax.Array]:
    """The sums of arrays of one shape along an axis, reading their inputs once."""
    zeros = [jnp.zeros_like(x, shape=()) for x in arrays]
    join = lambda a, b: [x + y for x, y in zip(a, b, strict=True)]  # noqa: E731
    return jax.lax.reduce(list(arrays), zeros, join, (axis,))


def running_sum(x: jax.Array, axis: int = 0) -> jax.Array:
    """The sums of each value and those before it along an axis, as `jnp.cumsum`.

    Args:
      x: int32 array, not empty along the axis.
      axis: the axis of x.

    Returns:
      int32 array of the shape of x.
    """
    cpu = functools.partial(_each_summed if x.shape[axis] <= _SHORT else _doubled, axis=axis)
    is_short = x.size * x.shape[axis] <= _PAIRS
    default = functools.partial(_each_summed if is_short else _cumsum, axis=axis)
    return jax.lax.platform_dependent(x, cpu=cpu, default=default)


def count_up_to(ascending: jax.Array, x: jax.Array) -> jax.Array:
    """How many of the ascending values are at most x, for each x along the last axis.

    On CPU a binary search for each, or comparisons with all of a few. Elsewhere, where it would be
    a chain of short kernels, the values are compared with every tenth, say, and then with the ten
    that follow.

    Args:
      ascending: int32 array `(..., m)`, not empty along the last axis.
      x: int32 array `(..., q)`, with the same leading axes.

    Returns:
      int32 array of the shape of x, from 0 to m.
    """
    ascending, x = _axes.varying_alike([ascending, x])
    cpu = _compared if ascending.shape[-1] <= _SHORT else _searched
    return jax.lax.platform_dependent(ascending, x, cpu=cpu, default=_searched_twice)


def _compared(ascending: jax.Array, x: jax.Array) -> jax.Array:
    """Each is compared with all values."""
    return jnp.sum(ascending[..., None, :] <= x[..., None], axis=-1, dtype=jnp.int32)


def _searched(ascending: jax.Array, x: jax.Array) -> jax.Array:
    """A binary search for each, in a loop."""
    m = ascending.shape[-1]
    steps = m.bit_length()

    def step(i: jax.Array, found: jax.Array) -> jax.Array:
        more = found + (1 << (steps - 1 - i))
        there = jnp.take_along_axis(ascending, jnp.minimum(more, m) - 1, -1, mode="clip")
        return jnp.where((more <= m) & (there <= x), more, found)

    return jax.lax.fori_loop(0, steps, step, jnp.zeros_like(x))


def _searched_twice(ascending: jax.Array, x: jax.Array) -> jax.Array:
    """A search among few values in a row each, then one between two of them, in two kernels."""
    m = ascending.shape[-1]
    width = math.isqrt(m - 1) + 1
    last = ascending[..., width - 1 :: width]
    start = width * jnp.sum(last[..., None, :] <= x[..., None], axis=-1, dtype=jnp.int32)
    place = start[..., None] + jax.lax.broadcasted_iota(jnp.int32, (*x.shape, width), x.ndim)
    flat = jnp.minimum(place, m - 1).reshape(*x.shape[:-1], -1)
    there = jnp.take_along_axis(ascending, flat, -1, mode="clip").reshape(place.shape)
    return start + jnp.sum((place < m) & (there <= x[..., None]), axis=-1, dtype=jnp.int32)


def all_finite(arrays: Sequence[jax.Array]) -> jax.Array:
    """Whether all elements of all arrays are finite; float32 vectors are checked fastest."""
    arrays = [x for x in arrays if x.size]
    if not arrays:
        return jnp.bool_(True)
    return jax.lax.platform_dependent(*arrays, cpu=_one_by_one, default=_at_once)


def finite_parts(x: jax.Array) -> jax.Array:
    """Whether parts of a float32 vector are finite, in one pass; for `all_parts`.

    Returns:
      bool array, true everywhere if and only if x is finite.
    """
    shape = (-(-x.size // _ROW),)
    at_once = lambda x: jnp.broadcast_to(_is_finite(x), shape)  # noqa: E731
    return jax.lax.platform_dependent(x, cpu=at_once, default=_rows_are_finite)


def all_parts(parts: Sequence[jax.Array]) -> jax.Array:
    """Whether all of several results of `finite_parts` are true everywhere."""
    return jax.lax.platform_dependent(
        list(parts),
        cpu=lambda parts: jnp.all(jnp.stack([part[0] for part in parts])),  # the others are equal
        default=lambda parts: jnp.all(jnp.concatenate(parts)),
    )


def _one_by_one(*arrays: jax.Array) -> jax.Array:
    checks = jnp.stack([_is_finite(x) for x in arrays])
    # Otherwise every loop that uses the flag would contain, and compile, the checks of all arrays.
    return computed_once(jnp.sum(checks, dtype=jnp.float32)) == len(checks)


def _at_once(*arrays: jax.Array) -> jax.Array:
    """The same in about one kernel per array, where XLA uses two and a comparison for each."""
    parts = [_rows_are_finite(x) if x.ndim == 1 else _is_finite(x)[None] for x in arrays]
    # Without the barrier XLA would reduce each array to one element and then join them.
    return jnp.all(jax.lax.optimization_barrier(jnp.concatenate(parts)))


def _rows_are_finite(x: jax.Array) -> jax.Array:
    """Whether pieces of a vector are finite, bool `(ceil(n / 1024),)`."""
    rows = jnp.pad(x, (0, -x.size % _ROW)).reshape(-1, _ROW)
    return jnp.all(_finite(rows), axis=1)


def computed_once(tree: Any) -> Any:
    """float32 arrays, such that XLA on CPU does not compute them anew for each use.

    XLA recomputes cheap operations for each use, and removes barriers before that. It does not
    recompute a division by an array; a division by a scalar becomes a product. NaN stays NaN.
    """
    once = functools.partial(jax.tree.map, lambda x: x / jnp.where(x == x, 1.0, jnp.nan))
    return jax.lax.platform_dependent(tree, cpu=once, default=lambda tree: tree)


def _is_finite(x: jax.Array) -> jax.Array:
    if x.ndim == 1 and x.dtype == jnp.float32:
        return largest(x) < INFINITY  # several times as fast on CPU
    return jnp.all(_finite(x))


def _finite(x: jax.Array) -> jax.Array:
    """Whether each element is finite; 16-bit ones by bits, as XLA on GPUs may skip rounding."""
    if x.dtype not in _INFINITIES:
        return jnp.isfinite(x)
    magnitude = jax.lax.bitcast_convert_type(x, jnp.uint16) & 0x7FFF
    return magnitude < _INFINITIES[x.dtype]


def _doubled(sums: jax.Array, axis: int) -> jax.Array:
    """Running sums: of 2 values, then of 4, and so on."""
    n = sums.shape[axis]

    def double(i: jax.Array, sums: jax.Array) -> jax.Array:
        padded = jnp.concatenate([jnp.zeros_like(sums), sums], axis)
        return sums + jax.lax.dynamic_slice_in_dim(padded, n - (1 << i), n, axis)

    return jax.lax.fori_loop(0, (n - 1).bit_length(), double, sums)


def _cumsum(x: jax.Array, axis: int) -> jax.Array:
    return jnp.cumsum(x, axis=axis, dtype=x.dtype)


def _each_summed(x: jax.Array, axis: int) -> jax.Array:
    """Running sums of few values, each on its own: one kernel instead of several."""
    x = jnp.moveaxis(x, axis, -1)
    to, of = (jax.lax.broadcasted_iota(jnp.int32, (x.shape[-1],) * 2, i) for i in (0, 1))
    up_to = (of <= to).reshape((1,) * (x.ndim - 1) + of.shape)
    sums = jnp.sum(jnp.where(up_to, x[..., None, :], 0), axis=-1, dtype=x.dtype)
    return jnp.moveaxis(sums, -1, axis)


def _fold(x: jax.Array, join: Join, last: Callable[[jax.Array, Join], jax.Array]) -> jax.Array:
    """The uint32 along the last axis joined, in a particular order; 0 is neutral.

    `last` joins the few values that remain along the last axis.
    """
    *lead, n = x.shape
    lanes = _LANES if n >= _ROWS * _LANES else _FEW_LANES
    rows = min(_ROWS, n // lanes)
    if rows < 2:
        return _reduced(x, join)
    axis, tile = len(lead), rows * lanes
    whole = n // tile * tile
    # The barriers keep XLA from merging the steps into one reduction, which is as slow as a plain
    # one.
    tiles = x[..., :whole].reshape(*lead, whole // tile, rows, lanes)
    folded = jax.lax.reduce(tiles, jnp.uint32(0), join, (axis + 1,))
    folded = last(jax.lax.optimization_barrier(folded), join)
    found = _fold(jax.lax.optimization_barrier(folded), join, last)
    return join(found, _fold(x[..., whole:], join, last)) if whole < n else found


def _reduced(x: jax.Array, join: Join) -> jax.Array:
    return jax.lax.reduce(x, jnp.uint32(0), join, (x.ndim - 1,))


def _halved(x: jax.Array, join: Join) -> jax.Array:
    """Joined in pairs, for sums that are rounded less often."""
    while (n := x.shape[-1]) > 1:
        x = join(x[..., : n // 2], x[..., n // 2 :])
    return x[..., 0]


def _sum_of_patterns(a: jax.Array, b: jax.Array) -> jax.Array:
    """The sum of floats as bit patterns; XLA would hand a sum of floats to a library."""
    return _patterns(_floats(a) + _floats(b))


def _patterns(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _floats(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.float32)


def _require(name: str, x: jax.Array) -> None:
    if x.dtype != jnp.float32 or x.ndim == 0:
        raise TypeError(
            f"{name} takes float32 with an axis to reduce, got {x.dtype} of shape {x.shape}; "
            "write x.astype(jnp.float32).reshape(-1)."
        )
