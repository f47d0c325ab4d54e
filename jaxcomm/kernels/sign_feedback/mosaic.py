"""Signs with error feedback as one kernel: everything is read once and written once."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm.kernels import bitplanes
from jaxcomm.kernels._mosaic import over_columns

_AT_ONCE = 8  # rows that are loaded before the first is stored: loads do not pass stores


def sign_feedback(
    x: jax.Array, residual: jax.Array, scale: jax.Array, *, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """As the specification; `interpret` as in `over_columns`.

    Where the length is no multiple of 32, x and the residual are padded first, at a copy each.
    """
    n, rows = x.size, bitplanes.BITS
    width = bitplanes.words_for(n)
    padding = (0, rows * width - n)
    streams = [jnp.pad(a, padding).reshape(rows, width) for a in (x, residual)]

    def body(at: Any, x_ref: Any, residual_ref: Any, scale_ref: Any, words: Any, kept: Any) -> None:
        scale, word = scale_ref[0], jnp.zeros((at.size,), jnp.uint32)
        for first in range(0, rows, _AT_ONCE):
            group = range(first, first + _AT_ONCE)
            owed = [x_ref[row, at] + residual_ref[row, at] for row in group]
            for row, value in zip(group, owed, strict=True):
                vote = value > 0
                word |= jnp.where(vote, jnp.uint32(1 << row), jnp.uint32(0))
                kept[row, at] = value - jnp.where(vote, scale, -scale)
        words[0, at] = word

    outputs = [(1, jnp.uint32), (rows, jnp.float32)]
    words, kept = over_columns(body, [*streams, scale[None]], outputs, interpret=interpret)
    return words[0], kept.reshape(-1)[:n]
