"""bfloat16 as 16-bit patterns: rounding float32 to them, and widening them again.

The patterns are uint16, because XLA's CPU backend promotes a bfloat16 collective to float32 and
sends 4 bytes an element; it leaves integers alone.

The plain version below is the specification, and so far the only one: XLA fuses both directions
with their neighbours, so each costs no pass over memory of its own.
"""

import jax
import jax.numpy as jnp


def round_to_bits(x: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """Rounds to the nearest bfloat16, ties to even, and returns the bit patterns.

    Args:
      x: float array of any shape.
      implementation: "xla", or None for the best on this device.

    Returns:
      uint16 array of the same shape. NaN stays NaN; what is too large becomes infinite.

    Raises:
      NotImplementedError: for an implementation that does not exist here.
    """
    _require_xla("round_to_bits", implementation)
    return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)


def widen_bits(bits: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """The float32 values that the bfloat16 bit patterns stand for, exactly.

    Args:
      bits: uint16 array of any shape.
      implementation: "xla", or None for the best on this device.

    Returns:
      float32 array of the same shape.

    Raises:
      NotImplementedError: for an implementation that does not exist here.
    """
    _require_xla("widen_bits", implementation)
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32)


def _require_xla(name: str, implementation: str | None) -> None:
    if implementation not in (None, "xla"):
        raise NotImplementedError(
            f'{name} has no implementation {implementation!r}; use "xla" or None.'
        )
