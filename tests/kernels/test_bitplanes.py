"""Bit planes against numpy, which counts with integers and packs bit by bit."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcomm.kernels import bitplanes
from jaxcomm.kernels.bitplanes import packing

LENGTHS = (0, 1, 31, 32, 33, 63, 64, 1000)
LEADING = (((), 33), ((1,), 64), ((3,), 33), ((2, 0), 33), ((2, 3), 0), ((2, 3), 64))


def packed(bits: np.ndarray) -> np.ndarray:
    """Word j holds, as its binary digit b, the bit of coordinate b W + j."""
    *lead, n = bits.shape
    width = -(-n // 32)
    words = np.zeros((*lead, width), np.uint32)
    for i in range(n):
        digit, word = divmod(i, width)
        words[..., word] += bits[..., i].astype(np.uint32) * np.uint32(2**digit)
    return words


def unpacked(words: np.ndarray, n: int) -> np.ndarray:
    """The bits of the first n coordinates."""
    width = words.shape[-1]
    bits = [words[..., i % width] // np.uint32(2 ** (i // width)) % 2 == 1 for i in range(n)]
    return np.stack(bits, -1) if n else np.zeros((*words.shape[:-1], 0), bool)


def planes_of(counts: np.ndarray, P: int) -> bitplanes.Planes:
    """Plane p holds the packed binary digits p of the counts."""
    return tuple(jnp.asarray(packed(counts // 2**p % 2 == 1)) for p in range(P))


def counts_of(planes: bitplanes.Planes, n: int) -> np.ndarray:
    """The counts of the first n coordinates."""
    return sum(unpacked(np.asarray(plane), n) * 2**p for p, plane in enumerate(planes))


def pairs(i: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Every pair of a count below i and a count below k."""
    a, b = np.meshgrid(np.arange(i), np.arange(k), indexing="ij")
    return a.reshape(-1), b.reshape(-1)


def bfloat16_of(patterns: np.ndarray) -> jax.Array:
    """bfloat16 values with these bit patterns."""
    return jax.lax.bitcast_convert_type(jnp.asarray(patterns, jnp.uint16), jnp.bfloat16)


@pytest.mark.newest
def test_a_word_takes_its_bits_from_32_streams() -> None:
    x = np.zeros(96, bool)
    x[[0, 1, 3, 95]] = True  # W = 3: word 0 bits 0 and 1, word 1 bit 0, word 2 bit 31
    np.testing.assert_array_equal(bitplanes.pack(x), np.uint32([3, 1, 2**31]))


@pytest.mark.parametrize("n", LENGTHS)
def test_every_length(n: int) -> None:
    bits = np.random.default_rng(n).random((2, n)) < 0.5
    words, back, signs = there_and_back(bits, n)
    assert words.shape == (2, bitplanes.words_for(n)) and words.dtype == jnp.uint32
    np.testing.assert_array_equal(words, packed(bits))
    np.testing.assert_array_equal(back, bits)
    np.testing.assert_array_equal(signs, np.where(bits, 1, -1))


@functools.partial(jax.jit, static_argnums=1)
def there_and_back(x: jax.Array, n: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    words = bitplanes.pack(x)
    return words, bitplanes.unpack(words, n), bitplanes.signs(words, n)


@pytest.mark.parametrize(("lead", "n"), LEADING)
def test_leading_axes_are_independent(lead: tuple[int, ...], n: int) -> None:
    x = np.random.default_rng(0).standard_normal((*lead, n), np.float32)
    words, bits, signs = there_and_back(x, n)
    assert words.shape == (*lead, bitplanes.words_for(n))
    np.testing.assert_array_equal(words, packed(x > 0))
    np.testing.assert_array_equal(bits, x > 0)
    np.testing.assert_array_equal(signs, np.where(x > 0, 1, -1))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("n", LENGTHS)
def test_both_signs_at_once(n: int, dtype: Any) -> None:
    x = np.random.default_rng(n).integers(-1, 2, (2, n)).astype(dtype)
    positive, negative = jax.jit(bitplanes.pack_both)(x)
    np.testing.assert_array_equal(positive, packed(x > 0))
    np.testing.assert_array_equal(negative, packed(x < 0))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_bits(data: st.DataObject) -> None:
    n = data.draw(st.sampled_from([1, 31, 64, 97, 130]))  # each is compiled
    bits = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)), bool)
    words, back, _ = there_and_back(bits, n)
    np.testing.assert_array_equal(words, packed(bits))
    np.testing.assert_array_equal(back, bits)


