"""Operations on planes and packed signs as one kernel each: all is read once and written once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm.kernels._mosaic import over_columns
from jaxcomm.kernels.bitplanes.counting import Planes, exceeds, ripple_carry, width_of_sum
from jaxcomm.kernels.bitplanes.packing import BITS, words_for

_AT_ONCE = 8  # rows that are loaded before the first is stored: loads do not pass stores


def add(a: Planes, b: Planes, width: int, *, interpret: Any = None) -> Planes:
    """As the specification; `interpret` as in `over_columns`."""
    return _on_planes(lambda a, b: ripple_carry(a, b, width), a, b, width, interpret)


def majority(a: Planes, b: Planes, threshold: int, *, interpret: Any = None) -> jax.Array:
    """As the specification; `interpret` as in `over_columns`."""
    width = width_of_sum(a, b)

    def logic(a: Planes, b: Planes) -> Planes:
        return (exceeds(ripple_carry(a, b, width), threshold),)

    return _on_planes(logic, a, b, 1, interpret)[0]


def _on_planes(
    logic: Callable[[Planes, Planes], Planes], a: Planes, b: Planes, width: int, interpret: Any
) -> Planes:
    def body(at: Any, *refs: Any) -> None:
        words = tuple(ref[0, at] for ref in refs[: len(a) + len(b)])
        results = logic(words[: len(a)], words[len(a) :])
        for ref, plane in zip(refs[len(words) :], results, strict=True):
            ref[0, at] = plane

    planes = [plane.reshape(1, -1) for plane in (*a, *b)]
    results = over_columns(body, planes, [(1, jnp.uint32)] * width, interpret=interpret)
    return tuple(result.reshape(a[0].shape) for result in results)


def add_signs(
    x: jax.Array, words: jax.Array, scale: jax.Array, *, interpret: Any = None
) -> jax.Array:
    """As the specification; `interpret` as in `over_columns`.

    Where the length is no multiple of 32, x is padded first and the result cut, at a copy each.
    """
    n, width = x.size, words_for(x.size)
    rows = jnp.pad(x, (0, BITS * width - n)).reshape(BITS, width)

    def body(at: Any, x_ref: Any, words_ref: Any, scale_ref: Any, out: Any) -> None:
        scale, word = scale_ref[0], words_ref[0, at]
        for first in range(0, BITS, _AT_ONCE):
            group = range(first, first + _AT_ONCE)
            values = [x_ref[row, at] for row in group]
            for row, value in zip(group, values, strict=True):
                positive = ((word >> row) & 1) == 1
                out[row, at] = value + jnp.where(positive, scale, -scale)

    inputs = [rows, words[None], scale[None]]
    (total,) = over_columns(body, inputs, [(BITS, jnp.float32)], interpret=interpret)
    return total.reshape(-1)[:n]
