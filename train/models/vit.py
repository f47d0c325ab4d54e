"""A vision transformer: patches, pre-norm encoder blocks, mean of the tokens.

With patches of 16, depth 12, a perceptron of four times the width, and heads of 64, for images of
224 x 224 and 1000 classes: width 192 is ViT-Ti with 5.7 M parameters, 384 ViT-S with 22.05 M, and
768 ViT-B with 86.6 M.

References:
  A. Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021, arXiv:2010.11929.
  L. Beyer, X. Zhai, A. Kolesnikov, "Better plain ViT baselines for ImageNet-1k", 2022,
  arXiv:2205.01580 (mean of the tokens instead of a class token).
"""

import jax
import jax.numpy as jnp
from flax import nnx


class EncoderBlock(nnx.Module):
    """Self-attention and a two-layer perceptron, each normalised before and added after."""

    def __init__(self, width: int, heads: int, mlp_width: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.expand = nnx.Linear(width, mlp_width, dtype=dtype, rngs=rngs)
        self.contract = nnx.Linear(mlp_width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.contract(nnx.gelu(self.expand(self.norm2(x))))


class ViT(nnx.Module):
    """A vision transformer with learned position embeddings.

    Args:
      image_shape: height, width and channels of one image.
      classes: number of logits.
      patch: side of a square patch; divides height and width.
      width: size of a token; divisible by `heads`.
      depth: encoder blocks.
      heads: attention heads of a block.
      mlp_width: hidden units of a block's perceptron.
      dtype: of the computation; parameters are float32.
      rngs: source of the initial parameters.
    """

    def __init__(
        self,
        *,
        image_shape: tuple[int, int, int],
        classes: int,
        patch: int,
        width: int,
        depth: int,
        heads: int,
        mlp_width: int,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        height, image_width, channels = image_shape
        if height % patch or image_width % patch:
            raise ValueError(f"patch {patch} does not divide images of {height} x {image_width}")
        if width % heads:
            raise ValueError(f"width {width} is not divisible by heads {heads}")
        tokens = (height // patch) * (image_width // patch)
        self.embed = nnx.Conv(
            channels, width, (patch, patch), strides=patch, padding="VALID", dtype=dtype, rngs=rngs
        )
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (tokens, width)))
        self.blocks = nnx.List(
            [EncoderBlock(width, heads, mlp_width, dtype, rngs) for _ in range(depth)]
        )
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(width, classes, dtype=dtype, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.embed(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])  # [batch, tokens, width]
        x = x + self.position[...].astype(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(axis=1))
