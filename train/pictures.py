"""Images that are decoded when a batch needs them: large ones, of many sizes.

Threads decode, cut and resize the images of a batch; Pillow releases the lock while it works.
Another thread prepares two batches ahead.
"""

import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grain
import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from train.augment import CropFlip
from train.errors import RunError, UserError
from train.images import open_split

Batch = dict[str, np.ndarray]
Box = tuple[float, float, float, float]  # Left, top, right, bottom, in pixels.

AREA = (0.08, 1.0)  # Share of an image that a crop for training covers.
RATIO = 4 / 3  # The largest ratio of its sides, in either direction.
TRIES = 10
CENTRE = 224 / 256  # Share of the shorter side that a crop for evaluation covers.
OPTIONS = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)


class Pictures:
    """The splits of a data set of encoded images.

    Args:
      builder: a prepared builder of TFDS.
      size: height and width that every image gets.

    Attributes:
      shape: height, width and channels of one image.

    Raises:
      UserError: if the data set's images are not encoded.
    """

    def __init__(self, builder: Any, size: int):
        feature: Any = builder.info.features["image"]
        self.shape = (size, size, feature.shape[-1])
        if not isinstance(feature, tfds.features.Image):
            raise UserError(
                f"config.data.image_size is {size}, but the images of {builder.info.name} are not "
                "encoded; leave it 0"
            )
        self._builder, self._size = builder, size
        self._pool = ThreadPoolExecutor(
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        )

    def stream(
        self,
        split: str,
        rows_of: Callable[[int], np.ndarray],
        share: int,
        devices: Sequence[int],
        seed: int,
        augment: CropFlip | None,
    ) -> grain.DatasetIterator:
        """Endless local batches, like those of `train.data.stream` from images in memory.

        Args:
          split: the split to read.
          rows_of: from the number of a batch to its rows, those of the first device first.
          share: rows of one device in a batch.
          devices: positions of the devices along the data axis.
          seed: the seed of the augmentation.
          augment: crops at random, mirrors, and changes further; None cuts out the middle. Its
            draws depend on the seed, the device's position, the number of the batch and the place
            in it.

        Returns:
          An iterator whose position is its number of batches.
        """
        source = open_split(self._builder, split, images=False)

        def batch(step: int) -> Batch:
            def view(place: int, image: Image.Image) -> np.ndarray:
                if augment is None:
                    return self.cut(image, central_box(*image.size))
                device, within = devices[place // share], place % share
                rng = np.random.default_rng((seed, device, step, 2 + within))
                array = self.cut(image, random_box(*image.size, rng))
                array = array[:, ::-1] if rng.random() < 0.5 else array
                return augment.further(array[None], rng)[0]

            return self.read(source, rows_of(step), view)

        steps = grain.MapDataset.range(2**40).map(batch)
        return iter(steps.to_iter_dataset(OPTIONS))

    def test_batches(self, split: str, rows: np.ndarray, weights: np.ndarray) -> grain.IterDataset:
        """Batches of the middles of images, read anew in every pass.

        Args:
          split: the split to read.
          rows: the rows of each batch, `[batches, rows]`.
          weights: the weights of the rows, likewise.
        """
        source = open_split(self._builder, split, images=False)

        def batch(number: int) -> Batch:
            def view(place: int, image: Image.Image) -> np.ndarray:
                del place
                return self.cut(image, central_box(*image.size))

            return {**self.read(source, rows[number], view), "weight": weights[number]}

        return grain.MapDataset.range(len(rows)).map(batch).to_iter_dataset(OPTIONS)

    def read(
        self, source: Any, rows: np.ndarray, view: Callable[[int, Image.Image], np.ndarray]
    ) -> Batch:
        """Decodes rows.

        Args:
          source: the split, whose images are not decoded.
          rows: which rows to decode.
          view: from the place in the batch and an image that is not yet decoded to a uint8 array
            `[size, size, channels]`.
        """

        def one(place: int, row: int) -> tuple[np.ndarray, int]:
            example = source[row]
            try:
                return view(place, Image.open(io.BytesIO(example["image"]))), example["label"]
            except (OSError, SyntaxError) as error:  # Pillow raises both.
                raise RunError(f"config.data: image {row} cannot be decoded: {error}") from error

        images, labels = zip(*self._pool.map(one, range(len(rows)), rows.tolist()), strict=True)
        return {"image": np.stack(images), "label": np.array(labels, np.int32)}

    def cut(self, image: Image.Image, box: Box) -> np.ndarray:
        """Decodes a part of an image, as uint8 `[size, size, channels]`."""
        width, height = image.size
        left, top, right, bottom = box
        # A JPEG is decoded at 1/2, 1/4 or 1/8 of its size where the part stays large enough.
        shrink = max(min(right - left, bottom - top) / self._size, 1.0)
        image.draft(None, (int(width / shrink), int(height / shrink)))
        x, y = image.width / width, image.height / height
        part = image.convert("L" if self.shape[-1] == 1 else "RGB").resize(
            self.shape[:2],
            Image.Resampling.BILINEAR,
            box=(left * x, top * y, right * x, bottom * y),
        )
        return np.asarray(part).reshape(self.shape)


def random_box(width: int, height: int, rng: np.random.Generator) -> Box:
    """A part for training: of 8 to 100 % of the area, with sides of a ratio of 3/4 to 4/3.

    References:
      C. Szegedy et al., "Going Deeper with Convolutions", 2015, arXiv:1409.4842, section 6.
    """
    for _ in range(TRIES):
        area = width * height * rng.uniform(*AREA)
        ratio = np.exp(rng.uniform(-np.log(RATIO), np.log(RATIO)))
        w, h = np.sqrt(area * ratio), np.sqrt(area / ratio)
        if w <= width and h <= height:
            left, top = rng.uniform(0, width - w), rng.uniform(0, height - h)
            return left, top, left + w, top + h
    return central_box(width, height, 1.0)


def central_box(width: int, height: int, share: float = CENTRE) -> Box:
    """The square in the middle, of a share of the shorter side."""
    side = share * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
