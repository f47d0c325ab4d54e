"""Natural compression: powers of two in 8 or 9 bits."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxcomm.codecs._codec import EVEN, Codec
from jaxcomm.codecs._rounding import ROUNDINGS, require_choice, rounding_key
from jaxcomm.kernels.powers_of_two import nine_bits, window
from jaxcomm.kernels.powers_of_two import rounding as powers
from jaxcomm.kernels.random_bits import rounding_words

BIAS = 127  # of float32's exponent field


@dataclasses.dataclass(frozen=True)
class Cnat(Codec):
    """Each value is rounded to one of its two nearest powers of two; sign and exponent are sent.

    Random rounding goes up with the probability that preserves the mean: it is unbiased, and
    E|C(x)|^2 <= 9/8 |x|^2. Nearest rounding has a relative error of at most 1/3, and is biased.
    Denormals are rounded the same way, to 0 or 2^-126. Magnitudes above 2^127 become 2^127.

    Attributes:
      rounding: "random" or "nearest".

    References:
      S. Horvath, C.-Y. Ho, L. Horvath, A. N. Sahu, M. Canini and P. Richtarik, "Natural Compression
      for Distributed Deep Learning", 2019, arXiv:1905.10988.
    """

    rounding: str
    name = "cnat"

    def __post_init__(self) -> None:
        """Checks the rounding."""
        require_choice("rounding", self.rounding, ROUNDINGS)

    @property
    def even(self) -> int:
        """Whole loops of vectors of 8 bits."""
        return EVEN

    @property
    def is_random(self) -> bool:
        """If `rounding` is "random"."""
        return self.rounding == "random"


@dataclasses.dataclass(frozen=True)
class CnatWindow(Cnat):
    """8 bits per value for a window of exponents below the message's largest, and one byte more.

    The first byte of the payload is the exponent field t of the largest magnitude of the message,
    rounded up to a power of two: 2^(t - 127). It is 0 if all values are zero. It is 255 if a value
    is not finite; the whole message then decodes to NaN. Each value is a sign bit above 7 bits c,
    which are 0 for zero and otherwise stand for 2^(t - 127 + c - 127). A value below the window,
    less than 2^-126 of the largest, is rounded to the lowest power or to zero, unbiased to within
    2^-32 of that power.
    """

    @property
    def operations(self) -> tuple[str, ...]:
        """The encoding of messages of a window."""
        return ("cnat.encode",)

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """float32 `(..., n)` to uint8 `(..., 1 + n)`."""
        return window.encode(x, rounding_key(self, key), implementation=self.implementation)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """uint8 `(..., 1 + n)` to float32 `(..., n)`."""
        del n
        return window.decode(payload)

    def message_bytes(self, n: int) -> int:
        """n + 1."""
        return window.message_bytes(n)


@dataclasses.dataclass(frozen=True)
class CnatFixed(Cnat):
    """8 bits per value: sign, a bit that is 0 for zero, and 6 bits of exponent, 2^-50 to 2^10.

    The exponent e is written as e + 50; 62 stands for infinity and 63 for NaN. Magnitudes below
    2^-50 are rounded to 2^-50 or to zero, unbiased to within 2^-32 of it. Magnitudes above 2^10
    become 2^10, which is biased, so this format is for messages of a known range.
    """

    LOWEST, HIGHEST = -50, 10
    has_fixed_range = True

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """float32 `(..., n)` to uint8 `(..., n)`."""
        bits = rounding_words(rounding_key(self, key), x.shape)
        low, high = jnp.uint32(self.LOWEST + BIAS), jnp.uint32(self.HIGHEST + BIAS)
        exponent = powers.exponents(x, bits, lowest=low)
        number = jnp.minimum(exponent, high) - low
        nonfinite = jnp.where(jnp.isnan(x), jnp.uint32(63), jnp.uint32(62))
        number = jnp.where(exponent == powers.NONFINITE, nonfinite, number)
        present = exponent > 0
        return window.signed(x, jnp.where(present, 0x40 | number, jnp.uint32(0)), present)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """uint8 `(..., n)` to float32 `(..., n)`."""
        del n
        code = payload.astype(jnp.uint32)
        number = code & 0x3F
        infinite = jnp.uint32(powers.NONFINITE)
        exponent = jnp.where(number < 62, number + (self.LOWEST + BIAS), infinite)
        exponent = jnp.where(code & 0x40 > 0, exponent, jnp.uint32(0))
        value = powers.values(exponent, code >> 7)
        return jnp.where(code & 0x7F == 0x7F, jnp.float32(jnp.nan), value)

    def message_bytes(self, n: int) -> int:
        """n."""
        return n


@dataclasses.dataclass(frozen=True)
class CnatAll(Cnat):
    """9 bits per value: every power of two of float32; see `kernels.powers_of_two.nine_bits`."""

    @property
    def operations(self) -> tuple[str, ...]:
        """Those of messages in 9 bits per value."""
        return ("nine_bits.encode", "nine_bits.decode_and_sum")

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """float32 `(..., n)` to uint8 `(..., n + 4 ceil(n / 32))`."""
        return nine_bits.encode(x, rounding_key(self, key), implementation=self.implementation)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """uint8 `(..., n + 4 ceil(n / 32))` to float32 `(..., n)`."""
        return nine_bits.decode(payload, n)

    def decode_and_sum(self, payloads: jax.Array, n: int) -> jax.Array:
        """uint8 `(N, n + 4 ceil(n / 32))` to float32 `(n,)`."""
        return nine_bits.decode_and_sum(payloads, n, implementation=self.implementation)

    def message_bytes(self, n: int) -> int:
        """n + 4 ceil(n / 32)."""
        return nine_bits.message_bytes(n)


EXPONENTS = {"window": CnatWindow, "fixed": CnatFixed, "all": CnatAll}


def cnat(exponents: str = "window", rounding: str = "random") -> Cnat:
    """Natural compression.

    Args:
      exponents: the exponents that a code can hold: "window", the 127 below the largest magnitude
        of the message; "fixed", those from -50 to 10; "all", in 9 bits per value instead of 8.
      rounding: "random", which is unbiased, or "nearest".

    Returns:
      The codec. A message of n values is uint8 `(n + 1,)`, with "fixed" `(n,)`, and with "all"
      `(n + 4 ceil(n / 32),)`. Rounded at random, `E|C(x) - x|^2 <= 1/8 |x|^2`; rounded to nearest,
      the relative error is at most 1/3.

    Raises:
      ValueError: for any other argument.

    References:
      S. Horvath et al., "Natural Compression for Distributed Deep Learning", 2019,
      arXiv:1905.10988.

    Differs from the paper: the paper's 8-bit codes have a fixed window, that of "fixed".
    """
    require_choice("exponents", exponents, EXPONENTS)
    return EXPONENTS[exponents](rounding)
