"""Messages in 9 bits per value in Mosaic: one kernel each way, which reads and writes once."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxcomm.kernels import bitplanes
from jaxcomm.kernels._mosaic import (
    THREADS,
    Rows,
    divided,
    launch,
    line,
    load,
    narrowed,
    require_little_padding,
    store,
    widened,
)
from jaxcomm.kernels.powers_of_two import plain
from jaxcomm.kernels.random_bits import HALF, key_words, threefry2x32

_AT_ONCE = 8  # rows that are loaded before the first is stored, because loads do not pass stores
_LOADS = 32  # loads before the first store where several messages are added
_MESSAGES = 64  # messages whose sign words fit into registers
_ROWS = bitplanes.BITS


def encode(x: jax.Array, key: jax.Array | None, *, interpret: Any = None) -> jax.Array:
    """The same payload as `plain.encode`; `interpret` as in `launch`.

    If n is not a multiple of 32, the plain version encodes the values whose sign words have 31
    bits. Short messages are padded first.
    """
    *lead, n = x.shape
    x = x.reshape(math.prod(lead), n)
    width = bitplanes.words_for(n)
    columns = n - (_ROWS - 1) * width  # of words that have all bits
    if columns < THREADS:
        payload = _short(x, width, key, interpret)
    else:
        payload = _encode(x, n, width, width, columns, key, interpret)
    if THREADS <= columns < width:
        places = bitplanes.places_of_short_words(n)
        exponent, sign = plain.fields(x[:, places], _words_of_short(key, n, len(x)))
        payload = payload.at[:, places].set(exponent.astype(jnp.uint8), unique_indices=True)
        words = bitplanes.pack(sign.reshape(len(x), -1))
        signs = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(len(x), -1)
        payload = payload.at[:, n + 4 * columns :].set(signs)
    return payload.reshape(*lead, -1)


def _short(x: jax.Array, width: int, key: jax.Array | None, interpret: Any) -> jax.Array:
    """Encodes messages whose rows are padded to `THREADS` columns, and cuts out their payloads."""
    messages, n = x.shape
    room = max(width, THREADS)
    require_little_padding("nine_bits.encode", x.size, messages * (_ROWS + 4) * room)
    wide = jax.vmap(lambda row: widened(row, _ROWS, width))(x)
    payload = _encode(wide, _ROWS * room, width, room, room, key, interpret)
    exponents, signs = payload[:, : _ROWS * room], payload[:, _ROWS * room :]
    exponents = jax.vmap(lambda row: narrowed(row, _ROWS, width))(exponents)
    return jnp.concatenate([exponents[:, :n], signs[:, : 4 * width]], axis=1)


def _encode(
    x: jax.Array,
    n: int,
    width: int,
    stride: int,
    columns: int,
    key: jax.Array | None,
    interpret: Any,
) -> jax.Array:
    """Encodes the first `columns` columns of messages of n values in rows of `stride` values.

    The rounding words are those of a message whose rows have `width` values.
    """
    messages, slices, size = len(x), -(-columns // THREADS), n + 4 * stride

    def body(program: jax.Array, x_ref: Any, *refs: Any) -> None:
        *_, out = refs
        own = None if key is None else (refs[0][0], refs[0][1])  # once: loads do not pass stores
        message, at = divided(program, slices)
        column = jnp.minimum(at * THREADS, columns - THREADS)
        start, begin = message * size, message * n + column

        def step(i: jax.Array, word: jax.Array) -> jax.Array:
            rows = [i * _AT_ONCE + k for k in range(_AT_ONCE)]
            values = [load(x_ref, begin + row * stride, THREADS) for row in rows]
            for row, value in zip(rows, values, strict=True):
                bits = jnp.uint32(HALF)
                if own is not None:
                    bits = words_of(own, message, row * width + column)
                exponent, sign = plain.fields(value, bits)
                digit = jnp.uint32(1) << row.astype(jnp.uint32)
                word |= jnp.where(sign, digit, jnp.uint32(0))
                store(out, start + row * stride + column, exponent.astype(jnp.uint8))
            return word

        zeros = plgpu.layout_cast(jnp.zeros((THREADS,), jnp.uint32), line())
        word = jax.lax.fori_loop(np.int32(0), np.int32(_ROWS // _AT_ONCE), step, zeros)
        signs = Rows(out, start + n + 4 * column, (THREADS, 4), interpret)
        signs.store(*[(word >> (8 * i)).astype(jnp.uint8) for i in range(4)])

    inputs = [x.reshape(-1)] + ([] if key is None else [key_words(key)])
    out = jax.ShapeDtypeStruct((messages * size,), jnp.uint8)
    payload = launch(body, inputs, out, messages * slices, interpret=interpret)
    return payload.reshape(messages, size)


def words_of(key: tuple[jax.Array, jax.Array], message: jax.Array, start: jax.Array) -> jax.Array:
    """The words of `random_bits` for THREADS values from `start` on, with the words of the key."""
    place = plgpu.broadcasted_iota(jnp.uint32, (THREADS,), 0, layout=line())
    place += start.astype(jnp.uint32)
    return threefry2x32(key, (place, message.astype(jnp.uint32)))[0]


def _words_of_short(key: jax.Array | None, n: int, messages: int) -> jax.Array:
    """The words of `random_bits` at `places_of_short_words(n)` of each message."""
    if key is None:
        return jnp.uint32(HALF)
    width = bitplanes.words_for(n)
    columns = n - (_ROWS - 1) * width
    own, shape = key_words(key), (messages, _ROWS - 1, width - columns)
    # Iotas instead of the constant array of places: XLA would take minutes to fold the cipher of a
    # constant key and constant places.
    message, row, column = (jax.lax.broadcasted_iota(jnp.uint32, shape, i) for i in range(3))
    place = row * jnp.uint32(width) + column + jnp.uint32(columns)
    return threefry2x32((own[0], own[1]), (place, message))[0]


def decode_and_sum(payloads: jax.Array, n: int, *, interpret: Any = None) -> jax.Array:
    """The same sum as `plain.decode_and_sum`; `interpret`, short words, padding as in `encode`."""
    messages, width = len(payloads), bitplanes.words_for(n)
    if messages > _MESSAGES:
        raise NotImplementedError(
            f'nine_bits.decode_and_sum: "mosaic" adds up to {_MESSAGES} messages, got {messages}; '
            'add them in groups, or use "xla" or None.'
        )
    columns = n - (_ROWS - 1) * width
    if columns < THREADS:
        room = max(width, THREADS)
        exponents = jax.vmap(lambda row: widened(row, _ROWS, width))(payloads[:, :n])
        signs = jnp.pad(payloads[:, n:], ((0, 0), (0, 4 * (room - width))))
        wide = jnp.concatenate([exponents, signs], axis=1)
        total = _decode_and_sum(wide, _ROWS * room, room, room, interpret)
        return narrowed(total, _ROWS, width)[:n]
    total = _decode_and_sum(payloads, n, width, columns, interpret)
    if columns == width:
        return total
    places = bitplanes.places_of_short_words(n)
    signs = payloads[:, n + 4 * columns :]
    rest = jnp.concatenate([payloads[:, places.reshape(-1)], signs], axis=1)
    rest = plain.decode_and_sum(rest, places.size).reshape(places.shape)
    return total.at[places].set(rest, unique_indices=True)


def _decode_and_sum(
    payloads: jax.Array, n: int, stride: int, columns: int, interpret: Any
) -> jax.Array:
    """Adds the first `columns` columns of payloads of n values in rows of `stride` values."""
    messages, size = payloads.shape
    at_once = max(1, min(_AT_ONCE, _LOADS >> (messages - 1).bit_length()))

    def body(program: jax.Array, ref: Any, out: Any) -> None:
        column = jnp.minimum(program * THREADS, columns - THREADS)
        words = []
        for message in range(messages):
            start = message * size + n + 4 * column
            parts = Rows(ref, start, (THREADS, 4), interpret).load_columns(line())
            words.append(sum(part.astype(jnp.uint32) << (8 * i) for i, part in enumerate(parts)))

        def step(i: jax.Array, _: None) -> None:
            rows = [i * at_once + k for k in range(at_once)]
            exponents = [
                [load(ref, m * size + row * stride + column, THREADS) for m in range(messages)]
                for row in rows
            ]
            for row, group in zip(rows, exponents, strict=True):
                signs = [((word >> row.astype(jnp.uint32)) & 1) == 1 for word in words]
                total = functools.reduce(jnp.add, map(plain.value, group, signs))
                store(out, row * stride + column, total)

        jax.lax.fori_loop(np.int32(0), np.int32(_ROWS // at_once), step, None)

    out = jax.ShapeDtypeStruct((n,), jnp.float32)
    programs = -(-columns // THREADS)
    return launch(body, [payloads.reshape(-1)], out, programs, interpret=interpret)
