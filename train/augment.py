"""Changes of training images that keep their class, drawn anew for every batch."""

from collections.abc import Callable

import numpy as np

Augment = Callable[[np.ndarray, np.random.Generator], np.ndarray]

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


# Name -> f(images, rng) -> images of the same shape.
AUGMENTATIONS: dict[str, Augment | None] = {"none": None, "crop_flip": crop_flip}
