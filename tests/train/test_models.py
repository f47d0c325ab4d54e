"""Sizes of the published networks, shapes, precision, and what a config can get wrong."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from running import read_config

from train import models
from train.errors import UserError
from train.models.embedding import looked_up

RESNET = {
    "name": "resnet",
    "dtype": "float32",
    "stages": (1, 1),
    "width": 16,
    "groups": 8,
    "bottleneck": False,
    "large_stem": False,
}
VIT = {
    "name": "vit",
    "dtype": "float32",
    "patch": 2,
    "width": 32,
    "depth": 1,
    "heads": 4,
    "mlp_width": 64,
}
ALEXNET = {"name": "alexnet", "dtype": "float32", "width": 0.125, "groups": 8}
VGG = ALEXNET | {"name": "vgg"}
CIFAR = (32, 32, 3)
IMAGENET = (224, 224, 3)


def size_of(config: dict[str, Any], shape: tuple[int, ...], classes: int) -> int:
    """The number of parameters of a network that is traced and not run."""
    options = {name: value for name, value in config.items() if name not in ("name", "dtype")}
    text = len(shape) == 1

    def run(inputs: jax.Array) -> tuple[jax.Array, Any]:
        names = ("length", "vocabulary") if text else ("image_shape", "classes")
        sizes = dict(zip(names, (shape[0] if text else shape, classes), strict=True))
        model = models.MODELS[config["name"]](
            **options, **sizes, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0)
        )
        return model(inputs), nnx.state(model, nnx.Param)

    inputs = jnp.zeros((2, *shape), jnp.int32 if text else jnp.float32)
    logits, params = jax.eval_shape(run, inputs)
    assert logits.shape == ((2, *shape, classes) if text else (2, classes))
    return sum(leaf.size for leaf in jax.tree.leaves(params))


IMAGENET_RESNET = RESNET | {"width": 64, "groups": 32, "bottleneck": True, "large_stem": True}
VIT_12 = VIT | {"patch": 16, "depth": 12}
LSTM = {"name": "lstm", "dtype": "float32", "layers": 2, "width": 16}
BERT = {
    "name": "bert",
    "dtype": "float32",
    "positions": 512,
    "width": 16,
    "depth": 1,
    "heads": 2,
    "mlp_width": 64,
}
PUBLISHED = {
    # torchvision's documentation: 25,557,032 and 44,549,160.
    "resnet50": (IMAGENET_RESNET | {"stages": (3, 4, 6, 3)}, IMAGENET, 1000, 25_557_032),
    "resnet101": (IMAGENET_RESNET | {"stages": (3, 4, 23, 3)}, IMAGENET, 1000, 44_549_160),
    # torchvision: vgg16_bn 138,365,992; alexnet 61,100,840, with a bias for each of 1152 channels
    # where these have a scale and an offset.
    "vgg16": (
        VGG | {"width": 1.0, "groups": 32, "hidden": (4096, 4096)},
        IMAGENET,
        1000,
        138_365_992,
    ),
    "alexnet": (
        ALEXNET | {"width": 1.0, "groups": 32, "large_stem": True},
        IMAGENET,
        1000,
        61_100_840 + 1152,
    ),
    # Steiner et al., arXiv:2106.10270: Ti 5.8 M, S 22.2 M and B 86.6 M with a class token and its
    # position, which the mean of the tokens does not need: 2 * width parameters fewer.
    "vit_ti16": (
        VIT_12 | {"width": 192, "heads": 3, "mlp_width": 768},
        IMAGENET,
        1000,
        5_717_416 - 2 * 192,
    ),
    "vit_s16": (
        VIT_12 | {"width": 384, "heads": 6, "mlp_width": 1536},
        IMAGENET,
        1000,
        22_050_664 - 2 * 384,
    ),
    "vit_b16": (
        VIT_12 | {"width": 768, "heads": 12, "mlp_width": 3072},
        IMAGENET,
        1000,
        86_567_656 - 2 * 768,
    ),
    # Zaremba et al.: "66M" and "20M"; 4w(2w + 1) a layer, and 2wV + V around them.
    "lstm_large": (LSTM | {"width": 1500}, (35,), 10_000, 66_022_000),
    "lstm_medium": (LSTM | {"width": 650}, (35,), 10_000, 19_775_200),
    # Devlin et al.: 110 M; Turc et al.: 4.4 M. Both published checkpoints have a pooler of w(w + 1)
    # in their 109,482,240 and 4,385,920, and not the head of w(w + 1) + 2w + V for masked tokens.
    "bert_base": (
        BERT | {"width": 768, "depth": 12, "heads": 12, "mlp_width": 3072},
        (512,),
        30_522,
        109_482_240 + 2 * 768 + 30_522,
    ),
    "bert_tiny": (
        BERT | {"width": 128, "depth": 2, "heads": 2, "mlp_width": 512},
        (512,),
        30_522,
        4_385_920 + 2 * 128 + 30_522,
    ),
}


SLOW = ("resnet50", "vit_ti16", "vit_b16", "lstm_medium", "bert_base")  # Others of the families.


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in PUBLISHED]
)
def test_published_networks(name: str) -> None:
    config, shape, classes, params = PUBLISHED[name]
    assert size_of(config, shape, classes) == params


def test_an_lstm_follows_its_equations() -> None:
    """Against numpy, one position after another; gates in the order i, f, g, o, f opened by 1."""
    shape, tokens = (7,), jax.random.randint(jax.random.key(1), (3, 7), 0, 11)
    graph, params = models.build(LSTM | {"layers": 1, "width": 4}, shape, 11, 0)
    logits = nnx.merge(graph, params)(tokens)
    p = jax.tree.map(np.asarray, params)
    layer = p["layers"][0]

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    hidden = cell = np.zeros((3, 4))
    for t in range(7):
        x = p["embed"]["embedding"][np.asarray(tokens)[:, t]]
        gates = x @ layer["input"]["kernel"] + layer["input"]["bias"]
        i, f, g, o = np.split(gates + hidden @ layer["hidden"]["kernel"], 4, axis=-1)
        cell = sigmoid(f + 1) * cell + sigmoid(i) * np.tanh(g)
        hidden = sigmoid(o) * np.tanh(cell)
        expected = hidden @ p["head"]["kernel"] + p["head"]["bias"]
        np.testing.assert_allclose(logits[:, t], expected, rtol=1e-4, atol=1e-5)


def test_who_sees_what_in_a_text() -> None:
    """An LSTM only what came before; BERT all positions."""
    tokens = jax.random.randint(jax.random.key(1), (1, 9), 0, 11)
    other = tokens.at[0, 5].set((tokens[0, 5] + 1) % 11)
    for config, first in ((LSTM, 5), (BERT, 0)):
        graph, params = models.build(config, (9,), 11, 0)
        run = jax.jit(lambda p, x, graph=graph: nnx.merge(graph, p)(x))
        changed = (run(params, tokens) != run(params, other)).any(-1)[0]
        assert not changed[:first].any() and changed[first:].all()


@pytest.mark.parametrize(
    ("stages", "layers", "params"), [((3, 3, 3), 20, 272_474), ((18, 18, 18), 110, 1_730_714)]
)
def test_cifar_resnets_are_the_papers_but_for_the_shortcuts(
    stages: tuple[int, ...], layers: int, params: int
) -> None:
    """6n + 2 layers with weights; He et al. widen shortcuts with zeros, here two are projected.

    Table 6 of He et al., 2016, has 0.27 M and 1.7 M parameters.
    """
    name = f"cifar_resnet{layers}"
    model = read_config(name).model
    assert tuple(model.stages) == stages and sum(2 * depth for depth in stages) + 2 == layers
    # He et al.: 3x3 convolutions without bias, a scale and an offset a channel, a dense layer.
    convs = [(3, 16)] + [
        (into if not i else out, out)
        for into, out, depth in zip((16, 16, 32), (16, 32, 64), stages, strict=True)
        for i in range(2 * depth)
    ]
    published = sum(9 * i * o + 2 * o for i, o in convs) + 64 * 10 + 10
    projections = (16 * 32 + 2 * 32) + (32 * 64 + 2 * 64)
    assert size_of(model.to_dict(), CIFAR, 10) == published + projections == params


def test_alexnet_has_its_weights_in_the_dense_layers() -> None:
    config = read_config("cifar_alexnet").model.to_dict()
    dense = (1024 + 1) * 4096 + (4096 + 1) * 4096 + (4096 + 1) * 10
    channels = (3, 64, 192, 384, 256, 256)
    convs = sum(9 * i * o + 2 * o for i, o in zip(channels, channels[1:], strict=False))
    # With a bias for every channel instead of a scale and an offset, 23,272,266.
    assert size_of(config, CIFAR, 10) == dense + convs == 23_272_266 + sum(channels[1:])
    narrow = size_of(config | {"width": 0.125}, CIFAR, 10)
    assert narrow < (dense + convs) / 50


def test_vgg_has_the_published_size() -> None:
    config = read_config("cifar_vgg").model.to_dict()
    assert size_of(config, CIFAR, 10) == 14_728_266


ALL = [RESNET, VIT, ALEXNET, pytest.param(VGG, marks=pytest.mark.slow), LSTM, BERT]


@pytest.mark.parametrize("config", ALL, ids=lambda config: config["name"])
def test_bfloat16_is_for_the_computation_only(config: dict[str, Any]) -> None:
    logits = {}
    shape = CIFAR if config in (ALEXNET, VGG) else (8, 8, 1)
    if config in (LSTM, BERT):
        shape, images = (6,), jnp.arange(12).reshape(2, 6) % 10
    else:
        images = jax.random.normal(jax.random.key(0), (2, *shape))
    for dtype in ("float32", "bfloat16"):
        graph, params = models.build(config | {"dtype": dtype}, shape, 10, 0)
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
        logits[dtype] = jax.jit(lambda p, x, graph=graph: nnx.merge(graph, p)(x))(params, images)
        assert logits[dtype].dtype == dtype
    difference = jnp.abs(logits["float32"] - logits["bfloat16"].astype(jnp.float32)).max()
    assert 0 < difference < 0.1


def test_the_seed_alone_decides_the_parameters() -> None:
    def bits(seed: int) -> bytes:
        _, params = models.build(VIT, (8, 8, 1), 10, seed)
        return b"".join(leaf.tobytes() for leaf in jax.tree.leaves(jax.device_get(params)))

    assert bits(0) == bits(0) != bits(1)


def test_a_block_starts_as_the_identity() -> None:
    graph, params = models.build(RESNET, (8, 8, 1), 10, 0)
    model = nnx.merge(graph, params)
    x = jnp.abs(jax.random.normal(jax.random.key(0), (2, 8, 8, 16)))  # After a relu.
    assert (model.blocks[0](x) == x).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "resnt"}, "config.model.name: there is no 'resnt'; did you mean 'resnet'"),
        ({"width": 12}, "config.model: width 12 is not divisible by groups 8"),
        ({"depth": 2}, "config.model: .*unexpected keyword argument 'depth'"),
        (VIT | {"patch": 3}, "config.model: patch 3 does not divide images of 8 x 8"),
        (VIT | {"heads": 5}, "config.model: width 32 is not divisible by heads 5"),
        (ALEXNET | {"width": 0.1}, "width 0.1 makes 6 channels of 64, .*not divisible by groups 8"),
        (ALEXNET, "config.model: alexnet halves images four times; 8 x 8 are not multiples of 16"),
        (VGG | {"width": 0.1}, "width 0.1 makes 6 channels of 64, .*not divisible by groups 8"),
        (VGG, "config.model: vgg halves images five times; 8 x 8 are not multiples of 32"),
        ({"dtype": "float23"}, "config.model: .*float23"),
        (LSTM, "config.model.name=lstm takes tokens, which config.data does not have"),
    ],
)
def test_mistakes(change: dict[str, Any], message: str) -> None:
    config = change if "dtype" in change and "name" in change else RESNET | change
    shape = CIFAR if "channels of" in message else (8, 8, 1)
    with pytest.raises(UserError, match=message):
        models.build(config, shape, 10, 0)


@pytest.mark.parametrize("name", ["digits_resnet", "digits_vit", "fashion_resnet"])
def test_models_of_the_configs(name: str) -> None:
    """Those of CIFAR-10 are above."""
    config = read_config(name)
    shape = (28, 28, 1) if name.startswith("fashion") else (8, 8, 1)
    assert size_of(config.model.to_dict(), shape, 10) > 0


def test_gradients_of_embeddings_are_summed_in_float32() -> None:
    """In bfloat16 a sum of ones ends at 256."""
    embed = nnx.Embed(2, 3, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    tokens = jnp.zeros((32, 512), jnp.int32)
    rows = looked_up(embed, tokens)
    assert rows.dtype == jnp.bfloat16 and rows.shape == (32, 512, 3)
    gradient = nnx.grad(lambda e: looked_up(e, tokens).astype(jnp.float32).sum())(embed)
    np.testing.assert_array_equal(jax.tree.leaves(gradient)[0], [[32 * 512] * 3, [0] * 3])
