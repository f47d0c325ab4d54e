"""Messages as floats of 8 bits, in blocks whose scale is their largest magnitude."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm.kernels import _implementations, float8
from jaxcomm.kernels._messages import require_messages
from jaxcomm.kernels.block_quantization import encoding, plain


def encode(
    x: jax.Array, dtype: Any, size: int, *, implementation: _implementations.Option = None
) -> jax.Array:
    """Floats of 8 bits, followed by the units of the blocks.

    Args:
      x: float32 array `(..., n)`; leading axes are independent messages.
      dtype: jnp.float8_e4m3fn or jnp.float8_e5m2, whose largest finite number stands for the
        largest magnitude of a block.
      size: the values of a block.
      implementation: "xla", "mosaic" (on NVIDIA GPUs), or another option of `_implementations`;
        None means the fastest that was timed.

    Returns:
      uint8 array `(..., n + 4 ceil(n / size))`: the bit patterns of `float8.round_to_bits`, then
      the units of `blocks.unit_and_factor`.

    Raises:
      TypeError: for another dtype of x.
      ValueError: for a scalar, for another dtype, for a size below 1, or for more elements than the
        implementation can index.
      NotImplementedError: for an implementation that does not exist here, or not for this size.
    """
    require_messages(x)
    if size < 1:
        raise ValueError(f"a block has at least 1 value, got {size}.")
    static = (jnp.dtype(dtype).name, size)
    return encoding.encode(x, writing(dtype, size), None, static, implementation)


def writing(dtype: Any, size: int) -> plain.Writing:
    """How floats are written: as their bit patterns, rounded to nearest, ties to even."""

    def codes(numbers: jax.Array, bits: jax.Array) -> jax.Array:
        del bits
        return float8.round_to_bits(numbers, dtype)

    return plain.Writing("fp8.encode", size, 8, float(jnp.finfo(dtype).max), codes)
