"""A language model of LSTM layers: tokens in, logits of the next token out.

With a vocabulary of 10,000, two layers of width 1500 are the large network of Zaremba et al. with
66.0 M parameters, and width 650 their medium one with 19.8 M. Papers on compression use it because
of its large embedding and output matrices.

Differs from the paper: no dropout (as in `train.models.alexnet`), and the hidden state begins at
zero in every row instead of continuing from the row before.

References:
  S. Hochreiter, J. Schmidhuber, "Long Short-Term Memory", Neural Computation 9(8), 1997.
  W. Zaremba, I. Sutskever, O. Vinyals, "Recurrent Neural Network Regularization", 2014,
  arXiv:1409.2329.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from train.models.embedding import looked_up


class LSTMLayer(nnx.Module):
    """One layer: the inputs of all positions in one product, then a loop over positions."""

    def __init__(self, width_in: int, width: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.input = nnx.Linear(width_in, 4 * width, dtype=dtype, rngs=rngs)
        self.hidden = nnx.Linear(width, 4 * width, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.hidden.kernel[...].astype(self.input.dtype or x.dtype)

        def step(
            carry: tuple[jax.Array, jax.Array], inputs: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            hidden, cell = carry
            i, f, g, o = jnp.split(inputs + hidden @ kernel, 4, axis=-1)
            # The forget gate begins open, so that early inputs are kept until training closes it.
            cell = nnx.sigmoid(f + 1) * cell + nnx.sigmoid(i) * jnp.tanh(g)
            hidden = nnx.sigmoid(o) * jnp.tanh(cell)
            return (hidden, cell), hidden

        inputs = self.input(x).swapaxes(0, 1)  # [position, batch, 4 * width]
        zero = 0 * inputs[0, :, : kernel.shape[0]]  # From the data, so that it varies by device.
        _, outputs = jax.lax.scan(step, (zero, zero), inputs)
        return outputs.swapaxes(0, 1)


class LSTM(nnx.Module):
    """Embedding, LSTM layers, and a dense layer to the vocabulary.

    Args:
      length: tokens in a row; any number works.
      vocabulary: the number of different tokens.
      width: size of the embedding and of every layer's state.
      layers: LSTM layers.
      dtype: of the computation; parameters are float32.
      rngs: source of the initial parameters.
    """

    def __init__(
        self,
        *,
        length: int,
        vocabulary: int,
        width: int,
        layers: int,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        del length
        self.embed = nnx.Embed(vocabulary, width, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([LSTMLayer(width, width, dtype, rngs) for _ in range(layers)])
        self.head = nnx.Linear(width, vocabulary, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = looked_up(self.embed, tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
