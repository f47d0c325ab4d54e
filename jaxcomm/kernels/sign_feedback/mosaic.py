"""Signs with error feedback as one kernel: everything is read once and written once."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm.kernels import bitplanes
from jaxcomm.kernels._mosaic import THREADS, narrowed, over_columns, widened
from jaxcomm.kernels.sign_feedback import plain

_AT_ONCE = 8  # rows that are loaded before the first is stored: loads do not pass stores
_ROWS = bitplanes.BITS


def sign_feedback(
    x: jax.Array, residual: jax.Array, scale: jax.Array, *, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """As the specification; `interpret` as in `launch`.

    Where the length is no multiple of 32, the words that have fewer bits are left to the plain
    version. Short arrays are padded first.
    """
    n, width = x.size, bitplanes.words_for(x.size)
    columns = n - (_ROWS - 1) * width  # of words that have all bits
    if columns < THREADS:
        room = max(width, THREADS)
        x, residual = widened(x, _ROWS, width), widened(residual, _ROWS, width)
        words, kept = _on_whole_words(x, residual, scale, room, room, interpret)
        return words[:width], narrowed(kept, _ROWS, width)[:n]
    words, kept = _on_whole_words(x, residual, scale, width, columns, interpret)
    if columns == width:
        return words, kept
    places = bitplanes.places_of_short_words(n)
    some, others = plain(x[places].reshape(-1), residual[places].reshape(-1), scale)
    kept = kept.at[places].set(others.reshape(places.shape), unique_indices=True)
    return words.at[columns:].set(some), kept


def _on_whole_words(
    x: jax.Array, residual: jax.Array, scale: jax.Array, width: int, columns: int, interpret: Any
) -> list[jax.Array]:
    def body(at: Any, x_ref: Any, residual_ref: Any, scale_ref: Any, words: Any, kept: Any) -> None:
        scale, word = scale_ref[0], jnp.zeros((), jnp.uint32)
        for first in range(0, _ROWS, _AT_ONCE):
            group = range(first, first + _AT_ONCE)
            owed = [x_ref[at(row)] + residual_ref[at(row)] for row in group]
            for row, value in zip(group, owed, strict=True):
                vote = value > 0
                word |= jnp.where(vote, jnp.uint32(1 << row), jnp.uint32(0))
                kept[at(row)] = value - jnp.where(vote, scale, -scale)
        words[at(0)] = word

    outputs = [(width, jnp.uint32), (x.size, jnp.float32)]
    inputs = [x, residual, scale[None]]
    return over_columns(body, inputs, outputs, width, columns, interpret=interpret)
