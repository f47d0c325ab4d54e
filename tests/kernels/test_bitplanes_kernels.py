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


def add(words: jax.Array, implementation: str | None = None) -> bitplanes.Planes:
    return bitplanes.add((words,), (words,), 2, implementation=implementation)


def test_named_ones_that_cannot_run_are_refused() -> None:
    words = jnp.zeros(2, jnp.uint32)
    with pytest.raises(NotImplementedError, match="there is no NVIDIA GPU"):
        add(words, "mosaic")
    with pytest.raises(NotImplementedError, match="no implementation 'triton'"):
        add(words, "triton")


def test_more_elements_than_indices_is_refused() -> None:
    many = jax.ShapeDtypeStruct((2**31,), jnp.uint32)
    with pytest.raises(ValueError, match=r"at most 2\^31 - 1 elements"):
        jax.eval_shape(functools.partial(add, implementation="mosaic"), many)


def test_nothing_is_nothing() -> None:
    assert [plane.shape for plane in add(jnp.zeros(0, jnp.uint32))] == [(0,)] * 2
