"""Sign compression with error feedback in Mosaic: one kernel reads and writes everything once."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm.kernels import bitplanes
from jaxcomm.kernels._mosaic import THREADS, narrowed, over_columns, widened
from jaxcomm.kernels.sign_feedback import plain

_AT_ONCE = 8  # rows that are loaded before the first is stored, because loads do not pass stores
_ROWS = bitplanes.BITS


def sign_feedback(
    x: jax.Array, residual: jax.Array, scale: jax.Array, *, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """The same results as `plain.sign_feedback`, row by row; `interpret` as in `launch`."""
    *lead, n = x.shape
    if x.ndim == 1:
        return _one_row(x, residual, scale, interpret)
    rows = math.prod(lead)
    rows_of = zip(x.reshape(rows, n), residual.reshape(rows, n), scale.reshape(rows), strict=True)
    words, kept = zip(*[_one_row(*row, interpret) for row in rows_of], strict=True)
    return jnp.stack(words).reshape(*lead, -1), jnp.stack(kept).reshape(*lead, n)


def _one_row(
    x: jax.Array, residual: jax.Array, scale: jax.Array, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """The results for `(n,)`.

    Where n is no multiple of 32, the plain version takes the values whose words have 31 bits. Short
    arrays are padded first.
    """
    n, width = x.size, bitplanes.words_for(x.size)
    columns = n - (_ROWS - 1) * width  # of words that have all bits
    if columns < THREADS:
        room = max(width, THREADS)
        x, residual = widened(x, _ROWS, width), widened(residual, _ROWS, width)
        words, kept = _complete_words(x, residual, scale, room, room, interpret)
        return words[:width], narrowed(kept, _ROWS, width)[:n]
    words, kept = _complete_words(x, residual, scale, width, columns, interpret)
    if columns == width:
        return words, kept
    places = bitplanes.places_of_short_words(n)
    rest = x[places].reshape(-1), residual[places].reshape(-1)
    last_words, last_kept = plain.sign_feedback(*rest, scale)
    kept = kept.at[places].set(last_kept.reshape(places.shape), unique_indices=True)
    return words.at[columns:].set(last_words), kept


def _complete_words(
    x: jax.Array, residual: jax.Array, scale: jax.Array, width: int, columns: int, interpret: Any
) -> list[jax.Array]:
    """The results for the first `columns` words, in arrays with room for all."""

    def body(at: Any, x_ref: Any, residual_ref: Any, scale_ref: Any, words: Any, kept: Any) -> None:
        scale, word = scale_ref[0], jnp.zeros((), jnp.uint32)
        for first in range(0, _ROWS, _AT_ONCE):
            group = range(first, first + _AT_ONCE)
            corrected = [x_ref[at(row)] + residual_ref[at(row)] for row in group]
            for row, value in zip(group, corrected, strict=True):
                positive = value > 0
                word |= jnp.where(positive, jnp.uint32(1 << row), jnp.uint32(0))
                kept[at(row)] = value - jnp.where(positive, scale, -scale)
        words[at(0)] = word

    outputs = [(width, jnp.uint32), (x.size, jnp.float32)]
    inputs = [x, residual, scale[None]]
    return over_columns(body, inputs, outputs, width, columns, interpret=interpret)
