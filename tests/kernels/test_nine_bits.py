"""Powers of two in 9 bits against numpy, and every implementation against the plain one."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import codec_oracles as expected
from implementations import every_implementation
from jaxcomm.kernels.powers_of_two import nine_bits
from jaxcomm.kernels.random_bits import random_bits

KEY = jax.random.key(6)


def floats(*shape: int) -> np.ndarray:
    rng = np.random.default_rng(shape[-1])
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-140, 126, shape)).astype(np.float32)


# Two programs, of which the second takes columns of the first again; short and odd lengths.
CASES = [
    ((32 * 130,), False),
    ((2, 32 * 129), False),
    ((3, 37), True),
    pytest.param((2, 32 * 170 + 5), True, marks=pytest.mark.newest),
]


@every_implementation(nine_bits.encode)
@pytest.mark.parametrize(("shape", "is_random"), CASES)
def test_encode(shape: tuple[int, ...], is_random: bool, f: Callable) -> None:
    x, key = floats(*shape), KEY if is_random else None

    def run(x: jax.Array) -> tuple[jax.Array, ...]:
        payload = f(x, key)
        decoded = nine_bits.decode(payload, x.shape[-1])
        return payload, nine_bits.encode(x, key), decoded, random_bits(KEY, x.shape)

    payload, plain, decoded, words = map(np.asarray, jax.jit(run)(x))
    np.testing.assert_array_equal(payload, plain)
    wanted = expected.power_of_two(x, words if is_random else expected.HALF)
    np.testing.assert_array_equal(decoded, wanted)


@every_implementation(nine_bits.encode)
def test_special_values(f: Callable) -> None:
    x = np.zeros(32 * 128, np.float32)
    x[:8] = [np.nan, -np.nan, np.inf, -np.inf, -0.0, 3.4e38, -(2.0**-149), -1]
    decoded = jax.jit(lambda x: nine_bits.decode(f(x, None), x.size))(x)
    wanted = [np.nan, np.nan, np.inf, -np.inf, 0, 2.0**127, 0, -1]
    np.testing.assert_array_equal(decoded[:8], np.float32(wanted))
    np.testing.assert_array_equal(decoded[8:], 0)


@every_implementation(nine_bits.decode_and_sum)
@pytest.mark.parametrize(("messages", "n"), [(3, 32 * 130), (1, 32 * 128), (2, 37), (2, 5445)])
def test_decode_and_sum(messages: int, n: int, f: Callable) -> None:
    """Powers of two that are near to each other: no sum of them is rounded."""
    rng = np.random.default_rng(n)
    x = (rng.choice([-1, 0, 1], (messages, n)) * 2.0 ** rng.integers(-3, 4, (messages, n))).astype(
        np.float32
    )
    x[0, [0, n // 2, n - 1]] = [np.nan, np.inf, -np.inf]
    total = jax.jit(lambda x: f(nine_bits.encode(x), n))(x)
    np.testing.assert_array_equal(total, x.sum(axis=0))


def test_nothing_is_nothing() -> None:
    assert jax.eval_shape(nine_bits.encode, jnp.zeros((3, 0))).shape == (3, 0)
    empty = jnp.zeros((2, 0), jnp.uint8)
    assert jax.eval_shape(lambda p: nine_bits.decode_and_sum(p, 0), empty).shape == (0,)


def test_a_named_one_that_cannot_run_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="there is no NVIDIA GPU"):
        nine_bits.encode(jnp.zeros(4), implementation="mosaic")
    with pytest.raises(NotImplementedError, match="no implementation 'triton'"):
        nine_bits.decode_and_sum(jnp.zeros((2, 8), jnp.uint8), 4, implementation="triton")
    from jaxcomm.kernels.powers_of_two import mosaic

    with pytest.raises(NotImplementedError, match="up to 64 messages, got 65"):
        mosaic.decode_and_sum(jnp.zeros((65, 8), jnp.uint8), 4)


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="takes float32, got bfloat16"):
        nine_bits.encode(jnp.zeros(4, jnp.bfloat16))
    with pytest.raises(ValueError, match="got a scalar"):
        nine_bits.encode(jnp.float32(1))
    with pytest.raises(TypeError, match="a payload is uint8, got uint32"):
        nine_bits.decode(jnp.zeros(8, jnp.uint32), 4)
    with pytest.raises(ValueError, match="4 values are 8 bytes along"):
        nine_bits.decode(jnp.zeros(9, jnp.uint8), 4)
    with pytest.raises(ValueError, match=r"takes messages \(N, m\)"):
        nine_bits.decode_and_sum(jnp.zeros(8, jnp.uint8), 4)


def test_more_elements_than_indices_is_refused() -> None:
    mosaic = functools.partial(nine_bits.encode, implementation="mosaic")
    with pytest.raises(ValueError, match=r"at most 2\^31 - 1 elements"):
        jax.eval_shape(mosaic, jax.ShapeDtypeStruct((2**31 - 32,), jnp.float32))
    payloads = jax.ShapeDtypeStruct((8, nine_bits.message_bytes(2**28)), jnp.uint8)
    summed = functools.partial(nine_bits.decode_and_sum, n=2**28, implementation="mosaic")
    with pytest.raises(ValueError, match=r"at most 2\^31 - 1 elements"):
        jax.eval_shape(summed, payloads)
