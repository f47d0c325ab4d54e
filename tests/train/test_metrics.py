"""What a run writes, what survives a kill, and what a resumed run keeps."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import pytest
from ml_collections import config_dict
from running import read_lines
from tensorboardX.proto.event_pb2 import Event

from train import metrics, workdir
from train.errors import RunError, UserError, is_disk_full


def record(workdir: Path, start: int, stop: int, steps: int) -> None:
    with metrics.Recorder(workdir, start, steps) as recorder:
        for step in range(start + 1, stop + 1):
            recorder.train(step, {"loss": jnp.float32(1 / step), "accuracy": jnp.float32(0.5)})
        with recorder.pause():
            recorder.write("test", stop, {"test_loss": float("nan"), "test_accuracy": 0.5})


def test_every_step_is_a_line(tmp_path: Path) -> None:
    record(tmp_path, 0, 5, 5)
    lines = read_lines(tmp_path, "train")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["loss"] for line in lines] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5])
    assert set(lines[0]) == {"kind", "step", "loss", "accuracy", "step_ms"}
    assert read_lines(tmp_path, "test") == [
        {"kind": "test", "step": 5, "test_loss": None, "test_accuracy": 0.5}
    ]


def test_every_step_is_an_event(tmp_path: Path) -> None:
    record(tmp_path, 0, 5, 5)
    found = {}
    for path in tmp_path.glob("events.out.tfevents.*"):
        for event in events(path):
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    assert found["train/loss"] == pytest.approx({k: 1 / k for k in range(1, 6)})
    assert set(found["train/step_ms"]) == set(range(1, 6))
    assert found["test/test_accuracy"] == {5: 0.5}


def events(path: Path) -> list[Event]:
    """The events of a file: length, its checksum, the event, its checksum (TFRecord)."""
    data, found = path.read_bytes(), []
    while data:
        size = int.from_bytes(data[:8], "little")
        found.append(Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    return found


def test_a_resumed_run_keeps_the_steps_before_it(tmp_path: Path) -> None:
    record(tmp_path, 0, 5, 9)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 6, "lo')  # Killed while it wrote.
    record(tmp_path, 3, 9, 9)
    assert [line["step"] for line in read_lines(tmp_path, "train")] == list(range(1, 10))


def test_a_new_run_starts_a_new_file(tmp_path: Path) -> None:
    record(tmp_path, 0, 5, 5)
    record(tmp_path, 0, 2, 2)
    assert [line["step"] for line in read_lines(tmp_path, "train")] == [1, 2]


def test_the_bar_shows_the_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, 0, 3, 3)
    shown = capsys.readouterr()
    assert shown.out == ""
    last = shown.err.split("\r")[-1]
    assert "3/3" in last and "loss=0.3333" in last and "accuracy=0.5" in last and "step_ms" in last


def test_the_request_to_stop_is_seen_and_not_written(tmp_path: Path) -> None:
    with metrics.Recorder(tmp_path, 0, 9) as recorder:
        for step, stop in ((1, 0.0), (2, 0.25), (3, 0.25)):
            recorder.train(step, {"loss": jnp.float32(1), "stop": jnp.float32(stop)})
            assert recorder.stop == (step == 3)  # A step is read while the next one runs.
    assert all("stop" not in line for line in read_lines(tmp_path, "train"))


def test_bad_losses_in_a_row_end_the_run(tmp_path: Path) -> None:
    losses = [1.0, float("nan"), float("inf"), 1.0, float("nan"), float("nan"), float("inf"), 1.0]
    with metrics.Recorder(tmp_path, 0, 9, bad_steps=3) as recorder:
        with pytest.raises(RunError, match="the loss was not finite in steps 5 to 7: lower"):
            for step, loss in enumerate(losses, 1):
                recorder.train(step, {"loss": jnp.float32(loss)})
    assert [line["loss"] for line in read_lines(tmp_path, "train")] == [
        1,
        None,
        None,
        1,
        None,
        None,
        None,
    ]


def test_the_config_is_kept(tmp_path: Path) -> None:
    config = config_dict.create(seed=3, data={"name": "digits"})
    with workdir.claimed(tmp_path / "a" / "b", config):
        kept = json.loads((tmp_path / "a" / "b" / "config.json").read_text())
    assert kept == {"seed": 3, "data": {"name": "digits"}}


def test_a_directory_that_cannot_be_written() -> None:
    message = "cannot write to --workdir=/dev/null/x: .*Not a directory"
    with pytest.raises(UserError, match=message):
        with workdir.claimed(Path("/dev/null/x"), config_dict.create()):
            pass


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB, which only root can make."""
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)]
    if sys.platform != "linux" or os.geteuid() != 0 or subprocess.run(command).returncode:
        pytest.skip("cannot mount a file system")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


@pytest.mark.parametrize("path", ["metrics.jsonl", "events"])
def test_a_full_disk_is_an_error_of_the_step_that_meets_it(small_disk: Path, path: str) -> None:
    with pytest.raises(OSError) as caught, metrics.Recorder(small_disk, 0, 99) as recorder:
        recorder.write("test", 1, {"test_loss": 1.0})
        with (small_disk / "fill").open("wb", buffering=0) as fill:
            with contextlib.suppress(OSError):
                while fill.write(bytes(4096)):
                    pass
        if path == "metrics.jsonl":
            for _ in range(200):
                recorder.write("test", 2, {"test_loss": 1.0, "text": "x" * 100})
        else:
            for number in range(10_000):
                recorder._events.scalar("loss", 1.0, number)
    assert is_disk_full(caught.value)
