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
from jaxcomm.kernels.reductions import computed_once


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
        width = self._width(n)
        return ChunkEntries(select.places_in(width), super().k(width), -(-n // width))

    def k(self, n: int) -> int:
        """The number of values to select from n: at least one of every chunk."""
        entries = self.entries(n)
        *_, last = range(0, n, self._width(n))
        return (entries.chunks - 1) * entries.k + min(entries.k, n - last)

    def padded(self, n: int) -> int:
        """Whole chunks: `exchange` would copy all values to fill up the last one."""
        return -(-n // self._width(n)) * self._width(n)

    def _width(self, n: int) -> int:
        """The values of a chunk."""
        return min(n, self.chunk)

    def exchange(
        self, x: jax.Array, threshold: jax.Array, step: jax.Array, axis: Axis
    ) -> tuple[SparseResult, jax.Array]:
        """See `SparseAllReduce.exchange`."""
        del step
        x = computed_once(x)  # before its view as a matrix
        entries, n, width = self.entries(x.size), x.size, self._width(x.size)
        chunks = jnp.pad(x, (0, -n % width)).reshape(entries.chunks, width)
        selected = select.largest_of_rows(chunks, entries.k, SMALLEST)
        own = _indices(selected, width, n)
        codes = entries.codes(take(x, own))
        messages = all_gather(entries.encode(codes, selected), axis)
        values, arrived = entries.decode(messages)
        mean = add_lists(jnp.zeros_like(x), values, _indices(arrived, width, n))
        mean /= _axes.world_of(axis)
        errors, taken = take_out(x, entries.rounded(codes), own)
        sent = jnp.sum(own < n, dtype=jnp.int32)
        applied = select.count_at_least(mean, jnp.float32(0))
        bounds = jnp.sum(entries.largest(messages), axis=0)  # no sum is larger
        return SparseResult(mean, errors, taken, sent, sent, applied, [bounds]), threshold


def _indices(places: jax.Array, width: int, n: int) -> jax.Array:
    """Indices in the bucket, int32 `(..., chunks, k)`; n where there is no entry."""
    columns = select.columns_of(places, width)
    first = width * jax.lax.broadcasted_iota(jnp.int32, columns.shape, columns.ndim - 2)
    return jnp.where(columns < width, first + jnp.minimum(columns, n - first), n)


def topk_chunks(chunk: int = 4096) -> TopkChunks:
    """The largest values of every chunk, in two bits, from everyone to everyone.

    With `residual_decay` below 1 this is the exchange of SparseLoCo.

    Args:
      chunk: the values of a chunk; fewer than 1/density have one entry. A shorter last one of a
        bucket has as many entries as the others, so short buckets send more than the density.

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
