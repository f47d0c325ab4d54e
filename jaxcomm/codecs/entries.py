"""Entries of sparse vectors: values and their offsets."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxcomm.kernels import bfloat16


@dataclasses.dataclass(frozen=True)
class Entries:
    """A list of (value, offset) pairs of static length, as uint16 words.

    Format: the low words of all values, then their high words if there are any, then the offsets in
    the same order. A slot without an entry has the value 0 and any offset.

    Attributes:
      values: "float32" (2 words) or "bfloat16" (1 word, rounded to nearest even).
      width: all offsets are below it; up to 2^16 they take one word, else two.
    """

    values: str
    width: int

    def __post_init__(self) -> None:
        check_values(self.values)

    @property
    def value_words(self) -> int:
        """1 or 2."""
        return 1 if self.values == "bfloat16" else 2

    @property
    def offset_words(self) -> int:
        """1 or 2."""
        return 1 if self.width <= 2**16 else 2

    @property
    def entry_bytes(self) -> int:
        """4, 6 or 8."""
        return 2 * (self.value_words + self.offset_words)

    def rounded(self, values: jax.Array) -> jax.Array:
        """The float32 values that `decode` returns for these."""
        if self.values == "float32":
            return values
        return bfloat16.widen_bits(bfloat16.round_to_bits(values))

    def encode(self, values: jax.Array, offsets: jax.Array) -> jax.Array:
        """float32 and int32 `(..., c)` to uint16 `(..., c * entry_bytes / 2)`."""
        if self.values == "bfloat16":
            first = [bfloat16.round_to_bits(values)]
        else:
            first = _words(jax.lax.bitcast_convert_type(values, jnp.uint32), 2)
        return jnp.concatenate(first + _words(offsets.astype(jnp.uint32), self.offset_words), -1)

    def decode(self, payload: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The values and offsets, float32 and int32 `(..., c)`."""
        words = jnp.split(payload, self.value_words + self.offset_words, axis=-1)
        first, offsets = words[: self.value_words], words[self.value_words :]
        if self.values == "bfloat16":
            values = bfloat16.widen_bits(first[0])
        else:
            values = jax.lax.bitcast_convert_type(_joined(first), jnp.float32)
        return values, _joined(offsets).astype(jnp.int32)


def check_values(values: str) -> None:
    """Raises a ValueError for an unknown format of values."""
    if values not in ("float32", "bfloat16"):
        raise ValueError(f'values must be "float32" or "bfloat16", got {values!r}.')


def _words(x: jax.Array, number: int) -> list[jax.Array]:
    """uint32 as `number` uint16, the lowest first."""
    return [(x >> (16 * i)).astype(jnp.uint16) for i in range(number)]


def _joined(words: list[jax.Array]) -> jax.Array:
    """Undoes `_words`."""
    total = words[0].astype(jnp.uint32)
    for i, word in enumerate(words[1:], 1):
        total = total | (word.astype(jnp.uint32) << (16 * i))
    return total
