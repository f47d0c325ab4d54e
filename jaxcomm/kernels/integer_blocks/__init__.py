"""Messages to integers of 8 or fewer bits in blocks, with the largest magnitude as the scale.

The plain version below is the specification. XLA on GPU reads x twice: the unit of a block, a
reduction, and the codes that it is broadcast to do not share a kernel.
"""

import functools

import jax
import jax.numpy as jnp

from jaxcomm.kernels import _device, blocks, reductions
from jaxcomm.kernels.levels import bytes_for, pack_levels, unpack_levels
from jaxcomm.kernels.random_bits import random_bits

HALF = 2**31  # the bits that round to nearest


def encode(
    x: jax.Array,
    levels: int,
    size: int,
    key: jax.Array | None = None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Integers from -levels to levels, packed, and behind them the units of the blocks.

    Args:
      x: float32 array `(..., n)`; leading axes are independent messages.
      levels: how many units the largest magnitude of a block is, 1 to 127.
      size: the values of a block.
      key: a PRNG key to round at random, with a word of `random_bits(key, x.shape)` for each value;
        None rounds to nearest, ties away from zero.
      implementation: "xla", "mosaic" (on NVIDIA GPUs, for widths of 4 and 8 bits), or None, which
        is "xla".

    Returns:
      uint8 array `(..., m)`: `codes.pack` of each block in two's complement, then the units of
      `blocks.unit_and_factor`.

    Raises:
      TypeError: for another dtype.
      ValueError: for a scalar, for levels or a size out of range, or for more elements than the
        implementation counts.
      NotImplementedError: for an implementation that does not exist here, or not for this size.
    """
    _check(levels, size)
    if x.dtype != jnp.float32:
        raise TypeError(f"encode takes float32, got {x.dtype}; write x.astype(jnp.float32).")
    if x.ndim == 0:
        raise ValueError("encode takes messages (..., n), got a scalar; write x.reshape(1).")
    name, elements = "integer_blocks.encode", x.size + x.size // size * 4  # also of the payload
    chosen = _device.choose(name, implementation, ("xla", "mosaic"), elements)
    if chosen == "mosaic":
        from jaxcomm.kernels.integer_blocks import mosaic  # Pallas takes long to import

        return mosaic.encode(x, levels, size, key)
    bits = jnp.uint32(HALF) if key is None else random_bits(key, x.shape)
    return plain(x, bits, levels, size)


def plain(x: jax.Array, bits: jax.Array, levels: int, size: int) -> jax.Array:
    """`encode` with the words that it rounds by, uint32 of the shape of x or the scalar HALF."""

    def encode_blocks(x: jax.Array, bits: jax.Array) -> tuple[jax.Array, jax.Array]:
        top = reductions.largest(x)
        largest = jax.lax.bitcast_convert_type(top, jnp.float32)
        unit, factor = blocks.unit_and_factor(top, largest, levels)
        return pack_levels(x * factor[..., None], bits, levels), unit

    return blocks.encode(x, bits, size, encode_blocks)


def decode(payload: jax.Array, n: int, levels: int, size: int) -> jax.Array:
    """The values of messages.

    Args:
      payload: uint8 array `(..., message_bytes(n, levels, size))`.
      n: the number of values.
      levels: as for `encode`.
      size: the values of a block.

    Returns:
      float32 array `(..., n)`.

    Raises:
      TypeError: for another dtype.
      ValueError: for another number of bytes, and for levels or a size out of range.
    """
    _check_payload(payload, n, levels, size)
    return blocks.decode(
        payload,
        n,
        size,
        functools.partial(bytes_for, levels=levels),
        functools.partial(unpack_levels, levels=levels),
    )


def decode_and_sum(
    payloads: jax.Array, n: int, levels: int, size: int, *, implementation: str | None = None
) -> jax.Array:
    """The sum of the values of several messages, added in their order.

    Args:
      payloads: uint8 array `(N, message_bytes(n, levels, size))`, N at least 1.
      n: the number of values.
      levels: as for `encode`.
      size: the values of a block.
      implementation: as for `encode`.

    Returns:
      float32 array `(n,)`.

    Raises:
      As `decode`; ValueError also for another shape, or for more elements than the implementation
        counts; NotImplementedError as `encode`.
    """
    _check_payload(payloads, n, levels, size)
    if payloads.ndim != 2 or payloads.shape[0] == 0:
        raise ValueError(f"decode_and_sum takes messages (N, m), got shape {payloads.shape}.")
    name, elements = "integer_blocks.decode_and_sum", max(payloads.size, n)
    if _device.choose(name, implementation, ("xla", "mosaic"), elements) == "mosaic":
        from jaxcomm.kernels.integer_blocks import mosaic

        return mosaic.decode_and_sum(payloads, n, levels, size)
    values = decode(payloads, n, levels, size)
    return functools.reduce(jnp.add, [values[r] for r in range(len(payloads))])


def _check(levels: int, size: int) -> None:
    if levels not in range(1, 128) or size < 1:
        raise ValueError(f"levels are 1 to 127 and a size is positive, got {levels} and {size}.")


def _check_payload(payload: jax.Array, n: int, levels: int, size: int) -> None:
    _check(levels, size)
    if payload.dtype != jnp.uint8:
        raise TypeError(f"a payload is uint8, got {payload.dtype}; encode makes them.")
    if n < 0 or payload.ndim == 0 or payload.shape[-1] != message_bytes(n, levels, size):
        raise ValueError(
            f"{n} values of {levels} levels in blocks of {size} are "
            f"{message_bytes(max(n, 0), levels, size)} bytes along the last axis, got a payload of "
            f"shape {payload.shape}; pass the n that was encoded."
        )


def message_bytes(n: int, levels: int, size: int) -> int:
    """The bytes of the payload of a message of n values."""
    whole, rest = divmod(n, size)
    packed = whole * bytes_for(size, levels) + bytes_for(rest, levels)
    return packed + 4 * -(-n // size)
