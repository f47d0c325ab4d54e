"""Batches from TensorFlow Datasets: one fixed shard of rows for each device.

A row is an image with its label (`train.images`), or some tokens of a text with the tokens that
follow them (`train.text`) or that are hidden among them (`train.masked_text`). A device draws from
its own shard only. The order is new in every epoch and depends on the seed alone. A process reads
the rows of its own devices once and keeps them in memory as integers; with `config.data.image_size`
it decodes images when a batch needs them (`train.pictures`). Batches are laid out device by device,
as `jaxcomm.global_batch` expects.
"""

import difflib
import functools
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import grain
import numpy as np
import tensorflow_datasets as tfds
from absl import flags, logging
from google.protobuf import json_format

from train import digits, python_topics
from train.augment import AUGMENTATIONS, Change, changes
from train.calls import read_call
from train.errors import UserError, choose
from train.images import Images
from train.masked_text import MaskedText
from train.text import Text

Batch = dict[str, np.ndarray]
Labels = Sequence[int] | np.ndarray


class Data(NamedTuple):
    """What the training loop reads.

    Attributes:
      train: endless iterator over this process's part of the batches; `get_state` is the position.
      test: this process's part of the whole test set; padding has weight 0. A list, or an iterable
        that is read anew for every evaluation.
      names: what a training batch has: "image", "label", and "weight" if not all labels count.
      shape: height, width and channels of one image, or the number of tokens in a row.
      classes: number of classes, or of different tokens.
      unit: what a test counts: "images" or "tokens".
      test_size: how many of them the whole test split has.
      identity: what identifies the whole splits, by name; other data have another identity.
    """

    train: grain.DatasetIterator
    test: list[Batch] | grain.IterDataset
    names: tuple[str, ...]
    shape: tuple[int, ...]
    classes: int
    unit: str
    test_size: int
    identity: dict[str, str]


def shuffled(labels: Labels, world: int, seed: int) -> list[np.ndarray]:
    """Deals all rows out to the devices at random: every shard looks like the whole set."""
    order = np.random.default_rng(seed).permutation(len(labels))
    return [order[device::world] for device in range(world)]


def by_label(labels: Labels, world: int, seed: int) -> list[np.ndarray]:
    """Gives device i of N the classes that are congruent to i modulo N, and no other."""
    del seed  # The shard is a set of rows; its order is drawn by the stream.
    return [np.flatnonzero(np.asarray(labels) % world == device) for device in range(world)]


def by_position(labels: Labels, world: int, seed: int) -> list[np.ndarray]:
    """Gives each device a contiguous part, such as its own chapters of a text."""
    del seed
    return np.array_split(np.arange(len(labels)), world)


SHARDS = {"shuffled": shuffled, "by_label": by_label, "by_position": by_position}
# Data sets that are prepared when they are first needed.
PREPARED_HERE = {"digits": digits.prepare, "python_topics": python_topics.prepare}


def load(config: Any, batch_size: int, devices: Sequence[int], world: int, seed: int) -> Data:
    """Opens a prepared data set and reads the part of it that this process's devices hold.

    Args:
      config: `config.data`: `name`, `data_dir`, `train_split`, `test_split`, `shards`, `augment`,
        `image_size`, and for text `sequence_length` and `masked`.
      batch_size: rows in a global batch; divisible by `world`.
      devices: positions along the data axis of this process's devices.
      world: number of devices of all processes.
      seed: the seed of the shards and of the order within them, equal in all processes.

    Returns:
      The two streams of this process.

    Raises:
      UserError: if the data set does not exist, a device would hold no row of it, or the config is
        for another kind of data.
    """
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # Grain's readers look at absl's flags.
    choose(SHARDS, config.shards, "config.data.shards")
    augment = read_call(config.augment, AUGMENTATIONS, "config.data.augment")
    if isinstance(augment, str):
        augment = AUGMENTATIONS[augment]()
    builder = open_builder(config)
    source = open_source(builder, config)
    share = batch_size // world
    split = config.train_split
    shards = _dealt(source, config, world, seed)
    if batch_size > (total := sum(map(len, shards))):
        raise UserError(
            f"config.batch_size={batch_size} is more than the {total} rows of {config.name} "
            f"in config.data.train_split={split!r}; lower it"
        )
    own = [shards[device] for device in devices]
    names = ("image", "label", "weight") if isinstance(source, MaskedText) else ("image", "label")
    test = test_rows(source.test_rows(config.test_split), share, devices, world)
    if config.image_size:
        from train import pictures  # Imports Pillow, which most runs do not need.

        later = pictures.Pictures(builder, config.image_size)
        blocks = functools.partial(rows_of_batch, own, share, devices, seed)
        train = later.stream(split, blocks, share, devices, seed, augment)
        batches, shape = later.test_batches(config.test_split, *test), later.shape
    else:
        read = source.read(split, np.concatenate(own))
        kept = {name: read[name] for name in names}
        change = source.change if isinstance(source, MaskedText) else changes(augment)
        train = stream(kept, [len(rows) for rows in own], share, devices, seed, change)
        batches, shape = test_batches(source, config.test_split, *test), read["image"].shape[1:]
    size = source.test_size(config.test_split)
    identity = identity_of(source, config)
    return Data(train, batches, names, shape, source.classes, source.unit, size, identity)


