"""Codes of 1 to 8 bits, packed into bytes.

A width is split into terms of 8, 4, 2 and 1 bits, largest first, and each term is packed
separately, starting from the least significant bits of the code. A code of 5 bits is thus a term of
4 bits, two to a byte, and a term of 1 bit, eight to a byte.

A term of f bits takes M = ceil(f n / 8) bytes. Bits f b to f b + f - 1 of byte j belong to
coordinate `b * M + j`: a byte takes its bits from 8 / f streams, and each stream is read in order.
Bits without a coordinate are zero.

There are only plain versions: XLA fuses them with the operation that makes the codes.
"""

import jax
import jax.numpy as jnp


def bytes_for(n: int, width: int) -> int:
    """The number of bytes that n codes of a width take: ceil(f n / 8) for each term f of it.

    Raises:
      ValueError: if the width is not 1 to 8.
    """
    return sum(_bytes_for(n, term) for term in _terms(width))


def pack(codes: jax.Array, width: int) -> jax.Array:
    """Packs the low bits of each code.

    Args:
      codes: uint8 array `(..., n)`; leading axes are independent. Bits from `width` up are lost.
      width: bits per code, 1 to 8.

    Returns:
      uint8 array `(..., bytes_for(n, width))`.

    Raises:
      TypeError: for another dtype.
      ValueError: if the width is not 1 to 8, or for a scalar.
    """
    _require_bytes("codes", codes)
    parts, shift = [], 0
    for term in _terms(width):
        parts.append(_pack(codes >> shift, term))
        shift += term
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def unpack(packed: jax.Array, n: int, width: int) -> jax.Array:
    """Undoes `pack`.

    Args:
      packed: uint8 array `(..., bytes_for(n, width))`.
      n: the number of codes along the last axis.
      width: bits per code, 1 to 8.

    Returns:
      The codes, uint8 array `(..., n)`.

    Raises:
      TypeError: for another dtype.
      ValueError: if the width is not 1 to 8, or n codes do not take as many bytes.
    """
    _require_bytes("packed codes", packed)
    if n < 0 or packed.shape[-1] != bytes_for(n, width):
        raise ValueError(
            f"{n} codes of {width} bits are {bytes_for(n, width)} bytes along the last axis, got "
            f"shape {packed.shape}; pass the n and the width that they were packed from."
        )
    codes = jnp.zeros((*packed.shape[:-1], n), jnp.uint8)
    start = shift = 0
    for term in _terms(width):
        stop = start + _bytes_for(n, term)
        codes |= _unpack(packed[..., start:stop], n, term) << shift
        start, shift = stop, shift + term
    return codes


def _terms(width: int) -> tuple[int, ...]:
    if width not in range(1, 9):
        raise ValueError(f"a code has 1 to 8 bits, got a width of {width}.")
    return tuple(term for term in (8, 4, 2, 1) if width & term)


def _bytes_for(n: int, term: int) -> int:
    return -(-n * term // 8)


def _pack(codes: jax.Array, term: int) -> jax.Array:
    """The low `term` bits of each code, a divisor of 8, as `(..., ceil(term n / 8))`."""
    if term == 8:
        return codes
    codes = codes & (2**term - 1)
    *lead, n = codes.shape
    M = _bytes_for(n, term)
    # As in `bitplanes.pack`: complete streams are reduced without a copy, the short one is added.
    whole = n // max(M, 1)
    complete = codes[..., : whole * M].reshape(*lead, whole, M)
    packed = jax.lax.reduce_or(complete << _shifts(complete.shape, term), axes=(len(lead),))
    rest = codes[..., whole * M :]
    if rest.shape[-1] == 0:
        return packed
    padding = [(0, 0)] * len(lead) + [(0, M - rest.shape[-1])]
    return packed | (jnp.pad(rest, padding) << (whole * term))


def _unpack(packed: jax.Array, n: int, term: int) -> jax.Array:
    codes = streams(packed, term)
    *lead, number, M = codes.shape
    return codes.reshape(*lead, number * M)[..., :n]


def streams(packed: jax.Array, term: int) -> jax.Array:
    """The codes of one term, uint8 `(..., M)` to `(..., 8 / term, M)`: those of a byte, apart."""
    *lead, M = packed.shape
    copies = jnp.broadcast_to(packed[..., None, :], (*lead, 8 // term, M))
    return (copies >> _shifts(copies.shape, term)) & (2**term - 1)


def _shifts(shape: tuple[int, ...], term: int) -> jax.Array:
    """`term` times the index along the last axis but one."""
    return jax.lax.broadcasted_iota(jnp.uint8, shape, len(shape) - 2) * jnp.uint8(term)


def _require_bytes(what: str, x: jax.Array) -> None:
    if x.dtype != jnp.uint8:
        raise TypeError(f"{what} are uint8, got {x.dtype}; write x.astype(jnp.uint8).")
    if x.ndim == 0:
        raise ValueError(f"{what} lie along the last axis, got a scalar; write x.reshape(1).")
