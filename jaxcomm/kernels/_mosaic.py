"""Mosaic GPU kernels that go down the columns of arrays: what they have in common.

They use plain loads and stores, without asynchronous copies or barriers, so that one source serves
every GPU from compute capability 8.0 on.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxcomm import _compat

THREADS = 128
VECTOR = 4  # 32-bit words that a thread loads at once, where every row begins at a multiple of it


def over_columns(
    body: Callable[..., None],
    inputs: Sequence[jax.Array],
    outputs: Sequence[tuple[int, Any]],
    *,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """Runs a kernel on slices of columns.

    Args:
      body: gets a slice of columns, then references to all inputs and outputs in global memory.
      inputs: arrays of 4 bytes an element, `(rows, W)` each with another number of rows; or
        `(1,)`, which has no columns. At least one has columns.
      outputs: rows and dtype of each `(rows, W)`.
      interpret: the parameters of Pallas' interpreter, to run on CPU in tests; None compiles.

    Returns:
      The outputs. Columns at the end may be computed twice: a body must not update in place.
    """
    width = max(x.shape[-1] for x in inputs if x.ndim == 2)
    # A slice is not longer than a row: short ones are padded, to one slice.
    room = max(width, THREADS)
    padding = ((0, 0), (0, room - width))
    inputs = [jnp.pad(x, padding) if x.ndim == 2 and room > width else x for x in inputs]
    wide = room % VECTOR == 0 and room >= VECTOR * THREADS
    lanes = VECTOR * THREADS if wide else THREADS

    def kernel(*refs: Any) -> None:
        start = jnp.minimum(jax.lax.axis_index("slice") * lanes, room - lanes)
        body(pl.ds(start, lanes), *refs)

    varying = frozenset().union(*map(_compat.varying_axes, inputs))
    inputs = [_compat.as_varying(x, varying) for x in inputs]
    mat = jax.typeof(inputs[0]).mat
    results = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((rows, room), dtype, manual_axis_type=mat)
            for rows, dtype in outputs
        ],
        grid=(-(-room // lanes),),
        grid_names=("slice",),
        interpret=interpret,
    )(*inputs)
    return tuple(result[:, :width] for result in results)
