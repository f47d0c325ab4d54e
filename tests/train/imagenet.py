"""A data set in the format of TFDS that looks like ImageNet: JPEGs of many sizes, few of them."""

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from ml_collections import config_dict
from PIL import Image

SIZES = {"train": 48, "validation": 20}
# What makes a config of ImageNet small.
TINY = {
    "imagenet_resnet50": {"model.stages": (1, 1), "model.width": 8, "model.groups": 8},
    "imagenet_resnet101": {"model.stages": (1, 2), "model.width": 8, "model.groups": 8},
    "imagenet_vit_s16": {"model.width": 16, "model.depth": 1, "model.heads": 2},
    "imagenet_vit_b16": {"model.width": 16, "model.depth": 2, "model.heads": 2},
}


def image(row: int) -> Image.Image:
    """Between 30 and 93 pixels high and wide; every seventh one is grey, as a few of ImageNet."""
    rng = np.random.default_rng(row)
    height, width = rng.integers(30, 94, 2)
    coarse = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    picture = Image.fromarray(coarse).resize((int(width), int(height)), Image.Resampling.BICUBIC)
    return picture.convert("L") if row % 7 == 0 else picture


class Imagenet2012(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """The features that TFDS gives ImageNet; the name stays that of its own builder."""

    VERSION = tfds.core.Version("5.1.0")

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict(
            {
                "image": tfds.features.Image(encoding_format="jpeg"),
                "label": tfds.features.ClassLabel(num_classes=1000),
                "file_name": tfds.features.Text(),
            }
        )
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
        del dl_manager
        return {name: self._generate_examples(name) for name in SIZES}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
        for row in range(SIZES[split]):
            file = io.BytesIO()
            image(row).save(file, format="jpeg", quality=95)
            file.seek(0)
            yield row, {"image": file, "label": row, "file_name": f"{row}.JPEG"}


def shrink(config: config_dict.ConfigDict, name: str, data_dir: str) -> None:
    """Makes a config of ImageNet tiny."""
    config.data.data_dir, config.data.image_size = data_dir, 32
    config.batch_size = 16
    config.model.dtype = "float32"  # Bfloat16 takes a CPU longer.
    config.update_from_flattened_dict(TINY[name])


def prepare(data_dir: str) -> None:
    """Writes it below a directory."""
    tfds.disable_progress_bar()
    Imagenet2012(data_dir=data_dir, file_format="array_record").download_and_prepare()
