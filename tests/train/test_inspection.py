"""What looks into the exchange say, against the same numbers from all devices' gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import config_dict
from running import read_config

import jaxcomm
from train import inspection, state, sync

DEVICES = 8
SHAPES = {"b": (5,), "w": (16, 24)}


def gradients(seed: int) -> dict[str, np.ndarray]:
    """Small whole numbers, so that votes tie and zeros are there; one device has other ones."""
    rng = np.random.default_rng(seed)
    made = {name: rng.integers(-2, 3, (DEVICES, *shape)) for name, shape in SHAPES.items()}
    return {name: value.astype(np.float32) for name, value in made.items()}


def look_at(options: dict[str, Any], *all_grads: dict[str, np.ndarray]) -> list[dict[str, float]]:
    """Trains on these gradients, and looks at each of them before its step."""
    config = read_config("digits_resnet").sync
    with config.unlocked():
        config.update(options)
    zeros = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    order, found = tuple(SHAPES), []
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:DEVICES])):
        exchange = sync.build(config, order, 10)
        optimizer = state.make_optimizer(read_config("digits_resnet").optimizer, 10)
        tx = sync.joined(config, exchange, optimizer)
        now = state.init(zeros, tx)

        def gradient(params: Any, batch: Any) -> Any:
            del params
            return (jnp.zeros(()), {}), jaxcomm.mark_local(batch)

        batches = [jaxcomm.global_batch(grads, sync.AXIS) for grads in all_grads]
        look = inspection.make_look(config, gradient, exchange, order, 10, 0, (now, batches[0]))
        update = jax.jit(tx.update)
        for batch in batches:
            found.append(look(now, batch))
            _, opt_state = update(jaxcomm.mark_local(batch), now.opt_state, now.params)
            now = now._replace(opt_state=opt_state)
    return found


def norm(tree: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum((value.astype(np.float64) ** 2).sum() for value in tree.values())))


def test_a_mean_with_feedback() -> None:
    first, second = gradients(0), gradients(1)
    options = {"codec": "int4(block_size=64)", "error_feedback": True}
    before, after = look_at(options, first, second)
    for seen, grads in ((before, first), (after, second)):
        exact = {name: value.mean(0) for name, value in grads.items()}
        assert seen["gradient_norm"] == pytest.approx(norm(exact), rel=1e-6)
        assert seen["device_gradient_norm"] == pytest.approx(norm(grads) / DEVICES**0.5, rel=1e-6)
        assert 0.01 < seen["error"] < 0.5 and seen["overflow"] == 0 and "ties" not in seen
        # By the law of cosines the three cannot contradict each other: |s - e| >= |e| sin.
        assert seen["error"] >= np.sqrt(1 - seen["cosine"] ** 2) - 1e-6
    # What the first step left is what the second finds.
    assert before["residual_norm"] == 0 and 0.01 < after["residual_norm"] < norm(first)


def test_votes_and_their_ties() -> None:
    grads = gradients(0)
    (seen,) = look_at({"method": "majority_vote", "ties": "random", "zeros": "abstain"}, grads)
    votes = np.sign(grads["w"]).sum(0)
    assert 0.05 < (votes == 0).mean() == pytest.approx(seen["ties"], abs=1e-7)
    assert "error" not in seen and "residual_norm" not in seen
    assert 0.5 < seen["cosine"] < 1


def test_exact_means_and_those_that_overflow() -> None:
    small, large = gradients(0), {n: np.full((DEVICES, *s), 3e38) for n, s in SHAPES.items()}
    large = {name: value.astype(np.float32) for name, value in large.items()}
    exact, over = look_at({"codec": "float32"}, small, large)
    assert exact["error"] < 1e-6 and exact["cosine"] == pytest.approx(1) and exact["zeroed"] == 0
    assert (exact["overflow"], over["overflow"]) == (0, 1)


def test_what_is_lost_to_zero() -> None:
    sent, exact = [jnp.array([0.0, 0.0, 3.0, 4.0])], [jnp.array([0.0, 1.0, 3.0, 4.0])]
    seen = {name: float(value) for name, value in inspection.compared(sent, exact).items()}
    assert seen["zeroed"] == 0.25 and seen["error"] == pytest.approx(26**-0.5)
    assert seen["cosine"] == pytest.approx(25 / (5 * 26**0.5))
    nothing = inspection.compared([jnp.zeros(3)], [jnp.zeros(3)])
    assert float(nothing["error"]) == float(nothing["cosine"]) == 0


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"every": 2}, {"gradient_norm", "device_gradient_norm"}),
        ({"method": "none"}, {"gradient_norm", "device_gradient_norm"}),
    ],
)
def test_where_no_mean_is_to_be_compared(options: dict[str, Any], names: set[str]) -> None:
    config = config_dict.create(method="mean", every=1, error_feedback=None)
    config.update(options)
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:DEVICES])):
        now = state.TrainState(jnp.zeros(()), {}, ())
        batch = jaxcomm.global_batch(gradients(0), sync.AXIS)
        look = inspection.make_look(
            config, lambda p, b: ((0.0, {}), jaxcomm.mark_local(b)), None, (), 10, 0, (now, batch)
        )
        assert set(look(now, batch)) == names
