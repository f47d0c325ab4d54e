"""The digits, and which device reads which of them in which order."""

import io
import multiprocessing
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cifar
import numpy as np
import PIL.Image
import pytest
import tensorflow_datasets as tfds
from ml_collections import config_dict
from sklearn.datasets import load_digits

from train import augment, data, digits, images
from train.errors import UserError
from train.images import read

WORLD = 4


@pytest.fixture
def settings(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
    return config.data


def split_of(data_dir: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    source = digits.prepare(data_dir).as_data_source(split)
    examples = [source[i] for i in range(len(source))]
    return np.stack([e["image"] for e in examples]), np.array([e["label"] for e in examples])


def test_the_digits_are_scikit_learns_in_a_fixed_stratified_split(data_dir: str) -> None:
    original = load_digits()
    images, labels = zip(split_of(data_dir, "train"), split_of(data_dir, "test"), strict=True)
    assert [len(part) for part in labels] == [1437, 360]
    rows = {
        (image.tobytes(), label)
        for image, label in zip(np.concatenate(images), np.concatenate(labels), strict=True)
    }
    expected = original.images.astype(np.uint8)[..., None]
    assert rows == {(i.tobytes(), t) for i, t in zip(expected, original.target, strict=True)}
    share = np.bincount(labels[1]) / np.bincount(original.target)
    np.testing.assert_allclose(share, 360 / 1797, atol=0.005)


def _prepare(path: str) -> int:
    return len(digits.prepare(path).as_data_source("train"))


@pytest.mark.slow
def test_processes_that_start_together_prepare_the_digits_once(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(_prepare, [str(tmp_path)] * 2, chunksize=1) == [1437] * 2
    assert [path.name for path in (tmp_path / "digits").iterdir()] == ["1.0.0"]


def test_half_prepared_digits_are_not_seen(data_dir: str, tmp_path: Path) -> None:
    (tmp_path / "digits" / ".preparing-abc" / "digits").mkdir(parents=True)
    assert _prepare(str(tmp_path)) == 1437
    assert (tmp_path / "digits" / ".preparing-abc").exists()  # Another process may be at work.


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_shards_partition_the_rows(world: int) -> None:
    labels = np.random.default_rng(0).integers(0, 10, 101)
    for shards_of in data.SHARDS.values():
        shards = shards_of(labels, world, 0)
        assert len(shards) == world
        assert sorted(np.concatenate(shards)) == list(range(101))
    by_label = data.by_label(labels, world, 0)
    assert all((labels[rows] % world == i).all() for i, rows in enumerate(by_label))
    sizes = [len(rows) for rows in data.shuffled(labels, world, 0)]
    assert max(sizes) - min(sizes) <= 1
    assert (data.shuffled(labels, world, 0)[0] != data.shuffled(labels, world, 1)[0]).any()


def test_a_process_reads_its_devices_one_after_another(settings: config_dict.ConfigDict) -> None:
    settings.shards = "by_label"
    batch = next(data.load(settings, 32, [1, 3], WORLD, 0).train)
    assert batch["image"].shape == (16, 8, 8, 1) and batch["image"].dtype == np.uint8
    assert (batch["label"][:8] % WORLD == 1).all() and (batch["label"][8:] % WORLD == 3).all()


def test_how_devices_are_spread_over_processes_changes_nothing(
    settings: config_dict.ConfigDict,
) -> None:
    together = data.load(settings, 32, [0, 1, 2, 3], WORLD, 0)
    apart = [data.load(settings, 32, [i], WORLD, 0) for i in range(WORLD)]
    for _ in range(60):  # More than one epoch of 44 batches.
        expected = next(together.train)
        parts = [next(process.train) for process in apart]
        for name, value in expected.items():
            assert (value == np.concatenate([part[name] for part in parts])).all()


def test_other_data_have_another_identity(
    settings: config_dict.ConfigDict, imagenet_dir: str
) -> None:
    """Sizes, and both ends of the whole splits: the same for all processes."""
    found = [data.load(settings, 32, [i], WORLD, i).identity for i in (0, 1)]
    assert found[0] == found[1] and found[0]["number of rows of train_split 'train'"] == "1437"
    expected = {"train[:-1]": ["number", "end"], "train[1:]": ["number", "beginning"]}
    for split, parts in expected.items():
        settings.train_split = split
        other = data.load(settings, 32, [0], WORLD, 0).identity
        pairs = zip(found[0].items(), other.values(), strict=True)
        differ = [name.split(" of ")[0] for (name, a), b in pairs if a != b]
        assert differ == parts
    settings.name, settings.data_dir, settings.image_size = "imagenet2012", imagenet_dir, 32
    settings.train_split, settings.test_split = "train", "validation"
    large = data.load(settings, 16, [0], WORLD, 0).identity
    assert len(set(large.values())) == 6  # two sizes, and images of which none is another


def test_an_epoch_holds_every_row_once_and_the_next_in_another_order(
    settings: config_dict.ConfigDict,
) -> None:
    size, share = 10, 4
    blocks = [data.shuffled_block(size, share, (0, 1), k) for k in range(10)]
    epochs = np.concatenate(blocks).reshape(4, size)
    assert (np.sort(epochs) == np.arange(size)).all()
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert (
        np.concatenate([data.shuffled_block(size, share, (1, 1), k) for k in range(10)])
        != np.concatenate(blocks)
    ).any()


def test_the_position_can_be_kept(settings: config_dict.ConfigDict) -> None:
    first, second = (data.load(settings, 32, [2], WORLD, 0).train for _ in range(2))
    for _ in range(50):
        next(first)
    second.set_state(first.get_state())
    for _ in range(5):
        a, b = next(first), next(second)
        assert all((a[name] == b[name]).all() for name in a)


@pytest.mark.parametrize(("world", "batch_size"), [(1, 64), (4, 64), (7, 14), (8, 800)])
def test_the_whole_test_set_is_seen_once(
    settings: config_dict.ConfigDict, data_dir: str, world: int, batch_size: int
) -> None:
    loaded = [data.load(settings, batch_size, [i], world, 0) for i in range(world)]
    assert len({len(process.test) for process in loaded}) == 1
    seen = [
        image.tobytes()
        for process in loaded
        for batch in process.test
        for image, weight in zip(batch["image"], batch["weight"], strict=True)
        if weight
    ]
    assert sorted(seen) == sorted(image.tobytes() for image in split_of(data_dir, "test")[0])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "shards",
            "by_lable",
            "config.data.shards: there is no 'by_lable'; did you mean 'by_label'",
        ),
        (
            "augment",
            "crop_flop",
            "config.data.augment: there is no 'crop_flop'; did you mean 'crop_flip'",
        ),
        ("name", "no_such_set", "config.data.name: there is no 'no_such_set', neither in TFDS nor"),
        ("name", "mnist", "data set 'mnist' is not in .*tfds build mnist --file_format=array_rec"),
        ("train_split", "trian", "config.data.train_split: digits has no images in 'trian'"),
        ("train_split", "train[:0]", r"config.data.train_split: .* no images in 'train\[:0\]'"),
        ("test_split", "tset", "config.data.test_split: digits has no images in 'tset'"),
    ],
)
def test_what_cannot_be_read(
    settings: config_dict.ConfigDict, field: str, value: str, message: str
) -> None:
    setattr(settings, field, value)
    with pytest.raises(UserError, match=message):
        data.load(settings, 32, [0], WORLD, 0)


