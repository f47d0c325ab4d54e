"""BERT with its masked-language-model head: tokens in, logits of the token at every position out.

Parameters with the published vocabulary of 30,522 and 512 positions: depth 12, width 768 and 12
heads (base) have 109,514,298, of which 108.9 M are the encoder; depth 2, width 128 and 2 heads
(tiny) have 4.4 M. The output matrix is the embedding.

Differs from the paper: no dropout (as in `train.models.alexnet`), no prediction of the next
sentence, so no pooler, all tokens belong to the first of the two segments, and matrices other than
the embeddings are initialised with a deviation of 1/sqrt(inputs).

References:
  J. Devlin, M. Chang, K. Lee, K. Toutanova, "BERT: Pre-training of Deep Bidirectional Transformers
  for Language Understanding", 2019, arXiv:1810.04805.
  I. Turc, M. Chang, K. Lee, K. Toutanova, "Well-Read Students Learn Better", 2019, arXiv:1908.08962
  (tiny).
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from train.models.embedding import looked_up

SEGMENTS = 2
EPSILON = 1e-12


class Layer(nnx.Module):
    """Self-attention and a two-layer perceptron, each normalised after the addition."""

    def __init__(self, width: int, heads: int, mlp_width: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, dtype=dtype, rngs=rngs)
        norm = partial(nnx.LayerNorm, width, epsilon=EPSILON, dtype=dtype, rngs=rngs)
        self.norm1, self.norm2 = norm(), norm()
        self.expand = nnx.Linear(width, mlp_width, dtype=dtype, rngs=rngs)
        self.contract = nnx.Linear(mlp_width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.contract(nnx.gelu(self.expand(x), approximate=False)))


class BERT(nnx.Module):
    """The encoder and the head that predicts masked tokens.

    Args:
      length: tokens in a row, at most `positions`.
      vocabulary: the number of different tokens.
      positions: learned position embeddings.
      width: size of a token; divisible by `heads`.
      depth: encoder layers.
      heads: attention heads of a layer.
      mlp_width: hidden units of a layer's perceptron; published networks have 4 times the width.
      dtype: of the computation; parameters are float32.
      rngs: source of the initial parameters.
    """

    def __init__(
        self,
        *,
        length: int,
        vocabulary: int,
        positions: int,
        width: int,
        depth: int,
        heads: int,
        mlp_width: int,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        if length > positions:
            raise ValueError(f"rows of {length} tokens are longer than positions {positions}")
        if width % heads:
            raise ValueError(f"width {width} is not divisible by heads {heads}")
        embed = partial(
            nnx.Embed, embedding_init=nnx.initializers.normal(0.02), dtype=dtype, rngs=rngs
        )
        self.tokens = embed(vocabulary, width)
        self.positions, self.segments = embed(positions, width), embed(SEGMENTS, width)
        norm = partial(nnx.LayerNorm, width, epsilon=EPSILON, dtype=dtype, rngs=rngs)
        self.norm = norm()
        self.layers = nnx.List([Layer(width, heads, mlp_width, dtype, rngs) for _ in range(depth)])
        self.transform = nnx.Linear(width, width, dtype=dtype, rngs=rngs)
        self.transform_norm = norm()
        self.bias = nnx.Param(jnp.zeros(vocabulary))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = looked_up(self.tokens, tokens) + self.positions(jnp.arange(tokens.shape[1]))
        x = self.norm(x + looked_up(self.segments, jnp.zeros_like(tokens)))
        for layer in self.layers:
            x = layer(x)
        x = self.transform_norm(nnx.gelu(self.transform(x), approximate=False))
        return self.tokens.attend(x) + self.bias[...].astype(x.dtype)
