"""ResNet-50 as the benchmarks of GPUs have it: group normalization, products in bfloat16."""

import jax.numpy as jnp
from flax import nnx

from train.models.resnet import ResNet


def resnet50(image: int = 224, stages: tuple[int, ...] = (3, 4, 6, 3)) -> ResNet:
    """The network for images of 1000 classes; other stages make a smaller one for tests."""
    return ResNet(
        image_shape=(image, image, 3),
        classes=1000,
        stages=stages,
        width=64,
        groups=32,
        bottleneck=True,
        large_stem=True,
        dtype=jnp.dtype("bfloat16"),
        rngs=nnx.Rngs(0),
    )
