"""Large images: which part of them is cut, and that every device reads its own rows."""

import io

import imagenet
import numpy as np
import pytest
from ml_collections import config_dict
from PIL import Image
from running import read_config

from train import augment, data, pictures, rand_augment
from train.errors import RunError, UserError

WORLD = 4
SIZE = 32


@pytest.fixture
def settings(imagenet_dir: str) -> config_dict.ConfigDict:
    config = read_config("imagenet_resnet50").data
    config.data_dir, config.image_size = imagenet_dir, SIZE
    return config


def load(settings: config_dict.ConfigDict, devices: list[int]) -> data.Data:
    return data.load(settings, 16, devices, WORLD, seed=0)


def test_every_device_reads_its_own_rows(settings: config_dict.ConfigDict) -> None:
    """The label of a row is its number, so labels tell which rows were read."""
    together = load(settings, list(range(WORLD)))
    seen: list[set[int]] = [set() for _ in range(WORLD)]
    for _ in range(3):  # An epoch of 48 images.
        batch = next(together.train)
        assert batch["image"].shape == (16, SIZE, SIZE, 3) and batch["image"].dtype == np.uint8
        for device, labels in enumerate(batch["label"].reshape(WORLD, 4)):
            seen[device] |= set(labels.tolist())
    assert sorted(row for rows in seen for row in rows) == list(range(48))
    alone = load(settings, [2])
    assert set(np.concatenate([next(alone.train)["label"] for _ in range(3)])) == seen[2]
    assert (together.shape, together.classes) == ((SIZE, SIZE, 3), 1000)


def test_a_resumed_stream_goes_on_with_the_same_bits(settings: config_dict.ConfigDict) -> None:
    settings.augment = "rand_augment"
    stream, resumed = load(settings, [0, 3]).train, load(settings, [0, 3]).train
    for _ in range(2):
        next(stream)
    resumed.set_state(stream.get_state())
    for _ in range(2):
        a, b = next(stream), next(resumed)
        assert all((a[name] == b[name]).all() for name in a)


def test_every_test_image_counts_once(settings: config_dict.ConfigDict) -> None:
    loaded = load(settings, list(range(WORLD)))
    assert loaded.test_size == 20
    for _ in range(2):  # Each evaluation reads them anew.
        batches = list(loaded.test)
        weights = np.concatenate([batch["weight"] for batch in batches])
        labels = np.concatenate([batch["label"] for batch in batches])
        assert sorted(labels[weights == 1]) == list(range(20))


def test_a_test_image_is_the_middle_of_the_picture(settings: config_dict.ConfigDict) -> None:
    batch = next(iter(load(settings, [0]).test))
    for array, row in zip(batch["image"], batch["label"], strict=True):
        picture = imagenet.image(int(row)).convert("RGB")
        side = min(picture.size) * 224 / 256
        left, top = ((length - side) / 2 for length in picture.size)
        box = (left, top, left + side, top + side)
        expected = np.asarray(picture.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box))
        # JPEG and its reduced decoding lose a little.
        assert np.abs(array.astype(int) - expected).mean() < 4


def test_crops_have_the_areas_and_the_ratios_of_the_paper() -> None:
    rng = np.random.default_rng(0)
    boxes = np.array([pictures.random_box(400, 300, rng) for _ in range(2000)])
    left, top, right, bottom = boxes.T
    assert left.min() >= 0 and top.min() >= 0 and right.max() <= 400 and bottom.max() <= 300
    area, ratio = (right - left) * (bottom - top) / 120_000, (right - left) / (bottom - top)
    assert 0.08 <= area.min() < 0.09 and area.max() > 0.95
    assert 0.75 <= ratio.min() < 0.76 and 1.32 < ratio.max() < 1.334
    assert pictures.random_box(1000, 10, rng)[2:] == (505.0, 10.0)  # No crop fits: the middle.


def test_what_cannot_be_read(settings: config_dict.ConfigDict, data_dir: str) -> None:
    settings.image_size = 0
    with pytest.raises(UserError, match="have many sizes; set --config.data.image_size=224"):
        load(settings, [0])
    settings.name, settings.data_dir, settings.image_size = "digits", data_dir, 8
    settings.test_split = "test"
    with pytest.raises(UserError, match="the images of digits are not encoded; leave it 0"):
        load(settings, [0])


