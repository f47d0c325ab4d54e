"""One bit per element to words and back."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.kernels import _device

BITS = 32

# The floats that can be packed: the integers of their size, and the bit pattern of infinity.
_PATTERNS = {"float32": (jnp.uint32, 0x7F800000), "bfloat16": (jnp.uint16, 0x7F80)}


def words_for(n: int) -> int:
    """The number of words that hold n bits, ceil(n / 32)."""
    return -(-n // BITS)


def places_of_short_words(n: int) -> np.ndarray:
    """The places of what is packed into the last words, those that have 31 bits.

    There are `32 * words_for(n) - n` of them, for n from 961 on: below, some have fewer bits.

    Returns:
      int32 array `(31, words)`; flat, it is packed into just these words.
    """
    width = words_for(n)
    columns = np.arange(n - (BITS - 1) * width, width, dtype=np.int32)
    return np.arange(BITS - 1, dtype=np.int32)[:, None] * np.int32(width) + columns


def pack(x: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """Packs one bit per element: the element itself if bool, else whether it is positive.

    Zero of either sign and NaN give 0, +inf and positive denormals give 1, on every backend.

    Args:
      x: bool, float32 or bfloat16 array `(..., n)`, for any n; leading axes are independent.
      implementation: "xla", or None for the best on this device.

    Returns:
      uint32 array `(..., ceil(n / 32))`.

    Raises:
      TypeError: for another dtype.
      ValueError: for a scalar.
      NotImplementedError: for an implementation that does not exist here.
    """
    _require_xla("pack", implementation)
    bits = votes(x)
    *lead, n = bits.shape
    width = words_for(n)
    # Padding x to 32 streams would test every element for being padding, at 3 times the cost on
    # CPU; so whole streams are reduced as they lie, and the one that is cut short is or-ed to them.
    whole = n // max(width, 1)
    streams = bits[..., : whole * width].reshape(*lead, whole, width).astype(jnp.uint32)
    words = jax.lax.reduce_or(streams << _stream(streams.shape), axes=(len(lead),))
    rest = bits[..., whole * width :].astype(jnp.uint32)
    if rest.shape[-1] == 0:
        return words
    padding = [(0, 0)] * len(lead) + [(0, width - rest.shape[-1])]
    return words | (jnp.pad(rest, padding) << whole)


def unpack(words: jax.Array, n: int, *, implementation: str | None = None) -> jax.Array:
    """The bits that `pack` packed.

    Args:
      words: uint32 array `(..., ceil(n / 32))`.
      n: the number of bits along the last axis.
      implementation: "xla", or None for the best on this device.

    Returns:
      bool array `(..., n)`.

    Raises:
      TypeError: if the words are not uint32.
      ValueError: if they are not as many as n bits need.
      NotImplementedError: for an implementation that does not exist here.
    """
    _require_xla("unpack", implementation)
    require_words(words)
    if n < 0 or words.ndim == 0 or words.shape[-1] != words_for(n):
        raise ValueError(
            f"{n} bits are ceil(n / 32) words along the last axis, got words of shape "
            f"{words.shape}; pass the n that they were packed from."
        )
    *lead, width = words.shape
    streams = jnp.broadcast_to(words[..., None, :], (*lead, BITS, width))
    bits = (streams >> _stream(streams.shape)) & 1
    return (bits == 1).reshape(*lead, BITS * width)[..., :n]


def signs(words: jax.Array, n: int, *, implementation: str | None = None) -> jax.Array:
    """+1 for every bit that is one and -1 for every other, as float32 `(..., n)`.

    Takes and raises what `unpack` does.
    """
    _require_xla("signs", implementation)
    return jnp.where(unpack(words, n), jnp.float32(1), jnp.float32(-1))


def add_signs(
    x: jax.Array, words: jax.Array, scale: jax.Array, *, implementation: str | None = None
) -> jax.Array:
    """`x` plus the scale for every bit that is one, and minus it for every other.

    Args:
      x: float32 array `(n,)`.
      words: uint32 array `(ceil(n / 32),)`.
      scale: float32 scalar.
      implementation: "xla", "mosaic" (on NVIDIA GPUs), or None, which is "xla".

    Returns:
      float32 array `(n,)`.

    Raises:
      TypeError: for other dtypes.
      ValueError: for other shapes; and for more than 2^31 - 1 elements with "mosaic".
      NotImplementedError: for an implementation that does not exist here.
    """
    require_words(words)
    if x.dtype != jnp.float32 or scale.dtype != jnp.float32:
        raise TypeError(f"add_signs takes float32, got {x.dtype} and a scale of {scale.dtype}.")
    if x.ndim != 1 or scale.ndim or words.shape != (words_for(x.size),):
        raise ValueError(
            "add_signs takes x (n,), words (ceil(n / 32),) and a scalar, got "
            f"{x.shape}, {words.shape} and {scale.shape}."
        )
    chosen = _device.choose("bitplanes.add_signs", implementation, ("xla", "mosaic"), x.size)
    if chosen == "mosaic" and x.size:
        from jaxcomm.kernels.bitplanes import mosaic  # Pallas takes long to import

        return mosaic.add_signs(x, words, scale)
    return x + jnp.where(unpack(words, x.size), scale, -scale)


def votes(x: jax.Array) -> jax.Array:
    """What `pack` packs, before it does: bool of the shape of x, whether it is positive.

    Takes and raises what `pack` does; a bool is itself.
    """
    if x.dtype != bool and x.dtype.name not in _PATTERNS:
        raise TypeError(
            f"pack takes bool, float32 or bfloat16, got {x.dtype}; for the signs of other numbers "
            "write pack(x > 0)."
        )
    if x.ndim == 0:
        raise ValueError("pack packs the last axis and got a scalar; write pack(x.reshape(1)).")
    if x.dtype == bool:
        return x
    # On the patterns, where the positive numbers are 1 to infinity's and NaN lies above: XLA's CPU
    # backend takes denormals for zero in a comparison of floats, and others do not.
    unsigned, infinity = _PATTERNS[x.dtype.name]
    return jax.lax.bitcast_convert_type(x, unsigned) - 1 < unsigned(infinity)


def require_words(words: jax.Array) -> None:
    """Raises a TypeError for anything but uint32."""
    if words.dtype != jnp.uint32:
        raise TypeError(f"words are uint32, got {words.dtype}; pack makes them.")


def _stream(shape: tuple[int, ...]) -> jax.Array:
    """The index along the last axis but one, for every element of `(..., streams, W)`."""
    return jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 2)


def _require_xla(name: str, implementation: str | None) -> None:
    if implementation not in (None, "xla"):
        raise NotImplementedError(
            f'{name} has no implementation {implementation!r}; use "xla" or None.'
        )
