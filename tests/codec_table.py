"""Every codec as a row of a table: what is true of it, and what it is tried on."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np

import codec_oracles as expected
import oracles
from jaxcomm import codecs
from jaxcomm.codecs import Codec

KEY = jax.random.key(7)


@dataclasses.dataclass(frozen=True)
class Case:
    """A codec, and what must be true of it.

    Attributes:
      oracle: x[n] and words, uint32[n] or HALF, to the values that are decoded.
      bytes: of a message of n values, by hand.
      error: of x and the largest magnitude around each value, the largest error of each value.
      exact: whether the oracle's norms are the codec's, bit for bit.
      variance: for unbiased codecs, the bound of E|C(x) - x|^2 / |x|^2.
    """

    name: str
    codec: Codec
    oracle: Callable[..., np.ndarray]
    bytes: Callable[[int], int]
    error: Callable[[np.ndarray, np.ndarray], np.ndarray]
    exact: bool = True
    variance: float | None = None


def plain(rounding: oracles.Rounding) -> Callable[..., np.ndarray]:
    return lambda x, words: rounding(x)


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def with_scales(size: int, bits: int) -> Callable[[int], int]:
    """Bytes of blocks of `bits` a value, every block from a byte on, with 4 bytes a block."""
    return lambda n: sum(4 + ceil(bits * min(size, n - start), 8) for start in range(0, n, size))


def below(share: float) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    return lambda x, top: share * np.abs(x)


def of_top(share: float) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    return lambda x, top: share * top


window, fixed, every = expected.cnat_window, expected.cnat_fixed, expected.power_of_two
levels = expected.blockwise
TABLE = [
    Case("float32", codecs.float32(), plain(oracles.round_float32), lambda n: 4 * n, below(0)),
    Case("bf16", codecs.bfloat16(), plain(oracles.round_bfloat16), lambda n: 2 * n, below(2**-8)),
    Case(
        "float16",
        codecs.float16(),
        plain(oracles.round_float16),
        lambda n: 2 * n,
        lambda x, top: np.maximum(2.0**-11 * np.abs(x), 2.0**-25),
    ),
    Case("cnat", codecs.cnat(), window, lambda n: n + 1, below(1), variance=1 / 8),
    Case("cnat_nearest", codecs.cnat("window", "nearest"), window, lambda n: n + 1, below(1 / 3)),
    Case("cnat_fixed", codecs.cnat("fixed"), fixed, lambda n: n, below(1), variance=1 / 8),
    Case("cnat_fixed_nearest", codecs.cnat("fixed", "nearest"), fixed, lambda n: n, below(1 / 3)),
    Case(
        "cnat_all",
        codecs.cnat("all"),
        every,
        lambda n: n + 4 * ceil(n, 32),
        below(1),
        variance=1 / 8,
    ),
    Case(
        "cnat_all_nearest",
        codecs.cnat("all", "nearest"),
        every,
        lambda n: n + 4 * ceil(n, 32),
        below(1 / 3),
    ),
    Case(
        "int8",
        codecs.int8(),
        functools.partial(levels, size=256, levels=127, norm="max"),
        with_scales(256, 8),
        of_top(0.5 / 127),
    ),
    Case(
        "int8_random",
        codecs.int8(96, "random"),
        functools.partial(levels, size=96, levels=127, norm="max"),
        with_scales(96, 8),
        of_top(1 / 127),
        variance=96 / 4 / 127**2,
    ),
    Case(
        "int4",
        codecs.int4(),
        functools.partial(levels, size=64, levels=7, norm="max"),
        with_scales(64, 4),
        of_top(0.5 / 7),
    ),
    Case(
        "int4_random",
        codecs.int4(37, "random"),
        functools.partial(levels, size=37, levels=7, norm="max"),
        with_scales(37, 4),
        of_top(1 / 7),
        variance=37 / 4 / 7**2,
    ),
    Case(
        "fp8_e4m3",
        codecs.fp8_e4m3(),
        lambda x, words: expected.fp8(x, 256, 4, 448),
        with_scales(256, 8),
        lambda x, top: np.maximum(2.0**-4 * np.abs(x), 2.0**-10 / 448 * top),
    ),
    Case(
        "fp8_e5m2",
        codecs.fp8_e5m2(100),
        lambda x, words: expected.fp8(x, 100, 5, 57344),
        with_scales(100, 8),
        lambda x, top: np.maximum(2.0**-3 * np.abs(x), 2.0**-17 / 57344 * top),
    ),
    Case(
        "qsgd",
        codecs.qsgd(),
        functools.partial(levels, size=512, levels=7, norm="l2"),
        with_scales(512, 4),
        of_top(512**0.5 / 7),
        exact=False,
        variance=512**0.5 / 7,
    ),
    Case(
        "qsgd_3_bits",
        codecs.qsgd(3, 40),
        functools.partial(levels, size=40, levels=3, norm="l2"),
        lambda n: sum(
            4 + ceil(2 * min(40, n - i), 8) + ceil(min(40, n - i), 8) for i in range(0, n, 40)
        ),
        of_top(40**0.5 / 3),
        exact=False,
        variance=40**0.5 / 3,
    ),
    Case(
        "terngrad",
        codecs.terngrad(),
        functools.partial(expected.terngrad, size=512, clip=None),
        with_scales(512, 2),
        of_top(1),
        variance=512**0.5,
    ),
    Case(
        "terngrad_clip",
        codecs.terngrad(128, clip=2.5),
        functools.partial(expected.terngrad, size=128, clip=2.5),
        with_scales(128, 2),
        of_top(1),
        exact=False,
    ),
    Case(
        "int2",
        codecs.int2(),
        lambda x, words: expected.int2(x, 256),
        with_scales(256, 2),
        of_top(1),
        exact=False,
    ),
    Case(
        "int2_30",
        codecs.int2(30),
        lambda x, words: expected.int2(x, 30),
        with_scales(30, 2),
        of_top(1),
        exact=False,
    ),
    Case(
        "scaled_sign",
        codecs.scaled_sign(),
        lambda x, words: expected.scaled_sign(x, 1024),
        with_scales(1024, 1),
        of_top(1),
        exact=False,
    ),
    Case(
        "scaled_sign_30",
        codecs.scaled_sign(30),
        lambda x, words: expected.scaled_sign(x, 30),
        with_scales(30, 1),
        of_top(1),
        exact=False,
    ),
]

SAMPLES = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "wide": lambda rng, n: rng.standard_normal(n) * 2.0 ** rng.integers(-30, 4, n),
    "grid": lambda rng, n: rng.integers(-12, 13, n) / 4.0,
}


ROWS, N = 14, 700  # one shape for most properties, so that each codec is compiled once for them


def sample(kind: str, n: int, seed: int = 0) -> np.ndarray:
    return SAMPLES[kind](np.random.default_rng(seed), n).astype(np.float32)


def samples(seed: int = 0) -> np.ndarray:
    """`(ROWS, N)` of all kinds in turn."""
    kinds = [*SAMPLES] * ROWS
    return np.stack([sample(kinds[row], N, ROWS * seed + row) for row in range(ROWS)])


@functools.cache
def compiled(codec: Codec) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    return jax.jit(codec.encode), jax.jit(codec.decode, static_argnums=1)


def there_and_back(codec: Codec, x: np.ndarray, key: jax.Array = KEY) -> np.ndarray:
    """What x is decoded to, both ways compiled."""
    encode, decode = compiled(codec)
    return np.asarray(decode(encode(x, key), x.shape[-1]))
