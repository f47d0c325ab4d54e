"""Launching Mosaic GPU kernels, and loading and storing parts of flat arrays in them.

The kernels use plain loads and stores, without asynchronous copies or barriers. So one source
serves every GPU from compute capability 8.0 on.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxcomm import _axes
from jaxcomm.kernels import _implementations

THREADS = 128
VECTOR = 4  # elements that a thread loads at once, where every row begins at a multiple of 4
WARPS, LANES = 4, 32
_MOST_PADDED = 2**22  # elements that short messages may take, however few values they have

# In newer jax the index may be part of the reference, and stores have their own function.
_IDX = inspect.signature(plgpu.load).parameters.get("idx")
_EVERYTHING = {"idx": ...} if _IDX and _IDX.default is inspect.Parameter.empty else {}


def launch(
    body: Callable[..., None],
    inputs: Sequence[jax.Array],
    out: jax.ShapeDtypeStruct,
    programs: int,
    *,
    interpret: Any,
) -> jax.Array:
    """Runs a kernel, also under the checks of `jax.shard_map`.

    Args:
      body: takes the number of the program, then references to all inputs and the output in global
        memory. It does not read the output: threads do not wait for each other where they store.
      inputs: arrays.
      out: the shape and dtype of the output.
      programs: the number of programs, each of 128 threads.
      interpret: the parameters of Pallas' interpreter, to run on CPU in tests; None compiles.

    Returns:
      The output. It varies over the mesh axes over which any of the inputs varies.
    """
    inputs = _axes.varying_alike(inputs)

    parameters = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
    )

    def kernel(*refs: Any) -> None:
        body(jax.lax.axis_index("program"), *refs)

    return plgpu.kernel(
        kernel,
        out_type=_axes.shape_varying_like(inputs[0], out.shape, out.dtype),
        grid=(programs,),
        grid_names=("program",),
        compiler_params=parameters,
        interpret=interpret,
    )(*inputs)


def divided(x: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of an int32; with `jax_enable_x64`, Python's ints have 64 bits."""
    return jax.lax.div(x, np.int32(by)), jax.lax.rem(x, np.int32(by))


def require_little_padding(operation: str, elements: int, padded: int) -> None:
    """Raises a NotImplementedError if padding takes too much memory, or exceeds int32 indices.

    Args:
      operation: its name, for the message.
      elements: the values of all messages.
      padded: the elements that the kernel indexes.
    """
    most = min(_implementations.MOST_ELEMENTS, max(_MOST_PADDED, 2 * elements))
    if padded > most:
        raise NotImplementedError(
            f'{operation}: "mosaic" would pad {elements} values of short messages to {padded}, at '
            f'most {most}; use "xla" or None.'
        )


def widened(x: jax.Array, rows: int, width: int) -> jax.Array:
    """Pads each row of a flat array, whose last row may be short, to at least THREADS columns."""
    whole = jnp.pad(x, (0, rows * width - x.size)).reshape(rows, width)
    return jnp.pad(whole, ((0, 0), (0, max(THREADS - width, 0)))).reshape(-1)


def narrowed(x: jax.Array, rows: int, width: int) -> jax.Array:
    """Undoes `widened`; zeros complete a short last row."""
    return x.reshape(rows, -1)[:, :width].reshape(-1)


def rows_layout(lanes: int, vector: int) -> tuple[int, Any]:
    """A layout in which several lanes of a warp share a row, each with a vector of neighbours.

    Args:
      lanes: the lanes that share a row, a power of two up to 32.
      vector: the neighbouring elements of a lane.

    Returns:
      The number of rows that all threads together process at once, and the layout of arrays `(rows,
      columns)`. Columns are a multiple of `lanes * vector`. A reduction along the columns stays
      within a warp.
    """
    high, wide = LANES // lanes, lanes * vector
    rows = WARPS * high
    if lanes == LANES:
        tiles, warp, lane = ((rows, wide), (vector,)), (-3,), (-2,)
    elif lanes == 1:
        tiles, warp, lane = ((rows, wide), (high, wide)), (-4,), (-2,)
    else:
        tiles, warp, lane = ((rows, wide), (high, wide), (vector,)), (-5,), (-3, -2)
    layout = plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=warp, lane_dims=lane, vector_dim=-1)
    return rows, layout


def line() -> Any:
    """The layout of `(columns,)`: neighbouring threads hold neighbouring elements.

    The columns are a multiple of THREADS.
    """
    tiles = ((THREADS,), (LANES,), (1,))
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def load(ref: Any, start: Any, size: int) -> jax.Array:
    """Loads `(size,)` from a flat array, beginning at `start`; its layout is `line()`."""
    return _load(ref.at[pl.ds(start, size)], line())


def store(ref: Any, start: Any, value: jax.Array) -> None:
    """Stores `(size,)` into a flat array, beginning at `start`."""
    _store(ref.at[pl.ds(start, value.size)], value)


class Rows:
    """A part of a flat array in global memory, as rows.

    Pallas' interpreter cannot reshape references, so there all rows are loaded or stored at once.
    """

    def __init__(self, ref: Any, start: Any, shape: tuple[int, int], interpret: Any) -> None:
        self.flat, self.shape = ref.at[pl.ds(start, shape[0] * shape[1])], shape
        self.interpreted = interpret is not None

    def load(self, first: int, size: int, layout: Any) -> jax.Array:
        """Loads `size` columns beginning at `first`, `(rows, size)`."""
        if self.interpreted:
            return self.flat[...].reshape(self.shape)[:, first : first + size]
        columns = self.flat.reshape(*self.shape).at[:, pl.ds(first, size)]
        return _load(columns, layout)

    def load_columns(self, layout: Any) -> list[jax.Array]:
        """Loads all columns, `(rows,)` each."""
        if self.interpreted:
            return list(self.flat[...].reshape(self.shape).T)
        rows = self.flat.reshape(*self.shape)
        return [_load(rows.at[:, i], layout) for i in range(self.shape[1])]

    def store(self, *parts: jax.Array) -> None:
        """Stores all columns, at once as `(rows, columns)` or one by one as `(rows,)` each."""
        if self.interpreted:
            parts = tuple(part.reshape(self.shape[0], -1) for part in parts)
            self.flat[...] = jnp.concatenate(parts, axis=1).reshape(-1)
            return
        rows = self.flat.reshape(*self.shape)
        for i, part in enumerate(parts):
            _store(rows if part.ndim == 2 else rows.at[:, i], part)


def _load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False, **_EVERYTHING)


def _store(ref: Any, value: jax.Array) -> None:
    store = getattr(plgpu, "store", None)
    if store is None:
        ref[...] = value
    else:
        store(ref, value, optimized=False)
