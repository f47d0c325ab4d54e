"""Counter-based random bits against published vectors, and against Threefry in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.kernels import random_bits as kernel
from jaxcomm.kernels.random_bits import own_key, random_bits, seeded_key, threefry2x32

# Known answers of the authors' library Random123, file tests/kat_vectors: rounds, counter, key.
ONES = 0xFFFFFFFF
VECTORS = [
    (13, (0, 0), (0, 0), (0x9D1C5EC6, 0x8BD50731)),
    (13, (ONES, ONES), (ONES, ONES), (0xFD36D048, 0x2D17272C)),
    (13, (0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xBA3E4725, 0xF27D669E)),
    (20, (0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    (20, (ONES, ONES), (ONES, ONES), (0x1CB996FC, 0xBB002BE7)),
    (20, (0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    (32, (0, 0), (0, 0), (0xCEE3D47E, 0xA23DFD5C)),
    (32, (ONES, ONES), (ONES, ONES), (0x6E2FE0D0, 0xB1B76F82)),
    (32, (0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xE2827716, 0xC3C05CDF)),
]


@pytest.mark.newest
@pytest.mark.parametrize(("rounds", "counter", "key", "answer"), VECTORS)
def test_threefry_gives_the_published_answers(
    rounds: int, counter: tuple[int, int], key: tuple[int, int], answer: tuple[int, int]
) -> None:
    words = [jnp.uint32(word) for word in (*key, *counter)]
    x, y = jax.jit(lambda a, b, c, d: threefry2x32((a, b), (c, d), rounds))(*words)
    assert (int(x), int(y)) == answer


def threefry(key: tuple[int, int], counter: tuple[int, int], rounds: int) -> int:
    """Salmon et al. 2011, section 4.2, in Python's integers; the first of two words."""
    keys = [*key, key[0] ^ key[1] ^ 0x1BD11BDA]
    x, y = (counter[0] + keys[0]) % 2**32, (counter[1] + keys[1]) % 2**32
    for i in range(1, rounds + 1):
        by = (13, 15, 26, 6, 17, 29, 16, 24)[(i - 1) % 8]
        x = (x + y) % 2**32
        y = (y << by | y >> (32 - by)) % 2**32 ^ x
        if i % 4 == 0:
            x = (x + keys[i // 4 % 3]) % 2**32
            y = (y + keys[(i // 4 + 1) % 3] + i // 4) % 2**32
    return x


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_words_are_those_of_their_row_and_column(impl: str) -> None:
    key = jax.random.key(5, impl=impl)
    own = jax.random.bits(key, (2,)) if impl == "rbg" else jax.random.key_data(key)
    own = tuple(int(word) for word in own)
    found = jax.jit(lambda key: random_bits(key, (2, 3, 4)))(key)
    assert found.dtype == jnp.uint32
    wanted = [[threefry(own, (i, row), kernel.ROUNDS) for i in range(4)] for row in range(6)]
    np.testing.assert_array_equal(found, np.uint32(wanted).reshape(2, 3, 4))


def test_a_longer_axis_changes_nothing_before_its_end() -> None:
    key = jax.random.key(0)
    short, long = random_bits(key, (3, 5)), random_bits(key, (3, 9))
    np.testing.assert_array_equal(long[:, :5], short)
    np.testing.assert_array_equal(random_bits(key, (5,)), short[0])


def test_bits_are_fair_and_independent() -> None:
    n = 2**17
    words = np.asarray(jax.jit(lambda key: random_bits(key, (4, n)))(jax.random.key(1)))
    bits = (words[..., None] >> np.arange(32, dtype=np.uint32)) & 1
    deviation = 0.5 / n**0.5
    assert (np.abs(bits.mean(1) - 0.5) < 5 * deviation).all()
    signs = bits.reshape(4 * n, 32).astype(np.float32) * 2 - 1
    correlation = signs.T @ signs / (4 * n) - np.eye(32)
    assert np.abs(correlation).max() < 5 / (4 * n) ** 0.5
    assert abs(np.corrcoef(words[0], words[1])[0, 1]) < 5 / n**0.5
    assert abs(np.corrcoef(words[0, 1:], words[0, :-1])[0, 1]) < 5 / n**0.5
    assert len(np.unique(words)) > 4 * n - 100


def test_they_are_not_those_that_a_caller_gets_from_the_key() -> None:
    key = jax.random.key(2)
    ours = set(np.asarray(random_bits(key, (1000,))))
    theirs = np.asarray(jax.random.key_data(jax.random.split(key, 500)))
    assert len(ours & set(theirs.reshape(-1))) <= 1


def test_keys_may_be_mapped() -> None:
    keys = jax.random.split(jax.random.key(3), 4)
    mapped = jax.vmap(lambda key: random_bits(key, (7,)))(keys)
    np.testing.assert_array_equal(mapped, np.stack([random_bits(key, (7,)) for key in keys]))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_own_keys_give_independent_words(impl: str) -> None:
    """Also where the sum of key and counter is nearly the same: 10946 times the first constant."""
    key, n = jax.random.key(4, impl=impl), 2**18
    assert jax.random.key_impl(own_key(key, 0)) == "threefry2x32"
    words = jax.jit(lambda first, second: random_bits(own_key(key, first, second), (n,)))
    reference, deviation = np.asarray(words(0, 0)), 0.5 / n**0.5
    for first, second in [(1, 0), (2, 0), (0, 1), (1, 1), (0, 1 << 16), (3, (1 << 16) + 1)]:
        differing = reference ^ np.asarray(words(first, second))
        bits = (differing[:, None] >> np.arange(32, dtype=np.uint32)) & 1
        assert (np.abs(bits.mean(0) - 0.5) < 5 * deviation).all(), (first, second)
    near = 0x9E3779B9 * 10946 % 2**32
    differing = reference[near:] ^ np.asarray(words(10946, 0))[: n - near]
    bits = (differing[:, None] >> np.arange(32, dtype=np.uint32)) & 1
    assert (np.abs(bits.mean(0) - 0.5) < 5 * 0.5 / (n - near) ** 0.5).all()


@pytest.mark.parametrize("seed", [0, 5, 2**31, 2**32, 2**40 + 5, -1])
def test_all_bits_of_a_seed_count_with_and_without_x64(seed: int) -> None:
    with jax.enable_x64(True):
        wanted = jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))
    for x64 in (False, True):
        with jax.enable_x64(x64):
            for same in (seed, np.int64(seed)):
                np.testing.assert_array_equal(jax.random.key_data(seeded_key(same)), wanted)


def test_own_keys_are_composed_of_both_numbers() -> None:
    key = jax.random.key(5)
    pairs = [(first, second) for first in range(4) for second in (0, 1, 2, 1 << 16, (1 << 31) + 1)]
    data = {tuple(np.asarray(jax.random.key_data(own_key(key, *pair)))) for pair in pairs}
    assert len(data) == len(pairs)
    both = own_key(own_key(key, 3), 0, 7)
    np.testing.assert_array_equal(
        jax.random.key_data(both), jax.random.key_data(own_key(key, 3, 7))
    )
