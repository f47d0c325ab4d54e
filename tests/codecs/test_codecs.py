"""The table of properties of all codecs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracles
from jaxcomm import codecs

ALL = list(codecs.BY_NAME)
BITS = {"float32": 32, "bfloat16": 16, "float16": 16}


def normal(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.newest
@pytest.mark.parametrize("name", ALL)
def test_equals_the_oracle_bit_for_bit(name: str) -> None:
    codec, x = codecs.from_name(name), normal((3, 1000))
    out = jax.jit(lambda x: codec.decode(codec.encode(x), 1000))(x)
    np.testing.assert_array_equal(out, oracles.ROUNDING[name](x))


@pytest.mark.parametrize("name", ALL)
def test_is_idempotent_on_its_grid(name: str) -> None:
    codec, x = codecs.from_name(name), normal((1000,))
    once = codec.decode(codec.encode(x), 1000)
    np.testing.assert_array_equal(codec.decode(codec.encode(once), 1000), once)


@pytest.mark.parametrize("name", ALL)
def test_blocks_are_independent(name: str) -> None:
    codec, x = codecs.from_name(name), normal((4, 33)) * np.float32([[1], [1e3], [1e-3], [0]])
    whole = codec.encode(jnp.asarray(x))
    for row, payload in zip(x, whole, strict=True):
        np.testing.assert_array_equal(codec.encode(row), payload)


@pytest.mark.parametrize("name", ALL)
def test_payload_has_exactly_the_stated_bits(name: str) -> None:
    payload = jax.eval_shape(codecs.from_name(name).encode, jnp.zeros((2, 100)))
    assert payload.size * payload.dtype.itemsize * 8 == 2 * 100 * BITS[name]


@pytest.mark.parametrize("name", ALL)
def test_zeros_decode_to_zeros(name: str) -> None:
    codec = codecs.from_name(name)
    payload = jax.eval_shape(codec.encode, jnp.zeros((2, 8)))
    np.testing.assert_array_equal(codec.decode(jnp.zeros(payload.shape, payload.dtype), 8), 0)


@pytest.mark.parametrize("name", ALL)
def test_nothing_non_finite_is_lost(name: str) -> None:
    codec = codecs.from_name(name)
    out = np.asarray(codec.decode(codec.encode(jnp.float32([jnp.nan, jnp.inf, -jnp.inf])), 3))
    np.testing.assert_array_equal(out, [np.nan, np.inf, -np.inf])


@pytest.mark.parametrize("name", ALL)
def test_native_dtype_has_the_codec_precision(name: str) -> None:
    x = normal((1000,))
    native = codecs.from_name(name).native(jnp.asarray(x))
    assert native.dtype == jnp.dtype(name)
    np.testing.assert_array_equal(native.astype(jnp.float32), oracles.ROUNDING[name](x))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown codec 'bf16'; choose one of float32, bfloat16"):
        codecs.from_name("bf16")


def test_a_factory_that_was_not_called_is_named() -> None:
    with pytest.raises(TypeError, match="must be called"):
        codecs.from_name(codecs.bfloat16)  # pyright: ignore[reportArgumentType]
