"""Messages in blocks in Mosaic: one kernel reads the values once and writes the payload once."""

import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxcomm.kernels._mosaic import (
    LANES,
    VECTOR,
    Rows,
    divided,
    launch,
    require_little_padding,
    rows_layout,
)
from jaxcomm.kernels.block_quantization import blocks, plain
from jaxcomm.kernels.random_bits import HALF, key_words, random_bits, threefry2x32

_ELEMENTS = 32  # of x that a thread holds in registers, if blocks are short enough
_MOST = 64  # elements of x that fit into the registers of a thread


class Plan(NamedTuple):
    """How messages are encoded.

    Attributes:
      n: the values of a message.
      writing: how values become codes.
      columns: the bytes of a block. A block is `size / columns` streams of as many values, which
        share its bytes as in `packing.pack`.
      units: the byte at which the units of a message begin.
      payload: the bytes of a message.
      rows: the blocks that a program encodes.
      layout: the layout of arrays `(rows, columns)`.
    """

    n: int
    writing: plain.Writing
    columns: int
    units: int
    payload: int
    rows: int
    layout: Any

    @property
    def size(self) -> int:
        """The values of a block."""
        return self.writing.size


def encode(
    x: jax.Array, writing: plain.Writing, key: jax.Array | None, *, interpret: Any = None
) -> jax.Array:
    """The same payload as `plain.encode`; `interpret` as in `launch`.

    The plain version encodes a short last block, and its bytes are put into the payload.
    """
    *lead, n = x.shape
    size = writing.size
    whole, messages = n // size, math.prod(lead)
    plan = _plan(messages, n, writing)
    if messages * whole == 0:
        return plain.encode(x, writing, key)
    if whole < plan.rows:
        payload = _few(x, plan, key, interpret)
    else:
        payload = _encode_whole(x, plan, key, interpret)
    start, byte = whole * size, whole * plan.columns
    if start == n:
        return payload
    bits = jnp.uint32(HALF) if key is None else random_bits(key, x.shape)[..., start:]
    short = plain.encode_with(x[..., start:], lambda: bits, writing)
    front = (0,) * (x.ndim - 1)
    payload = jax.lax.dynamic_update_slice(payload, short[..., :-4], (*front, byte))
    return jax.lax.dynamic_update_slice(payload, short[..., -4:], (*front, plan.payload - 4))


