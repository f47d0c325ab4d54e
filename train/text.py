"""Text as rows of tokens for a language model: every byte is a token, so there are 256.

The text of a split is cut into rows of T = `sequence_length` tokens; the labels of a row are its
tokens shifted by one:

    input  of row i   tokens  i T     ...  (i + 1) T - 1
    label  of row i   tokens  i T + 1 ...  (i + 1) T

So every token but the first is a label once. A shorter last row is left out in training, and padded
with labels of weight 0 in a test.
"""

import functools
import zlib
from typing import Any

import numpy as np

from train.errors import UserError

Batch = dict[str, np.ndarray]
VOCABULARY = 256
COMPARED = 2**20  # tokens at each end of a split


class Text:
    """The splits of a data set of text, as `train.data` reads them.

    Args:
      builder: the builder of a prepared data set whose examples have a "text".
      config: `config.data`, with `name`, `sequence_length`, `augment` and `shards`.

    Attributes:
      classes: the number of different tokens.
      unit: the name of what a test counts.

    Raises:
      UserError: for a config with fields for images.
    """

    classes, unit = VOCABULARY, "tokens"

    def __init__(self, builder: Any, config: Any):
        length = config.get("sequence_length")
        if length is None:
            raise UserError(
                f"config.data.sequence_length is None, and {config.name} is text; set the number "
                "of tokens in a row, such as --config.data.sequence_length=128"
            )
        if config.augment != "none":
            raise UserError(
                f"config.data.augment={config.augment!r} changes images, and {config.name} is "
                "text; set --config.data.augment=none"
            )
        if config.image_size:
            raise UserError(
                f"config.data.image_size={config.image_size} is of images, and {config.name} is "
                "text; set --config.data.image_size=0"
            )
        if config.shards == "by_label":
            raise UserError(
                f"config.data.shards='by_label' needs classes, and {config.name} is text; "
                "'by_position' gives each device its own part"
            )
        self._length = length
        self._builder, self._name = builder, config.name

    @functools.cache  # noqa: B019  (one object a run)
    def _tokens(self, split: str) -> np.ndarray:
        try:
            source = self._builder.as_data_source(split)
        except ValueError as error:  # No such split; the message lists the existing ones.
            raise UserError(f"config.data: {error}") from error
        text = b"".join(example["text"] for example in source)
        if len(text) <= self._length:
            raise UserError(
                f"{self._name} has {len(text)} tokens in {split!r}, fewer than one row of "
                f"config.data.sequence_length={self._length} and the token after it"
            )
        return np.frombuffer(text, np.uint8)

    def labels(self, split: str) -> np.ndarray:
        """The numbers of the rows for training: text has no classes to deal it by."""
        return np.arange(self.train_rows(split))

    def train_rows(self, split: str) -> int:
        """How many rows there are for training."""
        return (len(self._tokens(split)) - 1) // self._length

    def test_rows(self, split: str) -> int:
        """How many rows a test has, including the padded one."""
        return -(-(len(self._tokens(split)) - 1) // self._length)

    def test_size(self, split: str) -> int:
        """How many labels a test has."""
        return len(self._tokens(split)) - 1

    def read(self, split: str, rows: np.ndarray) -> Batch:
        """Rows of a split: uint8 tokens, int32 labels, and weights of the labels."""
        tokens, places = self._tokens(split), np.arange(self._length)
        at = rows[:, None] * self._length + places
        last = len(tokens) - 1
        return {
            "image": tokens[np.minimum(at, last)],
            "label": tokens[np.minimum(at + 1, last)].astype(np.int32),
            "weight": (at < last).astype(np.float32),
        }

    def read_test(self, split: str, rows: np.ndarray) -> Batch:
        """The same; masked text differs in a test."""
        return self.read(split, rows)

    def ends(self, split: str) -> list[int]:
        """CRC-32 of the beginning of a split and of its end."""
        tokens = self._tokens(split)
        return [zlib.crc32(part.tobytes()) for part in (tokens[:COMPARED], tokens[-COMPARED:])]