def _dealt(source: Images | Text, config: Any, world: int, seed: int) -> list[np.ndarray]:
    """The rows of each device.

    Raises:
      UserError: if a device would hold no row.
    """
    # Dealing out rows by their numbers reads no label of a large set.
    needs_labels, split = config.shards == "by_label", config.train_split
    labels = source.labels(split) if needs_labels else range(source.train_rows(split))
    shards = SHARDS[config.shards](labels, world, seed)
    if empty := [device for device in range(world) if not len(shards[device])]:
        is_text, is_even = isinstance(source, Text), config.shards == "shuffled"
        more = "a larger config.data.train_split" if is_even else "config.data.shards='shuffled'"
        what = "a row" if is_text else "an image"
        cure = "a shorter config.data.sequence_length" if is_text else more
        raise UserError(
            f"config.data.shards={config.shards!r} leaves device {empty[0]} of {world} without "
            f"{what} of {config.name}; use fewer devices or {cure}"
        )
    return shards


def identity_of(source: Images | Text, config: Any) -> dict[str, str]:
    """What identifies the splits of a run: their sizes, and CRC-32 of their ends."""
    found = {}
    for field, rows in (("train_split", source.train_rows), ("test_split", source.test_rows)):
        split = config[field]
        first, last = source.ends(split)
        parts = {"number of rows": rows(split), "beginning": first, "end": last}
        found |= {f"{part} of {field} {split!r}": str(value) for part, value in parts.items()}
    return found


def open_source(builder: Any, config: Any) -> Images | Text:
    """The reader of a data set's rows, by its features and `config.data.masked`."""
    if "text" not in builder.info.features:
        return Images(builder, config)
    return MaskedText(builder, config) if config.get("masked") else Text(builder, config)


def open_builder(config: Any) -> Any:
    """The TFDS builder of a data set that is prepared, or can be prepared here."""
    data_dir = config.data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    unread = f"data set {config.name!r} in {data_dir} cannot be read: move its folder away, and "
    if config.name in PREPARED_HERE:
        try:
            return PREPARED_HERE[config.name](data_dir)
        except OSError as error:
            if not error.errno:  # TFDS raises it without errno where its own files are missing.
                raise UserError(f"{unread}it is prepared again ({_first_line(error)})") from error
            raise UserError(
                f"cannot prepare {config.name} in {data_dir}: {error}; set --config.data.data_dir "
                "or TFDS_DATA_DIR to a directory that can be written"
            ) from error
        except json_format.ParseError as error:
            raise UserError(f"{unread}it is prepared again ({_first_line(error)})") from error
    logging.set_verbosity(logging.ERROR)  # TFDS would warn of what is reported below.
    try:
        builder = tfds.builder(config.name, data_dir=data_dir, try_gcs=False)
    except tfds.core.DatasetNotFoundError as error:
        names = [*PREPARED_HERE, *tfds.list_builders(with_community_datasets=False)]
        near = difflib.get_close_matches(config.name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(
            f"config.data.name: there is no {config.name!r}, neither in TFDS nor in "
            f"{data_dir}{hint}"
        ) from error
    except json_format.ParseError as error:
        raise UserError(f"{unread}prepare or copy it again ({_first_line(error)})") from error
    except (ValueError, AssertionError) as error:  # From TFDS: no such version, or no name at all.
        raise UserError(f"config.data.name: {' '.join(str(error).split())[:300]}") from error
    if not builder.is_prepared():
        by_hand = " ".join((builder.MANUAL_DOWNLOAD_INSTRUCTIONS or "").split())
        raise UserError(
            f"data set {config.name!r} is not in {builder.data_dir}; set --config.data.data_dir or "
            "TFDS_DATA_DIR to where it is, or prepare it once where TensorFlow is installed: "
            f"tfds build {config.name} --file_format=array_record --data_dir={data_dir}"
            + (f" (before: {by_hand.rstrip('.')})" if by_hand else "")
        )
    return builder


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def stream(
    arrays: Batch,
    shard_sizes: Sequence[int],
    share: int,
    devices: Sequence[int],
    seed: int,
    change: Change | None = None,
) -> grain.DatasetIterator:
    """Endless local batches: `share` rows of each device's shard, one device after another.

    Args:
      arrays: the rows of this process, those of its first device first.
      shard_sizes: how many rows each device of this process holds.
      share: rows of one device in a batch.
      devices: positions of the devices along the data axis; each has its own order.
      seed: the seed of the order and of the changes.
      change: a function that changes the rows of a device in place; its draws depend only on the
        seed, the device's position and the number of the batch.

    Returns:
      An iterator whose position is its number of batches, kept by `get_state` and `set_state`.
    """
    stops = np.cumsum(shard_sizes)
    shards = np.split(np.arange(stops[-1]), stops[:-1])

    def batch(step: int) -> Batch:
        rows = rows_of_batch(shards, share, devices, seed, step)
        made = {name: array[rows] for name, array in arrays.items()}
        if change is not None:
            for i, device in enumerate(devices):
                own = {name: rows[i * share : (i + 1) * share] for name, rows in made.items()}
                # Four numbers, the last not 0: no epoch's order is drawn from the same ones.
                change(own, np.random.default_rng((seed, device, step, 1)))
        return made

    # Everything is in memory, so reading threads would only wait for each other. The length only
    # has to exceed every run.
    steps = grain.MapDataset.range(2**40).map(batch)
    return iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=0)))


