"""Scikit-learn's handwritten digits as a TensorFlow Datasets builder: no download, no TensorFlow.

1,797 grey images of 8 x 8 with values 0 to 16, by 13 writers. The split is fixed: 360 test images,
stratified by class and drawn with seed 0, and the 1,437 others for training. Both splits hold
images by the same writers, so the accuracy says nothing about new writers.

References:
  E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
  Repository, 1998, doi:10.24432/C50P49.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from train.prepare import prepared

TEST_IMAGES = 360
SPLIT_SEED = 0


class Digits(tfds.core.GeneratorBasedBuilder):
    """Handwritten digits of 8 x 8 pixels with values 0 to 16, and their classes."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict(
            {
                "image": tfds.features.Tensor(shape=(8, 8, 1), dtype=np.uint8),
                "label": tfds.features.ClassLabel(num_classes=10),
            }
        )
        return tfds.core.DatasetInfo(
            builder=self,
            description=__doc__,
            features=features,
            supervised_keys=("image", "label"),
            homepage="https://archive.ics.uci.edu/dataset/80",
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
        del dl_manager  # Nothing is downloaded: the images come with scikit-learn.
        # Imported here: scikit-learn takes a second to load and is only needed for preparation.
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        images, labels = load_digits(return_X_y=True)
        train, test = train_test_split(
            np.arange(len(labels)), test_size=TEST_IMAGES, stratify=labels, random_state=SPLIT_SEED
        )
        images = images.reshape(-1, 8, 8, 1).astype(np.uint8)
        return {
            "train": self._generate_examples(images, labels, np.asarray(train)),
            "test": self._generate_examples(images, labels, np.asarray(test)),
        }

    def _generate_examples(
        self, images: np.ndarray, labels: np.ndarray, rows: np.ndarray
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for row in rows.tolist():
            yield row, {"image": images[row], "label": int(labels[row])}


def prepare(data_dir: str) -> tfds.core.DatasetBuilder:
    """Writes the data set below a directory, once, and returns its builder."""
    return prepared(Digits, data_dir)
