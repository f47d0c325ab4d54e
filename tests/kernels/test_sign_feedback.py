"""Signs with error feedback against numpy: what is sent and what is kept add up."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from implementations import every_implementation
from jaxcomm.kernels import bitplanes
from jaxcomm.kernels.sign_feedback import sign_feedback

Implementation = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def case(n: int) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Small integers and a scale of 2: no sum of them is rounded."""
    rng = np.random.default_rng(n)
    x, residual = rng.integers(-8, 9, (2, n)).astype(np.float32)
    return x, residual, np.float32(2)


@every_implementation(sign_feedback)
@pytest.mark.parametrize(
    "n",
    [1, 32, 33, 1000, 32 * 129, pytest.param(32 * 170 + 5, marks=pytest.mark.newest), 32 * 640],
)
def test_sent_and_kept_add_up(n: int, f: Implementation) -> None:
    x, residual, scale = case(n)
    words, kept = jax.jit(f)(x, residual, scale)
    np.testing.assert_array_equal(words, bitplanes.pack(jnp.asarray(x + residual > 0)))
    sent = scale * np.where(x + residual > 0, 1, -1).astype(np.float32)
    np.testing.assert_array_equal(sent + np.asarray(kept), x + residual)


@every_implementation(sign_feedback)
@pytest.mark.parametrize(("lead", "n"), [((3,), 33), ((2, 1), 32 * 170 + 5)])
def test_rows_have_scales_of_their_own(lead: tuple[int, ...], n: int, f: Implementation) -> None:
    rng = np.random.default_rng(n)
    x, residual = rng.integers(-8, 9, (2, *lead, n)).astype(np.float32)
    scale = np.arange(1, 1 + np.prod(lead), dtype=np.float32).reshape(lead)
    words, kept = map(np.asarray, jax.jit(f)(x, residual, scale))
    assert words.shape == (*lead, bitplanes.words_for(n)) and kept.shape == (*lead, n)
    positive = x + residual > 0
    np.testing.assert_array_equal(bitplanes.unpack(jnp.asarray(words), n), positive)
    sent = scale[..., None] * np.where(positive, 1, -1)
    np.testing.assert_array_equal(sent + kept, x + residual)


@every_implementation(sign_feedback)
def test_special_values(f: Implementation) -> None:
    x = np.float32([np.nan, np.inf, -np.inf, 0.0, -0.0, 2.0**-126, -(2.0**-126)])
    words, kept = jax.jit(f)(x, np.zeros(7, np.float32), np.float32(1))
    np.testing.assert_array_equal(bitplanes.unpack(words, 7), [0, 1, 0, 0, 0, 1, 0])
    np.testing.assert_array_equal(kept, np.float32([np.nan, np.inf, -np.inf, 1, 1, -1, 1]))


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_nothing_is_nothing(implementation: str | None) -> None:
    empty = jnp.zeros(0)
    words, kept = sign_feedback(empty, empty, jnp.float32(1), implementation=implementation)
    assert words.shape == kept.shape == (0,)


def test_a_named_one_that_cannot_run_is_refused() -> None:
    x, scale = jnp.zeros(4), jnp.float32(1)
    with pytest.raises(NotImplementedError, match="there is no NVIDIA GPU"):
        sign_feedback(x, x, scale, implementation="mosaic")
    with pytest.raises(NotImplementedError, match="no implementation 'cuda'"):
        sign_feedback(x, x, scale, implementation="cuda")


def test_bad_arguments() -> None:
    x, scale = jnp.zeros(4), jnp.float32(1)
    with pytest.raises(TypeError, match="float32, got bfloat16 for residual"):
        sign_feedback(x, x.astype(jnp.bfloat16), scale)
    with pytest.raises(ValueError, match="of one shape"):
        sign_feedback(x, jnp.zeros(5), scale)
    with pytest.raises(ValueError, match="one scale for each row"):
        sign_feedback(x, x, jnp.zeros(4))
    with pytest.raises(ValueError, match="one scale for each row"):
        sign_feedback(x[None], x[None], scale)


def test_more_elements_than_indices_is_refused() -> None:
    many, scale = jax.ShapeDtypeStruct((2**31,), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    mosaic = functools.partial(sign_feedback, implementation="mosaic")
    with pytest.raises(ValueError, match=r"at most 2\^31 - 1 elements"):
        jax.eval_shape(mosaic, many, many, scale)
    words, kept = jax.eval_shape(sign_feedback, many, many, scale)
    assert (words.shape, kept.shape) == ((2**26,), (2**31,))
