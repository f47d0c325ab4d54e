"""A GPT-style transformer: tokens in, logits of the next token out.

Its layers are one stack that `jax.lax.scan` runs through, so compiling 24 of them takes as long as
compiling one. Where parameters are split over the devices (`config.sync.gather`, `fsdp`), a layer
is whole on a device only while it is used.

Parameters with a vocabulary of 256: width 384 and depth 6 have 10.8 M; width 2048, depth 24 and
16 heads have 1.2 G.

Differs from the paper: no dropout (as in `train.models.alexnet`), and all matrices but the
embeddings are initialised with a deviation of 1/sqrt(inputs), whatever the depth.

References:
  A. Radford, J. Wu, R. Child, D. Luan, D. Amodei, I. Sutskever, "Language Models are Unsupervised
  Multitask Learners", 2019 (GPT-2).
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

import jaxcomm
from train.models.embedding import looked_up

STACK = "stack"  # The field of the model that holds the layers; each is gathered by itself.
SPLIT = "fsdp"  # The mesh axis of devices that together hold one copy of the parameters (HSDP).


class Block(nnx.Module):
    """Causal self-attention and a two-layer perceptron, each after a norm, added to its input."""

    def __init__(self, width: int, heads: int, mlp_width: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        norm = partial(nnx.LayerNorm, width, dtype=dtype, rngs=rngs)
        self.norm1, self.norm2 = norm(), norm()
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, dtype=dtype, rngs=rngs)
        self.expand = nnx.Linear(width, mlp_width, dtype=dtype, rngs=rngs)
        self.contract = nnx.Linear(mlp_width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.contract(nnx.gelu(self.expand(self.norm2(x))))


class Transformer(nnx.Module):
    """Embeddings of tokens and positions, the stack, a norm; the output matrix is the embedding.

    Args:
      length: tokens in a row.
      vocabulary: the number of different tokens.
      width: size of a token; divisible by `heads`.
      depth: layers.
      heads: attention heads of a layer.
      mlp_width: hidden units of a layer's perceptron.
      recompute: whether the backward pass computes the inside of a layer again, to save memory.
      dtype: of the computation; parameters are float32.
      rngs: source of the initial parameters.
    """

    def __init__(
        self,
        *,
        length: int,
        vocabulary: int,
        width: int,
        depth: int,
        heads: int,
        mlp_width: int,
        recompute: bool,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        if width % heads:
            raise ValueError(f"width {width} is not divisible by heads {heads}")
        embed = partial(
            nnx.Embed, embedding_init=nnx.initializers.normal(0.02), dtype=dtype, rngs=rngs
        )
        self.tokens, self.positions = embed(vocabulary, width), embed(length, width)

        @nnx.split_rngs(splits=depth)
        @nnx.vmap
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(width, heads, mlp_width, dtype, rngs)

        self.stack = stacked(rngs)
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.recompute = recompute

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = looked_up(self.tokens, tokens) + self.positions(jnp.arange(tokens.shape[1]))
        graph, blocks = nnx.split(self.stack)

        def layer(x: jax.Array, own: nnx.State) -> tuple[jax.Array, None]:
            return nnx.merge(graph, jaxcomm.gather(own, within=SPLIT))(x), None

        x, _ = jax.lax.scan(jax.checkpoint(layer) if self.recompute else layer, x, blocks)
        return self.tokens.attend(self.norm(x))