def test_unpack_ignores_the_bits_that_no_coordinate_owns() -> None:
    words = np.full(2, 2**32 - 1, np.uint32)
    assert bitplanes.unpack(words, 33).shape == (33,)
    np.testing.assert_array_equal(bitplanes.pack(bitplanes.unpack(words, 33)), packed(np.ones(33)))


def test_random_words_survive() -> None:
    words = np.random.default_rng(0).integers(0, 2**32, (3, 7), dtype=np.uint32)
    np.testing.assert_array_equal(bitplanes.unpack(words, 224), unpacked(words, 224))
    np.testing.assert_array_equal(bitplanes.pack(bitplanes.unpack(words, 224)), words)


@pytest.mark.parametrize("wrapper", [lambda f: f, jax.jit])
def test_special_values(wrapper: Callable) -> None:
    tiny, huge = np.float32(2.0**-149), np.finfo(np.float32).max
    positive = np.float32([tiny, 2.0**-127, 2.0**-126, 1, huge, np.inf])
    others = np.float32([0.0, np.nan, -np.nan])
    x = np.concatenate([positive, -positive, others, -others])
    words = wrapper(bitplanes.pack)(x)
    np.testing.assert_array_equal(words, packed(np.arange(len(x)) < len(positive)))
    negative = (np.arange(len(x)) // len(positive)) == 1
    np.testing.assert_array_equal(wrapper(packing.negatives)(jnp.asarray(x)), negative)
    both = wrapper(bitplanes.pack_both)(jnp.asarray(x))
    np.testing.assert_array_equal(both, (words, packed(negative)))


def test_any_pattern_of_float32() -> None:
    x = np.random.default_rng(1).integers(0, 2**32, 10_007, dtype=np.uint32).view(np.float32)
    np.testing.assert_array_equal(jax.jit(bitplanes.pack)(x), packed(x > 0))


def test_every_pattern_of_bfloat16() -> None:
    patterns = np.arange(2**16, dtype=np.uint16)
    wide = (patterns.astype(np.uint32) << 16).view(np.float32)
    words = jax.jit(bitplanes.pack)(bfloat16_of(patterns))
    np.testing.assert_array_equal(words, packed(wide > 0))
    np.testing.assert_array_equal(jax.jit(packing.negatives)(bfloat16_of(patterns)), wide < 0)


def test_signs() -> None:
    x = np.random.default_rng(2).standard_normal((2, 45), np.float32)
    y = jax.jit(bitplanes.signs, static_argnums=1)(bitplanes.pack(x), 45)
    assert y.dtype == jnp.float32
    np.testing.assert_array_equal(y, np.sign(x))


def test_planes_for() -> None:
    for k in range(70):
        P = bitplanes.planes_for(k)
        assert 2**P - 1 >= k and (P == 0 or 2 ** (P - 1) - 1 < k)
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        bitplanes.planes_for(-1)


@pytest.mark.parametrize(("P", "Q"), [*itertools.product(range(1, 5), repeat=2)])
def test_add_every_pair_of_counts(P: int, Q: int) -> None:
    a, b = pairs(2**P, 2**Q)
    width = bitplanes.planes_for(2**P + 2**Q - 2)
    for more in (0, 2):
        sums = bitplanes.add(planes_of(a, P), planes_of(b, Q), width + more)
        assert isinstance(sums, tuple) and len(sums) == width + more
        np.testing.assert_array_equal(counts_of(sums, len(a)), a + b)


@pytest.mark.parametrize(("P", "Q"), [(1, 1), (3, 3), (2, 4)])
def test_add_drops_what_does_not_fit(P: int, Q: int) -> None:
    a, b = pairs(2**P, 2**Q)
    sums = bitplanes.add(planes_of(a, P), planes_of(b, Q), max(P, Q))
    np.testing.assert_array_equal(counts_of(sums, len(a)), (a + b) % 2 ** max(P, Q))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 17), st.integers(0, 2**32 - 1))
