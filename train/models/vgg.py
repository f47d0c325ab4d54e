"""VGG-16: thirteen convolutions, five poolings, dense layers.

For images of 224 x 224 and with hidden layers of (4096, 4096) it is the published network, and has
138,365,992 parameters with those of the normalisation. The usual adaptation for CIFAR has no hidden
layers and 14,728,266 parameters: of images of 32 x 32, one pixel is left before the dense layers.

Differs from the paper: no dropout (as in `train.models.alexnet`), and normalisation over groups of
channels after every convolution, with as many parameters as batch normalisation;
`train.models.resnet` explains why.

References:
  K. Simonyan, A. Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition",
  2015, arXiv:1409.1556 (configuration D).
  S. Li, T. Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022,
  arXiv:2201.07598 (this network, with batch normalisation).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

# Channels at width 1 of the convolutions between two poolings.
STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))

_he_normal = nnx.initializers.he_normal()


class VGG(nnx.Module):
    """VGG-16 with group normalisation.

    Args:
      image_shape: height, width and channels of one image; sides are multiples of 32.
      classes: number of logits.
      width: multiplies the channels; 1 is the published network.
      groups: groups of channels that are normalised together; divides all channels.
      hidden: units of the dense layers before the classifier, at width 1.
      dtype: of the computation; parameters are float32.
      rngs: source of the initial parameters.
    """

    def __init__(
        self,
        *,
        image_shape: tuple[int, int, int],
        classes: int,
        width: float,
        groups: int,
        hidden: Sequence[int] = (),
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        height, image_width, channels_in = image_shape
        if height % 32 or image_width % 32:
            raise ValueError(
                f"vgg halves images five times; {height} x {image_width} are not multiples of 32"
            )
        stages = []
        for stage in STAGES:
            layers = []
            for full in stage:
                channels = int(width * full)
                if channels < 1 or channels % groups:
                    raise ValueError(
                        f"width {width} makes {channels} channels of {full}, which are not "
                        f"divisible by groups {groups}"
                    )
                conv = nnx.Conv(
                    channels_in, channels, (3, 3), kernel_init=_he_normal, dtype=dtype, rngs=rngs
                )
                norm = nnx.GroupNorm(channels, num_groups=groups, dtype=dtype, rngs=rngs)
                layers.append(nnx.List([conv, norm]))
                channels_in = channels
            stages.append(nnx.List(layers))
        self.stages = nnx.List(stages)
        sizes = [height // 32 * (image_width // 32) * channels_in]
        sizes += [int(width * units) for units in hidden]
        self.hidden = nnx.List(
            [
                nnx.Linear(i, o, kernel_init=_he_normal, dtype=dtype, rngs=rngs)
                for i, o in zip(sizes[:-1], sizes[1:], strict=True)
            ]
        )
        self.head = nnx.Linear(sizes[-1], classes, dtype=dtype, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = images
        for stage in self.stages:
            for conv, norm in stage:
                x = nnx.relu(norm(conv(x)))
            x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)  # [batch, height / 32 * width / 32 * channels]
        for layer in self.hidden:
            x = nnx.relu(layer(x))
        return self.head(x)
