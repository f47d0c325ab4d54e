"""Counting the entries at or above a threshold as one Mosaic kernel, which reads x once."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxcomm.kernels._mosaic import THREADS, VECTOR, launch, line, load
from jaxcomm.kernels.select.magnitudes import PAST_INFINITY, lowest_for, patterns_of

_AT_ONCE = 8  # loads before the first use
_TURNS = 4  # of as many loads in each program


def count_at_least(x: jax.Array, threshold: jax.Array, *, interpret: Any = None) -> jax.Array:
    """The same count as `selection.count_at_least`; `interpret` as in `launch`.

    Each program counts a part of x, and XLA adds the counts.
    """
    low = lowest_for(threshold)
    vector = VECTOR if x.size % VECTOR == 0 else 1
    lanes, layout = vector * THREADS, line(vector)
    part = _TURNS * _AT_ONCE * lanes
    x = jnp.pad(x, (0, max(part - x.size, 0)))  # zeros do not count

    def body(program: jax.Array, x_ref: Any, low_ref: Any, out: Any) -> None:
        low = low_ref[0]
        first = jnp.minimum(program * part, x.size - part)
        again = program * part - first  # entries that the previous program counts
        place = plgpu.broadcasted_iota(jnp.int32, (lanes,), 0, layout=layout)

        def turn(i: jax.Array, count: jax.Array) -> jax.Array:
            starts = [(i * _AT_ONCE + k) * lanes for k in range(_AT_ONCE)]
            values = [load(x_ref, first + start, lanes, layout) for start in starts]
            for start, value in zip(starts, values, strict=True):
                above = patterns_of(value) - low < PAST_INFINITY - low
                count += (above & (place + start >= again)).astype(jnp.int32)
            return count

        zeros = plgpu.layout_cast(jnp.zeros((lanes,), jnp.int32), layout)
        out[program] = jnp.sum(jax.lax.fori_loop(0, _TURNS, turn, zeros), dtype=jnp.int32)

    programs = -(-x.size // part)
    out = jax.ShapeDtypeStruct((programs,), jnp.int32)
    (counts,) = launch(body, [x, low[None]], [out], programs, interpret=interpret)
    return jnp.sum(counts, dtype=jnp.int32)
