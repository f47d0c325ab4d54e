"""What a run writes, what survives a kill, and what a resumed run keeps."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import config_dict
from running import read_lines
from tensorboardX.proto.event_pb2 import Event

from train import metrics, workdir
from train.errors import RunError, UserError, is_disk_full
from train.split import Split
from train.step import FINITE


def record(workdir: Path, start: int, stop: int, steps: int) -> None:
    with metrics.Recorder(workdir, start, steps) as recorder:
        for step in range(start + 1, stop + 1):
            recorder.train(step, {"loss": jnp.float32(1 / step), "accuracy": jnp.float32(0.5)})
        with recorder.pause("test"):
            recorder.write("test", stop, {"test_loss": float("nan"), "test_accuracy": 0.5})


def test_every_step_is_a_line(tmp_path: Path) -> None:
    record(tmp_path, 0, 5, 5)
    lines = read_lines(tmp_path, "train")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["loss"] for line in lines] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5])
    assert set(lines[0]) == {"kind", "step", "loss", "accuracy", "step_ms", "input_ms"}
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


def test_events_before_a_checkpoint_outlive_a_kill(tmp_path: Path) -> None:
    """A run that goes on there does not write them again."""
    with metrics.Recorder(tmp_path, 0, 9) as recorder:
        for step in (1, 2, 3):
            recorder.train(step, {"loss": jnp.float32(1 / step)})
        with recorder.pause("checkpoint"):
            (path,) = tmp_path.glob("events.out.tfevents.*")
            found = {event.step for event in events(path) if event.summary.value}
    assert found == {1, 2, 3}


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


def test_a_pause_is_no_part_of_the_step_behind_it(tmp_path: Path) -> None:
    with metrics.Recorder(tmp_path, 0, 2) as recorder:
        recorder.train(1, {"loss": jnp.float32(1)})
        with recorder.pause("test"):
            time.sleep(0.3)
        recorder.train(2, {"loss": jnp.float32(1)})
        recorder.flush()
        recorder.split(2)
    assert read_lines(tmp_path, "train")[1]["step_ms"] < 300
    (split,) = read_lines(tmp_path, "split")
    assert split["test_ms"] > 150 > split["step_ms"]


def test_the_request_to_stop_is_seen_and_not_written(tmp_path: Path) -> None:
    with metrics.Recorder(tmp_path, 0, 9) as recorder:
        for step, stop in ((1, 0.0), (2, 0.25), (3, 0.25)):
            recorder.train(step, {"loss": jnp.float32(1), "stop": jnp.float32(stop)})
            assert recorder.stop == (step == 3)  # A step is read while the next one runs.
    assert all("stop" not in line for line in read_lines(tmp_path, "train"))


def test_what_the_host_knows_of_a_step_is_written(tmp_path: Path) -> None:
    def known(step: int, frozen_at: int) -> dict[str, float]:
        return {"learning_rate": step / 10, "before": float(frozen_at)}

    frozen = (0, 0, 2, 2)  # The warm-up ends in the third step.
    with metrics.Recorder(tmp_path, 0, 4, batch={"images": 64}, known=known) as recorder:
        for step, value in enumerate(frozen, 1):
            recorder.train(step, {"loss": jnp.float32(1), "frozen_at": jnp.int32(value)})
        recorder.flush()
    lines = read_lines(tmp_path, "train")
    assert [line["learning_rate"] for line in lines] == [0.1, 0.2, 0.3, 0.4]
    assert [line["before"] for line in lines] == [0, 0, 0, 2]
    for line in lines:
        assert line["images_per_second"] == pytest.approx(64e3 / line["step_ms"])


def test_the_mean_of_bytes_counts_the_steps_before_a_restart(tmp_path: Path) -> None:
    """Two steps are kept of four; those that follow are of another method."""
    for start, sent in ((0, 4.0), (2, 1.0)):
        known = lambda step, frozen_at, sent=sent: {"bytes_per_param": sent}  # noqa: E731
        with metrics.Recorder(tmp_path, start, 9, known=known) as recorder:
            for step in range(start + 1, 5):
                recorder.train(step, {"loss": jnp.float32(1)})
            recorder.flush()
    assert recorder.summary()["bytes_per_param_mean"] == (4.0 + 4.0 + 1.0 + 1.0) / 4


class Running(NamedTuple):
    """A number that a device is still computing, or not."""

    ready: bool

    def is_ready(self) -> bool:
        return self.ready

    def __float__(self) -> float:
        return 1.0


def test_making_a_batch_is_waiting_only_if_the_step_before_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only goes on while a batch is made, by one second."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    with metrics.Recorder(tmp_path, 0, 9) as recorder:
        for step, ready in ((1, True), (2, False), (3, True), (4, True)):
            with recorder.waiting():
                clock[0] += 1.0
            recorder.train(step, {"loss": cast(jax.Array, Running(ready))})
        recorder.flush()
        # No step runs before the first; the batch of the third is made while the second runs.
        waited = [line["input_ms"] for line in read_lines(tmp_path, "train")]
        assert waited == [2000, 0, 1000, 0]  # A step's time ends with the next batch.
        assert recorder.input_share() == 0.75


def test_every_moment_belongs_to_one_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by one second whenever it is read."""
    now = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))
    with metrics.Recorder(tmp_path, 0, 9) as recorder:
        for step in range(1, 5):
            with recorder.waiting():
                pass
            recorder.train(step, {"loss": cast(jax.Array, Running(step > 2))})
            if step == 2:
                with recorder.pause("test"):
                    time.perf_counter()
        with recorder.pause("checkpoint"):
            recorder.split(4, compute_ms=2000.0)
        with recorder.pause("test"):
            recorder.split(5)  # No step since.
        recorder.split(5)
    first, *others = read_lines(tmp_path, "split")
    assert not others and first["step"] == 4 and first["steps"] == 4
    steps = sum(line["step_ms"] for line in read_lines(tmp_path, "train"))
    assert first["input_ms"] + first["step_ms"] == pytest.approx(steps / 4)
    assert (first["input_ms"], first["test_ms"]) == (750.0, 500.0)
    assert first["exchange_ms"] == first["step_ms"] - 2000 and "checkpoint_ms" not in first


