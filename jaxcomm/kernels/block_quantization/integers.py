"""Messages as integers of 8 or fewer bits, in blocks whose scale is their largest magnitude."""

import functools

import jax

from jaxcomm.kernels import _implementations
from jaxcomm.kernels._messages import require_messages, require_payload
from jaxcomm.kernels.block_quantization import blocks, plain
from jaxcomm.kernels.block_quantization.rounding import level_of, round_to_levels, width_for


def message_bytes(n: int, levels: int, size: int) -> int:
    """The bytes of the payload of a message of n values."""
    return blocks.message_bytes(n, size, width_for(levels))


def writing(levels: int, size: int) -> plain.Writing:
    """How integers are written: in two's complement."""
    codes = functools.partial(round_to_levels, levels=levels)
    return plain.Writing("integers.encode", size, width_for(levels), levels, codes)


def encode(
    x: jax.Array,
    levels: int,
    size: int,
    key: jax.Array | None = None,
    *,
    implementation: _implementations.Option = None,
) -> jax.Array:
    """Integers from -levels to levels, packed, followed by the units of the blocks.

    Args:
      x: float32 array `(..., n)`; leading axes are independent messages.
      levels: the number of units in the largest magnitude of a block, 1 to 127.
      size: the values of a block.
      key: a PRNG key to round at random, with a word of `random_bits(key, x.shape)` for each value;
        None rounds to nearest, ties away from zero.
      implementation: "xla", "mosaic" (on NVIDIA GPUs, for widths of 4 and 8 bits), or another
        option of `_implementations`; None means the fastest that was timed.

    Returns:
      uint8 array `(..., message_bytes(n, levels, size))`: the integers of each block in two's
      complement, packed by `packing.pack`, then the units of `blocks.unit_and_factor`.

    Raises:
      TypeError: for another dtype.
      ValueError: for a scalar, for levels or a size out of range, or for more elements than the
        implementation can index.
      NotImplementedError: for an implementation that does not exist here, or not for this size.
    """
    _check(levels, size)
    require_messages(x)

    def run(name: str, x: jax.Array, key: jax.Array | None) -> jax.Array:
        if name == "mosaic":
            from jaxcomm.kernels.block_quantization import mosaic  # Pallas takes long to import

            return mosaic.encode(x, writing(levels, size), key)
        return plain.encode(x, writing(levels, size), key)

    return _implementations.call(
        "integers.encode",
        implementation,
        run,
        (x, key),
        elements=x.size + x.size // size * 4,  # at least those of x and of the payload
        static=(levels, size),
    )


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
    return blocks.decode(payload, n, _format(levels, size))


def decode_and_sum(payloads: jax.Array, n: int, levels: int, size: int) -> jax.Array:
    """The sum of the values of several messages, added in their order.

    Args:
      payloads: uint8 array `(N, message_bytes(n, levels, size))`, N at least 1.
      n: the number of values.
      levels: as for `encode`.
      size: the values of a block.

    Returns:
      float32 array `(n,)`.

    Raises:
      As `decode`; ValueError also for another shape.
    """
    _check_payload(payloads, n, levels, size)
    if payloads.ndim != 2 or payloads.shape[0] == 0:
        raise ValueError(f"decode_and_sum takes messages (N, m), got shape {payloads.shape}.")
    return blocks.decode_and_sum(payloads, n, _format(levels, size))


def sum_with_own(
    payloads: jax.Array, own: jax.Array, place: jax.Array, levels: int, size: int
) -> jax.Array:
    """`decode_and_sum` with the values `own`, float32 `(n,)`, for those of payload `place`."""
    _check_payload(payloads, own.size, levels, size)
    return blocks.sum_with_own(payloads, own, place, _format(levels, size))


def error(x: jax.Array, payload: jax.Array, levels: int, size: int) -> jax.Array:
    """What encoding took from x: x, float32 `(..., n)`, minus the values of its payload.

    Raises:
      As `decode`.
    """
    _check_payload(payload, x.shape[-1], levels, size)
    return blocks.error(x, payload, _format(levels, size))


def _format(levels: int, size: int) -> blocks.Format:
    return blocks.Format(size, width_for(levels), lambda codes: level_of(codes, levels))


def _check(levels: int, size: int) -> None:
    if levels not in range(1, 128) or size < 1:
        raise ValueError(f"levels are 1 to 127 and a size is positive, got {levels} and {size}.")


def _check_payload(payload: jax.Array, n: int, levels: int, size: int) -> None:
    _check(levels, size)
    require_payload(payload, n, message_bytes(max(n, 0), levels, size))
