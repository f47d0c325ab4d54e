"""Entries of chunks: the places of as many values of each, and the values in two bits."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm.kernels import bfloat16, bitplanes, select


class Codes(NamedTuple):
    """Values in two bits.

    Attributes:
      positive: bool `(chunks, k)`.
      high: bool `(chunks, k)`, whether the magnitude is the higher of its chunk's two.
      levels: uint16 `(2, chunks)`, the lower and the higher magnitude as bits of bfloat16.
    """

    positive: jax.Array
    high: jax.Array
    levels: jax.Array


@dataclasses.dataclass(frozen=True)
class ChunkEntries:
    """The entries of chunks, k of each, as uint32 words of one message.

    Places ascend in a chunk, so they are sent as by Elias and Fano: the lowest bits of each as they
    are, and of the rest only how much it grows, in unary. That is between one and two bits, and the
    message has a static size. With k = width / 32 a place takes 7 bits, 12 if it were sent as it
    is. A value takes two: its sign, and which of two magnitudes of its chunk it has. These are the
    means of the magnitudes above and below their mean, so 0.006 of the squared norm is lost of the
    largest 3 % of normally distributed values.

    Format: planes of bits of all entries: the low bits of the place, lowest first, the sign, and
    which magnitude it is; the unary numbers, in whole words for each chunk; and a word for each
    chunk, its lower magnitude in the low half.

    Attributes:
      width: the places in a chunk; this number as a place stands for no entry.
      k: the entries of a chunk.
      chunks: how many.

    References:
      P. Elias, "Efficient Storage and Retrieval by Content and Address of Static Files", JACM 1974.
    """

    width: int
    k: int
    chunks: int

    @property
    def low(self) -> int:
        """The bits of a place that are sent as they are."""
        return max(0, (self.width // self.k).bit_length() - 1)

    @property
    def _planes(self) -> int:
        """The words of the planes of bits."""
        return (self.low + 2) * bitplanes.words_for(self.chunks * self.k)

    @property
    def _unary_words(self) -> int:
        """The words of a chunk's unary numbers."""
        return bitplanes.words_for((self.width >> self.low) + self.k)

    @property
    def words(self) -> int:
        """The size of the message, in words of 4 bytes."""
        return self._planes + self.chunks * (self._unary_words + 1)

    def codes(self, values: jax.Array) -> Codes:
        """Of values, float32 `(chunks, k)`, of which zeros stand in slots without an entry."""
        magnitudes = jnp.abs(values)
        # Sums of huge values would be infinite.
        is_huge = jnp.max(magnitudes, axis=1, keepdims=True) > 2.0**100
        parts = magnitudes * jnp.where(is_huge, jnp.float32(2.0**-40), 1)
        entry, unit = magnitudes > 0, jnp.where(is_huge, jnp.float32(2.0**40), 1)
        high = parts > _mean(parts, entry)
        levels = [unit * _mean(parts, entry & (high == which)) for which in (False, True)]
        bits = bfloat16.round_to_bits(jnp.concatenate(levels, axis=1).T)
        return Codes(values > 0, high, bits)

    def rounded(self, codes: Codes) -> jax.Array:
        """What the codes stand for, float32 `(..., chunks, k)`."""
        lower, higher = bfloat16.widen_bits(codes.levels)[..., None]
        magnitudes = jnp.where(codes.high, higher, lower)
        return jnp.where(codes.positive, magnitudes, -magnitudes)

    def encode(self, codes: Codes, places: jax.Array) -> jax.Array:
        """The message, uint32 `(words,)`, of codes and ascending places, int32 `(chunks, k)`."""
        fields = places.astype(jnp.uint32) & (2**self.low - 1)
        for i, bits in enumerate((codes.positive, codes.high)):
            fields |= bits.astype(jnp.uint32) << self.low + i
        planes = bitplanes.pack_fields(fields.reshape(-1), self.low + 2)
        long = 32 * self._unary_words
        row, column = (_numbered((self.chunks, self.k), axis) for axis in (0, 1))
        ends = (places >> self.low) + column + long * row
        bits = jnp.zeros(self.chunks * long, jnp.uint32).at[ends.reshape(-1)].set(1)
        unary = select.words_of_rows(bits.reshape(self.chunks, long)).reshape(-1)
        lower, higher = codes.levels.astype(jnp.uint32)
        return jnp.concatenate([planes.reshape(-1), unary, lower | higher << 16])

    def largest(self, messages: jax.Array) -> jax.Array:
        """The higher magnitude of every chunk of N messages, float32 `(N, chunks)`."""
        return bfloat16.widen_bits((messages[:, -self.chunks :] >> 16).astype(jnp.uint16))

    def decode(self, messages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The values and places, float32 and int32 `(N, chunks, k)`, of N messages."""
        shape, entries = (len(messages), self.chunks, self.k), self.chunks * self.k
        parts = self._planes, self._planes + self.chunks * self._unary_words
        planes, unary, levels = jnp.split(messages, parts, axis=1)
        planes = planes.reshape(len(messages), self.low + 2, -1)
        fields = bitplanes.unpack_fields(planes, entries).reshape(shape)
        ends = select.bits_of_rows(unary.reshape(-1, self._unary_words), self.k)
        places = ((ends - _numbered(ends.shape, 1)) << self.low).reshape(shape)
        places |= (fields & (2**self.low - 1)).astype(jnp.int32)
        halves = jnp.stack([levels.astype(jnp.uint16), (levels >> 16).astype(jnp.uint16)])
        positive, high = ((fields >> self.low + i) & 1 == 1 for i in (0, 1))
        return self.rounded(Codes(positive, high, halves)), places


def _numbered(shape: tuple[int, ...], axis: int) -> jax.Array:
    """The number of each row or column, int32."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _mean(parts: jax.Array, of: jax.Array) -> jax.Array:
    """The mean of some columns of every row, `(rows, 1)`; 0 if there are none."""
    count = jnp.sum(of, axis=1, keepdims=True, dtype=jnp.int32)
    total = jnp.sum(jnp.where(of, parts, 0), axis=1, keepdims=True)
    return total / jnp.maximum(count, 1).astype(jnp.float32)