def numbered(count: int, side: int) -> np.ndarray:
    """Images whose pixels are all different and none of them black."""
    assert side * side < 256
    image = np.arange(1, side * side + 1, dtype=np.uint8).reshape(side, side, 1)
    return np.broadcast_to(image, (count, side, side, 1)).copy()


def test_crops_are_parts_of_the_padded_image_in_either_direction() -> None:
    images = numbered(2000, 15)
    found = augment.crop_flip(images, np.random.default_rng(0))
    assert found.shape == images.shape and found.dtype == np.uint8
    assert (images == numbered(2000, 15)).all()
    padded = np.zeros((2, 23, 23, 1), np.uint8)
    padded[0, 4:-4, 4:-4], padded[1, 4:-4, 4:-4] = images[0], images[0][:, ::-1]
    places = {
        padded[flip, top : top + 15, left : left + 15].tobytes(): (flip, top, left)
        for flip in range(2)
        for top in range(9)
        for left in range(9)
    }
    drawn = [places[image.tobytes()] for image in found]
    assert len(places) == 162 and set(drawn) == set(places.values())
    flips, tops, lefts = np.array(drawn).T
    # 2000 draws; five standard deviations of their means.
    assert abs(flips.mean() - 0.5) < 0.056
    assert abs(tops.mean() - 4) < 0.29 and abs(lefts.mean() - 4) < 0.29
    for a, b in ((flips, tops), (flips, lefts), (tops, lefts)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.12


def test_colours_stay_together() -> None:
    images = np.repeat(numbered(20, 8), 3, axis=-1)
    found = augment.crop_flip(images, np.random.default_rng(0))
    assert (found == found[..., :1]).all() and (found != images).any()


def test_augmentation_changes_images_only(settings: config_dict.ConfigDict) -> None:
    plain = data.load(settings, 32, [0, 1, 2, 3], WORLD, 0)
    settings.augment = "crop_flip"
    changed = data.load(settings, 32, [0, 1, 2, 3], WORLD, 0)
    for _ in range(3):
        a, b = next(plain.train), next(changed.train)
        assert (a["label"] == b["label"]).all()
        same = (a["image"] == b["image"]).reshape(WORLD, -1).all(axis=1)
        assert not same.any()  # On every device.
    for a, b in zip(plain.test, changed.test, strict=True):
        assert all((a[name] == b[name]).all() for name in a)


def test_every_batch_device_and_seed_is_augmented_in_its_own_way() -> None:
    """All images are equal, so that all differences are the augmentation's."""
    arrays, changed = {"image": numbered(64, 8)}, augment.changes(augment.crop_flip)

    def batches(seed: int) -> list[bytes]:
        steps = data.stream(arrays, [32, 32], 32, [0, 1], seed, changed)
        parts = [np.split(next(steps)["image"], 2) for _ in range(4)]
        return [half.tobytes() for halves in parts for half in halves]

    assert len({*batches(0), *batches(1)}) == 16
    assert batches(0) == batches(0)
    assert (arrays["image"] == numbered(64, 8)).all()


def test_augmented_batches_do_not_depend_on_processes_or_on_where_a_run_was_stopped(
    settings: config_dict.ConfigDict,
) -> None:
    settings.augment = "crop_flip"
    together = data.load(settings, 32, [0, 1, 2, 3], WORLD, 0).train
    apart = [data.load(settings, 32, [i], WORLD, 0).train for i in range(WORLD)]
    for _ in range(5):
        expected = next(together)
        parts = [next(process) for process in apart]
        for name, value in expected.items():
            assert (value == np.concatenate([part[name] for part in parts])).all()
    resumed = data.load(settings, 32, [2], WORLD, 0).train
    state = apart[2].get_state()
    assert [value for value in state.values() if isinstance(value, int)] == [5], state
    resumed.set_state(state)
    for _ in range(5):
        a, b = next(apart[2]), next(resumed)
        assert all((a[name] == b[name]).all() for name in a)


def test_a_part_of_cifar(settings: config_dict.ConfigDict) -> None:
    settings.name, settings.data_dir = "cifar10", cifar.data_dir()
    settings.train_split, settings.test_split = "train[:500]", "test[:100]"
    settings.shards = "by_label"
    loaded = data.load(settings, 32, [1, 2], WORLD, 0)
    batch = next(loaded.train)
    assert batch["image"].shape == (16, 32, 32, 3) and batch["image"].dtype == np.uint8
    assert (batch["label"][:8] % WORLD == 1).all() and (batch["label"][8:] % WORLD == 2).all()
    first = {image.tobytes() for image in cifar.images(500)["image"]}
    assert {image.tobytes() for image in batch["image"]} <= first
    assert (loaded.shape, loaded.classes, loaded.test_size) == ((32, 32, 3), 10, 100)
    assert sum(part["weight"].sum() for part in loaded.test) == 50


def test_more_devices_than_classes(settings: config_dict.ConfigDict) -> None:
    settings.shards = "by_label"
    with pytest.raises(UserError, match="leaves device 10 of 12 without an image of digits"):
        data.load(settings, 24, [0], 12, 0)


def test_a_directory_that_cannot_be_written(settings: config_dict.ConfigDict) -> None:
    settings.data_dir = "/dev/null/data"
    with pytest.raises(UserError, match="cannot prepare digits in /dev/null/data"):
        data.load(settings, 32, [0], WORLD, 0)


@pytest.mark.parametrize("text", ["{", None])
def test_a_data_set_that_is_damaged(
    settings: config_dict.ConfigDict, tmp_path: Path, text: str | None
) -> None:
    settings.data_dir = str(tmp_path)
    data.load(settings, 32, [0], WORLD, 0)
    (info,) = tmp_path.glob("digits/*/dataset_info.json")
    info.write_text(text) if text else info.unlink()
    with pytest.raises(UserError, match="'digits' in .* cannot be read: move its folder away"):
        data.load(settings, 32, [0], WORLD, 0)


def test_images_that_are_stored_as_png(
    tmp_path: Path, settings: config_dict.ConfigDict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A builder that decodes: the labels alone are read without decoding its images."""

    class Png(digits.Digits):
        name = "png"

        def _info(self) -> tfds.core.DatasetInfo:
            features = tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(8, 8, 1)),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            )
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _generate_examples(
            self, images: np.ndarray, labels: np.ndarray, rows: np.ndarray
        ) -> Iterator[tuple[int, dict[str, Any]]]:
            for row, example in super()._generate_examples(images, labels, rows):
                png = io.BytesIO()
                PIL.Image.fromarray(example["image"][..., 0]).save(png, format="png")
                png.seek(0)
                yield row, {**example, "image": png}

    builder = Png(data_dir=str(tmp_path), file_format="array_record")
    builder.download_and_prepare()
    whole = read(builder, "test", np.arange(360))
    assert whole["image"].shape == (360, 8, 8, 1) and whole["image"].dtype == np.uint8
    monkeypatch.setattr(images, "AT_ONCE", 100)
    rows = images.Images(builder, config_dict.create(name="digits", image_size=0))
    assert (whole["label"] == rows.labels("test")).all()
    bears = types.SimpleNamespace(info=types.SimpleNamespace(features={"image": None}))
    with pytest.raises(UserError, match="the images of bears have no labels, but image; choose"):
        images.Images(bears, config_dict.create(name="bears", image_size=0))
