"""Mean squares of gradients by rows and columns, which all devices know exactly.

The squares of a matrix are kept as the means R of its rows and C of its columns, and stand for
R C^T / mean(R). A parameter with more dimensions has such a pair at each position of its leading
ones: the layers of a stack, the positions of a kernel. What is behind them is a matrix of some axes
by the others, as in `low_rank_mean`. It has the last two axes, and more of them where these save
little, or where those in front are as long as its sides and the matrix is not much longer than
wide: a projection to heads, (inputs, heads, width), is one of inputs by heads times width. Squares
of vectors, biases and norms are kept in full, also where layers are stacked.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm import _axes
from jaxcomm._notes import Message, noted
from jaxcomm.collectives.low_rank import inputs_of, sides
from jaxcomm.transforms._buckets import joined, split
from jaxcomm.transforms._exchange import Arrays, Own, on_every_device
from jaxcomm.transforms._layout import Layout, Leaf, filled_leaves, is_vector
from jaxcomm.transforms._specs import axes_in

Names = list[tuple[str, ...]]


# How many times fewer rows and columns a matrix should have than values, and how many times longer
# than wide one of more than two axes may be: Llama's keys have 16384 inputs and 8 heads of 128.
_LEAST_SAVED, _LOPSIDED = 4, 16


class _Cut(NamedTuple):
    """The axes of a parameter: those of positions, then of inputs, then of outputs."""

    positions: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class _Squares(NamedTuple):
    """The mean of a parameter's squared gradients.

    Attributes:
      rows: float32, the mean over the outputs; for a vector its squares.
      columns: float32, the mean over the inputs; for a vector ().
    """

    rows: Any
    columns: Any


def no_squares(layout: Layout) -> jax.Array:
    """Zero squares, before any gradient."""
    arrays = jax.tree.leaves([_shapes(leaf) for _, leaf in _filled(layout)])
    return jnp.zeros(sum(x.size for x in arrays), jnp.float32)


def require_squares(squares: jax.Array, layout: Layout) -> None:
    """Raises a ValueError for squares that are of other rows and columns."""
    arrays = jax.tree.leaves([_shapes(leaf) for _, leaf in _filled(layout)])
    if squares.shape != (expected := (sum(x.size for x in arrays),)):
        raise ValueError(
            f"the state of factored_adam has {squares.shape} squares, expected {expected}. Make tx "
            "as in the run that saved the state, also with its jaxcomm.with_layer_axis, or start "
            "over with tx.init(params)."
        )


def _filled(layout: Layout) -> list[tuple[int, Leaf]]:
    """The parameters that are not empty, and their numbers."""
    return [(i, layout.leaves[i]) for i in filled_leaves(layout)]


def _is_matrix(leaf: Leaf) -> bool:
    return not is_vector(leaf.path, leaf.shape, leaf.stacked)


def _cut_of(leaf: Leaf) -> _Cut:
    """How a leaf that is no vector is a matrix, at each of some positions."""
    shape, layers = leaf.shape, int(leaf.stacked)
    before = len(shape) - 2
    while before > layers and _goes_on(shape[layers:before], shape[before:]):
        before -= 1
    cut, axes = before + inputs_of(shape[before:]), tuple(range(len(shape)))
    return _Cut(axes[:before], axes[before:cut], axes[cut:])


def _goes_on(leading: tuple[int, ...], behind: tuple[int, ...]) -> bool:
    """Whether the last of some leading axes belongs to the matrix behind them."""
    m, n = sorted(sides(behind))
    less, more = sorted(sides((leading[-1], *behind)))
    saves_little = m * n < _LEAST_SAVED * (m + n)
    return saves_little or (max(leading) >= n and more <= _LOPSIDED * less)


def _shapes(leaf: Leaf) -> _Squares:
    array, shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32), leaf.shape
    if not _is_matrix(leaf):
        return _Squares(array(shape), ())
    positions, inputs, outputs = _cut_of(leaf)
    rows, columns = ([shape[i] for i in positions + own] for own in (inputs, outputs))
    return _Squares(array(rows), array(columns))


def next_squares_and_roots(
    grads: Arrays, layout: Layout, old: jax.Array, decay: float, seen: jax.Array
) -> tuple[jax.Array, Arrays]:
    """The decaying mean squares with this step's gradients in them, and their roots.

    Rows and columns are whole on every device, also those of leaves that are sharded over further
    axes. Each device puts its part in its place, and one all-reduce over the axis and those further
    ones adds them up.

    Args:
      grads: local gradients, as they are in the current view.
      layout: the layout of the parameters.
      old: float32 vector, the rows and columns of one parameter after those of the other.
      decay: the decay of the mean.
      seen: float32, the number of gradients in the result, to correct for its start at zero.

    Returns:
      A vector like `old`, equal on all devices; and for each leaf float32 roots, corrected for the
      start at zero, in the shape of the parameter in the current view.
    """
    filled = _filled(layout)
    # A region that is manual over other axes may have other parameters along them.
    split_over = [name for _, leaf in filled for names in _names(leaf) for n in names for name in n]
    every_axis = tuple(sorted({*_axes.names_of(layout.axis_name), *split_over}))
    size = _axes.axis_size(every_axis)
    shapes = {i: _shapes(leaf) for i, leaf in filled}
    if not filled:
        return old, [jnp.zeros(leaf.shape, jnp.float32) for leaf in layout.leaves]

    def on_device(grads: Arrays, own: Own, shared: Any) -> tuple[Arrays, Own]:
        old, seen = shared
        parts = {}
        for i, leaf in filled:
            square, (rows, columns) = jnp.square(grads[i].astype(jnp.float32)), _names(leaf)
            if not _is_matrix(leaf):
                parts[i, 0] = _in_place(square, shapes[i].rows, rows, size)
            else:
                _, inputs, outputs = _cut_of(leaf)
                parts[i, 0] = _in_place(square.mean(outputs), shapes[i].rows, rows, size)
                parts[i, 1] = _in_place(square.mean(inputs), shapes[i].columns, columns, size)
        with noted(Message("squares", tuple(shapes))), noted("float32, native"):
            means = jax.lax.psum(joined(parts), every_axis)
        new = decay * old + (1 - decay) * means
        known = split(new / (1 - decay**seen), parts)
        roots = [jnp.zeros(g.shape, jnp.float32) for g in grads]
        for i, leaf in filled:
            squares = _Squares(known[i, 0], known.get((i, 1), ()))
            roots[i] = _root(squares, leaf, grads[i].shape)
        return [*roots, new], own

    (*roots, new), _ = on_every_device(
        on_device, grads, layout, shared=(old, seen), further_results=1
    )
    return new, roots


def _root(squares: _Squares, leaf: Leaf, shape: tuple[int, ...]) -> jax.Array:
    """The root mean squares of this device's shard of a leaf."""
    rows, columns = _names(leaf)
    if not _is_matrix(leaf):
        return jnp.sqrt(_own_part(squares.rows, rows, shape))
    positions, inputs, outputs = _cut_of(leaf)

    def own(x: jax.Array, names: Names, *kept: tuple[int, ...]) -> jax.Array:
        part = _own_part(x, names, tuple(shape[i] for axes in kept for i in axes))
        return jnp.expand_dims(part, [i for i in range(len(shape)) if i not in sum(kept, ())])

    own_rows = own(squares.rows, rows, positions, inputs)
    own_columns = own(squares.columns, columns, positions, outputs)
    mean = squares.rows.mean(range(len(positions), squares.rows.ndim))
    mean = own(mean, rows[: len(positions)], positions)
    # Two roots: the product of two mean squares could underflow. XLA multiplies with a reciprocal,
    # which is infinite on GPUs for numbers that are not normal.
    tiny = jnp.finfo(jnp.float32).tiny
    return jnp.sqrt(own_rows / jnp.where(mean >= tiny, mean, 1.0)) * jnp.sqrt(own_columns)


