"""One bit per value, and a scale for every 1024: the wire format of 1-bit Adam.

These are functions rather than a `Codec`. A block may end in padding, which its scale must not
count, and a mean in this format needs error feedback.
"""

import jax
import jax.numpy as jnp

from jaxcomm.kernels import bitplanes, reductions

BLOCK = 1024  # values that share a scale
_TINY = jnp.finfo(jnp.float32).tiny


def encode_with_feedback(
    x: jax.Array, residual: jax.Array, counts: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The signs of `x + residual`, after scales that keep the L2 norm of a block; and the error.

    Zero has the sign -1.

    Args:
      x: float32 `(..., b * BLOCK)`; leading axes are independent messages of b blocks, and each
        block ends in zeros of padding.
      residual: float32 of the same shape, with zeros in the padding.
      counts: int32 `(..., b)`, the number of values of each block without the padding.

    Returns:
      The payload, uint32 `(..., b * (1 + BLOCK / 32))`: the bits of the scales, each the L2 norm of
      its block over sqrt(count), then one bit per value, 1 if the value is positive. And the next
      residual, float32 of the shape of x: `x + residual` minus the decoded payload, and zero in the
      padding.
    """
    corrected = x + residual
    scale = _scale(corrected.reshape(*x.shape[:-1], -1, BLOCK), counts)
    # The residual is computed from the bits before packing. The packed words must be complete
    # before they can be read, so using them would take a second kernel.
    positive, each = bitplanes.votes(corrected), _of_each_value(scale)
    left = without_padding(corrected - jnp.where(positive, each, -each), counts)
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32)
    words, left = jax.lax.platform_dependent(
        bitplanes.pack(positive), left, cpu=_together, default=_packed_first
    )
    return jnp.concatenate([bits, words], axis=-1), left


def decode(payload: jax.Array) -> jax.Array:
    """Plus or minus the scales, as float32 `(..., b * BLOCK)`, also in the padding."""
    blocks = payload.shape[-1] // (1 + bitplanes.words_for(BLOCK))
    scale = jax.lax.bitcast_convert_type(payload[..., :blocks], jnp.float32)
    return bitplanes.signs(payload[..., blocks:], blocks * BLOCK) * _of_each_value(scale)


def without_padding(x: jax.Array, counts: jax.Array) -> jax.Array:
    """float32 `(..., b * BLOCK)` with zeros after the first `counts` values of each block."""
    place = jax.lax.broadcasted_iota(jnp.int32, (*counts.shape, BLOCK), counts.ndim)
    is_value = place < counts[..., None]
    return jnp.where(is_value.reshape(x.shape), x, jnp.float32(0))


def _together(words: jax.Array, left: jax.Array) -> tuple[jax.Array, jax.Array]:
    """In one pass: XLA would else pack into the payload, in a kernel without room for `left`."""
    return jax.lax.optimization_barrier((words, left))


def _packed_first(words: jax.Array, left: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For GPUs, where what uses `left` computes it as it writes the next residual."""
    return jax.lax.optimization_barrier(words), left


def _of_each_value(scale: jax.Array) -> jax.Array:
    """The scale of a block for each of its values."""
    return jnp.broadcast_to(scale[..., None], (*scale.shape, BLOCK)).reshape(*scale.shape[:-1], -1)


def _scale(blocks: jax.Array, counts: jax.Array) -> jax.Array:
    """The root mean square of each block, float32 `(..., b)`."""
    # Values are divided by the largest magnitude first, because squares of large float32 values are
    # infinite. The divisor is from 2^-126 to 2^126: XLA multiplies by its reciprocal, which is
    # infinite on GPUs for a smaller number, and zero on CPU for a larger one.
    largest = jax.lax.bitcast_convert_type(reductions.largest(blocks), jnp.float32)
    unit = jnp.where(largest >= _TINY, jnp.minimum(largest, jnp.float32(2.0**126)), jnp.float32(1))
    squares = reductions.total(jnp.square(blocks / unit[..., None]))
    return unit * jnp.sqrt(squares / jnp.maximum(counts, 1).astype(jnp.float32))
