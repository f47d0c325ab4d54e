"""Integers in blocks against numpy, and every implementation against the plain one, bit by bit."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import codec_oracles as expected
from implementations import every_implementation
from jaxcomm import codecs
from jaxcomm.kernels.block_quantization import integers
from jaxcomm.kernels.random_bits import random_bits

KEY = jax.random.key(5)


CODECS = {127: codecs.int8, 7: codecs.int4}


def given(x: jax.Array, levels: int, size: int, key: jax.Array | None) -> tuple[Any, ...]:
    """What the kernel takes."""
    return x, integers.writing(levels, size), key


def there_and_back(
    f: Callable, x: np.ndarray, levels: int, size: int, key: jax.Array | None
) -> tuple[np.ndarray, ...]:
    """The payload, the plain one, what the first is decoded to, and the words for each value."""

    def run(x: jax.Array) -> tuple[jax.Array, ...]:
        payload = f(x, levels, size, key)
        decoded = CODECS[levels](size).decode(payload, x.shape[-1])
        return (
            payload,
            integers.encode(x, levels, size, key),
            decoded,
            random_bits(KEY, x.shape),
        )

    return tuple(map(np.asarray, jax.jit(run)(x)))


# Two programs, of which the second takes blocks of the first again, and a block that is cut short;
# messages of more than one; blocks that begin anywhere, fewer than a program takes; no whole block.
CASES = [
    pytest.param(127, 256, (17 * 256 + 13,), True, marks=pytest.mark.newest),
    (7, 64, (2, 65 * 64), True),
    (7, 64, (66 * 64 + 3,), False),
    (127, 36, (2, 3 * 36 + 5), False),
    (127, 256, (255,), True),
]


@every_implementation(integers.encode, given=given)
@pytest.mark.parametrize(("levels", "size", "shape", "is_random"), CASES)
def test_equals_the_oracle_and_the_specification(
    levels: int, size: int, shape: tuple[int, ...], is_random: bool, f: Callable
) -> None:
    rng = np.random.default_rng(levels + size)
    x = (rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 4, shape)).astype(np.float32)
    key = KEY if is_random else None
    payload, plain, decoded, words = there_and_back(f, x, levels, size, key)
    np.testing.assert_array_equal(payload, plain)
    rows = (array.reshape(-1, shape[-1]) for array in (x, words, decoded))
    for row, bits, found in zip(*rows, strict=True):
        own = bits if is_random else expected.HALF
        wanted = expected.blockwise(row, own, size, levels, "max")
        np.testing.assert_array_equal(found, wanted)


@every_implementation(integers.encode, given=given)
def test_special_values(f: Callable) -> None:
    """Of blocks that are not finite only the unit matters."""
    blocks = np.zeros((16, 256), np.float32)
    blocks[1:9, 3] = [np.nan, np.inf, -np.inf, 2.0**-149, 2.0**-126, 127 / 2**125, -3.4e38, 127]
    blocks[1:9, 4] = [1, 1, 1, 0, 0, 0, 1, 126.5]
    *_, decoded, _ = there_and_back(f, blocks.reshape(-1), 127, 256, None)
    decoded = decoded.reshape(blocks.shape)
    assert np.isnan(decoded[1:4]).all()
    np.testing.assert_array_equal(decoded[[0, 4, 5, *range(9, 16)]], 0)
    np.testing.assert_array_equal(decoded[[6, 8], 3], np.float32([127 / 2**125, 127]))
    assert (decoded[8, 4], decoded[7, 4]) == (127, 0)
    np.testing.assert_allclose(decoded[7, 3], -3.4e38, rtol=1e-4)


@pytest.mark.parametrize(
    ("levels", "size", "messages", "n"),
    [(127, 256, 3, 17 * 256 + 13), (7, 64, 2, 65 * 64), (127, 37, 2, 3 * 37 + 5), (7, 64, 1, 63)],
)
def test_decode_and_sum(levels: int, size: int, messages: int, n: int) -> None:
    """Units are powers of two that are near to each other: no sum is rounded."""
    rng = np.random.default_rng(n)
    x = rng.integers(-levels, levels + 1, (messages, n)).astype(np.float32)
    x[:, ::size] = levels
    x *= 2.0 ** (np.arange(n) // size % 4)
    x[0, n // 2] = np.nan

    def run(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        payloads = integers.encode(x, levels, size)
        codec = CODECS[levels](size)
        return codec.decode_and_sum(payloads, n), codec.decode(payloads, n)

    total, values = map(np.asarray, jax.jit(run)(x))
    lost = np.arange(n) // size == n // 2 // size
    np.testing.assert_array_equal(np.isnan(total), lost)
    np.testing.assert_array_equal(total[~lost], x[:, ~lost].sum(axis=0))
    np.testing.assert_array_equal(values[1:], x[1:])


def test_nothing_is_nothing() -> None:
    for shape in ((0,), (3, 0)):
        encode = functools.partial(integers.encode, levels=127, size=256)
        assert jax.eval_shape(encode, jnp.zeros(shape)).shape == shape


def test_a_named_one_that_cannot_run_is_refused() -> None:
    x = jnp.zeros(512)
    with pytest.raises(NotImplementedError, match="there is no NVIDIA GPU"):
        integers.encode(x, 127, 256, implementation="mosaic")
    with pytest.raises(NotImplementedError, match="no implementation 'triton'"):
        integers.encode(x, 127, 256, implementation="triton")


@pytest.mark.parametrize(
    ("levels", "size", "says"),
    [(3, 64, "got 3 bits"), (7, 63, "blocks of 63"), (127, 4096, "no room for blocks of 4096")],
)
def test_what_the_kernel_does_not_do_is_refused(levels: int, size: int, says: str) -> None:
    from jaxcomm.kernels.block_quantization import mosaic

    with pytest.raises(NotImplementedError, match=says):
        mosaic.encode(jnp.zeros(2 * size), integers.writing(levels, size), None)


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="takes float32, got bfloat16"):
        integers.encode(jnp.zeros(4, jnp.bfloat16), 127, 256)
    with pytest.raises(ValueError, match="got a scalar"):
        integers.encode(jnp.float32(1), 127, 256)
    for levels, size in ((0, 256), (128, 256), (127, 0)):
        with pytest.raises(ValueError, match="levels are 1 to 127"):
            integers.encode(jnp.zeros(4), levels, size)
    with pytest.raises(TypeError, match="a payload is uint8, got uint32"):
        codecs.int8().decode(jnp.zeros(8, jnp.uint32), 4)
    with pytest.raises(ValueError, match="4 values are 8 bytes along"):
        codecs.int8().decode(jnp.zeros(9, jnp.uint8), 4)
    with pytest.raises(ValueError, match=r"takes messages \(N, m\)"):
        codecs.int8().decode_and_sum(jnp.zeros(8, jnp.uint8), 4)


@pytest.mark.parametrize("shape", [(2**31,), (2**31 - 256,), (2**24, 125)])
def test_more_elements_than_indices_is_refused(shape: tuple[int, ...]) -> None:
    """Of the values or of the payload, which has a unit for each block too."""
    many = jax.ShapeDtypeStruct(shape, jnp.float32)
    encode = functools.partial(integers.encode, levels=127, size=256)
    with pytest.raises(ValueError, match=r"at most 2\^31 - 1 elements"):
        jax.eval_shape(functools.partial(encode, implementation="mosaic"), many)
    units = 4 * -(-shape[-1] // 256)
    assert jax.eval_shape(encode, many).shape == (*shape[:-1], shape[-1] + units)
