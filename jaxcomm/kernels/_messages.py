"""What the codes of messages take."""

import jax
import jax.numpy as jnp


def require_messages(x: jax.Array) -> None:
    """Raises a TypeError or a ValueError unless x is a float32 array `(..., n)`."""
    if x.dtype != jnp.float32:
        raise TypeError(f"encode takes float32, got {x.dtype}; write x.astype(jnp.float32).")
    if x.ndim == 0:
        raise ValueError("encode takes messages (..., n), got a scalar; write x.reshape(1).")


def require_payload(payload: jax.Array, n: int, length: int) -> None:
    """Raises a TypeError or a ValueError unless a payload `(..., length)`, of n values, is one."""
    if payload.dtype != jnp.uint8:
        raise TypeError(f"a payload is uint8, got {payload.dtype}; encode makes them.")
    if n < 0 or payload.ndim == 0 or payload.shape[-1] != length:
        raise ValueError(
            f"{n} values are {length} bytes along the last axis, got a payload of shape "
            f"{payload.shape}; pass the n that was encoded."
        )
