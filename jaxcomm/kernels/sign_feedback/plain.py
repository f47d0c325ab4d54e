"""Sign compression with error feedback: the plain version, which is the specification."""

import jax
import jax.numpy as jnp

from jaxcomm.kernels import bitplanes


def sign_feedback(
    x: jax.Array, residual: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Packs and keeps checked arguments; see the package."""
    corrected = x + residual
    # The residual uses the bits before they are packed: packed words must be complete first, which
    # would take a second kernel.
    positive = bitplanes.votes(corrected)
    scale = scale[..., None]
    return bitplanes.pack(positive), corrected - jnp.where(positive, scale, -scale)
