"""Entries of chunks: the places of as many values of each, and the values in two bits."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm.kernels import bfloat16, bitplanes, reductions


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

    Format: planes of the low bits of all places, lowest first; the unary numbers; the signs; which
    magnitude; and a word for each chunk, its lower magnitude in the low half.

    Attributes:
      width: the values in a chunk; this number as a place stands for no entry.
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
    def unary(self) -> int:
        """The bits of a chunk's unary numbers."""
        return (self.width >> self.low) + self.k

    @property
    def words(self) -> int:
        """The size of the message, in words of 4 bytes."""
        entries = bitplanes.words_for(self.chunks * self.k)
        return (
            (self.low + 2) * entries + bitplanes.words_for(self.chunks * self.unary) + self.chunks
        )

    def codes(self, values: jax.Array) -> Codes:
        """Of values, float32 `(chunks, k)`, of which zeros stand in slots without an entry."""
        magnitudes = jnp.abs(values)
        largest = jnp.max(magnitudes, axis=1, keepdims=True)
        parts = magnitudes / jnp.where(
            largest > 0, largest, 1
        )  # Sums of large values are infinite.
        entry = magnitudes > 0
        high = parts > _mean(parts, entry)
        levels = [largest * _mean(parts, entry & (high == which)) for which in (False, True)]
        bits = bfloat16.round_to_bits(jnp.concatenate(levels, axis=1).T)
        return Codes(values > 0, high, bits)

    def rounded(self, codes: Codes) -> jax.Array:
        """What the codes stand for, float32 `(chunks, k)`."""
        lower, higher = bfloat16.widen_bits(codes.levels)[..., None]
        magnitudes = jnp.where(codes.high, higher, lower)
        return jnp.where(codes.positive, magnitudes, -magnitudes)

    def encode(self, codes: Codes, places: jax.Array) -> jax.Array:
        """The message, uint32 `(words,)`, of codes and ascending places, int32 `(chunks, k)`."""
        flat = places.reshape(-1)
        planes = [bitplanes.pack((flat >> bit) & 1 != 0) for bit in range(self.low)]
        row, column = (_numbered((self.chunks, self.k), axis) for axis in (0, 1))
        ends = (places >> self.low) + column + self.unary * row
        unary = jnp.zeros(self.chunks * self.unary, bool).at[ends.reshape(-1)].set(True)
        values = [bitplanes.pack(bits.reshape(-1)) for bits in (codes.positive, codes.high)]
        lower, higher = codes.levels.astype(jnp.uint32)
        return jnp.concatenate([*planes, bitplanes.pack(unary), *values, lower | higher << 16])

    def decode(self, message: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The values and places, float32 and int32 `(chunks, k)`."""
        entries, long = self.chunks * self.k, self.chunks * self.unary
        sizes = [*[bitplanes.words_for(entries)] * self.low, bitplanes.words_for(long)]
        sizes += [bitplanes.words_for(entries)] * 2
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        *planes, unary, positive, high, levels = jnp.split(message, ends)
        shape = self.chunks, self.k
        places = self._from_unary(bitplanes.unpack(unary, long).reshape(self.chunks, self.unary))
        for bit, plane in enumerate(planes):
            places |= bitplanes.unpack(plane, entries).reshape(shape).astype(jnp.int32) << bit
        halves = jnp.stack([levels.astype(jnp.uint16), (levels >> 16).astype(jnp.uint16)])
        signs = [bitplanes.unpack(words, entries).reshape(shape) for words in (positive, high)]
        return self.rounded(Codes(*signs, halves)), places

    def _from_unary(self, bits: jax.Array) -> jax.Array:
        """The high bits of the places, shifted, int32 `(chunks, k)`."""
        row, column = (_numbered(bits.shape, axis) for axis in (0, 1))
        number = reductions.running_sum(bits.astype(jnp.int32), axis=1) - 1
        slot = jnp.where(bits, number, self.k)
        high = jnp.zeros((self.chunks, self.k), jnp.int32)
        return high.at[row, slot].set((column - number) << self.low, mode="drop")


def _numbered(shape: tuple[int, ...], axis: int) -> jax.Array:
    """The number of each row or column, int32."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _mean(parts: jax.Array, of: jax.Array) -> jax.Array:
    """The mean of some columns of every row, `(rows, 1)`; 0 if there are none."""
    count = jnp.sum(of, axis=1, keepdims=True, dtype=jnp.int32)
    total = jnp.sum(jnp.where(of, parts, 0), axis=1, keepdims=True)
    return total / jnp.maximum(count, 1).astype(jnp.float32)
