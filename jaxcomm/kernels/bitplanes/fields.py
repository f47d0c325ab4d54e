"""Numbers of a few bits, as one plane for each bit."""

import jax
import jax.numpy as jnp

from jaxcomm.kernels._apart import apart
from jaxcomm.kernels.bitplanes.packing import BITS, pack


def pack_fields(x: jax.Array, bits: int) -> jax.Array:
    """The lowest bits of numbers, `(bits, ceil(n / 32))` words of `pack`, the lowest plane first.

    Args:
      x: uint32 array `(n,)`.
      bits: how many of each number are kept.
    """
    return jnp.stack([pack((x >> bit) & 1 == 1) for bit in range(bits)])


def unpack_fields(words: jax.Array, n: int) -> jax.Array:
    """Undoes `pack_fields`.

    Args:
      words: uint32 array `(..., bits, ceil(n / 32))`.
      n: how many numbers there are.

    Returns:
      uint32 array `(..., n)`.
    """
    *lead, _, width = words.shape
    # Fused with its uses, it would divide by the width to find each bit.
    found = jax.lax.platform_dependent(words, cpu=apart(_joined), default=_joined)
    return found.reshape(*lead, BITS * width)[..., :n]


def _joined(words: jax.Array) -> jax.Array:
    """The numbers `(..., 32, W)`."""
    *lead, bits, width = words.shape
    shape = (*lead, BITS, width)
    stream = jax.lax.broadcasted_iota(jnp.uint32, shape, len(lead))
    planes = [jnp.broadcast_to(words[..., i, None, :], shape) for i in range(bits)]
    total = jnp.zeros(shape, jnp.uint32)
    for i, plane in enumerate(planes):
        total |= ((plane >> stream) & 1) << i
    return total