def test_a_tree_of_additions_counts_votes(devices: int, seed: int) -> None:
    votes = np.random.default_rng(seed).random((devices, 40)) < 0.5
    stacks = [((bitplanes.pack(v),), 1) for v in votes]
    while len(stacks) > 1:
        (a, i), (b, k), *rest = stacks
        stacks = [*rest, (bitplanes.add(a, b, bitplanes.planes_for(i + k)), i + k)]
    [(planes, total)] = stacks
    assert total == devices and len(planes) == bitplanes.planes_for(devices)
    np.testing.assert_array_equal(counts_of(planes, 40), votes.sum(0))
    majority = bitplanes.unpack(bitplanes.exceeds(planes, devices // 2), 40)
    np.testing.assert_array_equal(majority, 2 * votes.sum(0) > devices)
    tied = bitplanes.unpack(bitplanes.equals(planes, devices // 2), 40)
    np.testing.assert_array_equal(tied, votes.sum(0) == devices // 2)


@pytest.mark.parametrize("P", range(1, 6))
def test_compare_every_count_with_every_number(P: int) -> None:
    counts = np.arange(2**P)
    planes = planes_of(counts, P)
    for k in (-(2**P) - 1, *range(-2, 2**P + 2), 2 ** (P + 2) + 1, np.int64(1)):
        above = bitplanes.exceeds(planes, k)
        equal = bitplanes.equals(planes, k)
        assert above.dtype == equal.dtype == jnp.uint32
        np.testing.assert_array_equal(unpacked(np.asarray(above), 2**P), counts > k)
        np.testing.assert_array_equal(unpacked(np.asarray(equal), 2**P), counts == k)


@pytest.mark.parametrize(("P", "Q"), [*itertools.product(range(1, 6), repeat=2)])
def test_greater_for_every_pair_of_counts(P: int, Q: int) -> None:
    a, b = pairs(2**P, 2**Q)
    words = bitplanes.greater(planes_of(a, P), planes_of(b, Q))
    np.testing.assert_array_equal(unpacked(np.asarray(words), len(a)), a > b)


def majority(x: jax.Array) -> jax.Array:
    """The signs of what most of three vectors `(3, n)` vote for, by every function once."""
    n = x.shape[-1]
    a, b, c = ((bitplanes.pack(row),) for row in x)
    planes = bitplanes.add(bitplanes.add(a, b, 2), c, 2)
    all_three = bitplanes.equals(planes, 3)
    ones = bitplanes.exceeds(planes, 1) | all_three
    more = bitplanes.greater(planes, (~ones, all_three & ~all_three))
    return bitplanes.signs(ones & more, n)


def test_inside_jit_vmap_and_scan() -> None:
    x = np.random.default_rng(3).standard_normal((4, 3, 70), np.float32)
    expected = np.where((x > 0).sum(1) > 1, 1, -1)
    np.testing.assert_array_equal(jax.jit(jax.vmap(majority))(x), expected)
    last = jax.jit(jax.vmap(majority, in_axes=-1, out_axes=-1))
    np.testing.assert_array_equal(last(np.moveaxis(x, 0, -1)), expected.T)
    _, scanned = jax.lax.scan(lambda carry, row: (carry, majority(row)), 0, x)
    np.testing.assert_array_equal(scanned, expected)


def test_inside_shard_map(mesh8: jax.sharding.Mesh) -> None:
    spec = jax.P("data")
    x = np.random.default_rng(4).standard_normal((24, 70), np.float32)
    voted = jax.shard_map(lambda x: majority(x)[None], mesh=mesh8, in_specs=spec, out_specs=spec)
    ones = (x.reshape(8, 3, 70) > 0).sum(1) > 1
    np.testing.assert_array_equal(jax.jit(voted)(x), np.where(ones, 1, -1))


@pytest.mark.parametrize("n", [2**20, 10**6 + 7])
def test_nothing_is_unpacked_on_the_way(n: int) -> None:
    """A megabit of votes leaves room for its 2^15 words, and for no byte per coordinate."""
    W = bitplanes.words_for(n)
    words = jax.ShapeDtypeStruct((W,), jnp.uint32)
    stack = (words,) * 3
    for f, arguments in (
        (bitplanes.pack, (jax.ShapeDtypeStruct((n,), jnp.float32),)),
        (lambda a, b: bitplanes.add(a, b, 4), (stack, stack)),
        (lambda a: bitplanes.exceeds(a, 3), (stack,)),
        (lambda a: bitplanes.equals(a, 3), (stack,)),
        (bitplanes.greater, (stack, stack)),
        (lambda w: bitplanes.signs(w, 32 * W), (words,)),
    ):
        assert temporary_bytes(f, *arguments) <= 3 * 4 * W


def temporary_bytes(f: Callable[..., Any], *arguments: Any) -> int:
    return jax.jit(f).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("n", [2**20, 10**6 + 7])
def test_signs_of_leaves_are_unpacked_once(n: int) -> None:
    """Once for all leaves: fused into each of them, XLA on CPU takes 6 times as long."""
    cut, words = n // 3, jax.ShapeDtypeStruct((bitplanes.words_for(n),), jnp.uint32)

    def leaves(words: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = 3.0 * bitplanes.signs(words, n)
        return found[:cut], found[cut:]

    assert 4 * n <= temporary_bytes(leaves, words) <= 4 * n + 16 * 32


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint32, jnp.int8, jnp.float16, jnp.complex64])
def test_what_pack_does_not_take(dtype: jnp.dtype) -> None:
    with pytest.raises(TypeError, match=rf"got {jnp.dtype(dtype)}; .* write pack\(x > 0\)"):
        bitplanes.pack(jnp.ones(5, dtype))


def test_pack_needs_an_axis() -> None:
    with pytest.raises(ValueError, match=r"write pack\(x.reshape\(1\)\)"):
        bitplanes.pack(jnp.float32(1))


@pytest.mark.parametrize("f", [bitplanes.unpack, bitplanes.signs])
@pytest.mark.parametrize(("shape", "n"), [((2,), 65), ((2,), 32), ((2,), -1), ((0,), -1), ((), 1)])
def test_words_that_do_not_fit_their_length(f: Callable, shape: tuple[int, ...], n: int) -> None:
    with pytest.raises(ValueError, match=rf"^{n} bits .* pass the n"):
        f(jnp.zeros(shape, jnp.uint32), n)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32, jnp.uint16])
def test_words_of_another_dtype(dtype: jnp.dtype) -> None:
    wrong = jnp.zeros(1, dtype)
    right = (jnp.zeros(1, jnp.uint32),)
    for call in (
        lambda: bitplanes.unpack(wrong, 5),
        lambda: bitplanes.signs(wrong, 5),
        lambda: bitplanes.add(right, (wrong,), 2),
        lambda: bitplanes.greater((wrong,), right),
        lambda: bitplanes.exceeds((*right, wrong), 0),
        lambda: bitplanes.equals((wrong,), 0),
    ):
        with pytest.raises(TypeError, match=f"words are uint32, got {jnp.dtype(dtype)}"):
            call()


COUNTING: tuple[Callable, ...] = (
    lambda planes: bitplanes.add(planes, planes, 5),
    lambda planes: bitplanes.greater(planes, planes),
    lambda planes: bitplanes.exceeds(planes, 0),
    lambda planes: bitplanes.equals(planes, 0),
)


@pytest.mark.parametrize("f", COUNTING)
def test_planes_are_a_tuple_of_equal_shapes(f: Callable) -> None:
    with pytest.raises(TypeError, match="got an empty one"):
        f(())
    with pytest.raises(TypeError, match=r"Array.*; write \(words,\) .* do not stack"):
        f(jnp.zeros((2, 4), jnp.uint32))
    with pytest.raises(ValueError, match=r"one shape, got \(2,\), \(3,\)"):
        f((jnp.zeros(2, jnp.uint32), jnp.zeros(3, jnp.uint32)))


@pytest.mark.parametrize(("P", "Q", "width"), [(1, 3, 2), (3, 1, 2), (1, 1, 0)])
def test_a_sum_is_not_narrower_than_what_is_added(P: int, Q: int, width: int) -> None:
    plane = jnp.zeros(2, jnp.uint32)
    with pytest.raises(ValueError, match=f"of {P} and {Q} .* a width of at least {max(P, Q)}"):
        bitplanes.add((plane,) * P, (plane,) * Q, width)


@pytest.mark.parametrize("f", [bitplanes.exceeds, bitplanes.equals])
def test_numbers_to_compare_with_are_integers(f: Callable) -> None:
    with pytest.raises(TypeError, match="integer"):
        f((jnp.zeros(2, jnp.uint32),), 1.5)


@pytest.mark.parametrize("shape", [(32,), (3, 64), (2, 3, 320)])
def test_gpus_pack_by_halves(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **_: default(*args))
    bits = np.random.default_rng(5).random(shape) < 0.5
    np.testing.assert_array_equal(bitplanes.pack(jnp.asarray(bits)), packed(bits))
