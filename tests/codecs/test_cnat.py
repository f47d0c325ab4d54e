"""Natural compression, beyond what all codecs promise: its staircase, its edges, its formats."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import codec_oracles as expected
from jaxcomm import codecs
from jaxcomm.codecs import Codec
from jaxcomm.kernels.random_bits import random_bits

KEY = jax.random.key(3)
EXPONENTS = ("window", "fixed", "all")


@functools.cache
def compiled(codec: Codec) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    return jax.jit(codec.encode), jax.jit(codec.decode, static_argnums=1)


def decoded(codec: Codec, x: np.ndarray) -> np.ndarray:
    encode, decode = compiled(codec)
    return np.asarray(decode(encode(x, KEY), x.shape[-1]))


@pytest.mark.newest
@pytest.mark.parametrize("exponents", EXPONENTS)
def test_nearest_is_a_staircase(exponents: str) -> None:
    x = np.linspace(-8, 8, 4097, dtype=np.float32)
    out = decoded(codecs.cnat(exponents, "nearest"), x)
    # From 1 on, steps are at 1.5 times a power of two, where ties go up.
    assert set(out[np.abs(x) >= 1]) == {-8.0, -4.0, -2.0, -1.0, 1.0, 2.0, 4.0, 8.0}
    np.testing.assert_array_equal(out[(x >= 1) & (x < 1.5)], 1)
    np.testing.assert_array_equal(out[(x >= 1.5) & (x < 3)], 2)
    np.testing.assert_array_equal(out[(x >= 3) & (x < 6)], 4)
    np.testing.assert_array_equal(out, -out[::-1])


@pytest.mark.parametrize("exponents", EXPONENTS)
def test_random_is_a_neighbour_with_the_probability_of_the_mantissa(exponents: str) -> None:
    draws = 200_000
    x = np.float32([1.0, 1.125, 1.5, 1.75, -3.0, -2.5, 0.3, 2.0**-20 * 1.9])
    out = decoded(codecs.cnat(exponents), np.broadcast_to(x, (draws, len(x))))
    low = 2.0 ** np.floor(np.log2(np.abs(x)))
    assert ((np.abs(out) == low) | (np.abs(out) == 2 * low)).all()
    assert (np.sign(out) == np.sign(x)).all()
    wanted = np.abs(x) / low - 1
    found = (np.abs(out) == 2 * low).mean(0)
    deviation = np.sqrt(wanted * (1 - wanted) / draws)
    assert (np.abs(found - wanted) <= 4 * deviation + 1e-9).all()


@pytest.mark.parametrize("rounding", ["nearest", "random"])
def test_every_kind_of_float(rounding: str) -> None:
    patterns = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32)
    x = patterns.view(np.float32)
    x = x[np.isfinite(x)]
    words = np.asarray(random_bits(KEY, x.shape)) if rounding == "random" else expected.HALF
    for exponents, oracle in (
        ("window", expected.cnat_window),
        ("fixed", expected.cnat_fixed),
        ("all", expected.power_of_two),
    ):
        out = decoded(codecs.cnat(exponents, rounding), x)
        np.testing.assert_array_equal(out, oracle(x, words))


@pytest.mark.newest
def test_denormals_are_zero_or_the_least_normal() -> None:
    least = 2.0**-126
    x = np.float32([2.0**-149, 2.0**-128, 2.0**-127, 1.5 * 2.0**-127, least])
    for exponents in ("window", "all"):
        nearest = decoded(codecs.cnat(exponents, "nearest"), x)
        np.testing.assert_array_equal(nearest, np.float32([0, 0, least, least, least]))
        many = decoded(codecs.cnat(exponents), np.broadcast_to(x, (40_000, 5)))
        share = (many == np.float32(least)).mean(0)
        np.testing.assert_allclose(share, [0, 1 / 4, 1 / 2, 3 / 4, 1], atol=0.012)
        np.testing.assert_array_equal(many[many != np.float32(least)], 0)


@pytest.mark.parametrize("rounding", ["nearest", "random"])
def test_nothing_finite_becomes_infinite(rounding: str) -> None:
    x = np.float32([3.4028235e38, -3.4028235e38, 2.0**127, 1.9 * 2.0**127])
    wanted = np.float32(2.0**127) * np.sign(x)
    for exponents in ("window", "all"):
        np.testing.assert_array_equal(decoded(codecs.cnat(exponents, rounding), x), wanted)


@pytest.mark.newest
def test_fixed_ends_at_its_range() -> None:
    x = np.float32([1024, 1025, 2000, -1e30, 700, 800, 2.0**-50, 2.0**-51, 2.0**-52, -(2.0**-60)])
    nearest = decoded(codecs.cnat("fixed", "nearest"), x)
    wanted = np.float32([1024, 1024, 1024, -1024, 512, 1024, 2.0**-50, 2.0**-50, 0, 0])
    np.testing.assert_array_equal(nearest, wanted)
    many = decoded(codecs.cnat("fixed"), np.broadcast_to(x, (40_000, len(x))))
    assert set(many[:, 8]) == {0.0, 2.0**-50}
    np.testing.assert_allclose((many[:, 7:9] != 0).mean(0), [1 / 2, 1 / 4], atol=0.012)
    np.testing.assert_array_equal(many[:, 6], np.float32(2.0**-50))
    assert np.abs(many).max() == 1024


def test_fixed_is_the_eight_bits_of_its_docstring() -> None:
    x = np.float32([0, -0.0, 1, -1, 2.0**10, 2.0**-50, np.inf, -np.inf, np.nan])
    payload = compiled(codecs.cnat("fixed", "nearest"))[0](jnp.asarray(x))
    bits = [0, 0, 0x40 + 50, 0xC0 + 50, 0x40 + 60, 0x40, 0x7E, 0xFE, 0x7F]
    np.testing.assert_array_equal(payload, np.uint8(bits))


@pytest.mark.newest
def test_window_is_the_bytes_of_its_docstring() -> None:
    x = np.float32([3, -2, 0, 2.0**-124, 2.0**-125, 2.0**-126, -0.0])
    payload = compiled(codecs.cnat("window", "nearest"))[0](jnp.asarray(x))
    np.testing.assert_array_equal(payload, np.uint8([129, 127, 0xFE, 0, 1, 1, 0, 0]))
    nothing = compiled(codecs.cnat("window"))[0](jnp.zeros(3), KEY)
    np.testing.assert_array_equal(nothing, np.uint8([0, 0, 0, 0]))
    nan = compiled(codecs.cnat("window"))[0](jnp.float32([1, jnp.nan]), KEY)
    assert nan[0] == 255


def test_window_follows_the_message() -> None:
    x = np.float32([1, 2.0**-126, 1.5 * 2.0**-126])
    for scale in (2.0**-20, 1, 2.0**100):
        out = decoded(codecs.cnat("window", "nearest"), x * np.float32(scale))
        if scale >= 1:
            np.testing.assert_array_equal(out, np.float32([1, 2.0**-126, 2.0**-125]) * scale)
        else:  # float32 ends before the window
            np.testing.assert_array_equal(out, np.float32([scale, 0, 0]))


def test_window_rounds_what_is_below_it_without_bias() -> None:
    x = np.float32([2.0**100, 2.0**-27, 0.75 * 2.0**-26, -1.25 * 2.0**-30])
    many = decoded(codecs.cnat("window"), np.broadcast_to(x, (100_000, 4)))
    assert set(np.abs(many[:, 1:]).reshape(-1)) == {0.0, 2.0**-26}
    share = (many[:, 1:] != 0).mean(0)
    np.testing.assert_allclose(share, [1 / 2, 3 / 4, 1.25 / 16], atol=0.008)
    assert (many[:, 3] <= 0).all()


def test_all_is_the_nine_bits_of_its_docstring() -> None:
    x = np.float32([0, -0.0, 1, -1, 2.0**127, 2.0**-126, -np.inf, np.nan])
    payload = compiled(codecs.cnat("all", "nearest"))[0](jnp.asarray(x))
    fields, signs = [0, 0, 127, 127, 254, 1, 255, 0], 0b11001000
    np.testing.assert_array_equal(payload, np.uint8([*fields, signs, 0, 0, 0]))
