"""Exponents and signs as one kernel each way: everything is read once and written once."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxcomm.kernels import bitplanes, cnat_all, powers_of_two
from jaxcomm.kernels._mosaic import THREADS, Rows, launch, line, load, store
from jaxcomm.kernels.random_bits import key_words, threefry2x32

_AT_ONCE = 8  # rows that are loaded before the first is stored: loads do not pass stores;
_LOADS = 32  # when several messages are read, fewer rows, down to one
_MESSAGES = 64  # whose signs fit into registers
_ROWS = bitplanes.BITS


def encode(x: jax.Array, key: jax.Array | None, *, interpret: Any = None) -> jax.Array:
    """As the specification; `interpret` as in `launch`.

    Where a message is no multiple of 32, or is short, it is padded first and its payload cut, at a
    copy each.
    """
    *lead, n = x.shape
    messages, width = math.prod(lead), bitplanes.words_for(n)
    room = max(width, THREADS)  # a program takes so many columns
    rows = jnp.pad(x.reshape(messages, n), ((0, 0), (0, _ROWS * width - n)))
    rows = jnp.pad(rows.reshape(messages, _ROWS, width), ((0, 0), (0, 0), (0, room - width)))
    payload = _encode(rows.reshape(-1), messages, width, room, key, interpret)
    payload = payload.reshape(messages, cnat_all.message_bytes(_ROWS * room))
    if n < _ROWS * room:
        exponents = payload[:, : _ROWS * room].reshape(messages, _ROWS, room)[:, :, :width]
        exponents = exponents.reshape(messages, _ROWS * width)[:, :n]
        signs = payload[:, _ROWS * room : _ROWS * room + 4 * width]
        payload = jnp.concatenate([exponents, signs], axis=1)
    return payload.reshape(*lead, cnat_all.message_bytes(n))


def _encode(
    x: jax.Array, messages: int, width: int, room: int, key: jax.Array | None, interpret: Any
) -> jax.Array:
    """Messages of rows of `room` columns, of which `width` are of the message."""
    slices, size = -(-room // THREADS), cnat_all.message_bytes(_ROWS * room)

    def body(program: jax.Array, x_ref: Any, *refs: Any) -> None:
        *_, out = refs
        message, at = jax.lax.div(program, slices), jax.lax.rem(program, slices)
        column = jnp.minimum(at * THREADS, room - THREADS)
        start, word = message * size, jnp.zeros((), jnp.uint32)
        for first in range(0, _ROWS, _AT_ONCE):
            group = range(first, first + _AT_ONCE)
            begin = message * (_ROWS * room) + column
            values = [load(x_ref, begin + row * room, THREADS) for row in group]
            for row, value in zip(group, values, strict=True):
                bits = jnp.uint32(powers_of_two.HALF)
                if key is not None:
                    bits = _words(refs[0], message, row * width + column)
                exponent, sign = cnat_all.fields(value, bits)
                word |= jnp.where(sign, jnp.uint32(1 << row), jnp.uint32(0))
                store(out, start + row * room + column, exponent.astype(jnp.uint8))
        signs = Rows(out, start + _ROWS * room + 4 * column, (THREADS, 4), interpret)
        signs.store(*[(word >> (8 * i)).astype(jnp.uint8) for i in range(4)])

    inputs = [x] + ([] if key is None else [key_words(key)])
    out = jax.ShapeDtypeStruct((messages * size,), jnp.uint8)
    return launch(body, inputs, [out], messages * slices, interpret=interpret)[0]


def _words(key: Any, message: jax.Array, start: jax.Array) -> jax.Array:
    """What `random_bits` has for THREADS values from `start` on."""
    place = plgpu.broadcasted_iota(jnp.uint32, (THREADS,), 0, layout=line())
    place += start.astype(jnp.uint32)
    return threefry2x32((key[0], key[1]), (place, message.astype(jnp.uint32)))[0]


def decode_and_sum(payloads: jax.Array, n: int, *, interpret: Any = None) -> jax.Array:
    """As the specification; `interpret` as in `launch`.

    Where n is no multiple of 32 the result is copied once more; short payloads are padded.
    """
    messages, width = len(payloads), bitplanes.words_for(n)
    if messages > _MESSAGES:
        raise NotImplementedError(
            f'cnat_all.decode_and_sum: "mosaic" adds up to {_MESSAGES} messages, got {messages}; '
            'add them in groups, or use "xla" or None.'
        )
    room = max(width, THREADS)
    if width < room:
        exponents = jnp.pad(payloads[:, :n], ((0, 0), (0, _ROWS * width - n)))
        exponents = exponents.reshape(messages, _ROWS, width)
        signs = payloads[:, n:]
        exponents = jnp.pad(exponents, ((0, 0), (0, 0), (0, room - width)))
        signs = jnp.pad(signs, ((0, 0), (0, 4 * (room - width))))
        payloads = jnp.concatenate([exponents.reshape(messages, -1), signs], axis=1)
    n_there = _ROWS * room if width < room else n
    total = _decode_and_sum(payloads, n_there, room, interpret)
    return total.reshape(_ROWS, room)[:, :width].reshape(-1)[:n]


def _decode_and_sum(payloads: jax.Array, n: int, room: int, interpret: Any) -> jax.Array:
    """Of payloads of n values in rows of `room`, the last of which may be short.

    What is read behind its end are signs, and what becomes of them is cut off.
    """
    messages, size = payloads.shape
    at_once = max(1, min(_AT_ONCE, _LOADS >> (messages - 1).bit_length()))

    def body(program: jax.Array, ref: Any, out: Any) -> None:
        column = jnp.minimum(program * THREADS, room - THREADS)
        words = []
        for message in range(messages):
            start = message * size + n + 4 * column
            parts = Rows(ref, start, (THREADS, 4), interpret).load_columns(line())
            words.append(sum(part.astype(jnp.uint32) << (8 * i) for i, part in enumerate(parts)))

        def step(i: jax.Array, _: None) -> None:
            rows = [i * at_once + k for k in range(at_once)]
            exponents = [
                [load(ref, m * size + row * room + column, THREADS) for m in range(messages)]
                for row in rows
            ]
            for row, group in zip(rows, exponents, strict=True):
                signs = [((word >> row.astype(jnp.uint32)) & 1) == 1 for word in words]
                total = functools.reduce(jnp.add, map(cnat_all.value, group, signs))
                store(out, row * room + column, total)

        jax.lax.fori_loop(0, _ROWS // at_once, step, None)

    out = jax.ShapeDtypeStruct((_ROWS * room,), jnp.float32)
    programs = -(-room // THREADS)
    return launch(body, [payloads.reshape(-1)], [out], programs, interpret=interpret)[0]
