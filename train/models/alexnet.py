"""AlexNet for images of 32 x 32: five convolutions and most of its weights in three dense layers.

This is the usual adaptation to CIFAR: the channels of the one-GPU network, kernels of 3 x 3, a
first stride of 2 instead of 4, three poolings of 2 x 2. At width 1 it has 23.3 M parameters, of
which 21.0 M are in the dense layers. Papers on compression use it because it has many gradients for
little arithmetic. The network for ImageNet has 62.4 M, and images of 224 x 224.

Differs from the paper: no dropout (it would need random bits of its own in every step and on every
device), and normalisation over groups of channels after every convolution instead of local response
normalisation; `train.models.resnet` says why not over the batch.

References:
  A. Krizhevsky, I. Sutskever, G. Hinton, "ImageNet Classification with Deep Convolutional Neural
  Networks", 2012.
  A. Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014,
  arXiv:1404.5997 (the channels of the network without two halves).
  Y. Wu, K. He, "Group Normalization", 2018, arXiv:1803.08494.
"""

import jax
import jax.numpy as jnp
from flax import nnx

# (channels at width 1, stride, whether a pooling follows).
CONVOLUTIONS = ((64, 2, True), (192, 1, True), (384, 1, False), (256, 1, False), (256, 1, True))
HIDDEN = 4096

_he_normal = nnx.initializers.he_normal()


class AlexNet(nnx.Module):
    """AlexNet with group normalisation and without dropout.

    Args:
      image_shape: height, width and channels of one image; sides are multiples of 16.
      classes: number of logits.
      width: multiplies the channels and the hidden units; 1 is the published network.
      groups: groups of channels that are normalised together; divides all channels.
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
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        height, image_width, channels_in = image_shape
        if height % 16 or image_width % 16:
            raise ValueError(
                f"alexnet halves images four times; {height} x {image_width} are not multiples "
                "of 16"
            )
        convs, norms = [], []
        for full, stride, _ in CONVOLUTIONS:
            channels = int(width * full)
            if channels < 1 or channels % groups:
                raise ValueError(
                    f"width {width} makes {channels} channels of {full}, which are not divisible "
                    f"by groups {groups}"
                )
            conv = nnx.Conv(
                channels_in,
                channels,
                (3, 3),
                strides=stride,
                use_bias=False,
                kernel_init=_he_normal,
                dtype=dtype,
                rngs=rngs,
            )
            convs.append(conv)
            norms.append(nnx.GroupNorm(channels, num_groups=groups, dtype=dtype, rngs=rngs))
            channels_in = channels
        self.convs, self.norms = nnx.List(convs), nnx.List(norms)
        sizes = [height // 16 * (image_width // 16) * channels_in] + 2 * [int(width * HIDDEN)]
        self.hidden = nnx.List(
            [
                nnx.Linear(i, o, kernel_init=_he_normal, dtype=dtype, rngs=rngs)
                for i, o in zip(sizes[:-1], sizes[1:], strict=True)
            ]
        )
        self.head = nnx.Linear(sizes[-1], classes, dtype=dtype, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = images
        for conv, norm, (_, _, pooled) in zip(self.convs, self.norms, CONVOLUTIONS, strict=True):
            x = nnx.relu(norm(conv(x)))
            if pooled:
                x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)  # [batch, height / 16 * width / 16 * channels]
        for layer in self.hidden:
            x = nnx.relu(layer(x))
        return self.head(x)
