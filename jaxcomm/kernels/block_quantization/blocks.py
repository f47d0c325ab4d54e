"""The layout of a payload in blocks, and the unit that each block counts in.

A payload is uint8. First come the codes of every block in order; each block's codes begin at a
whole byte. Then come the units, float32 and thus 4 bytes per block. The last block is short if the
block size does not divide n.

There are only plain versions; the Mosaic kernel for whole messages writes the same layout.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.kernels._apart import apart
from jaxcomm.kernels._messages import require_payload
from jaxcomm.kernels.block_quantization import packing
from jaxcomm.kernels.reductions import INFINITY, sum_in_order

# Bit patterns of 2^-126 and of the largest finite float32.
LEAST_NORMAL = 0x00800000
_MAX = 0x7F7FFFFF
# XLA replaces a division by a broadcast scalar with a product with its reciprocal, so this code
# itself multiplies. The reciprocal of a larger number is denormal, and so zero on CPU.
LARGEST_DIVISOR = np.float32(2.0**126)
_CUT = 8  # bits of float32's mantissa that a unit drops


# Codes, uint8 of any shape, to the numbers that they stand for, float32 of that shape.
Numbers = Callable[[jax.Array], jax.Array]


class Format(NamedTuple):
    """How values are written.

    Attributes:
      size: the values of a block.
      width: the bits of a code, 1 to 8.
      numbers: what codes stand for, in units of their block.
    """

    size: int
    width: int
    numbers: Numbers


class _Piece(NamedTuple):
    """All complete blocks of a message together, or its short last block.

    Attributes:
      size: the values of a block.
      blocks: how many there are.
      start: the place of the first value.
      byte: that of the first byte of codes in the payload.
      columns: the bytes of codes of a block.
      unit: the place of the first byte of units.
    """

    size: int
    blocks: int
    start: int
    byte: int
    columns: int
    unit: int

    def of(self, x: jax.Array) -> jax.Array:
        """Its elements of `(..., n)`, as `(..., blocks, size)`."""
        return cut(x, self.start, self.blocks, self.size)

    def codes(self, payload: jax.Array) -> jax.Array:
        """Its packed codes, uint8 `(..., blocks, columns)`."""
        return cut(payload, self.byte, self.blocks, self.columns)

    def units(self, payload: jax.Array) -> jax.Array:
        """Its units, float32 `(..., blocks)`."""
        found = cut(payload, self.unit, self.blocks, 4)
        return jax.lax.bitcast_convert_type(found, jnp.float32)


def _pieces(n: int, size: int, width: int) -> list[_Piece]:
    whole, rest = divmod(n, size)
    columns, short = packing.bytes_for(size, width), packing.bytes_for(rest, width)
    units = whole * columns + short
    complete = _Piece(size, whole, 0, 0, columns, units)
    last = _Piece(rest, 1, whole * size, whole * columns, short, units + 4 * whole)
    return [piece for piece in (complete, last) if piece.size * piece.blocks] or [complete]


def cut(x: jax.Array, start: int, blocks: int, size: int) -> jax.Array:
    """Elements of `(..., n)` from a place on, as `(..., blocks, size)`."""
    return x[..., start : start + blocks * size].reshape(*x.shape[:-1], blocks, size)


def joined(blocks: jax.Array) -> jax.Array:
    """`(..., blocks, size)` as `(..., blocks * size)`."""
    return blocks.reshape(*blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1])


def message_bytes(n: int, size: int, width: int) -> int:
    """The bytes of the payload of n values: codes, and 4 for each block."""
    return sum(piece.blocks * (piece.columns + 4) for piece in _pieces(n, size, width))


def encode(
    x: jax.Array,
    words: Callable[[], jax.Array],
    size: int,
    width: int,
    encode_blocks: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
) -> jax.Array:
    """Encodes messages block by block.

    Args:
      x: float32 array `(..., n)`.
      words: draws the rounding words: of the shape of x, or a scalar.
      size: the values of a block.
      width: the bits of a code.
      encode_blocks: maps blocks `(..., b, s)` and their rounding words to codes, uint8
        `(..., b, s)`, and units, float32 `(..., b)`.

    Returns:
      The payloads, uint8 array `(..., m)`.
    """

    def of(piece: _Piece, vector: jax.Array) -> tuple[jax.Array, jax.Array]:
        bits = words()
        own = piece.of(bits) if bits.ndim else bits
        codes, units = encode_blocks(piece.of(vector.reshape(x.shape)), own)
        return packing.pack(codes, width), units

    codes, units = [], []
    for piece in _pieces(x.shape[-1], size, width):
        encoded = functools.partial(of, piece)
        found = jax.lax.platform_dependent(x.reshape(-1), cpu=apart(encoded), default=encoded)
        codes.append(joined(found[0]))
        units.append(joined(jax.lax.bitcast_convert_type(found[1], jnp.uint8)))
    return jnp.concatenate([*codes, *units], axis=-1)


def decode(payload: jax.Array, n: int, form: Format) -> jax.Array:
    """Decodes messages: each value is its number times the unit of its block.

    Args:
      payload: uint8 array `(..., m)`.
      n: the values of a message.
      form: how they are written.

    Returns:
      The values, float32 array `(..., n)`.

    Raises:
      TypeError: for another dtype.
      ValueError: for another number of bytes.
    """
    return _of_values(lambda values: values, payload, n, form, payload.shape[:-1])


def decode_and_sum(payloads: jax.Array, n: int, form: Format) -> jax.Array:
    """The sum of the values of payloads `(N, m)`, added in order: float32 `(n,)`.

    Raises:
      As `decode`; ValueError also for another shape.
    """
    if payloads.ndim != 2 or payloads.shape[0] == 0:
        raise ValueError(f"decode_and_sum takes messages (N, m), got shape {payloads.shape}.")
    return _of_values(sum_in_order, payloads, n, form, ())


def sum_with_own(payloads: jax.Array, own: jax.Array, place: jax.Array, form: Format) -> jax.Array:
    """The same, with the values `own`, float32 `(n,)`, for those of the payload at `place`."""

    def total(values: jax.Array, own: jax.Array) -> jax.Array:
        row = jax.lax.broadcasted_iota(jnp.int32, values.shape, 0)
        return sum_in_order(jnp.where(row == place, own, values))

    return _of_values(total, payloads, own.size, form, (), own)


def error(x: jax.Array, payload: jax.Array, form: Format) -> jax.Array:
    """x, float32 `(..., n)`, minus the values of its payload."""
    return _of_values(lambda values, x: x - values, payload, x.shape[-1], form, x.shape[:-1], x)


def _of_values(
    f: Callable[..., jax.Array],
    payload: jax.Array,
    n: int,
    form: Format,
    lead: tuple[int, ...],
    *arrays: jax.Array,
) -> jax.Array:
    """f of the decoded values and of arrays `(..., n)`, in any common shape, as `(*lead, n)`.

    On CPU the values are decoded in the order of the streams of their codes, which XLA compiles to
    vector loops, and apart from what uses them. Decoding in the order of the values, or fused with
    what uses them, takes up to 8 times as long.
    """
    size, width, numbers = form
    require_payload(payload, n, message_bytes(max(n, 0), size, width))

    def of(piece: _Piece, in_streams: bool, payload: jax.Array, *arrays: jax.Array) -> jax.Array:
        codes, units = piece.codes(payload), piece.units(payload)
        if in_streams:
            values = numbers(packing.streams(codes, width)) * units[..., None, None]
        else:
            values = numbers(packing.unpack(codes, piece.size, width)) * units[..., None]
        shape = (*lead, *values.shape[payload.ndim - 1 :])
        return f(values, *(piece.of(x.reshape(*lead, n)).reshape(shape) for x in arrays))

    found = []
    for piece in _pieces(n, size, width):
        in_streams = 8 % width == 0 and piece.size * width % 8 == 0
        on_cpu = apart(functools.partial(of, piece, in_streams))
        plain = functools.partial(of, piece, False)
        shape = (*lead, piece.blocks * piece.size)
        cpu, default = (
            lambda *args, f=f, shape=shape: f(*args).reshape(shape) for f in (on_cpu, plain)
        )
        vectors = [x.reshape(-1) for x in arrays]
        found.append(jax.lax.platform_dependent(payload, *vectors, cpu=cpu, default=default))
    if len(found) == 1:
        return found[0]
    return jax.lax.platform_dependent(*found, cpu=_put_behind, default=_concatenated)


def _concatenated(whole: jax.Array, rest: jax.Array) -> jax.Array:
    return jnp.concatenate([whole, rest], axis=-1)


def _put_behind(whole: jax.Array, rest: jax.Array) -> jax.Array:
    """The same for CPU, where XLA would fuse padding into the decoding, but not a concatenation."""
    room = jnp.pad(whole, [(0, 0)] * (whole.ndim - 1) + [(0, rest.shape[-1])])
    return jax.lax.dynamic_update_slice_in_dim(room, rest, whole.shape[-1], axis=-1)


def unit_and_factor(top: jax.Array, scale: jax.Array, most: float) -> tuple[jax.Array, jax.Array]:
    """The unit of each block, its scale over `most`, and the factor from values to numbers.

    The mantissa of a unit is rounded up to 16 bits, so products with numbers of 8 bits are exact.
    Hence every device decodes and adds the same values, however the compiler orders or contracts
    the operations, and encoding a decoded block gives the same unit again.

    Args:
      top: uint32 array, the bit pattern of the largest magnitude of each block, from
        `reductions.largest`.
      scale: float32 array of that shape. Its value is ignored where the block is not finite.
      most: the number of units in a scale.

    Returns:
      The units, float32: zero if the unit would be below 2^-126, NaN if the block is not finite.
      The factors: the reciprocals of the units, and zero for a zero unit.
    """
    quotient = jax.lax.bitcast_convert_type(scale * np.float32(1 / most), jnp.uint32)
    # Rounds up, except from at most 2 of 256 parts above a 16-bit mantissa: such an excess is a
    # rounding error of the quotient.
    pattern = (quotient + (2**_CUT - 3)) >> _CUT << _CUT
    pattern = jnp.minimum(pattern, jnp.uint32(_largest_unit(most)))
    unit = jax.lax.bitcast_convert_type(pattern, jnp.float32)
    zero = (top < LEAST_NORMAL) | (pattern < LEAST_NORMAL)
    factor = jnp.where(zero, jnp.float32(0), 1 / unit)
    unit = jnp.where(zero, jnp.float32(0), unit)
    return jnp.where(top < INFINITY, unit, jnp.float32(jnp.nan)), factor


def _largest_unit(most: float) -> int:
    """The bit pattern of the largest unit with a normal reciprocal and a finite `most`-fold."""
    largest = float(np.uint32(_MAX).view(np.float32)) * (1 - 2.0**-24) / most
    return int(np.float32(min(largest, LARGEST_DIVISOR)).view(np.uint32)) >> _CUT << _CUT