def rows_of_batch(
    shards: Sequence[np.ndarray], share: int, devices: Sequence[int], seed: int, step: int
) -> np.ndarray:
    """The rows of a batch of this process, those of its first device first, as in `stream`."""
    blocks = [
        rows[shuffled_block(len(rows), share, (seed, device), step)]
        for device, rows in zip(devices, shards, strict=True)
    ]
    return np.concatenate(blocks)


def shuffled_block(size: int, share: int, seed: tuple[int, int], block: int) -> np.ndarray:
    """The rows of block number `block`, in an endless order of 0 .. size-1 that is new every epoch.

    A whole permutation is drawn at a time. Grain's own `shuffle` draws each index separately, which
    takes 80 us per image, more than the gradient of a small model.
    """
    positions = block * share + np.arange(share)
    epochs, within = np.divmod(positions, size)
    rows = [
        permutation(size, seed, epoch)[within[epochs == epoch]]
        for epoch in range(epochs[0], epochs[-1] + 1)
    ]
    return np.concatenate(rows)


@functools.lru_cache(maxsize=64)  # A process reads about two epochs per device at once.
def permutation(size: int, seed: tuple[int, int], epoch: int) -> np.ndarray:
    """The order of one epoch, which depends only on the seed and the epoch."""
    return np.random.default_rng((*seed, epoch)).permutation(size)


def test_rows(
    size: int, share: int, devices: Sequence[int], world: int
) -> tuple[np.ndarray, np.ndarray]:
    """The rows that this process's devices test, padded so that all devices have equally many.

    Returns:
      For each batch its rows, those of the first device first, and their weights: 0 for padding.
    """
    count = math.ceil(size / world / share)  # Batches, equal on all devices.
    # [batch, device, row of the device]: device i of N holds rows i, i + N, i + 2N, ...
    rows = np.stack([device + world * np.arange(count * share) for device in devices])
    rows = rows.reshape(len(devices), count, share).swapaxes(0, 1).reshape(count, -1)
    return np.minimum(rows, size - 1), (rows < size).astype(np.float32)


def test_batches(
    source: Text | Images, split: str, rows: np.ndarray, weights: np.ndarray
) -> list[Batch]:
    """The test rows of this process's devices."""
    batches = [source.read_test(split, batch) for batch in rows]
    for batch, weight in zip(batches, weights, strict=True):
        batch["weight"][weight == 0] = 0
    return batches


def pixels(data: Any, channels: int) -> tuple[Any, Any]:
    """Mean and standard deviation of the pixels of images.

    Args:
      data: `config.data`.
      channels: the number of channels of an image.

    Raises:
      UserError: if one of them is missing, or is for another number of channels.
    """
    for name in ("mean", "std"):
        if name not in data:
            raise UserError(
                f"the config has no field data.{name}, which images need: of the pixels, from 0 to "
                "255, or of each channel's; configs/bases has those of some data sets"
            )
        count = len(data[name]) if isinstance(data[name], tuple) else 1
        if count not in (1, channels):
            raise UserError(
                f"config.data.{name} has {count} values, and images of {data.name} have {channels} "
                "channels; give one value, or one for each channel"
            )
    return data.mean, data.std
