"""Messages as integers of 8 or fewer bits, in blocks whose scale is their largest magnitude."""

import functools

import jax

from jaxcomm.kernels import _implementations
from jaxcomm.kernels._messages import require_messages
from jaxcomm.kernels.block_quantization import encoding, plain
from jaxcomm.kernels.block_quantization.rounding import round_to_levels, width_for


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
      uint8 array `(..., writing(levels, size).message_bytes(n))`: the integers of each block in
      two's complement, packed by `packing.pack`, then the units of `blocks.unit_and_factor`.

    Raises:
      TypeError: for another dtype.
      ValueError: for a scalar, for levels or a size out of range, or for more elements than the
        implementation can index.
      NotImplementedError: for an implementation that does not exist here, or not for this size.
    """
    if levels not in range(1, 128) or size < 1:
        raise ValueError(f"levels are 1 to 127 and a size is positive, got {levels} and {size}.")
    require_messages(x)
    return encoding.encode(x, writing(levels, size), key, (levels, size), implementation)
