"""Operations on planes and packed signs as one kernel each: all is read once and written once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm.kernels._mosaic import THREADS, narrowed, over_columns, widened
from jaxcomm.kernels.bitplanes.counting import Planes, exceeds, ripple_carry, width_of_sum
from jaxcomm.kernels.bitplanes.packing import BITS, places_of_short_words, unpack, words_for

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
    shape, size = a[0].shape, a[0].size

    def body(at: Any, *refs: Any) -> None:
        words = tuple(ref[at(0)] for ref in refs[: len(a) + len(b)])
        results = logic(words[: len(a)], words[len(a) :])
        for ref, plane in zip(refs[len(words) :], results, strict=True):
            ref[at(0)] = plane

    planes = [widened(plane.reshape(-1), 1, size) for plane in (*a, *b)]
    room = planes[0].size
    outputs = [(room, jnp.uint32)] * width
    results = over_columns(body, planes, outputs, room, room, interpret=interpret)
    return tuple(result[:size].reshape(shape) for result in results)


def add_signs(
    x: jax.Array, words: jax.Array, scale: jax.Array, *, interpret: Any = None
) -> jax.Array:
    """As the specification; `interpret` as in `launch`.

    Where the length is no multiple of 32, the words that have fewer bits are left to the plain
    version. Short arrays are padded first.
    """
    n, width = x.size, words_for(x.size)
    columns = n - (BITS - 1) * width  # of words that have all bits
    if columns < THREADS:
        room = max(width, THREADS)
        x, words = widened(x, BITS, width), widened(words, 1, width)
        total = _add_signs(x, words, scale, room, room, interpret)
        return narrowed(total, BITS, width)[:n]
    total = _add_signs(x, words, scale, width, columns, interpret)
    if columns == width:
        return total
    places = places_of_short_words(n)
    signs = unpack(words[columns:], places.size).reshape(places.shape)
    rest = x[places] + jnp.where(signs, scale, -scale)
    return total.at[places].set(rest, unique_indices=True)


def _add_signs(
    x: jax.Array, words: jax.Array, scale: jax.Array, width: int, columns: int, interpret: Any
) -> jax.Array:
    def body(at: Any, x_ref: Any, words_ref: Any, scale_ref: Any, out: Any) -> None:
        scale, word = scale_ref[0], words_ref[at(0)]
        for first in range(0, BITS, _AT_ONCE):
            group = range(first, first + _AT_ONCE)
            values = [x_ref[at(row)] for row in group]
            for row, value in zip(group, values, strict=True):
                positive = ((word >> row) & 1) == 1
                out[at(row)] = value + jnp.where(positive, scale, -scale)

    inputs, outputs = [x, words, scale[None]], [(x.size, jnp.float32)]
    return over_columns(body, inputs, outputs, width, columns, interpret=interpret)[0]
