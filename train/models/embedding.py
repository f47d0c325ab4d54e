"""Looking up embeddings, with gradients that are summed in float32."""

import jax
import jax.numpy as jnp
from flax import nnx


def looked_up(embed: nnx.Embed, tokens: jax.Array) -> jax.Array:
    """The rows of tokens, `[..., width]`, in the dtype of the embedding's computation.

    The gradient of a row is a sum over all occurrences of its token, thousands in a batch of bytes.
    In bfloat16 the sum would stop growing, so rows are looked up before they are rounded.
    """
    rows = jnp.take(embed.embedding[...], tokens, axis=0)
    return rows if embed.dtype is None else rows.astype(embed.dtype)
