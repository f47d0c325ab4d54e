"""Sign compression with error feedback: packs the signs of `x + residual`, keeps the error.

`plain` is the specification. XLA on GPU makes one kernel of it, which reads and writes everything
once, where the length is a multiple of 32. Elsewhere XLA makes two kernels, because the two results
are split into different parts, and reads the inputs twice.
"""

import jax
import jax.numpy as jnp

from jaxcomm.kernels import _implementations
from jaxcomm.kernels.sign_feedback import plain


def sign_feedback(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array,
    *,
    implementation: _implementations.Option = None,
) -> tuple[jax.Array, jax.Array]:
    """Packs the signs of `x + residual`, and keeps the error of plus or minus `scale`.

    Zero and NaN have the sign -1, as in `bitplanes.signs`.

    Args:
      x: float32 array `(..., n)`; leading axes are independent rows.
      residual: float32 array of the shape of x.
      scale: float32 array `(...)`, one for each row.
      implementation: "xla", "mosaic" (on NVIDIA GPUs), or another option
        of `_implementations`; None is "xla".

    Returns:
      The words of `bitplanes.pack(x + residual)`, uint32 `(..., ceil(n / 32))`. The next residual,
      float32 `(..., n)`: `x + residual` minus `scale * bitplanes.signs(words, n)`.

    Raises:
      TypeError: for other dtypes.
      ValueError: for other shapes, and for more than 2^31 - 1 elements with "mosaic".
      NotImplementedError: for an implementation that does not exist here.
    """
    _check(x, residual, scale)
    return _implementations.call(
        "sign_feedback", implementation, _run, (x, residual, scale), elements=x.size
    )


def _run(
    name: str, x: jax.Array, residual: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    if name == "mosaic":
        from jaxcomm.kernels.sign_feedback import mosaic  # Pallas takes long to import

        return mosaic.sign_feedback(x, residual, scale)
    return plain.sign_feedback(x, residual, scale)


def _check(x: jax.Array, residual: jax.Array, scale: jax.Array) -> None:
    for name, array in (("x", x), ("residual", residual), ("scale", scale)):
        if array.dtype != jnp.float32:
            raise TypeError(
                f"sign_feedback takes float32, got {array.dtype} for {name}; "
                f"write {name}.astype(jnp.float32)."
            )
    if x.ndim == 0 or residual.shape != x.shape or scale.shape != x.shape[:-1]:
        raise ValueError(
            "sign_feedback takes x and residual of one shape (..., n) and one scale for each row, "
            f"(...), got {x.shape}, {residual.shape} and {scale.shape}."
        )
