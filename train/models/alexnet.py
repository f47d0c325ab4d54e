"""AlexNet: five convolutions and most of its weights in three dense layers.

With a large stem it is the single-GPU version of the network for images of 224 x 224: kernels of 11
x 11, 5 x 5 and 3 x 3, a first stride of 4, overlapping poolings; 61.1 M parameters, of which 58.6 M
are in the dense layers. Without it, this is the usual adaptation to CIFAR: kernels of 3 x 3, a
first stride of 2, poolings of 2 x 2; 23.3 M parameters, of which 21.0 M are in the dense layers.
Papers on compression use it because it has many gradients for little arithmetic.

Differs from the paper: no dropout (it would need its own random bits in every step and on every
device), the initialisation of He et al., and normalisation over groups of channels after every
convolution instead of local response normalisation; `train.models.resnet` explains why not over the
batch.

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

# (channels at width 1, side of the kernel with a large stem, whether a pooling follows).
CONVOLUTIONS = ((64, 11, True), (192, 5, True), (384, 3, False), (256, 3, False), (256, 3, True))
HIDDEN = 4096

_he_normal = nnx.initializers.he_normal()


class AlexNet(nnx.Module):
    """AlexNet with group normalisation and without dropout.

    Args:
      image_shape: height, width and channels of one image; sides are multiples of 16.
      classes: number of logits.
      width: multiplies the channels and the hidden units; 1 is the published network.
      groups: groups of channels that are normalised together; divides all channels.
      large_stem: the published kernels, strides and poolings, for images of 224 x 224.
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
        large_stem: bool = False,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        height, image_width, channels_in = image_shape
        if not large_stem and (height % 16 or image_width % 16):
            raise ValueError(
                f"alexnet halves images four times; {height} x {image_width} are not multiples "
                "of 16"
            )
        self.pool = 3 if large_stem else 2
        convs, norms = [], []
        for full, side, _ in CONVOLUTIONS:
            size = side if large_stem else 3
            stride = 1 if convs else (4 if large_stem else 2)
            channels = int(width * full)
            if channels < 1 or channels % groups:
                raise ValueError(
                    f"width {width} makes {channels} channels of {full}, which are not divisible "
                    f"by groups {groups}"
                )
            conv = nnx.Conv(
                channels_in,
                channels,
                (size, size),
                strides=stride,
                # 224 becomes 55 and 32 becomes 16; the other convolutions keep the size.
                padding=2 if stride == 4 else "SAME",
                use_bias=False,
                kernel_init=_he_normal,
                dtype=dtype,
                rngs=rngs,
            )
            convs.append(conv)
            norms.append(nnx.GroupNorm(channels, num_groups=groups, dtype=dtype, rngs=rngs))
            channels_in = channels
        self.convs, self.norms = nnx.List(convs), nnx.List(norms)
        pixels = _pixels(height, large_stem) * _pixels(image_width, large_stem)
        sizes = [pixels * channels_in] + 2 * [int(width * HIDDEN)]
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
                x = nnx.max_pool(x, (self.pool, self.pool), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)  # [batch, pixels that are left * channels]
        for layer in self.hidden:
            x = nnx.relu(layer(x))
        return self.head(x)


def _pixels(side: int, large_stem: bool) -> int:
    """The length of a side after the convolutions and poolings."""
    if not large_stem:
        return side // 16
    side = (side + 2 * 2 - 11) // 4 + 1
    for _ in range(3):
        side = (side - 3) // 2 + 1
    if side < 1:
        raise ValueError("alexnet with large_stem needs images of at least 63 x 63")
    return side
