"""The properties of all codecs. A codec enters by a row of `codec_table.TABLE`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import codec_oracles as expected
import oracles
from codec_table import (
    KEY,
    ROWS,
    SAMPLES,
    TABLE,
    Case,
    N,
    compiled,
    sample,
    samples,
    there_and_back,
)
from jaxcomm import codecs
from jaxcomm.codecs import Codec
from jaxcomm.codecs.cnat import CnatWindow
from jaxcomm.kernels.random_bits import random_bits

each = pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
HAVE_A_RANGE = ("float16", "cnat_fixed", "cnat_fixed_nearest")
SCALED = [case for case in TABLE if hasattr(case.codec, "block_size")]


def each_that(is_chosen: Callable[[Case], bool]) -> Any:
    """Some of the cases."""
    cases = list(filter(is_chosen, TABLE))
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def largest_around(codec: Codec, x: np.ndarray) -> np.ndarray:
    """For every value of x[n], the largest magnitude of its block."""
    size = getattr(codec, "block_size", max(len(x), 1))
    starts = np.arange(0, len(x), size)
    return np.repeat(np.maximum.reduceat(np.abs(x), starts), size)[: len(x)]


def test_every_codec_is_in_the_table() -> None:
    # random_k sends some of the values: its laws are others.
    assert {case.codec.name for case in TABLE} == set(codecs.BY_NAME) - {"random_k"}


@pytest.mark.newest
@each
def test_equals_the_oracle(case: Case) -> None:
    x = samples()
    words = np.asarray(random_bits(KEY, x.shape))
    out = there_and_back(case.codec, x)
    for row, own, decoded in zip(x, words, out, strict=True):
        wanted = case.oracle(row, own if case.codec.is_random else expected.HALF)
        # A norm that differs in its last bit may be rounded up to another unit.
        np.testing.assert_allclose(decoded, wanted, rtol=0 if case.exact else 2.0**-15)


@pytest.mark.parametrize(
    ("case", "scale"),
    [
        pytest.param(case, scale, id=f"{case.name}-{scale:g}")
        for case in TABLE
        for scale in ([1] if case.name in HAVE_A_RANGE else [2.0**-60, 1, 2.0**100])
    ],
)
def test_errors_are_within_their_bound(case: Case, scale: float) -> None:
    x = samples() * np.float32(scale)
    for row, out in zip(x, there_and_back(case.codec, x), strict=True):
        bound = case.error(row, largest_around(case.codec, row))
        assert (np.abs(out.astype(np.float64) - row) <= (1 + 2.0**-15) * bound).all()


# The values that the others decode to have another norm, or none of their grid.
@each_that(lambda case: not case.codec.is_random or case.name.startswith("cnat"))
def test_is_idempotent_on_its_grid(case: Case) -> None:
    once = there_and_back(case.codec, samples(seed=5))
    again = there_and_back(case.codec, once, jax.random.key(8))
    np.testing.assert_array_equal(again, once)


@each
def test_messages_are_independent(case: Case) -> None:
    encode, decode = compiled(case.codec)
    x = samples() * np.resize(np.float32([1, 1e3, 1e-3, 0]), (ROWS, 1))
    whole = np.asarray(encode(x, KEY))
    other = x.copy()
    other[1:] *= 3
    np.testing.assert_array_equal(encode(other, KEY)[0], whole[0])
    out = there_and_back(case.codec, x)
    for row, payload in zip(out, whole, strict=True):
        np.testing.assert_array_equal(decode(payload, N), row)
    if not case.codec.is_random:
        for row, same in zip(x, out, strict=True):
            alone = decode(encode(row, KEY), N)
            np.testing.assert_allclose(alone, same, rtol=0 if case.exact else 2.0**-15)


@each
def test_sums_are_of_decoded_values_in_order(case: Case) -> None:
    encode, decode = compiled(case.codec)
    scales = np.resize(np.float32([1, 1e-5, 1e4, 1e-3, 30]), (ROWS, 1))  # sums are rounded
    payloads = encode(sample("normal", ROWS * N).reshape(ROWS, N) * scales, KEY)
    wanted = np.zeros(N, np.float32)
    for values in np.asarray(decode(payloads, N))[:5]:
        wanted = wanted + values
    total = jax.jit(case.codec.decode_and_sum, static_argnums=1)(payloads[:5], N)
    np.testing.assert_array_equal(total, wanted)


@each
def test_blocks_have_any_number_of_leading_axes(case: Case) -> None:
    encode, decode = compiled(case.codec)
    x, lead = samples(), (2, ROWS // 2)
    payload, flat = encode(x.reshape(*lead, N), KEY), encode(x, KEY)
    np.testing.assert_array_equal(payload, flat.reshape(*lead, -1))
    out = decode(payload, N)
    np.testing.assert_array_equal(out, decode(flat, N).reshape(*lead, N))
    none = jax.ShapeDtypeStruct((0, *payload.shape[1:]), payload.dtype)
    assert jax.eval_shape(lambda none: decode(none, N), none).shape == (0, ROWS // 2, N)


@each
@pytest.mark.parametrize(("n", "lead"), [(1, ()), (31, (3,)), (32, ()), (257, (3,)), (1000, ())])
def test_payload_has_exactly_the_stated_bytes(case: Case, n: int, lead: tuple[int, ...]) -> None:
    x = jax.ShapeDtypeStruct((*lead, n), jnp.float32)
    payload = jax.eval_shape(case.codec.encode, x, KEY)
    assert payload.shape[:-1] == lead
    assert payload.shape[-1] * payload.dtype.itemsize == case.bytes(n)
    decoded = jax.eval_shape(lambda payload: case.codec.decode(payload, n), payload)
    assert decoded.shape == (*lead, n) and decoded.dtype == jnp.float32
    assert case.codec.message_bytes(n) == case.bytes(n)


@each
def test_zeros_stay_zeros(case: Case) -> None:
    zeros = np.zeros((ROWS, N), np.float32) * np.resize(np.float32([1, -1]), (ROWS, 1))
    np.testing.assert_array_equal(there_and_back(case.codec, zeros), 0)
    encode, decode = compiled(case.codec)
    payload = jnp.zeros_like(encode(zeros, KEY))
    np.testing.assert_array_equal(decode(payload, N), 0)
    if case.codec.needs_error_feedback:
        return  # other values give it a sign
    x = samples()
    x[:, ::3] = 0
    np.testing.assert_array_equal(there_and_back(case.codec, x)[:, ::3], 0)


@pytest.mark.parametrize(
    ("case", "n"), [*((case, 90) for case in TABLE), *((case, 1) for case in TABLE[::3])]
)
def test_padding_changes_nothing_before_it(case: Case, n: int) -> None:
    x = samples()[:, :n]
    alone = there_and_back(case.codec, x)
    padded = there_and_back(case.codec, np.pad(x, ((0, 0), (0, N - n))))
    if case.codec.needs_error_feedback:  # no code for zero: the scale of the last block shrinks
        before, last = n // case.codec.block_size * case.codec.block_size, n - 1
        np.testing.assert_array_equal(padded[:, :before], alone[:, :before])
        assert (np.abs(padded).max(1) <= np.abs(alone).max(1)).all() or before
        if case.codec.name == "scaled_sign":
            assert (np.abs(padded[:, last]) <= np.abs(alone[:, last])).all()
        np.testing.assert_array_equal(np.sign(padded[:, :n]), np.sign(alone))
        return
    # Another order of summation, of the zeros too, may change the last bit of a norm.
    tolerance = 0 if case.exact else 2.0**-15
    np.testing.assert_allclose(padded[:, :n], alone, rtol=tolerance)
    np.testing.assert_array_equal(padded[:, n:], 0)


@each
def test_nothing_non_finite_is_lost(case: Case) -> None:
    good = np.broadcast_to(sample("normal", N), (ROWS, N))
    x = good.copy()
    places = [
        (bad, place) for bad in (np.nan, -np.nan, np.inf, -np.inf) for place in (0, 130, N - 1)
    ]
    for row, (bad, place) in zip(x, places, strict=False):
        row[place] = bad
    good, out = there_and_back(case.codec, good), there_and_back(case.codec, x)
    np.testing.assert_array_equal(out[-1], good[-1])
    for row, same, (bad, place) in zip(out, good, places, strict=False):
        if hasattr(case.codec, "block_size"):
            lost = np.arange(N) // case.codec.block_size == place // case.codec.block_size
            assert np.isnan(row[lost]).all()
        elif isinstance(case.codec, CnatWindow):
            lost = np.full(N, True)
            assert np.isnan(row).all()
        else:
            lost = np.arange(N) == place
            np.testing.assert_array_equal(row[place], np.float32(bad))
        np.testing.assert_array_equal(row[~lost], same[~lost])


@each_that(lambda case: case.codec.largest is None)
def test_finite_values_stay_finite(case: Case) -> None:
    most, tiny = np.finfo(np.float32).max, np.float32(2.0**-149)
    i = np.arange(N)
    rows = [
        np.full(N, most),
        np.where(i % 2 == 0, most, -most / 3),
        np.where(i % 7 == 0, most, tiny),
        np.full(N, tiny),
        np.where(i % 2 == 0, 2.0**-126, -(2.0**-149)),
        np.full(N, 2.0**-127),
        np.where(i % 300 == 0, 2.0**-125, 2.0**-126),
    ]
    x = np.resize(np.stack(rows), (ROWS, N)).astype(np.float32)
    out = there_and_back(case.codec, x)
    finite = np.isfinite(out)
    if case.name == "bf16":  # rounds up to infinity above 2^128 - 2^119
        finite |= np.abs(x) == most
    assert finite.all()
    assert (np.sign(out) * np.sign(x) >= 0).all()
    if not case.name.startswith(("cnat_fixed", "scaled_sign")):
        assert (np.abs(out[:3]).max(1) > 8e37).all()  # nor is the largest lost


@each_that(lambda case: case.variance is not None)
def test_unbiased_codecs_are_unbiased(case: Case) -> None:
    n, draws = 60, 10_000
    for kind in SAMPLES:
        x = sample(kind, n, seed=3)
        out = there_and_back(case.codec, np.broadcast_to(x, (draws, n))).astype(np.float64)
        wrong = np.abs(out.mean(0) - x)
        spread = 5 * out.std(0) / draws**0.5
        rare = 3 * np.abs(out).max() / draws  # what happens only a few times in all draws
        assert (wrong <= spread + rare + 2.0**-15 * np.abs(x)).all()
        noise = ((out - x) ** 2).sum(1).mean() / (x.astype(np.float64) ** 2).sum()
        assert noise <= case.variance * 1.01


@each
def test_random_codecs_repeat_themselves_with_a_key(case: Case) -> None:
    x = np.broadcast_to(sample("normal", N), (ROWS, N))
    encode = compiled(case.codec)[0]
    once, again, other = encode(x, KEY), encode(x, KEY), encode(x, jax.random.key(8))
    np.testing.assert_array_equal(once, again)
    assert case.codec.is_random == bool((once != other).any())
    assert case.codec.is_random == bool((once[0] != once[1]).any())


@each
def test_random_codecs_need_a_key(case: Case) -> None:
    if case.codec.is_random:
        with pytest.raises(ValueError, match=f"{case.codec.name} rounds at random and needs a key"):
            case.codec.encode(jnp.zeros(8))
    else:
        assert jax.eval_shape(case.codec.encode, jnp.zeros(8)).ndim == 1


@pytest.mark.parametrize("case", SCALED, ids=lambda case: case.name)
@pytest.mark.parametrize(
    ("size", "error"),
    [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError), (None, TypeError)],
)
def test_block_sizes_are_checked(case: Case, size: object, error: type) -> None:
    with pytest.raises(error, match=f"block_size must be an integer of at least 1, got {size}"):
        dataclasses.replace(case.codec, block_size=size)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: codecs.cnat("windows"),
            ValueError,
            '"window" or "fixed" or "all", got \'windows\'',
        ),
        (lambda: codecs.cnat(rounding="up"), ValueError, '"nearest" or "random", got \'up\''),
        (lambda: codecs.int8(rounding="up"), ValueError, '"nearest" or "random", got \'up\''),
        (lambda: codecs.int4(64, "odd"), ValueError, '"nearest" or "random", got \'odd\''),
        (lambda: codecs.qsgd(0), ValueError, "levels must be an integer from 1 to 127, got 0"),
        (lambda: codecs.qsgd(128), ValueError, "levels must be an integer from 1 to 127, got 128"),
        (lambda: codecs.qsgd(2.5), TypeError, "levels must be an integer from 1 to 127, got 2.5"),
        (lambda: codecs.terngrad(clip=0), ValueError, "clip must be positive and finite"),
        (lambda: codecs.terngrad(clip=float("nan")), ValueError, "clip must be positive"),
        (lambda: codecs.scaled_sign(0), ValueError, "block_size must be an integer of at least 1"),
        (lambda: codecs.terngrad(clip="2.5"), TypeError, "clip must be a number or None"),
    ],
)
def test_arguments_are_checked_at_construction(
    make: Callable[[], Codec], error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("levels", [1, 2, 7, 8, 31, 64, 127])  # codes of 2 to 8 bits
def test_qsgd_with_any_number_of_levels(levels: int) -> None:
    codec, x = codecs.qsgd(levels, 50), sample("normal", 333)
    wanted = expected.blockwise(x, np.asarray(random_bits(KEY, x.shape)), 50, levels, "l2")
    np.testing.assert_allclose(there_and_back(codec, x), wanted, rtol=2.0**-15)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_native_dtype_has_the_codec_precision(name: str) -> None:
    x = sample("normal", 1000)
    native = codecs.from_name(name).native(jnp.asarray(x))
    assert native.dtype == jnp.dtype(name)
    np.testing.assert_array_equal(native.astype(jnp.float32), oracles.ROUNDING[name](x))


@each
def test_xla_cannot_add_codes(case: Case) -> None:
    if case.codec.name not in ("float32", "bfloat16", "float16"):
        with pytest.raises(ValueError, match=f"cannot add {case.codec.name} codes"):
            case.codec.native(jnp.zeros(3))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown codec 'bf16'; choose one of float32, bfloat16"):
        codecs.from_name("bf16")


def test_a_factory_that_was_not_called_is_named() -> None:
    with pytest.raises(TypeError, match="must be called"):
        codecs.from_name(codecs.bfloat16)  # pyright: ignore[reportArgumentType]


WITH_KERNELS = [case for case in TABLE if case.codec.operations]


def test_the_codecs_with_kernels() -> None:
    names = {"int8", "int4", "fp8_e4m3", "fp8_e5m2", "cnat"}
    assert {case.codec.name for case in WITH_KERNELS} == names
    assert codecs.random_k(0.1, codecs.int8()).operations == codecs.int8().operations


@pytest.mark.parametrize("case", WITH_KERNELS, ids=lambda case: case.name)
def test_the_option_reaches_the_kernels_of_a_codec(case: Case) -> None:
    codec = dataclasses.replace(case.codec, implementation="mosaic")
    assert codec == case.codec and codec.implementation == "mosaic"
    x = jnp.zeros(8)
    payloads = jax.eval_shape(case.codec.encode, x[None], KEY)
    calls = {
        "encode": lambda: codec.encode(x, KEY),
        "decode_and_sum": lambda: codec.decode_and_sum(payloads, 8),
    }
    for operation in codec.operations:
        with pytest.raises(NotImplementedError, match="there is no NVIDIA GPU"):
            calls[operation.partition(".")[2]]()
    one = dataclasses.replace(codec, implementation=((codec.operations[0], "xla"),))
    assert hash(one) == hash(case.codec)
    jax.eval_shape(one.encode, x, KEY)


def test_terngrad_clips_by_the_deviation_of_what_is_not_zero() -> None:
    """Zeros, such as padding, do not lower it: here it is 1, and nothing is beyond."""
    x = jnp.zeros(512).at[:64].set(jnp.tile(jnp.array([1.0, -1.0]), 32))
    codec = codecs.terngrad(clip=1.0)
    found = codec.decode(codec.encode(x, jax.random.key(0)), 512)
    np.testing.assert_allclose(found, x, rtol=1e-4)


@each
@pytest.mark.parametrize("n", [1, 256, 1000, 4096])
def test_errors_and_sums_are_those_of_the_values(case: Case, n: int) -> None:
    """What CPUs compute without storing the values, bit for bit."""
    x = np.stack([sample("normal", n, seed) for seed in range(3)])
    payload = case.codec.encode(x, KEY)
    values = np.asarray(case.codec.decode(payload, n))
    np.testing.assert_array_equal(jax.jit(case.codec.error)(x, payload), x - values)

    def in_order(rows: np.ndarray) -> np.ndarray:
        return (rows[0] + rows[1]) + rows[2]

    total = jax.jit(case.codec.decode_and_sum, static_argnums=1)(payload, n)
    np.testing.assert_array_equal(total, in_order(values))
    own = np.where(np.arange(3)[:, None] == 1, x, values)
    total = jax.jit(case.codec.sum_with_own)(payload, x[1], jnp.int32(1))
    np.testing.assert_array_equal(total, in_order(own))


@pytest.mark.parametrize("name", codecs.BY_NAME)
def test_no_messages_are_none(name: str) -> None:
    codec = codecs.from_name(name)
    payload = codec.encode(jnp.zeros((0, 5)), KEY)
    assert payload.shape[0] == 0
    assert codec.decode(payload, 5).shape == (0, 5)


def test_what_is_clipped_has_an_error_below_its_values() -> None:
    assert codecs.terngrad(64).variance == 3.5 and codecs.terngrad(64, clip=2.5).variance == 0
