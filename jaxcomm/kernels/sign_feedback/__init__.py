"""Signs with error feedback: what is owed is voted on, and what the votes leave is kept.

The plain version below is the specification. XLA on GPU makes one kernel of it where the length is
a multiple of 32, so that everything is read once and written once; elsewhere two, as its results
then differ in how they are split, and the inputs are read a second time.
"""

import jax
import jax.numpy as jnp

from jaxcomm.kernels import _device, bitplanes


def sign_feedback(
    x: jax.Array, residual: jax.Array, scale: jax.Array, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Packs the signs of `x + residual`, and keeps what plus or minus `scale` lacks of it.

    Zero and NaN have the sign -1, as in `bitplanes.signs`.

    Args:
      x: float32 array `(n,)`.
      residual: float32 array `(n,)`.
      scale: float32 scalar.
      implementation: "xla", "mosaic" (on NVIDIA GPUs), or None, which is "xla".

    Returns:
      The words of `bitplanes.pack(x + residual)`, and the next residual, float32 `(n,)`: what
      `x + residual` has beyond `scale * bitplanes.signs(words, n)`.

    Raises:
      TypeError: for other dtypes.
      ValueError: for other shapes, and for more than 2^31 - 1 elements with "mosaic".
      NotImplementedError: for an implementation that does not exist here.
    """
    _check(x, residual, scale)
    chosen = _device.choose("sign_feedback", implementation, ("xla", "mosaic"), x.size)
    if chosen == "mosaic" and x.size:
        from jaxcomm.kernels.sign_feedback import mosaic  # Pallas takes long to import

        return mosaic.sign_feedback(x, residual, scale)
    return plain(x, residual, scale)


def plain(x: jax.Array, residual: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`sign_feedback` of what was checked."""
    owed = x + residual
    # From the votes, not from the packed words: those would have to be complete before.
    votes = bitplanes.votes(owed)
    return bitplanes.pack(votes), owed - jnp.where(votes, scale, -scale)


def _check(x: jax.Array, residual: jax.Array, scale: jax.Array) -> None:
    for name, array in (("x", x), ("residual", residual), ("scale", scale)):
        if array.dtype != jnp.float32:
            raise TypeError(
                f"sign_feedback takes float32, got {array.dtype} for {name}; "
                f"write {name}.astype(jnp.float32)."
            )
    if x.ndim != 1 or residual.shape != x.shape or scale.ndim:
        raise ValueError(
            "sign_feedback takes x and residual of one shape (n,) and a scalar, got "
            f"{x.shape}, {residual.shape} and {scale.shape}."
        )
