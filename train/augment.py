"""Changes of training images that keep their class, drawn anew for every batch."""

from collections.abc import Callable
from typing import Any

import numpy as np

Augment = Callable[[np.ndarray, np.random.Generator], np.ndarray]
Change = Callable[[dict[str, np.ndarray], np.random.Generator], None]

PADDING = 4  # Pixels at each side; a crop cuts the image back to its size.


def crop_flip(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Mirrors images at random, pads them with 4 black pixels, and crops them at a random place.

    Each of the 81 places is equally likely, and so is either direction.

    Args:
      images: uint8 `[images, height, width, channels]`.
      rng: draws place and direction of each image.

    Returns:
      New images of the same shape.

    References:
      K. He, X. Zhang, S. Ren, J. Sun, "Deep Residual Learning for Image Recognition", 2016,
      arXiv:1512.03385, section 4.2.
    """
    place = rng.integers(0, 2 * PADDING + 1, (2, len(images)))
    mirrored = rng.random(len(images)) < 0.5
    images = images.copy()
    images[mirrored] = images[mirrored][:, :, ::-1]
    sides = (PADDING, PADDING)
    padded = np.pad(images, ((0, 0), sides, sides, (0, 0)))
    # A view of all crops, [image, top, left, 1, height, width, channels]; only one each is copied.
    crops = np.lib.stride_tricks.sliding_window_view(padded, images.shape[1:], axis=(1, 2, 3))
    return crops[np.arange(len(images)), place[0], place[1], 0]


class CropFlip:
    """`crop_flip`, followed by a further change.

    Args:
      further: the change to the images after the crop; None changes nothing more.
    """

    def __init__(self, further: Augment | None = None):
        self.further: Augment = further or (lambda images, rng: images)

    def __call__(self, images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return self.further(crop_flip(images, rng), rng)


def only_crop_flip() -> CropFlip:
    """`crop_flip`, to which a config cannot add anything; an error shows this name."""
    return CropFlip()


def rand_augment(**options: Any) -> CropFlip:
    """`crop_flip`, then what `train.rand_augment` does."""
    from train.rand_augment import rand_augment  # Imports Pillow, which most runs do not need.

    return CropFlip(rand_augment(**options))


# Name -> the factory of the change. Large images are cropped and mirrored when they are decoded
# (`train.pictures`), so only `further` of a CropFlip is left to do.
AUGMENTATIONS: dict[str, Callable[..., CropFlip | None]] = {
    "none": lambda: None,
    "crop_flip": only_crop_flip,
    "rand_augment": rand_augment,
}


def changes(augment: Augment | None) -> Change | None:
    """A function that does this to the images of a batch, in place."""
    if augment is None:
        return None

    def change(batch: dict[str, np.ndarray], rng: np.random.Generator) -> None:
        batch["image"][:] = augment(batch["image"], rng)

    return change
