"""Images of a prepared TensorFlow data set, decoded to uint8."""

import difflib
import zlib
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from train.errors import UserError

Batch = dict[str, np.ndarray]
AT_ONCE = 1024  # rows whose labels are read at once


class Images:
    """The splits of a data set of images with one label each, as `train.data` reads them.

    Args:
      builder: the builder of a prepared data set whose examples have an "image" and a "label".
      config: `config.data`, with `name` and `image_size`.

    Attributes:
      classes: number of labels.
      unit: the name of what a test counts.

    Raises:
      UserError: if the images have many sizes and the config does not give one.
    """

    unit = "images"

    def __init__(self, builder: Any, config: Any):
        if "label" not in builder.info.features:
            raise UserError(
                f"config.data: the images of {config.name} have no labels, but "
                f"{', '.join(builder.info.features)}; choose a data set for classification"
            )
        if None in builder.info.features["image"].shape and not config.image_size:
            raise UserError(
                f"images of {config.name} have many sizes; set --config.data.image_size=224, or "
                "another one"
            )
        self._builder = builder
        self.classes = builder.info.features["label"].num_classes

    def labels(self, split: str) -> np.ndarray:
        """The labels of all images of a split, without decoding the images."""
        self._size(split, "train_split")
        source = open_split(self._builder, split, images=False)
        starts = range(0, len(source), AT_ONCE)  # a row comes with its image, as it is stored
        blocks = [range(start, min(start + AT_ONCE, len(source))) for start in starts]
        found = [row["label"] for block in blocks for row in source.__getitems__([*block])]
        return np.array(found, np.int32)

    def train_rows(self, split: str) -> int:
        """How many images there are for training."""
        self._size(split, "train_split")
        return len(open_split(self._builder, split, images=False))

    def test_size(self, split: str) -> int:
        """How many images a test has."""
        return self._size(split, "test_split")

    test_rows = test_size

    def _size(self, split: str, field: str) -> int:
        """How many images a split has, or a part of it, such as "test[:1000]"."""
        try:
            size = self._builder.info.splits[split].num_examples
        except ValueError:
            size = 0
        if not size:
            splits = list(self._builder.info.splits)
            near = difflib.get_close_matches(split.strip("'\"").split("[")[0], splits, 1)
            hint = f"did you mean {near[0]!r}? " if near and near[0] not in split else ""
            if split[:1] in ("'", '"'):
                hint = "leave out the quotes around it. "
            raise UserError(
                f"config.data.{field}: {self._builder.info.name} has no images in {split!r}; "
                f"{hint}its splits are {', '.join(splits)}"
            )
        return size

    def read(self, split: str, rows: np.ndarray) -> Batch:
        """Images of a split with their labels, and a weight of 1 for each."""
        batch = read(self._builder, split, rows)
        return {**batch, "weight": np.ones(len(rows), np.float32)}

    read_test = read

    def ends(self, split: str) -> list[int]:
        """CRC-32 of the first row of a split and of the last.

        Images of one size are compared by their pixels, because another program may have packed
        them. Images of many sizes are compared as files, as the data set's authors made them.
        """
        packed = None in self._builder.info.features["image"].shape
        source = open_split(self._builder, split, images=not packed)
        rows = source.__getitems__([0, len(source) - 1])
        return [zlib.crc32(_bytes(row["image"]) + _bytes(int(row["label"]))) for row in rows]


def open_split(builder: Any, split: str, images: bool = True) -> Any:
    """The rows of a split, with their images decoded or not."""
    decoders = None if images else {"image": tfds.decode.SkipDecoding()}
    try:
        return builder.as_data_source(split, decoders=decoders)
    except ValueError as error:  # No such split; the message lists the existing ones.
        raise UserError(f"config.data: {error}") from error


def read(builder: Any, split: str, rows: np.ndarray) -> Batch:
    """Decodes rows of a split."""
    examples = open_split(builder, split).__getitems__(rows.tolist())
    return {
        "label": np.array([example["label"] for example in examples], np.int32),
        "image": np.stack([example["image"] for example in examples]),
    }


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else np.asarray(value).tobytes()
