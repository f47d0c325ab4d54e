"""Sizes of the published networks, shapes, precision, and what a config can get wrong."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from running import read_config

from train import models
from train.errors import UserError

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
CIFAR = (32, 32, 3)
IMAGENET = (224, 224, 3)


def size_of(config: dict[str, Any], shape: tuple[int, int, int], classes: int) -> int:
    """The number of parameters of a network that is traced and not run."""
    options = {name: value for name, value in config.items() if name not in ("name", "dtype")}

    def run(images: jax.Array) -> tuple[jax.Array, Any]:
        arguments = {**options, "image_shape": shape, "classes": classes}
        model = models.MODELS[config["name"]](
            **arguments, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0)
        )
        return model(images), nnx.state(model, nnx.Param)

    logits, params = jax.eval_shape(run, jnp.zeros((2, *shape)))
    assert logits.shape == (2, classes)
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("change", "shape", "classes", "millions"),
    [
        # Table 6 of He et al., 2016: 0.27 M, 1.7 M; torchvision's ResNet-50: 25.557 M.
        ({"stages": (3, 3, 3)}, CIFAR, 10, 0.27),
        ({"stages": (18, 18, 18)}, CIFAR, 10, 1.73),
        (
            {"stages": (3, 4, 6, 3), "width": 64, "groups": 32}
            | {"bottleneck": True, "large_stem": True},
            IMAGENET,
            1000,
            25.557,
        ),
    ],
)
def test_published_sizes(
    change: dict[str, Any], shape: tuple[int, int, int], classes: int, millions: float
) -> None:
    assert size_of(RESNET | change, shape, classes) / 1e6 == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize("config", [RESNET, VIT], ids=lambda config: config["name"])
def test_bfloat16_is_for_the_computation_only(config: dict[str, Any]) -> None:
    logits = {}
    images = jax.random.normal(jax.random.key(0), (2, 8, 8, 1))
    for dtype in ("float32", "bfloat16"):
        graph, params = models.build(config | {"dtype": dtype}, (8, 8, 1), 10, 0)
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
        ({"dtype": "float23"}, "config.model: .*float23"),
    ],
)
def test_mistakes(change: dict[str, Any], message: str) -> None:
    config = change if "patch" in change else RESNET | change
    with pytest.raises(UserError, match=message):
        models.build(config, (8, 8, 1), 10, 0)


@pytest.mark.parametrize("name", ["digits_resnet", "digits_vit", "fashion_resnet"])
def test_models_of_the_configs(name: str) -> None:
    config = read_config(name)
    shape = (28, 28, 1) if "fashion" in name else (8, 8, 1)
    assert size_of(config.model.to_dict(), shape, 10) > 0