def test_a_broken_image_is_named(settings: config_dict.ConfigDict) -> None:
    builder = data.open_builder(settings)
    broken = [{"image": b"no image", "label": 0}] * 3
    found = pictures.Pictures(builder, SIZE)
    with pytest.raises(RunError, match="config.data: image 2 cannot be decoded: cannot identify"):
        found.read(broken, np.array([2]), lambda place, image: found.cut(image, (0, 0, 1, 1)))
    file = io.BytesIO()
    imagenet.image(1).save(file, format="jpeg")
    broken[0] = {"image": file.getvalue()[:200], "label": 0}
    with pytest.raises(RunError, match="image 0 cannot be decoded"):
        found.read(broken, np.array([0]), lambda place, image: found.cut(image, (0, 0, 9, 9)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("imagenet2013", "there is no 'imagenet2013', .* did you mean 'imagenet2012'"),
        ("imagenette/330px", "config.data.name: .*BuilderConfig 330px not found"),
        ("cifar10", "'cifar10' is not in .*/cifar10/3.0.2; .* tfds build cifar10 --file_format="),
    ],
)
def test_data_sets_that_are_not_there(
    settings: config_dict.ConfigDict, name: str, message: str
) -> None:
    settings.name = name
    with pytest.raises(UserError, match=message):
        load(settings, [0])


def test_what_has_to_be_fetched_by_hand_is_said(settings: config_dict.ConfigDict) -> None:
    settings.data_dir = "/nowhere"
    with pytest.raises(UserError, match=r"ILSVRC2012_img_val.tar. You need to register .*\)$"):
        load(settings, [0])


def test_rand_augment_draws_for_each_image() -> None:
    image = np.asarray(imagenet.image(3).resize((SIZE, SIZE)))
    images = np.stack([image] * 400)
    one_layer = rand_augment.rand_augment(layers=1, magnitude=5)
    found = one_layer(images, np.random.default_rng(0))
    assert found.shape == images.shape and found.dtype == np.uint8 and (images == image).all()
    # 14 operations: five do not look at the sign, so there are at most 5 + 2 * 9 results.
    counts = np.unique(found.reshape(400, -1), axis=0, return_counts=True)[1]
    assert 15 <= len(counts) <= 23
    assert abs((found == image).all((1, 2, 3)).mean() - 1 / 14) < 0.05
    again = one_layer(images, np.random.default_rng(0))
    assert (found == again).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_operations(channels: int) -> None:
    """Strength 0 leaves an image as it is, where there is a strength; full strength does not."""
    array = np.asarray(imagenet.image(3).resize((SIZE, SIZE)))[..., :channels]
    image = Image.fromarray(array if channels == 3 else array[..., 0])
    for number, operation in enumerate(rand_augment.OPERATIONS):
        unchanged = np.asarray(operation(image, 0.0)).reshape(array.shape)
        changed = np.asarray(operation(image, -1.0)).reshape(array.shape)
        if number not in (1, 2):  # Contrast and histogram are stretched in full or not at all.
            assert (unchanged == array).all(), number
        color = number == 5 and channels == 1  # Grey has no colour.
        assert (changed == array).all() == (number == 0 or color), number


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rand_augment(magnitude=11)", "config.data.augment: .*magnitude is 11; it must be from 0"),
        ("rand_augment(layers=0)", "config.data.augment: .*layers is 0; it must be a whole number"),
        ("rand_augmnt()", "config.data.augment: there is no 'rand_augmnt'; did you mean 'rand_aug"),
        ("rand_augmnt", "config.data.augment: there is no 'rand_augmnt'; did you mean 'rand_aug"),
        ("rand_augment(3)", "config.data.augment: .*expected a name with named arguments"),
    ],
)
def test_augmentations_that_are_none(
    settings: config_dict.ConfigDict, text: str, message: str
) -> None:
    settings.augment = text
    with pytest.raises(UserError, match=message):
        load(settings, [0])


def test_small_images_are_augmented_behind_the_crop() -> None:
    images = np.asarray(imagenet.image(3).resize((SIZE, SIZE)))[None]
    crop = augment.crop_flip(images, np.random.default_rng(7))
    same = augment.rand_augment(layers=1, magnitude=0)
    found = {same(images, np.random.default_rng(7)).tobytes() for _ in range(3)}
    assert len(found) == 1 and same.further is not None
    inverted = augment.CropFlip(lambda images, rng: 255 - images)
    assert (inverted(images, np.random.default_rng(7)) == 255 - crop).all()
