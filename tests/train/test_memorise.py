"""Every network for CIFAR-10 can learn some images by heart: the first thing to ask of a model."""

import sys
import time
from typing import Any

import cifar
import jax
import optax
import pytest
from running import read_config

from train import models, step


def memorise(name: str, images: int, rate: float, limit: int, **change: Any) -> tuple[int, float]:
    """Trains on the same images until all are right; returns the steps and seconds it took."""
    batch = cifar.images(images)
    config = read_config(name)
    options = {**config.model.to_dict(), **change}
    graph, params = models.build(options, (32, 32, 3), 10, 0)
    forward = step.make_forward(graph, config.data.mean, config.data.std)
    gradient = jax.value_and_grad(step.make_loss(forward, 0.0), has_aux=True)
    tx = optax.sgd(rate, momentum=0.9, nesterov=True)

    @jax.jit
    def train(params: Any, opt_state: Any) -> tuple[Any, Any, jax.Array]:
        (_, metrics), grads = gradient(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, metrics["accuracy"]

    opt_state, started, accuracy = tx.init(params), time.perf_counter(), 0.0
    for number in range(1, limit + 1):
        params, opt_state, accuracy = train(params, opt_state)
        if float(accuracy) == 1.0:  # Before this step's update.
            return number - 1, time.perf_counter() - started
    pytest.fail(f"after {limit} steps the accuracy is {float(accuracy):.3f}")


SLOW = (pytest.mark.slow, pytest.mark.timeout(1500))


@pytest.mark.parametrize(
    ("name", "images", "rate", "limit", "change"),
    [
        ("cifar_resnet20", 16, 0.1, 100, {"large_stem": True, "stages": (1, 1, 1)}),
        ("cifar_alexnet", 16, 0.05, 200, {"width": 0.125}),
        ("cifar_vgg", 16, 0.01, 100, {"width": 0.125}),
        pytest.param("cifar_resnet20", 64, 0.1, 200, {"large_stem": True}, marks=SLOW),
        pytest.param("cifar_resnet20", 64, 0.1, 200, {}, marks=SLOW),
        pytest.param("cifar_alexnet", 64, 0.05, 400, {"width": 0.125}, marks=SLOW),
        pytest.param("cifar_vgg", 64, 0.01, 200, {"width": 0.125}, marks=SLOW),
        pytest.param("cifar_vgg", 64, 0.001, 200, {}, marks=SLOW),
        # ResNet-110 on 8 x 8 pixels behind the stem: all of its depth, and a shallower one.
        pytest.param(
            "cifar_resnet110", 64, 0.1, 200, {"large_stem": True, "stages": (6, 6, 6)}, marks=SLOW
        ),
        pytest.param("cifar_resnet110", 64, 0.1, 200, {"large_stem": True}, marks=SLOW),
    ],
    ids=[
        "resnet8_large_stem",
        "alexnet",
        "vgg_narrow",
        "resnet20_large_stem",
        "resnet20",
        "alexnet, 64 images",
        "vgg_narrow, 64 images",
        "vgg",
        "resnet38_large_stem",
        "resnet110_large_stem",
    ],
)
def test_images_by_heart(
    name: str, images: int, rate: float, limit: int, change: dict[str, Any]
) -> None:
    steps, seconds = memorise(name, images, rate, limit, **change)
    print(f"{name} {change}: {steps} steps, {seconds:.1f} s", file=sys.stderr)
