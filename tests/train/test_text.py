"""Text as rows of tokens: every token is predicted once, on any number of processes."""

from pathlib import Path
from typing import Any

import cifar
import numpy as np
import pytest
import tensorflow_datasets as tfds
from ml_collections import config_dict
from texts import InMemory

from train import data, python_topics
from train.errors import UserError
from train.text import COMPARED, Text

LENGTH = 8


@pytest.fixture
def settings(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
    with config.unlocked():
        config.data.update({"name": "python_topics", "sequence_length": LENGTH})
    return config.data


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = InMemory(train=200, test=101)
    monkeypatch.setattr(data, "open_builder", lambda config: sizes)


@pytest.mark.parametrize("size", [9, 16, 17, 18, 100])
def test_every_token_but_the_first_is_a_label_once(
    size: int, settings: config_dict.ConfigDict
) -> None:
    text = Text(InMemory(test=size), settings)
    rows = text.read("test", np.arange(text.test_rows("test")))
    counts = rows["weight"] > 0
    assert rows["label"][counts].tolist() == list(range(1, size))
    assert (rows["image"][counts] + 1 == rows["label"][counts]).all()
    assert text.test_size("test") == size - 1 == counts.sum()
    whole = text.read("test", text.labels("test"))
    assert whole["weight"].all() and 0 <= size - 1 - whole["label"].size < LENGTH
    assert (whole["image"].dtype, whole["label"].dtype) == (np.uint8, np.int32)


@pytest.mark.parametrize(("world", "batch_size"), [(1, 4), (4, 8), (7, 7)])
def test_a_test_is_seen_once_on_any_number_of_processes(
    in_memory: None, settings: config_dict.ConfigDict, world: int, batch_size: int
) -> None:
    loaded = [data.load(settings, batch_size, [i], world, 0) for i in range(world)]
    assert len({len(process.test) for process in loaded}) == 1
    seen = [b["label"][b["weight"] > 0] for process in loaded for b in process.test]
    assert sorted(np.concatenate(seen)) == list(range(1, 101))
    first = loaded[0]
    assert (first.shape, first.classes, first.unit, first.test_size) == ((8,), 256, "tokens", 100)


def test_other_texts_have_another_identity(settings: config_dict.ConfigDict) -> None:
    def ends(text: bytes) -> list[int]:
        source = InMemory()
        source.texts["test"] = text
        return Text(source, settings).ends("test")

    size = 2 * COMPARED + 2
    same, first, last = (
        ends(a + bytes(size - 2) + b) for a, b in ((b"0", b"0"), (b"1", b"0"), (b"0", b"1"))
    )
    assert (first[0] != same[0], first[1] != same[1]) == (True, False)
    assert (last[0] != same[0], last[1] != same[1]) == (False, True)


def test_rows_are_dealt_and_the_position_is_kept(
    in_memory: None, settings: config_dict.ConfigDict
) -> None:
    """24 rows on four devices: three batches of two rows a device are an epoch."""
    together = data.load(settings, 8, [0, 1, 2, 3], 4, 0).train
    apart = [data.load(settings, 8, [i], 4, 0).train for i in range(4)]
    batches = [next(together) for _ in range(6)]
    for batch in batches[:4]:
        parts = [next(process) for process in apart]
        assert all((batch[k] == np.concatenate([p[k] for p in parts])).all() for k in batch)
    assert {name: x.shape for name, x in batches[0].items()} == dict.fromkeys(
        ("image", "label"), (8, LENGTH)
    )
    epochs = np.concatenate([b["image"][:, 0] for b in batches]).reshape(2, 24)
    assert (np.sort(epochs) == LENGTH * np.arange(24)).all() and (epochs[0] != epochs[1]).any()
    resumed = data.load(settings, 8, [2], 4, 0).train
    resumed.set_state(apart[2].get_state())
    assert (next(resumed)["image"] == batches[4]["image"][4:6]).all()


def test_parts_by_position(in_memory: None, settings: config_dict.ConfigDict) -> None:
    settings.shards = "by_position"
    loaded = data.load(settings, 12, [1, 3], 4, 0).train
    rows = next(loaded)["image"][:, 0] // LENGTH
    assert set(rows[:3]) <= set(range(6, 12)) and set(rows[3:]) <= set(range(18, 24))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"sequence_length": None}, "sequence_length is None, and python_topics is text; set the num"),
    ({"sequence_length": 200}, "has 200 tokens in 'train', fewer than one row of .*=200 and the"),
    ({"augment": "crop_flip"}, "augment='crop_flip' changes images, and python_topics is text"),
    ({"shards": "by_label"}, "shards='by_label' needs classes, and python_topics is text; 'by_pos"),
    ({"test_split": "tset"}, "config.data: Unknown split 'tset'"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_what_cannot_be_read(
    in_memory: None, settings: config_dict.ConfigDict, fields: dict[str, Any], message: str
) -> None:
    settings.update(fields)
    with pytest.raises(UserError, match=message):
        data.load(settings, 4, [0], 4, 0)


def test_too_few_rows_for_the_devices(in_memory: None, settings: config_dict.ConfigDict) -> None:
    settings.sequence_length = 50
    with pytest.raises(
        UserError, match="leaves device 3 of 4 without a row of python_topics; .* or a shorter"
    ):
        data.load(settings, 4, [0], 4, 0)


def test_a_text_that_is_not_prepared(settings: config_dict.ConfigDict, tmp_path: Path) -> None:
    settings.name, settings.data_dir = "tiny_shakespeare", str(tmp_path)
    with pytest.raises(UserError, match=f"not in {tmp_path}/.*; .* tfds build tiny_shakespeare"):
        data.load(settings, 4, [0], 4, 0)


def test_the_help_texts_of_python_are_split_by_position(tmp_path: Path) -> None:
    builder = python_topics.prepare(str(tmp_path))
    sizes = {s: len(builder.as_data_source(s)[0]["text"]) for s in builder.info.splits}
    whole = python_topics.whole_text().encode()
    parts = [builder.as_data_source(s)[0]["text"] for s in ("train", "validation", "test")]
    assert b"".join(parts) == whole and len(whole) > 300_000
    assert sizes["train"] / len(whole) == pytest.approx(0.9, abs=0.01)
    assert sizes["test"] / len(whole) == pytest.approx(0.05, abs=0.01)


def test_tiny_shakespeare(settings: config_dict.ConfigDict) -> None:
    settings.name, settings.sequence_length = "tiny_shakespeare", 64
    settings.data_dir = cifar.data_dir("tiny_shakespeare")
    loaded = data.load(settings, 8, [0, 1], 4, 0)
    assert loaded.test_size == 55_769 and next(loaded.train)["image"].shape == (4, 64)
    text = tfds.builder_from_directory(f"{settings.data_dir}/tiny_shakespeare/1.0.0")
    start = text.as_data_source("test")[0]["text"][:64]
    assert loaded.test[0]["image"][0].tobytes() == start
