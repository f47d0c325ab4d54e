"""The models, batches and optimizers whose steps `benchmarks.gpu_steps` times on a GPU."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

import jaxcomm
from benchmarks.aot import resnet, transformer
from train.step import make_forward, make_loss

SCALES: dict[str, dict[str, dict[str, Any]]] = {
    "resnet50": {
        "tiny": {"rows": 2, "image": 32, "stages": (1, 1)},
        "full": {"rows": 64, "image": 224, "stages": (3, 4, 6, 3)},
    },
    "transformer": {
        "tiny": {"rows": 1, "layers": 2, "width": 64, "context": 32},
        "full": {"rows": 8, "layers": 12, "width": 768, "context": 1024},
    },
}

Make = Callable[[], optax.GradientTransformation]
EXCHANGES: dict[str, Make] = {
    "float32": lambda: jaxcomm.mean("data"),
    "bfloat16": lambda: jaxcomm.mean("data", "bfloat16"),
    "cnat": lambda: jaxcomm.mean("data", "cnat"),
    "cnat_all": lambda: jaxcomm.mean("data", jaxcomm.codecs.cnat("all")),
    "int8": lambda: jaxcomm.mean("data", "int8"),
    "int4": lambda: jaxcomm.mean("data", "int4", error_feedback=True),
    "scaled_sign": lambda: jaxcomm.mean("data", "scaled_sign", error_feedback=True),
    "vote": lambda: jaxcomm.majority_vote("data"),
    "vote_direct": lambda: jaxcomm.majority_vote("data", "direct"),
    "oktopk": lambda: jaxcomm.sparse_mean("data", 0.01),
    "topk_allgather": lambda: jaxcomm.sparse_mean("data", 0.01, "topk_allgather"),
    "gaussiank": lambda: jaxcomm.sparse_mean("data", 0.01, "gaussiank"),
    "int8_plain": lambda: jaxcomm.mean("data", "int8", implementation="xla"),
    "cnat_all_plain": lambda: jaxcomm.mean(
        "data", jaxcomm.codecs.cnat("all"), implementation="xla"
    ),
    "oktopk_plain": lambda: jaxcomm.sparse_mean("data", 0.01, implementation="xla"),
    "low_rank": lambda: jaxcomm.low_rank_mean("data", 4),
}


class Model(NamedTuple):
    """A loss, its parameters, a batch and an optimizer."""

    loss: Callable[..., Any]
    params: Any
    batch: Any
    optimizer: optax.GradientTransformation


def resnet50(rows: int, image: int, stages: tuple[int, ...]) -> Model:
    graph, params = nnx.split(resnet.resnet50(image, stages))
    loss = make_loss(make_forward(graph, 127.0, 64.0), 0.1)
    rng = np.random.default_rng(0)
    batch = {
        "image": rng.integers(0, 256, (rows, image, image, 3), np.uint8),
        "label": rng.integers(0, 1000, rows, np.int32),
    }
    params = jax.device_get(nnx.to_pure_dict(params))  # else they would count as memory
    return Model(loss, params, batch, optax.sgd(0.01, momentum=0.9))


def scanned(rows: int, layers: int, width: int, context: int) -> Model:
    shapes = transformer.shapes(layers, width, heads=width // 64, vocabulary=256, context=context)
    rng = np.random.default_rng(0)

    def drawn(path: Any, shape: Any) -> np.ndarray:
        if path[-1].key == "scale":
            return np.ones(shape.shape, np.float32)
        return 0.02 * rng.standard_normal(shape.shape, np.float32)

    params = jax.tree_util.tree_map_with_path(drawn, shapes)
    tokens = rng.integers(0, 256, (rows, context + 1), np.int32)
    loss = lambda params, tokens: (transformer.loss_fn(params, tokens), {})  # noqa: E731
    return Model(loss, params, tokens, optax.adam(1e-4))


MODELS = {"resnet50": resnet50, "transformer": scanned}
METHODS = (*EXCHANGES, "one_bit_adam", "multi_steps")


def optimizer(model: Model, method: str) -> optax.GradientTransformation:
    if method == "none":
        return model.optimizer
    if method == "one_bit_adam":
        return jaxcomm.one_bit_adam("data", 1e-4, dense_steps=1)
    if method == "multi_steps":
        return jaxcomm.multi_steps(optax.chain(EXCHANGES["int4"](), model.optimizer), 4)
    return optax.chain(EXCHANGES[method](), model.optimizer)


def step_of(model: Model, tx: optax.GradientTransformation, exchanges: bool) -> Callable[..., Any]:
    """A step: parameters, state and batch to the next parameters, the next state and the loss."""
    gradient = (
        jaxcomm.value_and_grad(model.loss, "data", has_aux=True)
        if exchanges
        else jax.value_and_grad(model.loss, has_aux=True)
    )

    def step(params: Any, state: Any, batch: Any) -> Any:
        (loss, _), grads = gradient(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step
