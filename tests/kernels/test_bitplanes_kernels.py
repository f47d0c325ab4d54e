"""Every implementation of what is a kernel in bit planes, against numpy."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from implementations import every_implementation
from jaxcomm.kernels import bitplanes

# Words: padded to a program; two programs that share columns; and with vectors.
WIDTHS = [5, 129, 516]


def planes(count: int, width: int) -> np.ndarray:
    return np.random.default_rng(width).integers(0, 2**32, (count, width), np.uint32)


def counts(planes: np.ndarray) -> np.ndarray:
    """Of each bit of all words, in their order."""
    bits = np.stack([np.unpackbits(plane.view(np.uint8)) for plane in planes]).astype(np.int64)
    return np.sum(bits << np.arange(len(planes))[:, None], axis=0)


@pytest.mark.newest
@every_implementation(bitplanes.add)
@pytest.mark.parametrize("width", WIDTHS)
def test_add(width: int, f: Callable) -> None:
    x = planes(5, width)
    total = jax.jit(lambda *x: f(x[:3], x[3:], 4))(*x)
    np.testing.assert_array_equal(counts(np.stack(total)), counts(x[:3]) + counts(x[3:]))


@pytest.mark.newest
@every_implementation(bitplanes.majority)
@pytest.mark.parametrize("threshold", [-1, 4])
def test_majority(threshold: int, f: Callable) -> None:
    """Of counts up to 7 and up to 3."""
    x = planes(5, 2 * 129).reshape(5, 2, 129)
    words = jax.jit(lambda *x: f(x[:3], x[3:], threshold))(*x)
    assert words.shape == (2, 129)
    x = x.reshape(5, -1)
    total = counts(x[:3]) + counts(x[3:])
    np.testing.assert_array_equal(counts(np.asarray(words).reshape(1, -1)), total > threshold)


@pytest.mark.newest
@every_implementation(bitplanes.add_signs)
@pytest.mark.parametrize("n", [5, 32 * 516, 32 * 130 + 7, 32 * 170 + 5])
def test_add_signs(n: int, f: Callable) -> None:
    rng = np.random.default_rng(n)
    x, positive = rng.standard_normal(n).astype(np.float32), rng.random(n) < 0.5
    words = bitplanes.pack(jnp.asarray(positive))
    got = jax.jit(f)(jnp.asarray(x), words, jnp.float32(0.3))
    np.testing.assert_array_equal(got, x + np.where(positive, np.float32(0.3), np.float32(-0.3)))


CALLS = [
    lambda words, x, **which: bitplanes.add((words,), (words,), 2, **which),
    lambda words, x, **which: bitplanes.majority((words,), (words,), 1, **which),
    lambda words, x, **which: bitplanes.add_signs(x, words, jnp.float32(1), **which),
]


@pytest.mark.parametrize("call", CALLS)
def test_named_ones_that_cannot_run_are_refused(call: Callable) -> None:
    words, x = jnp.zeros(2, jnp.uint32), jnp.zeros(64)
    with pytest.raises(NotImplementedError, match="there is no NVIDIA GPU"):
        call(words, x, implementation="mosaic")
    with pytest.raises(NotImplementedError, match="no implementation 'triton'"):
        call(words, x, implementation="triton")


@pytest.mark.parametrize("call", CALLS)
def test_more_elements_than_indices_is_refused(call: Callable) -> None:
    many = jax.ShapeDtypeStruct((2**31,), jnp.uint32)
    if call is CALLS[-1]:
        many = jax.ShapeDtypeStruct((2**26,), jnp.uint32)
    x = jax.ShapeDtypeStruct((2**31,), jnp.float32)
    with pytest.raises(ValueError, match=r"at most 2\^31 - 1 elements"):
        jax.eval_shape(functools.partial(call, implementation="mosaic"), many, x)


@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_nothing(call: Callable) -> None:
    result = call(jnp.zeros(0, jnp.uint32), jnp.zeros(0))
    assert {leaf.shape for leaf in jax.tree.leaves(result)} == {(0,)}


def test_what_add_signs_does_not_take() -> None:
    words, scale = jnp.zeros(1, jnp.uint32), jnp.float32(1)
    with pytest.raises(TypeError, match="takes float32, got bfloat16"):
        bitplanes.add_signs(jnp.zeros(3, jnp.bfloat16), words, scale)
    with pytest.raises(TypeError, match="words are uint32"):
        bitplanes.add_signs(jnp.zeros(3), jnp.zeros(1, jnp.int32), scale)
    with pytest.raises(ValueError, match="and a scalar, got"):
        bitplanes.add_signs(jnp.zeros(33), words, scale)
