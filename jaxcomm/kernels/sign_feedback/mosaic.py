"""Sign compression with error feedback in Mosaic: one kernel reads and writes everything once."""

import math
from functools import partial
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
    """The same results as `plain.sign_feedback`; `interpret` as in `launch`.

    Where n is no multiple of 32, the plain version takes the values whose words have 31 bits. Short
    rows are padded first.
    """
    *lead, n = x.shape
    rows, width = math.prod(lead), bitplanes.words_for(n)
    x, residual, scale = x.reshape(rows, n), residual.reshape(rows, n), scale.reshape(rows)
    columns = n - (_ROWS - 1) * width  # of words that have all bits
    if columns < THREADS:
        room = max(width, THREADS)
        pad = jax.vmap(partial(widened, rows=_ROWS, width=width))
        words, kept = _complete_words(pad(x), pad(residual), scale, room, room, interpret)
        kept = jax.vmap(partial(narrowed, rows=_ROWS, width=width))(kept)[:, :n]
    else:
        words, kept = _complete_words(x, residual, scale, width, columns, interpret)
        if columns < width:
            places = bitplanes.places_of_short_words(n)
            last_words, last_kept = plain.sign_feedback(
                x[:, places].reshape(rows, -1), residual[:, places].reshape(rows, -1), scale
            )
            last_kept = last_kept.reshape(rows, *places.shape)
            kept = kept.at[:, places].set(last_kept, unique_indices=True)
            words = words.at[:, columns:].set(last_words)
    return words[:, :width].reshape(*lead, width), kept.reshape(*lead, n)


def _complete_words(
    x: jax.Array, residual: jax.Array, scale: jax.Array, width: int, columns: int, interpret: Any
) -> list[jax.Array]:
    """The results of each row for the first `columns` words, in arrays with room for all."""
    rows, n = x.shape

    def body(at: Any, x_ref: Any, residual_ref: Any, scale_ref: Any, words: Any, kept: Any) -> None:
        scale, word = scale_ref[at.batch], jnp.zeros((), jnp.uint32)
        for first in range(0, _ROWS, _AT_ONCE):
            group = [at(row, n) for row in range(first, first + _AT_ONCE)]
            corrected = [x_ref[part] + residual_ref[part] for part in group]
            for row, (part, value) in enumerate(zip(group, corrected, strict=True), first):
                positive = value > 0
                word |= jnp.where(positive, jnp.uint32(1 << row), jnp.uint32(0))
                kept[part] = value - jnp.where(positive, scale, -scale)
        words[at(0, width)] = word

    outputs = [(rows * width, jnp.uint32), (x.size, jnp.float32)]
    words, kept = over_columns(
        body,
        [x.reshape(-1), residual.reshape(-1), scale],
        outputs,
        width,
        columns,
        batches=rows,
        stride=n,
        interpret=interpret,
    )
    return [words.reshape(rows, width), kept.reshape(rows, n)]
