"""Selection against numpy, which sorts."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from implementations import every_implementation, interpreted
from jaxcomm.kernels import select
from jaxcomm.kernels.bitplanes import packing
from jaxcomm.kernels.select import compaction
from jaxcomm.kernels.select import magnitudes as bands
from jaxcomm.kernels.select import threshold as search
from selecting import INFINITY, TINY, assert_selected, bits_of, kth, magnitudes, samples, selected

LARGE = 2**19 + 17  # enough for a sample to be taken

threshold_for = jax.jit(select.threshold_for, static_argnums=1)


@partial(jax.jit, static_argnums=1)
def sorting(x: np.ndarray, k: int) -> jax.Array:
    """What GPUs do in place of counting, with fewer entries sorted at once than there."""
    before, search._SORTED = search._SORTED, LARGE - 1
    try:
        pattern = search._by_sorting(jnp.asarray(x), k, None)
    finally:
        search._SORTED = before
    return jax.lax.bitcast_convert_type(jnp.maximum(pattern, 1), jnp.float32)


@partial(jax.jit, static_argnums=1)
def counting(x: np.ndarray, k: int) -> jax.Array:
    """What GPUs do where a sample was misleading."""
    pattern = search.counted(search.patterns_of(jnp.asarray(x)), k)
    return jax.lax.bitcast_convert_type(jnp.maximum(pattern, 1), jnp.float32)


each_search = pytest.mark.parametrize(
    "threshold_for", [threshold_for, sorting, counting], ids=["own", "sort", "count"]
)
count_at_least = jax.jit(select.count_at_least)
compact = jax.jit(select.compact, static_argnums=2)


LENGTHS = (1, 7, 255, 256, 257, 513, 2000, 30_001)
THRESHOLDS = (0.5, 0.0, -0.0, -1.0, TINY, 3 * TINY, 2.5, np.inf, -np.inf, np.nan, -np.nan)


def cases(n: int) -> Iterator[tuple[np.ndarray, np.float32]]:
    """Samples with three thresholds each; all lengths together have every pair of the two."""
    first = 3 * LENGTHS.index(n)
    for i, x in enumerate(samples(n, n)):
        for t in range(first + i, first + i + 3):
            yield x, np.float32(THRESHOLDS[t % len(THRESHOLDS)])


def test_the_lengths_have_every_pair() -> None:
    found = {(i // 3, t.view(np.uint32)) for n in LENGTHS for i, (_, t) in enumerate(cases(n))}
    assert len(found) == len(samples(1, 1)) * len(THRESHOLDS)


def test_the_documented_order() -> None:
    x = np.zeros(600, np.float32)
    x[[0, 1, 8, 248, 255, 256, 257, 264, 599]] = 1
    got = compact(x, jnp.float32(1), 10)
    np.testing.assert_array_equal(got.indices, [0, 8, 248, 1, 255, 256, 264, 257, 599, 600])


# Capacities that are too small for most samples, that suffice for some, and that exceed n.
CAPACITIES = [
    *((1, 4), (7, 1), (255, 5), (256, 51), (257, 260), (2000, 400), (30_001, 600)),
    pytest.param(513, 10, marks=pytest.mark.newest),
]


@every_implementation(select.compact, "triton")
@pytest.mark.parametrize(("n", "capacity"), CAPACITIES)
def test_compact(n: int, capacity: int, f: Callable) -> None:
    compact = jax.jit(f, static_argnums=2)
    for x, t in [*cases(n)][:: 4 if n > 2000 else 1]:
        assert_selected(compact(x, t, capacity), x, selected(x, t), capacity)


@pytest.mark.parametrize("n", LENGTHS)
def test_count_at_least(n: int) -> None:
    for x, t in cases(n):
        assert count_at_least(x, t) == len(selected(x, t))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_patterns(data: st.DataObject) -> None:
    n, capacity = 300, 20
    places = data.draw(st.sets(st.integers(0, n - 1), max_size=40))
    x = np.zeros(n, np.float32)
    x[sorted(places)] = [data.draw(st.floats(width=32)) for _ in places]
    t = np.float32(data.draw(st.floats(width=32)))
    assert_selected(compact(x, t, capacity), x, selected(x, t), capacity)


@pytest.mark.parametrize(
    ("n", "k"),
    [(1, 1), (7, 4), (255, 255), (256, 2), (257, 1), (513, 257), (2000, 2000), (30_001, 300)],
)
@each_search
def test_threshold_for(threshold_for: Callable, n: int, k: int) -> None:
    for x in samples(n, n):
        t = threshold_for(x, k)
        assert t.dtype == jnp.float32 and t.shape == ()
        assert bits_of(t) == bits_of(kth(x, k))
        nonzero = np.count_nonzero(magnitudes(x))
        assert min(k, nonzero) <= len(selected(x, t)) <= nonzero


@pytest.mark.parametrize("shape", [(4096, 512), (4200, 500), (35_000, 60)])
def test_samples_see_all_columns_of_a_matrix(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape) * np.exp(rng.standard_normal(shape[1]))
    x = x.astype(np.float32).reshape(-1)
    k = x.size // 100
    low, high = search._between(search._digits, *search._sample_of(jnp.asarray(x), k))
    assert low <= bits_of(kth(x, k)) <= high
    for number in range(4):
        near = select.threshold_near(jnp.asarray(x), k, jnp.int32(number))
        assert 0.85 * k < np.sum(magnitudes(x) >= magnitudes(np.asarray(near)[None])) < 1.2 * k


@pytest.mark.parametrize(
    "k", [1, LARGE // 100, LARGE]
)  # a sample bounds it from below, both, above
@each_search
def test_threshold_for_large(threshold_for: Callable, k: int) -> None:
    # The sample, every third entry, sees nothing of what is large, and nothing of what is small.
    rng = np.random.default_rng(0)
    low, high = rng.standard_normal((2, LARGE)).astype(np.float32)
    stride = search._stride(LARGE)
    low[::stride] = 1e-6 * rng.random(len(low[::stride]))
    high[::stride] = 10 + rng.random(len(high[::stride]))
    # Each k leaves out a third of the samples, so every sample has two of the three.
    skipped = (1, LARGE // 100, LARGE).index(k)
    others = [x for i, x in enumerate(samples(LARGE, k)) if i % 3 != skipped]
    for x in (*others, low, high):
        assert bits_of(threshold_for(x, k)) == bits_of(kth(x, k))


@pytest.mark.parametrize("count", [bands._count_in_tiles, bands._count_one_by_one])
@pytest.mark.parametrize("n", [1, 1023, 1024, 5000])
def test_both_formulations_count(n: int, count: Callable) -> None:
    lows = np.uint32([1, 3, 0x3F000000, INFINITY, bands.PAST_INFINITY])
    run = jax.jit(count)
    for x in samples(n, n):
        patterns = x.view(np.uint32) % 2**31
        wanted = [np.sum((low <= patterns) & (patterns <= INFINITY)) for low in lows]
        np.testing.assert_array_equal(run(patterns, lows), wanted)


def test_gpus_pack_and_place_alike() -> None:
    """Bits are packed by halves, and each slot looks for its chunk by itself."""
    for n, capacity in ((1, 4), (513, 600), (30_001, 600)):
        slot = jnp.arange(capacity, dtype=jnp.int32)
        for x in samples(n, n):
            inside = bands.patterns_of(x) >= bands.lowest_for(jnp.float32(0.5))
            streams = jnp.pad(inside, (0, -n % bands.CHUNK)).reshape(-1, packing.BITS, bands.LANES)
            words = packing._joined(streams)
            np.testing.assert_array_equal(packing._joined_by_halves(streams), words)
            before = compaction._count_before(words)
            marks = compaction._places_by_marks(words, before, capacity)
            found = compaction._places_by_search(words, before, capacity)
            filled = np.asarray(slot) < int(before[-1])
            np.testing.assert_array_equal(found[filled], marks[filled])


def every_function(x: jax.Array) -> tuple[jax.Array, ...]:
    t = select.threshold_for(x, x.size // 50)
    whole = select.compact(x, t, x.size // 40)
    k_largest, least = select.largest(x, x.size // 50, x.size // 40, 1e-30)
    found = (t, least, select.count_at_least(x, t), *whole, *k_largest)
    return tuple(leaf[None] for leaf in found)


def on_two_devices(f: Callable, mesh: Mesh, n: int) -> tuple[np.ndarray, Any]:
    """Two vectors, and what `f` makes of each in a checked `jax.shard_map`."""
    x = np.random.default_rng(n).standard_normal(2 * n).astype(np.float32)
    spec = PartitionSpec("data")
    mapped = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True)
    return x.reshape(2, n), jax.tree.map(np.asarray, jax.jit(mapped)(x))


def test_a_large_threshold_in_shard_map(make_mesh: Callable[[int], Mesh]) -> None:
    x, got = on_two_devices(
        lambda x: select.threshold_for(x, LARGE // 50)[None], make_mesh(2), LARGE
    )
    np.testing.assert_array_equal(got, [kth(own, LARGE // 50) for own in x])


def test_in_shard_map(make_mesh: Callable[[int], Mesh]) -> None:
    n = 3000
    x, got = on_two_devices(every_function, make_mesh(2), n)
    for own, t, least, count, *found in zip(x, *got, strict=True):
        assert bits_of(t) == bits_of(least) == bits_of(kth(own, n // 50))
        places = selected(own, t)
        assert count == len(places)
        for leaves in (found[:3], found[3:]):
            assert_selected(select.Selected(*leaves), own, places, n // 40)


@pytest.mark.parametrize(
    "f",
    [
        partial(select.threshold_for, k=LARGE // 100),
        partial(select.count_at_least, threshold=jnp.float32(1)),
        partial(select.compact, threshold=jnp.float32(1), capacity=5000),
    ],
)
def test_nothing_is_sorted(f: Callable) -> None:
    x = jax.ShapeDtypeStruct((LARGE,), jnp.float32)
    program = jax.jit(f).lower(x).as_text().lower()
    assert "bitcast" in program
    assert not any(word in program for word in ("stablehlo.sort", "top_k", "topk"))
    control = jax.jit(lambda x: jax.lax.top_k(jnp.sort(x), 5)).lower(x).as_text().lower()
    assert "stablehlo.sort" in control and "top_k" in control


def test_wrong_arguments() -> None:
    x, t = jnp.ones(600), jnp.float32(1)
    for wrong in (0, 601, -1):
        with pytest.raises(ValueError, match=f"k is 1 to n = 600, got {wrong}"):
            select.threshold_for(x, wrong)
    for call in (
        lambda x: select.threshold_for(x, 1),
        lambda x: select.count_at_least(x, t),
        lambda x: select.compact(x, t, 5),
    ):
        with pytest.raises(TypeError, match=r"got bfloat16; write x.astype\(jnp.float32\)"):
            call(x.astype(jnp.bfloat16))
        for shape in ((), (0,), (2, 300)):
            with pytest.raises(ValueError, match=r"write x.reshape\(-1\)"):
                call(jnp.ones(shape))
    many = jax.ShapeDtypeStruct((2**31,), jnp.float32)
    with pytest.raises(ValueError, match=r"1 to 2\^31 - 256 elements"):
        jax.eval_shape(select.count_at_least, many, t)
    with pytest.raises(TypeError, match="got int32; write jnp.float32"):
        select.compact(x, jnp.int32(1), 5)
    with pytest.raises(ValueError, match=r"one threshold, got shape \(1,\)"):
        select.count_at_least(x, t[None])
    with pytest.raises(ValueError, match="the capacity is at least 1, got 0"):
        select.compact(x, t, 0)


def test_tiles_that_are_full_beside_empty_ones() -> None:
    from jaxcomm.kernels.select import triton

    rng = np.random.default_rng(0)
    x = rng.standard_normal(11 * triton.TILE + 5).astype(np.float32)
    full = np.zeros(len(x), bool)
    for start in (0, 3 * triton.TILE + 256, 10 * triton.TILE):
        full[start : start + triton.TILE] = True
    x = np.where(full, x, np.where(rng.random(len(x)) < 0.03, x, 0)).astype(np.float32)
    places = selected(x, 0)
    compact = jax.jit(interpreted(select.compact, "triton"), static_argnums=2)
    for capacity in (80, len(places) - 1, 2400):
        assert_selected(compact(x, jnp.float32(0), capacity), x, places, capacity)


def test_more_than_the_kernels_can_number() -> None:
    triton = interpreted(select.compact, "triton")
    for n, capacity in ((2**31 - 256, 1), (8, 2**30 + 1)):
        x = jax.ShapeDtypeStruct((n,), jnp.float32)
        with pytest.raises(
            NotImplementedError, match=rf"slots, got {n} and {capacity}; cut the array"
        ):
            jax.eval_shape(lambda x, c=capacity: triton(x, jnp.float32(1), c), x)


def test_a_named_implementation_never_falls_back() -> None:
    x, t = jnp.zeros(4), jnp.float32(1)
    compact = partial(select.compact, x, t, 1)
    with pytest.raises(NotImplementedError, match="there is no NVIDIA GPU"):
        compact(implementation="triton")
    with pytest.raises(NotImplementedError, match="no implementation 'mosaic'"):
        compact(implementation="mosaic")


def test_what_is_taken_from_a_list_is_what_is_taken_from_the_vector() -> None:
    """As where the largest sums are searched for: in zeros, in ties, and with room to spare."""
    for x in samples(2000, 2000):
        listed = compact(x, np.float32(np.finfo(np.float32).tiny), 2000)
        for k in (1, 300, 2000):
            threshold = np.maximum(kth(np.asarray(listed.values), k), np.finfo(np.float32).tiny)
            found = jax.jit(select.narrow, static_argnums=(2, 3))(listed, threshold, k, x.size)
            wanted = compaction.compact_at_most(jnp.asarray(x), threshold, k, k)
            for a, b in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(a, b)
