"""Every further family learns 64 examples by heart, at a small width; nothing explains them."""

import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from train import models

EXAMPLES, TOKENS, LENGTH = 64, 16, 8
MASK = TOKENS  # A token of its own.
RATES = {"vgg": 3e-4}
RESNET = {"name": "resnet", "stages": (1, 1, 1, 1), "width": 16, "groups": 8}
VIT = {"name": "vit", "width": 64, "depth": 2, "heads": 4, "mlp_width": 128}
NETWORKS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "resnet_bottleneck": (RESNET | {"bottleneck": True, "large_stem": True}, (32, 32, 3)),
    "vit": (VIT | {"patch": 8}, (32, 32, 3)),
    "alexnet": ({"name": "alexnet", "width": 0.125, "groups": 8, "large_stem": True}, (67, 67, 3)),
    "vgg": ({"name": "vgg", "width": 0.125, "groups": 8, "hidden": (512, 512)}, (32, 32, 3)),
    "lstm": ({"name": "lstm", "width": 64, "layers": 2}, (LENGTH,)),
    "bert": (
        {"name": "bert", "width": 64, "depth": 2, "heads": 4, "mlp_width": 128, "positions": 64},
        (LENGTH,),
    ),
}


def examples(name: str, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Inputs, what to answer, and where: random images and classes, or texts.

    A text begins with the two digits of its number, then its tokens are drawn at random. An LSTM
    answers with the next token, BERT with the tokens behind the number, which it does not see.
    """
    rng = np.random.default_rng(0)
    if len(shape) == 3:
        images = rng.normal(size=(EXAMPLES, *shape)).astype(np.float32)
        return (
            jnp.asarray(images),
            jnp.asarray(rng.integers(0, TOKENS, EXAMPLES)),
            jnp.ones(EXAMPLES),
        )
    number = np.arange(EXAMPLES)
    head = np.stack([number // TOKENS, number % TOKENS], axis=1)
    texts = np.concatenate([head, rng.integers(0, TOKENS, (EXAMPLES, LENGTH - 2))], axis=1)
    if name == "bert":
        known = (np.arange(LENGTH) >= 2) * np.ones((EXAMPLES, 1))
        return jnp.asarray(np.where(known > 0, MASK, texts)), jnp.asarray(texts), jnp.asarray(known)
    # The number itself is not learned, and behind the last token there is none.
    known = (np.arange(LENGTH) >= 1) * (np.arange(LENGTH) < LENGTH - 1) * np.ones((EXAMPLES, 1))
    return jnp.asarray(texts), jnp.asarray(np.roll(texts, -1, axis=1)), jnp.asarray(known)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NETWORKS)
def test_examples_by_heart(name: str) -> None:
    config, shape = NETWORKS[name]
    inputs, answers, weights = examples(name, shape)
    graph, params = models.build(config | {"dtype": "float32"}, shape, TOKENS + 1, 0)
    tx = optax.adam(RATES.get(name, 3e-3))

    @jax.jit
    def train(params: Any, opt_state: Any) -> tuple[Any, Any, jax.Array]:
        def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
            logits = nnx.merge(graph, params)(inputs)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, answers)
            right = (logits.argmax(-1) == answers) | (weights == 0)
            return (losses * weights).sum() / weights.sum(), right.all()

        (_, right), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, right

    opt_state, started = tx.init(params), time.perf_counter()
    for number in range(1, 601):
        params, opt_state, right = train(params, opt_state)
        if right:
            print(f"{name}: {number} steps, {time.perf_counter() - started:.1f} s", file=sys.stderr)
            return
    pytest.fail(f"{name} has not learned {EXAMPLES} examples in 600 steps")
