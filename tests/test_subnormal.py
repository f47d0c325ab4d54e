"""Divisors that GPUs keep and CPUs take for zero: XLA multiplies with their reciprocals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm.codecs import sign
from jaxcomm.collectives import low_rank

SIZES = [0.0, 2.0**-149, 1e-40, 2.0**-126, 1.0, 2.0**127]


@pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("size", SIZES)
def test_every_size_has_a_finite_unit(size: float, platform: str) -> None:
    values = np.zeros((1, 1, sign.BLOCK), np.float32)
    values[..., :4] = size
    with jax.default_device(jax.devices(platform)[0]):
        columns = np.asarray(jax.jit(low_rank._scaled)(values))
        counts = np.full((1, 1), sign.BLOCK, np.int32)
        scale = np.asarray(jax.jit(sign._scale)(values, counts))
    is_normal = size >= 2.0**-126
    np.testing.assert_array_equal(columns[..., 4:], 0)
    assert (1 <= columns[..., :4]).all() if is_normal else (columns == 0).all()
    assert (columns <= 4).all()
    expected = size * (4 / sign.BLOCK) ** 0.5 if is_normal else 0.0
    np.testing.assert_allclose(scale, expected, rtol=1e-6, atol=1e-38)


@pytest.mark.gpu
def test_an_optimizer_whose_gradients_have_died_away() -> None:
    """Each method sees gradients, and then zeros until its averages are no normal numbers."""
    methods = [
        jaxcomm.low_rank_mean("data", 2),
        jaxcomm.one_bit_adam("data", 0.1, dense_steps=1200),
        jaxcomm.factored_adam(jaxcomm.mean("data", "int4", error_feedback=True), 0.1),
    ]
    for tx in methods:
        with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices("cuda")[:1])):
            state = tx.init(jnp.zeros((64, 32)))
            first = jax.random.normal(jax.random.key(0), (1, 64, 32))
            update = jax.jit(tx.update)
            for step in range(1500):
                updates, state = update(first * float(step == 0), state)
            assert np.isfinite(updates).all()
