"""Messages of a window of exponents in Mosaic: a kernel reads the values and writes the payload.

The largest magnitude of each message is found before, by XLA.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from jaxcomm.kernels._mosaic import THREADS, divided, launch, load, store
from jaxcomm.kernels.powers_of_two import plain_window
from jaxcomm.kernels.powers_of_two.mosaic import words_of
from jaxcomm.kernels.random_bits import HALF, key_words

_AT_ONCE = 8  # rows that are loaded before the first is stored, because loads do not pass stores
_ROWS = 32  # of THREADS values, that a program encodes


def encode(x: jax.Array, key: jax.Array | None, *, interpret: Any = None) -> jax.Array:
    """The same payload as `plain_window.encode`; `interpret` as in `launch`.

    The plain version encodes messages of fewer than THREADS values.
    """
    *lead, n = x.shape
    messages = math.prod(lead)
    if messages == 0 or n < THREADS:
        return plain_window.encode(x, key)
    # A power of two, so that the rows of short messages are also loaded several at once.
    rows = min(_ROWS, 1 << (n // THREADS).bit_length() - 1)
    programs = -(-n // (rows * THREADS))  # of a message
    at_once = min(_AT_ONCE, rows)

    def body(program: jax.Array, x_ref: Any, top_ref: Any, *refs: Any) -> None:
        out = refs[-1]
        message, part = divided(program, programs)
        own = None if key is None else (refs[0][0], refs[0][1])  # once: loads do not pass stores
        first = jnp.minimum(part * (rows * THREADS), n - rows * THREADS)
        start, top = message * (n + 1), top_ref[message]

        @pl.when(part == 0)
        def _() -> None:
            store(out, start, jnp.broadcast_to(top, (1,)).astype(jnp.uint8))

        def step(i: jax.Array, _: Any, *, is_far: bool) -> None:
            places = [first + (i * at_once + k) * THREADS for k in range(at_once)]
            values = [load(x_ref, message * n + place, THREADS) for place in places]
            for place, value in zip(places, values, strict=True):
                bits = jnp.uint32(HALF) if own is None else words_of(own, message, place)
                store(out, start + 1 + place, plain_window.codes(value, bits, top, is_far=is_far))

        # Where the window reaches down to 2^-126, rounding takes fewer operations.
        for is_far in (False, True):

            @pl.when((top > plain_window.WINDOW) == is_far)
            def _(is_far: bool = is_far) -> None:
                loop = functools.partial(step, is_far=is_far)
                jax.lax.fori_loop(np.int32(0), np.int32(rows // at_once), loop, None)

    inputs = [x.reshape(-1), plain_window.largest(x).reshape(-1)]
    inputs += [] if key is None else [key_words(key)]
    out = jax.ShapeDtypeStruct((messages * (n + 1),), jnp.uint8)
    payload = launch(body, inputs, out, messages * programs, interpret=interpret)
    return payload.reshape(*lead, n + 1)
