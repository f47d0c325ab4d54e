"""RandAugment: operations of Pillow, drawn anew for each image."""

from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

Augment = Callable[[np.ndarray, np.random.Generator], np.ndarray]

MAX_MAGNITUDE = 10
GREY = 128  # What a shear, a shift or a rotation uncovers.


def rand_augment(*, layers: int = 2, magnitude: float = 10) -> Augment:
    """RandAugment: each image goes through some operations, drawn with equal probability.

    Operations that have a direction (shear, shift, rotation, more or less of a property) take
    either with probability 1/2. What they uncover is grey.

    Args:
      layers: operations on each image.
      magnitude: their strength, from 0 to 10.

    Returns:
      `f(images, rng)`: new uint8 images of the same shape `[images, height, width, channels]`,
      where channels are 1 or 3.

    Raises:
      ValueError: for invalid layers or magnitudes.

    References:
      E. D. Cubuk, B. Zoph, J. Shlens, Q. V. Le, "RandAugment: Practical automated data augmentation
      with a reduced search space", 2020, arXiv:1909.13719.

    Differs from the paper: magnitude 0 changes nothing where an operation has a strength. Shifts go
    up to 0.45 of a side, as in the paper for images of 331 pixels.
    """
    if not (isinstance(layers, int) and layers >= 1):
        raise ValueError(f"layers is {layers!r}; it must be a whole number of at least 1")
    if not (isinstance(magnitude, int | float) and 0 <= magnitude <= MAX_MAGNITUDE):
        raise ValueError(f"magnitude is {magnitude!r}; it must be from 0 to {MAX_MAGNITUDE}")
    strength = magnitude / MAX_MAGNITUDE

    def augment(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        chosen = rng.integers(len(OPERATIONS), size=(len(images), layers))
        signs = rng.choice((-1.0, 1.0), size=(len(images), layers))
        changed = np.empty_like(images)
        for i, array in enumerate(images):
            image = Image.fromarray(array if array.shape[-1] == 3 else array[..., 0])
            for operation, sign in zip(chosen[i], signs[i], strict=True):
                image = OPERATIONS[operation](image, sign * strength)
            changed[i] = np.asarray(image).reshape(array.shape)
        return changed

    return augment


def _moved(image: Any, *matrix: float) -> Any:
    """Pixel (x, y) is what was at (a x + b y + c, d x + e y + f)."""
    fill = (GREY,) * len(image.getbands())
    affine = Image.Transform.AFFINE
    return image.transform(image.size, affine, matrix, fillcolor=fill if len(fill) > 1 else GREY)


def _rotated(image: Any, s: float) -> Any:
    return image.rotate(30 * s, fillcolor=(GREY,) * 3 if image.mode == "RGB" else GREY)


def _enhanced(name: str) -> Callable[[Any, float], Any]:
    def operation(image: Any, s: float) -> Any:
        return getattr(ImageEnhance, name)(image).enhance(1 + 0.9 * s)

    return operation


def _with_ops(name: str, *arguments: Callable[[float], int]) -> Callable[[Any, float], Any]:
    def operation(image: Any, s: float) -> Any:
        return getattr(ImageOps, name)(image, *(argument(abs(s)) for argument in arguments))

    return operation


# Of an image and a strength from -1 to 1, whose sign only some of them look at.
OPERATIONS: tuple[Callable[[Any, float], Any], ...] = (
    lambda image, s: image,
    _with_ops("autocontrast"),
    _with_ops("equalize"),
    _with_ops("solarize", lambda s: round(256 - 256 * s)),  # Inverts brighter pixels.
    _with_ops("posterize", lambda s: round(8 - 4 * s)),  # Keeps this many bits.
    _enhanced("Color"),
    _enhanced("Contrast"),
    _enhanced("Brightness"),
    _enhanced("Sharpness"),
    _rotated,
    lambda image, s: _moved(image, 1, 0.3 * s, 0, 0, 1, 0),
    lambda image, s: _moved(image, 1, 0, 0, 0.3 * s, 1, 0),
    lambda image, s: _moved(image, 1, 0, 0.45 * s * image.width, 0, 1, 0),
    lambda image, s: _moved(image, 1, 0, 0, 0, 1, 0.45 * s * image.height),
)
