"""CIFAR-10, if it is prepared on this machine, and configs cut to a size that a test can run."""

import os

import numpy as np
import pytest
import tensorflow_datasets as tfds
from ml_collections import config_dict
from running import ROOT

# What makes a config small beyond its steps.
TINY: dict[str, dict[str, object]] = {
    "cifar_resnet20": {"model.stages": (1, 1, 1)},
    "cifar_resnet110": {"model.stages": (2, 1, 1)},
    "cifar_alexnet": {"model.width": 0.125},
    "cifar_vgg": {"model.width": 0.125},
}


def data_dir(name: str = "cifar10") -> str:
    """Where a data set is prepared: TFDS_DATA_DIR or ../shared/data/tfds; else the test skips."""
    for path in (os.environ.get("TFDS_DATA_DIR"), str(ROOT.parent / "shared" / "data" / "tfds")):
        if path and os.path.isdir(os.path.join(path, name)):
            return path
    pytest.skip(f"{name} is not prepared in TFDS_DATA_DIR nor in ../shared/data/tfds")


def shrink(config: config_dict.ConfigDict, name: str) -> None:
    """Makes a config of CIFAR-10 tiny."""
    config.data.data_dir = data_dir()
    config.data.train_split = "train[:512]"
    config.data.test_split = "test[:128]"
    config.batch_size = 32
    config.update_from_flattened_dict(TINY.get(name, {}))


def images(count: int) -> dict[str, np.ndarray]:
    """The first training images and their labels."""
    builder = tfds.builder("cifar10", data_dir=data_dir(), try_gcs=False)
    examples = builder.as_data_source(f"train[:{count}]").__getitems__(list(range(count)))
    return {
        "image": np.stack([example["image"] for example in examples]),
        "label": np.array([example["label"] for example in examples], np.int32),
    }