def _names(leaf: Leaf) -> tuple[Names, Names]:
    """The mesh axes over which each dimension of a leaf's rows, and of its columns, is sharded."""
    names = axes_in(leaf.spec, len(leaf.shape))
    if not _is_matrix(leaf):
        return names, []
    positions, inputs, outputs = _cut_of(leaf)
    return [names[i] for i in positions + inputs], [names[i] for i in positions + outputs]


def _starts(names: Names, local: tuple[int, ...]) -> list[Any]:
    """Where this device's part of an array begins."""
    pairs = zip(names, local, strict=True)
    return [jax.lax.axis_index(axes) * n if axes else 0 for axes, n in pairs]


def _own_part(whole: jax.Array, names: Names, local: tuple[int, ...]) -> jax.Array:
    """This device's part of an array that it has as a whole."""
    return jax.lax.dynamic_slice(whole, _starts(names, local), local) if any(names) else whole


def _in_place(part: jax.Array, whole: Any, names: Names, size: int) -> jax.Array:
    """A zero array of the full size with this device's part in its place.

    The part is divided by the number of devices that hold it before they are added up: a sum of
    large squares could overflow.
    """
    shards = math.prod(_axes.axis_size(axes) for axes in names if axes)
    part = part * (shards / size)
    if not any(names):
        return part
    return jax.lax.dynamic_update_slice(
        jnp.zeros(whole.shape, whole.dtype), part, _starts(names, part.shape)
    )