def _plan(messages: int, n: int, writing: plain.Writing) -> Plan:
    size, width = writing.size, writing.width
    if width not in (4, 8) or size * width % 8:
        raise NotImplementedError(
            f'{writing.operation}: "mosaic" packs 4 or 8 bits per value and whole bytes per block, '
            f'got {width} bits and blocks of {size}; use "xla" or None.'
        )
    columns = size * width // 8
    payload = writing.message_bytes(n)
    starts = (columns, n, payload) if messages > 1 else (columns,)
    vector = VECTOR if all(start % VECTOR == 0 for start in starts) else 1
    lanes = math.gcd(columns // vector, LANES)
    if size > _MOST * lanes:
        raise NotImplementedError(
            f'{writing.operation}: "mosaic" has no room for blocks of {size} in its registers; '
            'take a power of two up to 2048, or use "xla" or None.'
        )
    at_once, layout = rows_layout(lanes, vector)
    rows = at_once * max(1, _ELEMENTS * lanes // size)
    units = payload - 4 * -(-n // size)
    return Plan(n, writing, columns, units, payload, rows, layout)


def _padded(plan: Plan) -> Plan:
    """The plan for a message of just as many complete blocks as one program encodes."""
    n = plan.rows * plan.size
    payload = plan.writing.message_bytes(n)
    return plan._replace(n=n, units=payload - 4 * plan.rows, payload=payload)


def _few(x: jax.Array, plan: Plan, key: jax.Array | None, interpret: Any) -> jax.Array:
    """Encodes fewer complete blocks than one program does: pads with zeros and cuts the result."""
    whole = plan.n // plan.size
    padded, codes = _padded(plan), whole * plan.columns
    messages = x.size // plan.n
    most = messages * max(padded.n, padded.payload)
    require_little_padding(plan.writing.operation, x.size, most)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, padded.n - whole * plan.size)]
    found = _encode_whole(jnp.pad(x[..., : whole * plan.size], padding), padded, key, interpret)
    payload = jnp.zeros((*x.shape[:-1], plan.payload), jnp.uint8)
    payload = payload.at[..., :codes].set(found[..., :codes])
    units = found[..., padded.units : padded.units + 4 * whole]
    return payload.at[..., plan.units : plan.units + 4 * whole].set(units)


def _encode_whole(x: jax.Array, plan: Plan, key: jax.Array | None, interpret: Any) -> jax.Array:
    """Encodes all complete blocks; the bytes of a short last block are not written."""
    n, size, columns, rows, layout = plan.n, plan.size, plan.columns, plan.rows, plan.layout
    *lead, _ = x.shape
    whole, width = n // size, plan.writing.width
    programs = -(-whole // rows)  # of a message

    def body(program: jax.Array, x_ref: Any, *refs: Any) -> None:
        message, group = divided(program, programs)
        first = jnp.minimum(group * rows, whole - rows)
        read = Rows(x_ref, message * n + first * size, (rows, size), interpret)
        parts = [read.load(start, columns, layout) for start in range(0, size, columns)]
        unit, factor = _units(parts, plan.writing.most)
        factor = jax.lax.broadcast_in_dim(factor, (rows, columns), (0,))
        factor = plgpu.layout_cast(factor, layout)
        codes = []
        for i, part in enumerate(parts):
            bits = jnp.uint32(HALF)
            if key is not None:
                bits = _words(refs[0], message, first * size + i * columns, plan)
            code = plan.writing.codes(part * factor, bits)
            if len(parts) > 1:
                code = (code & (2**width - 1)) << (i * width)
            codes.append(code)
        code = functools.reduce(operator.or_, codes)
        *_, out = refs
        start = message * plan.payload
        Rows(out, start + first * columns, (rows, columns), interpret).store(code.astype(jnp.uint8))
        pattern = jax.lax.bitcast_convert_type(unit, jnp.uint32)
        Rows(out, start + plan.units + 4 * first, (rows, 4), interpret).store(
            *[(pattern >> (8 * i)).astype(jnp.uint8) for i in range(4)]
        )

    messages = math.prod(lead)
    out = jax.ShapeDtypeStruct((messages * plan.payload,), jnp.uint8)
    inputs = [x.reshape(-1)] + ([] if key is None else [key_words(key)])
    payload = launch(body, inputs, out, messages * programs, interpret=interpret)
    return payload.reshape(*lead, plan.payload)


def _units(parts: list[jax.Array], most: float) -> tuple[jax.Array, jax.Array]:
    """The units and factors of the blocks whose streams are given, `(rows,)` each."""
    top = jnp.uint32(0)
    for part in parts:
        top = jnp.maximum(top, jax.lax.bitcast_convert_type(part, jnp.uint32) & 0x7FFFFFFF)
    top = jnp.max(top, axis=1)
    return blocks.unit_and_factor(top, jax.lax.bitcast_convert_type(top, jnp.float32), most)


def _words(key: Any, message: jax.Array, start: jax.Array, plan: Plan) -> jax.Array:
    """The words of `random_bits` for `(rows, columns)` values.

    The first row begins at value `start` of the message, and each row `size` values after the row
    before it.
    """
    shape = (plan.rows, plan.columns)
    row, column = (
        plgpu.broadcasted_iota(jnp.uint32, shape, axis, layout=plan.layout) for axis in (0, 1)
    )
    place = start.astype(jnp.uint32) + row * jnp.uint32(plan.size) + column
    return threefry2x32((key[0], key[1]), (place, message.astype(jnp.uint32)))[0]
