"""The largest values of every chunk, in two bits, from everyone to everyone."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxcomm import _axes
from jaxcomm._axes import Axis
from jaxcomm._numbers import is_integer
from jaxcomm.codecs.chunk_entries import ChunkEntries
from jaxcomm.collectives._sending import all_gather
from jaxcomm.collectives.sparse._sparse import (
    SMALLEST,
    SparseAllReduce,
    SparseResult,
    add_lists,
    take,
    take_out,
)
from jaxcomm.kernels import select


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopkChunks(SparseAllReduce):
    """An all-gather of the largest values of every chunk, and a local sum.

    A bucket is cut into chunks, and as many values are selected of each. So leaves of small
    gradients take part as well as those of large ones; there is no threshold and no spare room.

    Attributes:
      chunk: the values of a chunk.
    """

    name = "topk_chunks"

    chunk: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_integer(self.chunk) or self.chunk < 1:
            raise ValueError(f"chunk must be a positive number of values, got {self.chunk!r}.")

    def entries(self, n: int) -> ChunkEntries:
        """The message of n values."""
        width = min(n, self.chunk)
        return ChunkEntries(width, super().k(width), -(-n // width))

    def k(self, n: int) -> int:
        """The number of values to select from n: at least one of every chunk."""
        entries = self.entries(n)
        *_, last = range(0, n, entries.width)
        return (entries.chunks - 1) * entries.k + min(entries.k, n - last)

    def exchange(
        self, x: jax.Array, threshold: jax.Array, step: jax.Array, axis: Axis
    ) -> tuple[SparseResult, jax.Array]:
        """See `SparseAllReduce.exchange`."""
        del step
        entries, n = self.entries(x.size), x.size
        chunks = jnp.pad(x, (0, -n % entries.width)).reshape(entries.chunks, entries.width)
        columns = select.largest_of_rows(chunks, entries.k, SMALLEST)
        own = _places(columns, entries, n)
        codes = entries.codes(take(x, own))
        messages = all_gather(entries.encode(codes, columns), axis)
        values, arrived = entries.decode(messages)
        places = _places(arrived, entries, n).reshape(len(messages), -1)
        mean = add_lists(jnp.zeros_like(x), values.reshape(places.shape), places)
        mean /= _axes.world_of(axis)
        errors, taken = take_out(x, entries.rounded(codes), own)
        selected = jnp.sum(own < n, dtype=jnp.int32)
        applied = select.count_at_least(mean, jnp.float32(0))
        bounds = jnp.sum(entries.largest(messages), axis=0)  # no sum is larger
        return SparseResult(mean, errors, taken, selected, selected, applied, [bounds]), threshold


def _places(columns: jax.Array, entries: ChunkEntries, n: int) -> jax.Array:
    """Places in the bucket, int32 `(..., chunks, k)`; n where there is no entry."""
    first = entries.width * jax.lax.broadcasted_iota(jnp.int32, columns.shape, columns.ndim - 2)
    return jnp.where(columns < entries.width, first + jnp.minimum(columns, n - first), n)


def topk_chunks(chunk: int = 4096) -> TopkChunks:
    """The largest values of every chunk, in two bits, from everyone to everyone.

    With `residual_decay` below 1 this is the exchange of SparseLoCo.

    Args:
      chunk: the values of a chunk. Less than 1/density leave one entry of each.

    Returns:
      The sparse all-reduce, for `jaxcomm.sparse_mean`.

    Raises:
      ValueError: for a chunk that is not a positive number.

    Wire: N-1 messages in one all-gather. Each has k entries of 2 bits for the value and about
    floor(log2 1/d) + 2 bits for the place, where d is the density, and 4 bytes for each chunk: 9.25
    bits an entry for d = 1/32, 10.5 for 1/64, 12 for 0.01, where whole words of each chunk cost
    more than a bit.

    References:
      A. Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025,
      arXiv:2508.15706 (top-k of chunks in two bits).

    Differs from the paper: places are coded together, in 7 bits instead of 12 for d = 1/32, and
    chunks are parts of buckets, not squares of matrices.
    """
    return TopkChunks(chunk=chunk)
