"""What is trained: models, and data of which each device holds a part that differs from the others.

Text is dealt in contiguous parts, images by label: device i of N holds the classes congruent to i.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow_datasets as tfds
from absl import flags

from benchmarks.pareto import models

Arrays = tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True)
class Data:
    """Examples as arrays.

    Attributes:
      shards: of each device, arrays with a leading device axis.
      validation: whole batches, in arrays `[batches, batch, ...]`.
      test: likewise.
    """

    shards: Arrays
    validation: Any
    test: Any


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its data, and how long it is trained.

    Attributes:
      name: of the task.
      init: from a key to parameters.
      loss: from parameters and a batch to the mean loss, in nats.
      batch: from the arrays of one device's shard and drawn numbers to a batch.
      load: from a directory of data sets and the number of devices to the data.
      share: examples of a device in a step.
      steps: of the training.
    """

    name: str
    init: Callable[[jax.Array], Any]
    loss: Callable[[Any, Any], jax.Array]
    batch: Callable[[Any, jax.Array], Any]
    load: Callable[[str | None, int], Data]
    share: int
    steps: int


CONTEXT = 64  # characters


def builder(name: str, data_dir: str | None) -> Any:
    """A prepared data set of TensorFlow Datasets."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # Grain's readers look at absl's flags.
    found = tfds.builder(name, data_dir=data_dir, try_gcs=False)
    if not found.is_prepared():
        raise SystemExit(
            f"pareto: {name} is not in {found.data_dir}; set TFDS_DATA_DIR or --data_dir to where "
            f"it is, or prepare it: tfds build {name} --file_format=array_record"
        )
    return found


def load_text(data_dir: str | None, world: int) -> Data:
    """Tiny Shakespeare as int32 characters; each device has a contiguous part of it."""
    source = builder("tiny_shakespeare", data_dir)
    texts = {s: source.as_data_source(s)[0]["text"] for s in ("train", "validation", "test")}
    known = sorted(set(b"".join(texts.values())))
    number = np.zeros(256, np.int32)
    number[known] = np.arange(len(known))
    coded = {name: number[np.frombuffer(text, np.uint8)] for name, text in texts.items()}

    def windows(text: np.ndarray, batch: int = 67) -> np.ndarray:
        count = (len(text) - 1) // CONTEXT // batch * batch
        rows = np.arange(count)[:, None] * CONTEXT + np.arange(CONTEXT + 1)
        return text[rows].reshape(-1, batch, CONTEXT + 1)

    train = coded["train"]
    parts = train[: len(train) // world * world].reshape(world, -1)
    return Data((parts,), windows(coded["validation"]), windows(coded["test"]))


def load_images(data_dir: str | None, world: int, train: int = 10_000) -> Data:
    """CIFAR-10 as uint8; the last 2,000 of the training images are for validation."""
    source = builder("cifar10", data_dir)

    def read(split: str) -> Arrays:
        examples = source.as_data_source(split)
        examples = examples.__getitems__(list(range(len(examples))))
        labels = np.array([example["label"] for example in examples], np.int32)
        return np.stack([example["image"] for example in examples]), labels

    images, labels = read(f"train[:{train}]")
    rows = [np.flatnonzero(labels % world == device) for device in range(world)]
    rows = np.stack([r[: min(map(len, rows))] for r in rows])
    batches = lambda split: tuple(x.reshape(-1, 200, *x.shape[1:]) for x in read(split))  # noqa: E731
    return Data((images[rows], labels[rows]), batches("train[48000:]"), batches("test"))


def text_batch(shard: Any, numbers: jax.Array) -> jax.Array:
    """Windows of a device's text, `[examples, CONTEXT + 1]`."""
    (text,) = shard
    starts = numbers % (text.size - CONTEXT)
    return text[starts[:, None] + jnp.arange(CONTEXT + 1)]


def image_batch(shard: Any, numbers: jax.Array) -> Any:
    """Images and labels of a device; half of the images are mirrored."""
    images, labels = shard
    rows = numbers // 2 % len(labels)
    drawn = images[rows]
    mirrored = (numbers % 2 == 1)[:, None, None, None]
    return jnp.where(mirrored, drawn[:, :, ::-1], drawn), labels[rows]


def text_loss(logits: Callable[..., jax.Array]) -> Callable[[Any, Any], jax.Array]:
    """The mean negative logarithm of the probability of the next character."""

    def loss(params: Any, windows: jax.Array) -> jax.Array:
        windows = windows.reshape(-1, CONTEXT + 1)
        return _nats(logits(params, windows[:, :-1]), windows[:, 1:])

    return loss


def image_loss(params: Any, batch: Any) -> jax.Array:
    """The mean negative logarithm of the probability of the label."""
    images, labels = batch
    pixels = (images.astype(jnp.float32) - 121.0) / 64.0
    return _nats(models.resnet20_logits(params, pixels), labels)


def _nats(logits: jax.Array, labels: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -chosen.mean()


def gpt(name: str, width: int, depth: int, share: int) -> Task:
    """A GPT on characters."""

    def init(key: jax.Array) -> Any:
        return models.gpt_init(key, tokens=65, context=CONTEXT, width=width, depth=depth)

    return Task(name, init, text_loss(models.gpt_logits), text_batch, load_text, share, 500)


def resnet20(name: str) -> Task:
    """A ResNet-20 with group norm on small images."""
    return Task(name, models.resnet20_init, image_loss, image_batch, load_images, 16, 300)


def lstm(name: str, width: int = 128) -> Task:
    """An LSTM on characters."""

    def init(key: jax.Array) -> Any:
        return models.lstm_init(key, tokens=65, width=width)

    return Task(name, init, text_loss(models.lstm_logits), text_batch, load_text, 8, 500)


TASKS = {
    task.name: task
    for task in (
        gpt("gpt", width=128, depth=5, share=8),  # 1.0 M parameters
        gpt("gpt_small", width=96, depth=2, share=4),  # 0.24 M
        lstm("lstm"),
        lstm("lstm_nesterov"),
        resnet20("resnet20"),
        resnet20("resnet20_nesterov"),
    )
}
