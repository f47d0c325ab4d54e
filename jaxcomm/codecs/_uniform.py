"""Integers from -levels to levels, rounded and packed."""

import jax
import jax.numpy as jnp

from jaxcomm.kernels import codes
from jaxcomm.kernels.levels import round_to_levels, width_for


def code_bytes(size: int, levels: int) -> int:
    """The bytes of the packed codes of `size` values."""
    return codes.bytes_for(size, width_for(levels))


def encode(numbers: jax.Array, bits: jax.Array, levels: int) -> jax.Array:
    """`round_to_levels`, in two's complement and packed: uint8 `(..., code_bytes(n, levels))`."""
    return codes.pack(round_to_levels(numbers, bits, levels).astype(jnp.uint8), width_for(levels))


def decode(packed: jax.Array, n: int, levels: int) -> jax.Array:
    """The integers, as float32 `(..., n)`."""
    width = width_for(levels)
    code = codes.unpack(packed, n, width)
    high = jax.lax.bitcast_convert_type(code << (8 - width), jnp.int8)
    return (high >> (8 - width)).astype(jnp.float32)
