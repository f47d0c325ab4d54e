"""Text for masked language modelling: some tokens of a row are hidden and have to be predicted.

A share of the tokens is to be predicted, equally many in every row. In the input each of them is
replaced by a special token ([MASK]) with probability 0.8, replaced by a random byte with 0.1, and
kept with 0.1; so the network never knows which of the visible tokens are right. The draws for a
training batch depend on the seed, the device and the number of the batch, so every epoch hides
other tokens, and a resumed run hides the same ones. Those for a test row depend only on its number,
so all runs are tested on the same tokens.

The text is cut into rows of T tokens. A last row of fewer tokens is left out in training. In a test
it is extended backwards to T tokens, of which only those that are in no earlier row may be hidden.

Differs from the paper: bytes instead of word pieces, a text is masked anew in every epoch instead
of ten times in all, and there is no next-sentence prediction.

References:
  J. Devlin, M. Chang, K. Lee, K. Toutanova, "BERT: Pre-training of Deep Bidirectional Transformers
  for Language Understanding", 2019, arXiv:1810.04805, section 3.1 and appendix A.1.
"""

from typing import Any

import numpy as np

from train.text import VOCABULARY, Batch, Text

MASK = VOCABULARY  # The token after the 256 bytes.
_MASKED, _DRAWN = 0.8, 0.1  # Shares of the hidden tokens that become [MASK], or a random byte.


class MaskedText(Text):
    """The splits of a data set of text, as `train.data` reads them.

    Args:
      builder: the builder of a prepared data set whose examples have a "text".
      config: as for `Text`, with `masked`, the share of tokens to be predicted.
    """

    classes = VOCABULARY + 1

    def __init__(self, builder: Any, config: Any):
        super().__init__(builder, config)
        self._share = config.masked

    def train_rows(self, split: str) -> int:
        """How many rows there are for training."""
        return len(self._tokens(split)) // self._length

    def test_rows(self, split: str) -> int:
        """How many rows a test has, including the extended one."""
        return -(-len(self._tokens(split)) // self._length)

    def test_size(self, split: str) -> int:
        """How many tokens are predicted in a test."""
        rows, rest = divmod(len(self._tokens(split)), self._length)
        sizes = np.array([self._length] * rows + [rest] * (rest > 0))
        return int(hidden_of(sizes, self._share).sum())

    def read(self, split: str, rows: np.ndarray) -> Batch:
        """Rows for training: uint16 tokens, int32 labels, and weights of what may be hidden."""
        tokens = self._tokens(split)
        begins = rows[:, None] * self._length
        at = np.minimum(begins, len(tokens) - self._length) + np.arange(self._length)
        return {
            "image": tokens[at].astype(np.uint16),
            "label": tokens[at].astype(np.int32),
            "weight": (at >= begins).astype(np.float32),
        }

    def read_test(self, split: str, rows: np.ndarray) -> Batch:
        """Rows for a test, each masked by its own draws; weights are 1 for hidden tokens."""
        batch = self.read(split, rows)
        for i, row in enumerate(rows.tolist()):
            own = {name: array[i : i + 1] for name, array in batch.items()}
            self.change(own, np.random.default_rng(row))
        return batch

    def change(self, batch: Batch, rng: np.random.Generator) -> None:
        """Hides tokens of a batch, in place."""
        mask(batch, rng, self._share)


def hidden_of(sizes: np.ndarray, share: float) -> np.ndarray:
    """How many tokens are hidden in rows of these sizes: at least one."""
    return np.maximum(np.rint(share * sizes), 1).astype(int)


def mask(batch: Batch, rng: np.random.Generator, share: float) -> None:
    """Hides tokens of rows, in place.

    Args:
      batch: "image", the tokens `[rows, length]`, and "weight", 1 where a token may be hidden; it
        becomes 1 where one is hidden, and 0 elsewhere.
      rng: draws which tokens are hidden, and what replaces them.
      share: the share of a row's maskable tokens to hide.
    """
    tokens, weight = batch["image"], batch["weight"]
    order = np.where(weight > 0, rng.random(tokens.shape), 2.0).argsort(axis=1)
    count = hidden_of((weight > 0).sum(axis=1), share)
    # The first `count` of a row's order.
    rows, ranks = np.nonzero(np.arange(tokens.shape[1]) < count[:, None])
    places = order[rows, ranks]
    kind = rng.random(len(rows))
    drawn = rng.integers(0, VOCABULARY, len(rows))
    seen = np.where(kind < _MASKED + _DRAWN, drawn, tokens[rows, places])
    tokens[rows, places] = np.where(kind < _MASKED, MASK, seen)
    weight[:] = 0
    weight[rows, places] = 1