def test_an_exchange_within_noise_takes_no_time() -> None:
    parts = Split()
    parts.step(0.003, 0.001)
    assert parts.line(compute_ms=5.0)["exchange_ms"] == 0


def test_looks_are_lines_and_have_means(tmp_path: Path) -> None:
    with metrics.Recorder(tmp_path, 0, 9) as recorder:
        assert recorder.looks() == {}
        recorder.looked(2, {"error": 0.25, "cosine": 1.0})
        recorder.looked(4, {"error": 0.75, "cosine": 0.5})
        assert recorder.looks() == {"exchange_error": 0.5, "exchange_cosine": 0.75}
        recorder.looked(6, {"error": float("nan"), "cosine": 0.0})
    with metrics.Recorder(tmp_path, 4, 9) as recorder:  # which drops the last of them
        recorder.looked(6, {"error": 1.1, "cosine": 0.0, "ties": 1.0})
        means = {"exchange_error": 0.7, "exchange_cosine": 0.5, "exchange_ties": 1.0}
        assert recorder.looks() == pytest.approx(means)
    with metrics.Recorder(tmp_path, 6, 9) as recorder:
        assert recorder.looks() == pytest.approx(means)
    assert read_lines(tmp_path, "exchange")[1] == {
        "kind": "exchange",
        "step": 4,
        "error": 0.75,
        "cosine": 0.5,
    }


def test_what_is_said_at_the_start_is_said_once(tmp_path: Path) -> None:
    for _ in range(2):
        with metrics.Recorder(tmp_path, 3, 9) as recorder:
            recorder.write("start", 3, {"params": 5})
    assert len(read_lines(tmp_path, "start")) == 1


def test_bad_losses_in_a_row_end_the_run(tmp_path: Path) -> None:
    losses = [1.0, float("nan"), float("inf"), 1.0, float("nan"), float("nan"), float("inf"), 1.0]
    message = "the loss or a gradient was not finite in steps 5 to 7: lower"
    with metrics.Recorder(tmp_path, 0, 9, bad_steps=3) as recorder:
        with pytest.raises(RunError, match=message):
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


def test_bad_gradients_behind_finite_losses_end_the_run_too(tmp_path: Path) -> None:
    with metrics.Recorder(tmp_path, 0, 9, bad_steps=3) as recorder:
        with pytest.raises(RunError, match="a gradient was not finite in steps 3 to 5"):
            for step, finite in enumerate([1.0, 1.0, 0.0, 0.0, 0.0, 1.0], 1):
                recorder.train(step, {"loss": jnp.float32(1), FINITE: jnp.float32(finite)})
        assert recorder.bad == 3
    found = [line.get(FINITE) for line in read_lines(tmp_path, "train")]
    assert found == [None, None, 0, 0, 0]


def test_the_config_is_kept(tmp_path: Path) -> None:
    config = config_dict.create(seed=3, data={"name": "digits"})
    workdir.keep_config(tmp_path / "a" / "b", config, resumed=False)
    kept = json.loads((tmp_path / "a" / "b" / "config.json").read_text())
    assert kept == {"seed": 3, "data": {"name": "digits"}}


def test_a_directory_that_cannot_be_written() -> None:
    message = "cannot write to --workdir=/dev/null/x: .*Not a directory"
    with pytest.raises(UserError, match=message):
        with workdir.claimed(Path("/dev/null/x")):
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
                recorder._events.scalars({"loss": 1.0}, number)
    assert is_disk_full(caught.value)


def test_a_new_folder_is_named_by_the_clock_of_process_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines may be in different time zones."""
    there = np.array([2026, 1, 2, 3, 4, 5], np.int32)
    monkeypatch.setattr(workdir.multihost_utils, "broadcast_one_to_all", lambda mine: there)
    assert workdir.new("digits") == Path("workdir/digits/20260102-030405")


def test_a_step_waits_no_longer_than_it_takes() -> None:
    parts = Split()
    parts.step(1.0, waited=2.0)
    assert parts.line() == {"steps": 1, "input_ms": 1e3, "step_ms": 0.0}
