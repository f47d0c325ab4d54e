"""Rows of blocks: encoded vectors, of which any blocks can be decoded by themselves.

Decoded into the place where they are needed, values are written once. On CPU, all of them at once
would be written, read to look for what is not finite, and copied to where they are needed.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm.kernels._apart import apart
from jaxcomm.kernels.block_quantization import packing
from jaxcomm.kernels.block_quantization.blocks import Format, cut


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("codes", "units"), meta_fields=("form",)
)
@dataclasses.dataclass(frozen=True)
class Rows:
    """Blocks of one encoded vector, in order.

    Attributes:
      codes: uint8 `(blocks, columns)`, packed.
      units: float32 `(blocks,)`; NaN for a block with a value that is not finite.
      form: how the values are written.
    """

    codes: jax.Array
    units: jax.Array
    form: Format


class Owed(NamedTuple):
    """What a device still owes of a vector: it sent a part of it in N messages, all but one.

    Attributes:
      values: float32 `(N * n,)`, the part.
      sent: its blocks, as in the messages.
      own: float32 `(n,)`, what is left of the message that is not sent.
      place: its place, int32.
      first: the first block of the part, int32; nothing is owed of others.
    """

    values: jax.Array
    sent: Rows
    own: jax.Array
    place: jax.Array
    first: jax.Array


def are_rows(n: int, form: Format) -> bool:
    """Whether messages of n values are whole blocks whose codes fill whole bytes."""
    return n > 0 and n % form.size == 0 and 8 % form.width == 0 and form.size * form.width % 8 == 0


def rows_of(payloads: jax.Array, n: int, form: Format) -> Rows:
    """The blocks of a vector that was cut into messages of n values, from payloads `(N, m)`."""
    blocks, columns = n // form.size, packing.bytes_for(form.size, form.width)
    codes = cut(payloads, 0, blocks, columns).reshape(-1, columns)
    units = jax.lax.bitcast_convert_type(cut(payloads, blocks * columns, blocks, 4), jnp.float32)
    return Rows(codes, units.reshape(-1), form)


def values(rows: Rows) -> jax.Array:
    """The values of the blocks, float32 `(blocks * size,)`."""
    return jax.lax.platform_dependent(
        cpu=lambda: _values_in_streams(rows).reshape(-1),
        default=lambda: _decoded(False, rows).reshape(-1),
    )


def left(
    owed: Owed, start: jax.Array, count: int, old: Any = None, is_new: Any = None
) -> jax.Array:
    """What is owed of some blocks, float32 `(count * size,)`.

    Args:
      owed: of the whole vector.
      start: the first of the blocks.
      count: how many there are.
      old: float32 of as many values, to return instead where `is_new` is False; None for none.
      is_new: a bool scalar.
    """
    form = owed.sent.form

    def by(of: Any, *row: int) -> jax.Array:
        before = None if old is None else old.reshape(count, *row)
        return of(owed, start, before, is_new, count=count).reshape(-1)

    left_of = functools.partial(_left_of, False)
    streams = 8 // form.width, form.size * form.width // 8
    return jax.lax.platform_dependent(
        cpu=lambda: by(_left_in_streams, *streams), default=lambda: by(left_of, form.size)
    )


def _left_of(
    in_streams: bool, owed: Owed, start: jax.Array, old: Any, is_new: Any, count: int
) -> jax.Array:
    """`left`, in the shape of what `_decoded` returns."""
    row = start - owed.first + jnp.arange(count, dtype=jnp.int32)
    sent = Rows(_at(owed.sent.codes, row), _at(owed.sent.units, row), owed.sent.form)
    decoded = _decoded(in_streams, sent)
    whole, own = (x.reshape(-1, *decoded.shape[1:]) for x in (owed.values, owed.own))
    own_row = row - owed.place * len(own)
    each = (-1, *[1] * (decoded.ndim - 1))
    is_own = ((own_row >= 0) & (own_row < len(own))).reshape(each)
    is_owed = ((row >= 0) & (row < len(whole))).reshape(each)
    found = jnp.where(is_own, _at(own, own_row), _at(whole, row) - decoded)
    found = jnp.where(is_owed, found, jnp.float32(0))
    return found if old is None else jnp.where(is_new, found, old)


def _at(array: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows of an array; any where there are none."""
    return array.at[rows].get(mode="clip")


def _decoded(in_streams: bool, rows: Rows) -> jax.Array:
    """The values, `(blocks, size)`; in streams `(blocks, streams, columns)`, in the same order."""
    form = rows.form
    if in_streams:
        codes, units = packing.streams(rows.codes, form.width), rows.units[:, None, None]
    else:
        codes, units = packing.unpack(rows.codes, form.size, form.width), rows.units[:, None]
    return form.numbers(codes) * units


# In streams and apart on CPU, as in `blocks`. Leaves of one shape are traced once.
_values_in_streams = apart(functools.partial(_decoded, True))
_left_in_streams = apart(functools.partial(_left_of, True), static_argnames="count")
