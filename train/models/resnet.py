"""Residual networks: from a tiny one for 8x8 digits to ResNet-110 and ResNet-50, by arguments.

Normalisation is over groups of channels of one image, never over the batch. If each device holds
other classes, its batch statistics describe only these classes, and evaluation meets others.
Averaging the statistics over devices would take one more exchange per layer in both directions, and
would hide what the gradient exchange costs. Group normalisation has no statistics to exchange and
no state to keep.

References:
  K. He, X. Zhang, S. Ren, J. Sun, "Deep Residual Learning for Image Recognition", 2016,
  arXiv:1512.03385.
  Y. Wu, K. He, "Group Normalization", 2018, arXiv:1803.08494.
  P. Goyal et al., "Accurate, Large Minibatch SGD", 2017, arXiv:1706.02677 (zero last scale).
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

_he_normal = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")


class Block(nnx.Module):
    """Two 3x3 convolutions, or a 1x1, 3x3, 1x1 bottleneck, beside a shortcut."""

    def __init__(
        self,
        channels_in: int,
        channels: int,
        stride: int,
        *,
        expansion: int,
        groups: int,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        conv = partial(
            nnx.Conv, use_bias=False, kernel_init=_he_normal, dtype=dtype, rngs=rngs, padding="SAME"
        )
        norm = partial(nnx.GroupNorm, num_groups=groups, dtype=dtype, rngs=rngs)
        channels_out = channels * expansion
        bottleneck = expansion > 1
        # (input channels, output channels, kernel size, stride); the stride is the first 3x3's.
        plan = (
            [(channels_in, channels, 1, 1), (channels, channels, 3, stride)]
            + [(channels, channels_out, 1, 1)]
            if bottleneck
            else [(channels_in, channels, 3, stride), (channels, channels, 3, 1)]
        )
        self.convs = nnx.List([conv(i, o, (k, k), strides=s) for i, o, k, s in plan])
        # A block starts as the identity: the scale of its last norm is zero.
        scales = [nnx.initializers.ones_init()] * (len(plan) - 1) + [nnx.initializers.zeros_init()]
        self.norms = nnx.List(
            [norm(p[1], scale_init=scale) for p, scale in zip(plan, scales, strict=True)]
        )
        self.project = nnx.data(None)
        if stride != 1 or channels_in != channels_out:
            self.project = nnx.List(
                [conv(channels_in, channels_out, (1, 1), strides=stride), norm(channels_out)]
            )

    def __call__(self, x: jax.Array) -> jax.Array:
        shortcut = x
        for layer in self.project or ():
            shortcut = layer(shortcut)
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = norm(conv(x))
            if i + 1 < len(self.convs):
                x = nnx.relu(x)
        return nnx.relu(x + shortcut)


class ResNet(nnx.Module):
    """A residual network with group normalisation.

    ResNet-20 and ResNet-110 of the CIFAR kind have stages (3, 3, 3) and (18, 18, 18) at width 16;
    ResNet-50 and ResNet-101 have stages (3, 4, 6, 3) and (3, 4, 23, 3) at width 64, `bottleneck`
    and a `large_stem`: 25.56 M and 44.55 M parameters for 1000 classes.

    Args:
      image_shape: height, width and channels of one image.
      classes: number of logits.
      stages: residual blocks of each stage; every stage after the first halves the image.
      width: channels of the first stage, doubled by every further one.
      groups: groups of channels that are normalised together; divides `width`.
      bottleneck: blocks of 1x1, 3x3, 1x1 convolutions whose output is four times as wide.
      large_stem: a 7x7 convolution and a pooling that quarter the image, instead of one 3x3.
      dtype: of the computation; parameters are float32.
      rngs: source of the initial parameters.
    """

    def __init__(
        self,
        *,
        image_shape: tuple[int, int, int],
        classes: int,
        stages: Sequence[int],
        width: int,
        groups: int,
        bottleneck: bool,
        large_stem: bool,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        if width % groups:
            raise ValueError(f"width {width} is not divisible by groups {groups}")
        self.large_stem = large_stem
        size, stride = (7, 2) if large_stem else (3, 1)
        self.stem = nnx.Conv(
            image_shape[-1],
            width,
            (size, size),
            strides=stride,
            use_bias=False,
            kernel_init=_he_normal,
            dtype=dtype,
            rngs=rngs,
        )
        self.stem_norm = nnx.GroupNorm(width, num_groups=groups, dtype=dtype, rngs=rngs)
        expansion = 4 if bottleneck else 1
        blocks, channels_in = [], width
        for stage, depth in enumerate(stages):
            for i in range(depth):
                blocks.append(
                    Block(
                        channels_in,
                        width * 2**stage,
                        stride=2 if stage and not i else 1,
                        expansion=expansion,
                        groups=groups,
                        dtype=dtype,
                        rngs=rngs,
                    )
                )
                channels_in = width * 2**stage * expansion
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(channels_in, classes, dtype=dtype, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.relu(self.stem_norm(self.stem(images)))
        if self.large_stem:
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))
