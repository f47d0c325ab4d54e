"""Entries of sparse vectors: values and their offsets."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.codecs._rounding import require_choice
from jaxcomm.kernels import bfloat16, reductions

VALUES = ("float32", "bfloat16")
BLOCK = 2**16  # the number of offsets that one word can tell apart


@dataclasses.dataclass(frozen=True)
class Entries:
    """A list of (value, offset) pairs of static length, as uint16 words.

    Format: the low words of all values, then their high words if there are any, then the low words
    of the offsets in the same order. Where offsets need more than one word, entries are sorted by
    the block of 2^16 offsets that they are in, and the list ends with the number of entries in each
    block, two words each. A slot without an entry has the value 0 and any offset; all of them are
    at the end.

    Attributes:
      values: "float32" (2 words) or "bfloat16" (1 word, rounded to nearest even).
      width: all offsets are below it.
    """

    values: str
    width: int

    def __post_init__(self) -> None:
        require_choice("values", self.values, VALUES)

    @property
    def value_words(self) -> int:
        """1 or 2."""
        return 1 if self.values == "bfloat16" else 2

    @property
    def blocks(self) -> int:
        """The number of blocks whose entries are counted; 0 where one word holds an offset."""
        return 0 if self.width <= BLOCK else -(-self.width // BLOCK)

    def bytes_of(self, slots: int) -> int:
        """The size of a list: 6 bytes per slot, or 4 in bfloat16, and 4 per block."""
        return 2 * slots * (self.value_words + 1) + 4 * self.blocks

    def rounded(self, values: jax.Array) -> jax.Array:
        """The float32 values that `decode` returns for these."""
        if self.values == "float32":
            return values
        return bfloat16.widen_bits(bfloat16.round_to_bits(values))

    def encode(self, values: jax.Array, offsets: jax.Array) -> jax.Array:
        """float32 and int32 `(..., c)` to uint16 `(..., bytes_of(c) / 2)`.

        Args:
          values: the values.
          offsets: ascending by block; an offset of `width` or more marks a slot without an entry.
        """
        if self.values == "bfloat16":
            parts = [bfloat16.round_to_bits(values)]
        else:
            parts = _words(jax.lax.bitcast_convert_type(values, jnp.uint32))
        parts.append(offsets.astype(jnp.uint16))
        if self.blocks:
            sizes = {"blocks": self.blocks, "width": self.width}
            by_ends = functools.partial(_counts_by_ends, **sizes)
            searched = functools.partial(_counts_by_search, **sizes)
            counts = jax.lax.platform_dependent(offsets, cpu=searched, default=by_ends)
            parts += _words(counts.astype(jnp.uint32))
        return jnp.concatenate(parts, -1)

    def decode(self, payload: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The values and offsets, float32 and int32 `(..., c)`; `width` where there is no entry."""
        slots = (payload.shape[-1] - 2 * self.blocks) // (self.value_words + 1)
        ends = [slots * i for i in range(1, self.value_words + 2)]
        *first, low, counts = jnp.split(payload, ends, axis=-1)
        if self.values == "bfloat16":
            values = bfloat16.widen_bits(first[0])
        else:
            values = jax.lax.bitcast_convert_type(_joined(*first), jnp.float32)
        offsets = low.astype(jnp.int32)
        if self.blocks:
            per_block = _joined(*jnp.split(counts, 2, axis=-1)).astype(jnp.int32)
            starts = reductions.running_sum(per_block, axis=per_block.ndim - 1)[..., :-1]
            slot = _each(slots, starts.shape[:-1])
            offsets += reductions.count_up_to(starts, slot) * BLOCK
        return values, jnp.where(values == 0, self.width, offsets)


def _each(number: int, lead: tuple[int, ...]) -> jax.Array:
    """0, 1, ... along the last axis, int32 `(*lead, number)`."""
    return jnp.broadcast_to(jnp.arange(number, dtype=jnp.int32), (*lead, number))


def _counts_by_search(offsets: jax.Array, blocks: int, width: int) -> jax.Array:
    """From offsets `(..., c)`, how many entries each block has, int32 `(..., blocks)`."""
    last = np.minimum(np.arange(1, blocks + 1) * BLOCK, width) - 1
    last = np.broadcast_to(last.astype(np.int32), (*offsets.shape[:-1], blocks))
    ends = reductions.count_up_to(offsets, jnp.asarray(last))
    one_later = [(0, 0, 0)] * (ends.ndim - 1) + [(1, -1, 0)]
    return ends - jax.lax.pad(ends, np.int32(0), one_later)


def _counts_by_ends(offsets: jax.Array, blocks: int, width: int) -> jax.Array:
    """The same for GPUs, in one kernel: the first and the last entry of a block know its ends."""
    block = jnp.where(offsets < width, offsets // BLOCK, blocks)
    changes = block[..., 1:] != block[..., :-1]
    end = jnp.ones((*block.shape[:-1], 1), bool)
    first, last = jnp.concatenate([end, changes], -1), jnp.concatenate([changes, end], -1)
    slot = _each(block.shape[-1], block.shape[:-1])
    share = jnp.where(last, slot + 1, 0) - jnp.where(first, slot, 0)
    place = jnp.where(first | last, block, blocks)

    def add(place: jax.Array, share: jax.Array) -> jax.Array:
        return jnp.zeros(blocks, jnp.int32).at[place].add(share, mode="drop")

    return jnp.vectorize(add, signature="(c),(c)->(b)")(place, share)


def _words(x: jax.Array) -> list[jax.Array]:
    """uint32 as two uint16, the lower one first."""
    return [x.astype(jnp.uint16), (x >> 16).astype(jnp.uint16)]


def _joined(low: jax.Array, high: jax.Array) -> jax.Array:
    """Undoes `_words`."""
    return low.astype(jnp.uint32) | (high.astype(jnp.uint32) << 16)
