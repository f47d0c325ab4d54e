"""Floats of 8 bits in blocks against numpy, and every implementation against the plain one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import codec_oracles as expected
from implementations import every_implementation
from jaxcomm import codecs
from jaxcomm.kernels.block_quantization import fp8

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
CODECS = {E4M3: codecs.fp8_e4m3, E5M2: codecs.fp8_e5m2}
RANGES = {E4M3: (4, 448), E5M2: (5, 57344)}


def given(x: jax.Array, dtype: Any, size: int) -> tuple[Any, ...]:
    """What the kernel takes."""
    return x, fp8.writing(dtype, size), None


def there_and_back(f: Callable, x: np.ndarray, dtype: Any, size: int) -> tuple[np.ndarray, ...]:
    """The payload, the plain one, and what the first is decoded to."""

    def run(x: jax.Array) -> tuple[jax.Array, ...]:
        payload = f(x, dtype, size)
        decoded = CODECS[dtype](size).decode(payload, x.shape[-1])
        return payload, fp8.encode(x, dtype, size), decoded

    return tuple(map(np.asarray, jax.jit(run)(x)))


# Two programs, of which the second takes blocks of the first again, and a block that is cut short;
# messages of more than one; blocks that begin anywhere, fewer than a program takes; no whole block.
CASES = [
    pytest.param(E4M3, 256, (17 * 256 + 13,), marks=pytest.mark.newest),
    (E5M2, 64, (2, 65 * 64)),
    (E5M2, 36, (2, 3 * 36 + 5)),
    (E4M3, 256, (255,)),
]


@every_implementation(fp8.encode, given=given)
@pytest.mark.parametrize(("dtype", "size", "shape"), CASES)
def test_equals_the_oracle_and_the_specification(
    dtype: Any, size: int, shape: tuple[int, ...], f: Callable
) -> None:
    rng = np.random.default_rng(size)
    x = (rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 4, shape)).astype(np.float32)
    payload, plain, decoded = there_and_back(f, x, dtype, size)
    np.testing.assert_array_equal(payload, plain)
    for row, found in zip(*(a.reshape(-1, shape[-1]) for a in (x, decoded)), strict=True):
        np.testing.assert_array_equal(found, expected.fp8(row, size, *RANGES[dtype]))


@every_implementation(fp8.encode, given=given)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_special_values(dtype: Any, f: Callable) -> None:
    """Of blocks that are not finite only the unit matters."""
    blocks = np.zeros((16, 256), np.float32)
    blocks[1:7, 3] = [np.nan, np.inf, -np.inf, 2.0**-149, 2.0**-126, -3.4e38]
    blocks[1:4, 4] = 1
    *_, decoded = there_and_back(f, blocks.reshape(-1), dtype, 256)
    decoded = decoded.reshape(blocks.shape)
    assert np.isnan(decoded[1:4]).all()
    np.testing.assert_array_equal(decoded[[0, 4, 5, *range(7, 16)]], 0)
    np.testing.assert_allclose(decoded[6, 3], max(-3.4e38, -(2.0**126) * RANGES[dtype][1]), 1e-4)


def test_nothing_is_nothing() -> None:
    for shape in ((0,), (3, 0)):
        encoded = jax.eval_shape(lambda x: fp8.encode(x, E4M3, 256), jnp.zeros(shape))
        assert encoded.shape == shape


def test_what_the_kernel_does_not_do_is_refused() -> None:
    from jaxcomm.kernels.block_quantization import mosaic

    with pytest.raises(NotImplementedError, match="fp8.encode: .* no room for blocks of 100"):
        mosaic.encode(jnp.zeros(200), fp8.writing(E5M2, 100), None)
    with pytest.raises(NotImplementedError, match="there is no NVIDIA GPU"):
        fp8.encode(jnp.zeros(512), E4M3, 256, implementation="mosaic")


def test_a_payload_of_more_elements_than_indices_is_refused() -> None:
    many = jax.ShapeDtypeStruct((2**31 - 256,), jnp.float32)
    with pytest.raises(ValueError, match=r"at most 2\^31 - 1 elements"):
        jax.eval_shape(lambda x: fp8.encode(x, E4M3, 256, implementation="mosaic"), many)


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="takes float32, got bfloat16"):
        fp8.encode(jnp.zeros(4, jnp.bfloat16), E4M3, 256)
    with pytest.raises(ValueError, match="got a scalar"):
        fp8.encode(jnp.float32(1), E4M3, 256)
    with pytest.raises(ValueError, match="at least 1 value, got 0"):
        fp8.encode(jnp.zeros(4), E4M3, 0)
    with pytest.raises(ValueError, match="dtype must be one of"):
        fp8.encode(jnp.zeros(4), jnp.float16, 256)
