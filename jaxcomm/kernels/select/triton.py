"""Compaction as two Triton kernels, which read x once and otherwise move only selected entries.

The first kernel takes x in tiles. For each tile it counts the selected entries and stores them in a
buffer of the tile. XLA computes the sums of the counts. The second kernel moves the entries from
the buffers to their slots. If a tile selects more entries than its buffer holds, the second kernel
reads the tile again.

The kernels are in Triton because Mosaic GPU cannot store to a computed address for each element.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxcomm import _axes
from jaxcomm.kernels.select import compaction
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
_LEAST_ROOM = 32  # entries in the buffer of a tile
_SHARES = 4  # the buffer of a tile holds as many times its share of the capacity
_MOST_SLOTS = 2**30


def compact(
    x: jax.Array,
    threshold: jax.Array,
    capacity: int,
    at_most: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> Selected:
    """The same result as `compaction.compact`; `interpret` runs it on CPU, in tests.

    Where too many entries tie, which is rare, the plain version takes some out.

    Raises:
      ValueError: for more elements or slots than the kernels can number.
    """
    tiles = -(-x.size // TILE)
    if capacity > _MOST_SLOTS or x.size > 2**31 - TILE:
        raise ValueError(
            f'the implementation "triton" takes at most 2^31 - {TILE} elements and 2^30 slots, got '
            f'{x.size} and {capacity}; cut the array, or use "xla" or None.'
        )
    room = room_for(x.size, capacity)
    low = jnp.reshape(lowest_for(threshold), 1)
    *entries, counts = _call(
        _select,
        [x, low],
        [(tiles * room, jnp.float32), (tiles * room, jnp.uint16), (tiles, jnp.int32)],
        tiles,
        interpret,
    )
    before = jnp.concatenate(
        [jnp.zeros_like(counts, shape=(1,)), jnp.cumsum(counts, dtype=jnp.int32)]
    )
    values, places = _call(
        _arrange,
        [x, low, *entries, before],
        [(capacity, jnp.float32), (capacity, jnp.int32)],
        max(tiles, -(-capacity // TILE)),
        interpret,
    )
    found = Selected(values, places, before[-1])
    if at_most is None:
        return found
    return jax.lax.cond(
        found.count > at_most,
        lambda: compaction.compact(x, threshold, capacity, at_most),
        lambda: found,
    )


def room_for(n: int, slots: int) -> int:
    """The entries that the buffer of each tile of n holds; no kernel touches its unused end."""
    share = -(-slots // -(-n // TILE))
    return min(TILE, max(_LEAST_ROOM, _power_of_two(_SHARES * share)))


def _select(x_ref: Any, low_ref: Any, values_ref: Any, places_ref: Any, counts_ref: Any) -> None:
    """Counts the selected entries of a tile, and stores the first of them in its buffer."""
    tile, room = pl.program_id(0), values_ref.shape[0] // counts_ref.shape[0]
    words, ends = _words(x_ref, low_ref, tile)
    count = jnp.max(ends)
    counts_ref[tile] = count
    kept = jnp.minimum(count, room)

    def put(rank: jax.Array) -> None:
        place, mask = _place(words, ends, rank), rank < kept
        value = plt.load(x_ref.at[tile * TILE + place], mask=mask, other=0)
        entry = (values_ref, value), (places_ref, place.astype(jnp.uint16))
        _scatter(tile * room + rank, mask, *entry)

    _by_groups(kept, put)


def _arrange(
    x_ref: Any,
    low_ref: Any,
    values_ref: Any,
    places_ref: Any,
    before_ref: Any,
    *out_refs: Any,
) -> None:
    """Moves the selected entries of a tile to their slots, and fills a share of the empty slots."""
    program, tiles = pl.program_id(0), before_ref.shape[0] - 1
    room, capacity = values_ref.shape[0] // tiles, out_refs[0].shape[0]
    tile = jnp.minimum(program, tiles - 1)
    first = before_ref[tile]
    count = jnp.where(program < tiles, before_ref[tile + 1] - first, 0)

    def put(value: jax.Array, place: jax.Array, rank: jax.Array, mask: jax.Array) -> None:
        slot = first + rank
        mask &= slot < capacity
        _scatter(slot, mask, (out_refs[0], value), (out_refs[1], place))

    def put_found(rank: jax.Array) -> None:
        slot, mask = tile * room + rank, rank < count
        value = plt.load(values_ref.at[slot], mask=mask, other=0)
        place = plt.load(places_ref.at[slot], mask=mask, other=0)
        put(value, tile * TILE + place.astype(jnp.int32), rank, mask)

    @pl.when(count <= room)
    def _() -> None:
        _by_groups(count, put_found)

    @pl.when(count > room)
    def _() -> None:
        words, ends = _words(x_ref, low_ref, tile)

        def put_again(rank: jax.Array) -> None:
            place, mask = tile * TILE + _place(words, ends, rank), rank < count
            put(plt.load(x_ref.at[place], mask=mask, other=0), place, rank, mask)

        _by_groups(count, put_again)

    _fill(program, before_ref[tiles], x_ref.shape[0], out_refs)


def _by_groups(count: jax.Array, put: Callable[[jax.Array], None]) -> None:
    """Calls `put` with groups of ranks from 0 on; the last group may go beyond the count."""
    jax.lax.fori_loop(
        0,
        jax.lax.div(count + (_GROUP - 1), _GROUP),
        lambda i, _: put(i * _GROUP + jax.lax.iota(jnp.int32, _GROUP)),
        None,
    )


def _fill(program: jax.Array, count: jax.Array, n: int, out_refs: Sequence[Any]) -> None:
    """Writes zeros, and n as the index, to the empty slots in this program's share of all slots."""
    slots = out_refs[0].shape[0]
    share = _power_of_two(-(-slots // pl.num_programs(0)))
    slot = program * share + jax.lax.iota(jnp.int32, share)
    empty = (slot < slots) & (slot >= count)
    nothing = jnp.zeros((share,), jnp.float32), jnp.full((share,), n, jnp.int32)
    _scatter(slot, empty, *zip(out_refs, nothing, strict=True))


def _words(x_ref: Any, low_ref: Any, tile: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The words of `words_in` for a tile, and the number of bits set up to and in each word."""
    place = tile * TILE + jax.lax.iota(jnp.int32, TILE)
    x = plt.load(x_ref.at[place], mask=place < x_ref.shape[0], other=0)
    rows = _inside(x, low_ref[0]).astype(jnp.int32).reshape(-1, CHUNK // LANES, LANES)
    words = jnp.sum(rows << jax.lax.broadcasted_iota(jnp.int32, rows.shape, 1), axis=1).reshape(-1)
    return words, jnp.cumsum(jax.lax.population_count(words))


def _place(words: jax.Array, ends: jax.Array, rank: jax.Array) -> jax.Array:
    """The places in a tile of the entries with these ranks; arbitrary beyond the last entry."""
    # The ranks lie along the rows, so a thread holds one of them, and reductions stay in a thread.
    number = jax.lax.broadcasted_iota(jnp.int32, (words.size, rank.size), 0)
    past = ends[:, None] <= rank[None]
    index = jnp.sum(past.astype(jnp.int32), axis=0)
    ahead = jnp.max(jnp.where(past, ends[:, None], 0), axis=0)
    word = jnp.sum(jnp.where(number == index[None], words[:, None], 0), axis=0)
    bit = bit_with_rank(word, rank - ahead)
    return jax.lax.div(index, LANES) * CHUNK + bit * LANES + jax.lax.rem(index, LANES)


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


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
