"""Steps that do not end: what a process waits for is said, and it ends."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Program

from train import signals, watchdog


class Ends:
    """What is said, and the statuses with which a process would end; the thread waits instead."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.lines: list[str] = []
        self.statuses: list[int] = []

    def end(self, status: int) -> None:
        self.statuses.append(status)
        self.over.wait()

    def wait(self) -> None:
        deadline = time.monotonic() + 20
        while not self.statuses:
            assert time.monotonic() < deadline, self.lines
            time.sleep(0.005)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    ends = Ends()
    monkeypatch.setattr(signals, "say", ends.lines.append)
    monkeypatch.setattr(signals, "end", ends.end)
    monkeypatch.setattr(signals, "stop", threading.Event())
    monkeypatch.setattr(watchdog, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "SAVE_SECONDS", 0.1)
    monkeypatch.setattr(watchdog, "LATER_SECONDS", 0.1)
    yield ends
    ends.over.set()


@contextlib.contextmanager
def started(seconds: float, alone: bool = False) -> Iterator[watchdog.Watchdog]:
    dog = watchdog.Watchdog(seconds, alone)
    dog.start()
    yield dog
    dog.close()


@pytest.mark.parametrize(("alone", "what"), [(True, "its devices"), (False, "the other processes")])
def test_who_waits_for_others_says_so(ends: Ends, alone: bool, what: str) -> None:
    with started(0.1, alone) as dog:
        dog.ended(30)
        ends.wait()
    line = f"step 31 has not ended for 0.1 s; this process waits for {what}, and ends"
    assert ends.statuses == [1] and ends.lines == [f"{line} (--config.guard.step_seconds)"]


def test_who_waits_for_its_data_says_so_and_ends_first(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "LATER_SECONDS", 1e9)
    with started(0.1) as dog:
        dog.below_bar = True
        dog.ended(30)
        with dog.at("its data", ahead=1):
            ends.wait()
    assert ends.statuses == [1]
    assert ends.lines[0].startswith("\nstep 32 has not ended for 0.1 s; this process waits for its")


def test_what_takes_long_is_no_step(ends: Ends) -> None:
    """Nothing before the first step has ended, no pause, nothing behind the end, no limit of 0."""
    with started(0.05) as dog:
        time.sleep(0.3)
        dog.ended(1)
        for _ in range(2):
            with dog.paused(), dog.at("its files"):
                time.sleep(0.2)
        dog.close()
        time.sleep(0.2)
    with started(0.0) as dog:
        dog.ended(1)
        time.sleep(0.2)
    assert ends.lines == [] and ends.statuses == []


def test_sigterm_without_a_step_to_save_after(ends: Ends) -> None:
    with started(0.0) as dog:
        signals.stop.set()
        with dog.paused():  # the test, or the checkpoint itself
            time.sleep(0.3)
        assert ends.statuses == []
        ends.wait()
    assert ends.statuses == [143] and len(ends.lines) == 1
    assert ends.lines[0].startswith("SIGTERM: no step has ended for 0.1 s, so this process, which")
    assert "waits for the other processes, could not save" in ends.lines[0]


HANGING = """
import sys, time
from configs import digits_resnet
from train.run import Run

def batch(self, stop, make=Run.batch, made=[]):
    made.append(1)
    if len(made) == 6 and "--process_id=1" in sys.argv:
        time.sleep(1000)
    return make(self, stop)

Run.batch = batch

def get_config():
    return digits_resnet.get_config()
"""


@pytest.mark.multiprocess
def test_the_launcher_names_the_process_that_hangs(program: Program, tmp_path: Path) -> None:
    """Process 1 does not come to its sixth batch; process 0 waits for it."""
    (tmp_path / "config.py").write_text(HANGING)
    flags = [f"--config={tmp_path}/config.py", f"--workdir={tmp_path}/run"]
    flags += ["--config.model.stages=(1,)", "--config.guard.step_seconds=8"]
    done = program.run("train.launch", "--processes=2", "--", *flags)
    assert done.returncode == 1, done.stderr
    launched = done.stderr.splitlines()
    first = "launch: process 1 failed with status 1; the others are ended"
    assert first in launched, done.stderr
    start = launched.index(first)
    assert launched[start + 1] == "launch: last lines of process 1:"
    assert "step 6 has not ended for 8 s; this process waits for its data" in launched[-1]


def test_after_a_pause_a_step_has_the_full_time(ends: Ends) -> None:
    with started(1.5) as dog:
        dog.ended(1)
        for _ in range(4):
            time.sleep(0.5)
            with dog.paused():
                pass
    assert ends.lines == [] and ends.statuses == []


def test_every_late_step_is_said_once(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LATER_SECONDS", 1e9)
    deadline = time.monotonic() + 20
    with started(0.05) as dog:
        for number, step in enumerate((30, 31), 1):
            dog.ended(step)
            while len(ends.lines) < number and time.monotonic() < deadline:
                time.sleep(0.005)
    assert [line.split(" has not")[0] for line in ends.lines] == ["step 31", "step 32"]
