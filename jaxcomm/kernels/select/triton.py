"""Compaction as two Triton kernels, which read x once and otherwise move only selected entries.

The first kernel takes x in tiles. For each tile it counts the selected entries and lists their
places in the tile. XLA computes the running sums of the counts. The second kernel finds the tile of
each slot's entry by binary search in these sums, and reads the entry from x.

The kernels are in Triton because Mosaic GPU cannot store to a computed address for each element.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxcomm import _axes
from jaxcomm.kernels import reductions
from jaxcomm.kernels.select.compaction import Selected
from jaxcomm.kernels.select.magnitudes import (
    CHUNK,
    LANES,
    PAST_INFINITY,
    bit_with_rank,
    lowest_for,
    patterns_of,
)

# Entries, CHUNK times a power of two. On an H100, 1024 and 2048 in one warp were the fastest of 256
# to 4096; 512 took 1.25 times as long.
TILE = 1024
_GROUP = 32  # ranks that are searched for at once
_WARPS = 1  # of a program
_SLOTS = 128  # that a program fills
_MOST_SLOTS = 2**30


def compact(
    x: jax.Array,
    threshold: jax.Array,
    capacity: int,
    *,
    interpret: bool = False,
) -> Selected:
    """The same result as `compaction.compact`; `interpret` runs it on CPU, in tests.

    Raises:
      NotImplementedError: for more elements or slots than the kernels can number.
    """
    tiles = -(-x.size // TILE)
    if capacity > _MOST_SLOTS or x.size > 2**31 - TILE:
        raise NotImplementedError(
            f'the implementation "triton" takes at most 2^31 - {TILE} elements and 2^30 slots, got '
            f'{x.size} and {capacity}; cut the array, or use "xla" or None.'
        )
    low = jnp.reshape(lowest_for(threshold), 1)
    # Only the filled part of a tile's list is written and read.
    shapes = [(tiles * TILE, jnp.uint16), (tiles, jnp.int32)]
    listed, counts = _call(_select, [x, low], shapes, tiles, interpret)
    before = jnp.concatenate([jnp.zeros_like(counts, shape=(1,)), reductions.running_sum(counts)])
    values, places = _call(
        _arrange,
        [x, listed, before],
        [(capacity, jnp.float32), (capacity, jnp.int32)],
        -(-capacity // _SLOTS),
        interpret,
    )
    return Selected(values, places, before[-1])


def _select(x_ref: Any, low_ref: Any, listed_ref: Any, counts_ref: Any) -> None:
    """Counts the selected entries of a tile, and lists their places in it."""
    tile = pl.program_id(0)
    words, ends = _words(x_ref, low_ref, tile)
    count = jnp.max(ends)
    counts_ref[tile] = count

    def put(i: jax.Array, _: None) -> None:
        rank = i * _GROUP + jax.lax.iota(jnp.int32, _GROUP)
        place = _place(words, ends, rank).astype(jnp.uint16)
        _scatter(tile * TILE + rank, rank < count, (listed_ref, place))

    groups = jax.lax.div(count + (_GROUP - 1), np.int32(_GROUP))
    jax.lax.fori_loop(np.int32(0), groups, put, None)


def _arrange(
    x_ref: Any, listed_ref: Any, before_ref: Any, values_ref: Any, places_ref: Any
) -> None:
    """Fills slots, those without an entry with zeros, and n as the index."""
    slot = pl.program_id(0) * _SLOTS + jax.lax.iota(jnp.int32, _SLOTS)
    tiles = before_ref.shape[0] - 1
    tile = jnp.zeros_like(slot)
    for power in reversed(range(tiles.bit_length())):
        more = tile + (1 << power)
        there = plt.load(before_ref.at[jnp.minimum(more, tiles)])
        tile = jnp.where((more < tiles) & (there <= slot), more, tile)
    filled = slot < before_ref[tiles]
    rank = jnp.where(filled, slot - plt.load(before_ref.at[tile]), 0)
    place = plt.load(listed_ref.at[tile * TILE + rank], mask=filled, other=0)
    place = jnp.where(filled, tile * TILE + place.astype(jnp.int32), 0)
    value = plt.load(x_ref.at[place], mask=filled, other=0)
    value = jnp.where(filled, value, jnp.float32(0))
    place = jnp.where(filled, place, x_ref.shape[0])
    _scatter(slot, slot < values_ref.shape[0], (values_ref, value), (places_ref, place))


def _words(x_ref: Any, low_ref: Any, tile: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The words of `words_in` for a tile, and the number of bits set up to and in each word."""
    place = tile * TILE + jax.lax.iota(jnp.int32, TILE)
    x = plt.load(x_ref.at[place], mask=place < x_ref.shape[0], other=0)
    rows = _inside(x, low_ref[0]).astype(jnp.int32).reshape(-1, CHUNK // LANES, LANES)
    words = _sum(rows << jax.lax.broadcasted_iota(jnp.int32, rows.shape, 1), 1).reshape(-1)
    return words, jnp.cumsum(jax.lax.population_count(words), dtype=jnp.int32)


def _place(words: jax.Array, ends: jax.Array, rank: jax.Array) -> jax.Array:
    """The places in a tile of the entries with these ranks; arbitrary beyond the last entry."""
    # The ranks lie along the rows, so a thread holds one of them, and reductions stay in a thread.
    number = jax.lax.broadcasted_iota(jnp.int32, (words.size, rank.size), 0)
    past = ends[:, None] <= rank[None]
    index = _sum(past.astype(jnp.int32), 0)
    ahead = jnp.max(jnp.where(past, ends[:, None], 0), axis=0)
    word = _sum(jnp.where(number == index[None], words[:, None], 0), 0)
    bit = bit_with_rank(word, rank - ahead)
    lanes = np.int32(LANES)
    return jax.lax.div(index, lanes) * CHUNK + bit * LANES + jax.lax.rem(index, lanes)


def _sum(x: jax.Array, axis: int) -> jax.Array:
    """In int32, also where `jax_enable_x64` is set."""
    return jnp.sum(x, axis=axis, dtype=jnp.int32)


def _inside(x: jax.Array, low: jax.Array) -> jax.Array:
    return patterns_of(x) - low < PAST_INFINITY - low


def _scatter(slot: jax.Array, mask: jax.Array, *pairs: tuple[Any, jax.Array]) -> None:
    """Stores values at slots of flat arrays where the mask is set.

    The other slots are set beyond the end, because the interpreter ignores the mask.
    """
    for ref, value in pairs:
        plt.store(ref.at[jnp.where(mask, slot, ref.shape[0])], value, mask=mask)


def _call(
    kernel: Callable[..., None],
    inputs: Sequence[jax.Array],
    outputs: Sequence[tuple[int, Any]],
    programs: int,
    interpret: bool,
) -> list[jax.Array]:
    """Runs a kernel on flat arrays, also under the checks of `jax.shard_map`."""
    inputs = _axes.varying_alike(inputs)
    call = pl.pallas_call(
        kernel,
        out_shape=[_axes.shape_varying_like(inputs[0], (n,), dtype) for n, dtype in outputs],
        grid=(programs,),
        compiler_params=plt.CompilerParams(num_warps=_WARPS),
        interpret=interpret,
    )
    return call(*inputs)
