"""Muon in the training program: which leaves it makes orthogonal, and as which matrices."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import config_dict
from running import read_config

import jaxcomm
from train import models, state
from train.run import assemble

SHAPES = {
    "lm_transformer": ((16,), 256),
    "text_bert": ((16,), 256),
    "text_lstm": ((16,), 256),
    "digits_vit": ((8, 8, 1), 10),
    "digits_resnet": ((8, 8, 1), 10),
    "cifar_alexnet": ((32, 32, 3), 10),
}


SMALLER = {
    "lm_transformer": {"depth": 2, "width": 96, "mlp_width": 128},
    "text_bert": {"depth": 1, "width": 64, "mlp_width": 128},
    "text_lstm": {"width": 32},
    "cifar_alexnet": {"width": 0.125},
}


@functools.cache
def parameters(name: str) -> Any:
    """Of a model of a config, made smaller."""
    config = read_config(name).model
    config.update(SMALLER.get(name, {}))
    return models.build(config, *SHAPES[name], seed=0)[1]


def step_of(params: Any, grads: Any) -> Any:
    """The first step of Muon with a rate of 1."""
    fields = {"name": "muon", "learning_rate": 1.0, "warmup_steps": 0, "momentum": 0.9}
    config = config_dict.create(**fields, b2=0.999, weight_decay=0.0, nesterov=False)
    config.clip_norm = config_dict.placeholder(float)
    tx = state.make_optimizer(config, 10).step
    return tx.update(grads, tx.init(params), params)[0]


@pytest.mark.parametrize(
    ("name", "adam"),
    [
        ("lm_transformer", {"tokens", "positions"}),
        ("text_bert", {"tokens", "positions", "segments"}),
        ("text_lstm", {"embed", "head"}),
        ("digits_vit", {"embed", "head", "position"}),
        ("digits_resnet", {"stem", "head"}),
        ("cifar_alexnet", {"head"}),
    ],
)
def test_all_weights_but_those_of_stems_embeddings_and_heads(name: str, adam: set[str]) -> None:
    params = parameters(name)
    found = state.hidden_matrices(params)
    weights = state.decayed(params)
    for (path, axes), x, is_weight in zip(
        jax.tree_util.tree_leaves_with_path(found, is_leaf=lambda x: x is None or is_axes(x)),
        jax.tree.leaves(params),
        jax.tree.leaves(weights),
        strict=True,
    ):
        assert is_axes(axes) == (is_weight and path[0].key not in adam), path
        if is_axes(axes):
            stacked = int(path[0].key == "stack")
            both = (*axes.reduction_axis, *axes.output_axis)
            assert both == tuple(range(stacked, x.ndim)), path


def is_axes(x: Any) -> bool:
    return isinstance(x, optax.contrib.MuonDimensionNumbers)


def test_attention_and_convolutions_are_matrices_from_inputs_to_outputs() -> None:
    vit = state.hidden_matrices(parameters("digits_vit"))["blocks"][0]["attention"]
    assert vit["query"]["kernel"] == ((0,), (1, 2)) and vit["out"]["kernel"] == ((0, 1), (2,))
    stack = state.hidden_matrices(parameters("lm_transformer"))["stack"]
    assert stack["attention"]["value"]["kernel"] == ((1,), (2, 3))
    assert stack["attention"]["out"]["kernel"] == ((1, 2), (3,))
    assert stack["expand"]["kernel"] == ((1,), (2,))
    convolution = state.hidden_matrices(parameters("digits_resnet"))["blocks"][0]["convs"][0]
    assert convolution["kernel"] == ((0, 1, 2), (3,))


def test_each_layer_of_a_stack_is_made_orthogonal_by_itself() -> None:
    """Its singular values are alike, as large as an Adam step's on average; Adam has the rest."""
    keys = jax.random.split(jax.random.key(0), 2)
    grads = {
        "stack": {"attention": {"query": {"kernel": jax.random.normal(keys[0], (2, 16, 4, 8))}}},
        "tokens": {"embedding": jax.random.normal(keys[1], (5, 16))},
    }
    step = step_of(jax.tree.map(jnp.zeros_like, grads), grads)
    layers = np.asarray(step["stack"]["attention"]["query"]["kernel"]).reshape(2, 16, 32)
    of_gradient = np.asarray(grads["stack"]["attention"]["query"]["kernel"]).reshape(2, 16, 32)
    for layer, gradient in zip(layers, of_gradient, strict=True):
        singular = np.linalg.svd(layer, compute_uv=False)
        assert singular.max() / singular.min() < 2 < np.linalg.cond(gradient)
        assert np.sqrt(np.mean(layer**2)) == pytest.approx(0.2, rel=0.2)
        assert np.sum(layer * gradient) > 0  # with the sign of a gradient
    embedding = np.asarray(step["tokens"]["embedding"]) / np.sign(grads["tokens"]["embedding"])
    np.testing.assert_allclose(embedding, embedding[0, 0], rtol=1e-4)
    assert embedding[0, 0] > 0


@pytest.mark.parametrize(
    ("field", "value", "parts"),
    [
        ("gather", "int8", "int8"),
        ("gather", "int8(block_size=64)", "int8"),
        ("gather", "cnat", "float32"),  # rounds at random
        ("gather", "float16", "float32"),  # has not its range
        ("fsdp", 2, "float32"),
    ],
)
def test_parts_of_matrices_travel_as_parameters_are_gathered(
    field: str, value: Any, parts: str, tmp_path: Path
) -> None:
    config = read_config("digits_vit")
    config.model.depth, config.optimizer.name, config.sync[field] = 1, "muon", value
    run = assemble(config, tmp_path)
    text = str(jaxcomm.explain(run.tx, run.place(run.params)))
    assert f"; {parts}, whole matrices" in text
