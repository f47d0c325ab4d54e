"""A window of powers of two against numpy, and every implementation against the plain one."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import codec_oracles as expected
from implementations import every_implementation
from jaxcomm.kernels.powers_of_two import window
from jaxcomm.kernels.random_bits import random_bits

KEY = jax.random.key(8)


def floats(*shape: int) -> np.ndarray:
    """Some are below the window of the first message; that of others reaches down to 2^-126."""
    rng = np.random.default_rng(shape[-1])
    x = (rng.standard_normal(shape) * 2.0 ** rng.integers(-140, 20, shape)).astype(np.float32)
    if len(shape) > 1:
        x[1:] *= np.float32(2.0**-30)
    return x


# Two programs, of which the second takes values of the first again; several messages; one row, two
# rows, and rows that are loaded in several steps; odd lengths; too few values for the kernel.
CASES = [
    ((32 * 128,), False),
    ((3, 129), True),
    ((2, 2 * 128), False),
    ((2, 3, 37), True),
    pytest.param((2, 32 * 128 + 301), True, marks=pytest.mark.newest),
]


@every_implementation(window.encode)
@pytest.mark.parametrize(("shape", "is_random"), CASES)
def test_encode(shape: tuple[int, ...], is_random: bool, f: Callable) -> None:
    x, key = floats(*shape), KEY if is_random else None

    def run(x: jax.Array) -> tuple[jax.Array, ...]:
        payload = f(x, key)
        return payload, window.encode(x, key), window.decode(payload), random_bits(KEY, x.shape)

    payload, plain, decoded, words = map(np.asarray, jax.jit(run)(x))
    np.testing.assert_array_equal(payload, plain)
    rows = (array.reshape(-1, shape[-1]) for array in (x, words, decoded))
    for row, bits, found in zip(*rows, strict=True):
        wanted = expected.cnat_window(row, bits if is_random else expected.HALF)
        np.testing.assert_array_equal(found, wanted)


@every_implementation(window.encode)
def test_special_values(f: Callable) -> None:
    x = np.zeros((8, 130), np.float32)
    x[:7, 1] = [np.nan, np.inf, -np.inf, -(2.0**-149), 2.0**-126, -3.4e38, 2.0**100]
    x[:7, 129] = [1, -1, 1, -0.0, 0, 2.0**-26, -(2.0**-27)]
    payload, plain = jax.jit(lambda x: (f(x, None), window.encode(x)))(x)
    np.testing.assert_array_equal(payload, plain)
    np.testing.assert_array_equal(payload[:, 0], [255, 255, 255, 1, 1, 254, 227, 0])
    decoded = np.asarray(jax.jit(window.decode)(payload))
    assert np.isnan(decoded[:3]).all()
    wanted = [[0, 2.0**-126, -(2.0**127), 2.0**100, 0], [0, 0, 0, -(2.0**-26), 0]]
    np.testing.assert_array_equal(decoded[3:, [1, 129]].T, np.float32(wanted))


def test_nothing_is_nothing() -> None:
    assert jax.jit(window.encode)(jnp.zeros((3, 0))).tolist() == [[0], [0], [0]]
    assert jax.eval_shape(window.encode, jnp.zeros((0, 3))).shape == (0, 4)


def test_a_named_one_that_cannot_run_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="there is no NVIDIA GPU"):
        window.encode(jnp.zeros(4), implementation="mosaic")
    with pytest.raises(NotImplementedError, match="no implementation 'triton'"):
        window.encode(jnp.zeros(4), implementation="triton")


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="takes float32, got bfloat16"):
        window.encode(jnp.zeros(4, jnp.bfloat16))
    with pytest.raises(ValueError, match="got a scalar"):
        window.encode(jnp.float32(1))


def test_more_elements_than_indices_is_refused() -> None:
    mosaic = functools.partial(window.encode, implementation="mosaic")
    with pytest.raises(ValueError, match=r"at most 2\^31 - 1 elements"):
        jax.eval_shape(mosaic, jax.ShapeDtypeStruct((2**31 - 1,), jnp.float32))
