"""Processes that belong together: who failed is named, and none is left behind."""

import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from running import python

from train import supervise as supervision

pytestmark = pytest.mark.usefixtures("handlers")


def supervise(tmp_path: Path, *sources: str) -> int:
    commands, asked = python(*sources), supervision.Asked()
    names = [str(i) for i in range(len(sources))]
    return supervision.supervise(commands, [{} for _ in sources], names, tmp_path, asked)


def test_all_end_well(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert supervise(tmp_path, "print('zero')", "print('one')") == 0
    assert capfd.readouterr() == ("zero\n", "")  # The others write to files.


def test_the_first_failure_ends_the_others_and_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    lines = "; ".join(f"print('line', {i})" for i in range(20))
    status = supervise(
        tmp_path,
        "import time; time.sleep(60)",
        f"import sys; {lines}; sys.exit(7)",
        "import time; time.sleep(60)",
    )
    assert status == 7 and time.monotonic() - started < 10
    assert capfd.readouterr().err.splitlines() == [
        "",  # a bar may stand on the line
        "launch: process 1 failed with status 7; the others are ended",
        "launch: last lines of process 1:",
        *[f"line {i}" for i in range(5, 20)],
    ]


def test_nothing_is_written_behind_the_report(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Process 0 writes to the same terminal, and would go on until it is ended."""
    bar = "import sys\nwhile True: sys.stderr.write('bar ')"
    lines = "print('line ' * 100000)"  # which take a moment to be shown
    supervise(tmp_path, bar, f"import sys, time; time.sleep(0.5); {lines}; sys.exit(7)")
    said = capfd.readouterr().err
    assert "bar" in said and "bar" not in said[said.index("launch: process 1 failed") :]


def test_who_was_killed_is_named_before_who_failed_for_want_of_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    failed, killed = python("import sys; sys.exit(2)", "import os; os.kill(os.getpid(), 9)")
    running = [subprocess.Popen(command) for command in (failed, killed)]
    for process in running:
        process.wait()
    status = supervision.wait(running, ["0", "3 on node2"], tmp_path, supervision.Asked())
    assert status == 128 + 9
    assert "launch: process 3 on node2 failed with signal SIGKILL" in capfd.readouterr().err


def test_among_failures_of_one_moment_one_that_would_come_again_counts(tmp_path: Path) -> None:
    running = [subprocess.Popen(command) for command in python(*map("exit({})".format, (1, 3, 1)))]
    for process in running:
        process.wait()
    status = supervision.wait(running, ["0", "1", "2"], tmp_path, supervision.Asked())
    assert status == 3 and status in supervision.FINAL


def test_ctrl_c_ends_the_wait_for_processes_that_save(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM came first; they would have 25 s."""
    up, asked = tmp_path / "up", tmp_path / "asked"
    deaf = (
        f"import signal, time; signal.signal(15, lambda *_: open({str(asked)!r}, 'w'));"
        f"open({str(up)!r}, 'w');"
    )
    script = (
        "import sys, pathlib; from train import supervise\n"
        f"deaf = [sys.executable, '-c', {deaf + ' [time.sleep(0.1) for _ in range(900)]'!r}]\n"
        "sys.exit(supervise.supervise([deaf], [{}], '0', pathlib.Path(), supervise.Asked()))"
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    while not up.exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    while not asked.exists():
        time.sleep(0.01)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 128 + signal.SIGINT and time.monotonic() - started < 5
    assert "interrupted; all processes end" in capfd.readouterr().err


def test_a_killed_process_is_named_with_its_signal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status = supervise(
        tmp_path, "import time; time.sleep(60)", "import os; os.kill(os.getpid(), 9)"
    )
    assert status == 128 + 9
    said = capfd.readouterr().err
    assert "process 1 failed with signal SIGKILL; the others are" in said
    assert "the system was short of memory: raise --config.microbatches" in said
    assert "last lines" not in said  # it has written none


# What jax writes of process 2.
HEARTBEATS = """\
F1126 11:44:02 client.h:80] Terminating process because the JAX distributed service detected fatal
errors. absl::Status: UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):
2
The tasks have crashed. Check the task logs for an earlier error.
*** Check failure stack trace: ***
"""


@pytest.mark.parametrize("written", [HEARTBEATS, ""])
def test_a_process_that_does_not_answer_is_named(
    written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Process 0 aborts first; the log of process 1 says why, or nothing does, as with two."""
    monkeypatch.setattr(supervision, "LOG_SECONDS", 1.0)
    stop = "import os, time; os.kill(os.getpid(), 19); time.sleep(60)"
    abort = "import os, time; time.sleep(0.5); os.abort()"
    one = f"import sys, time; sys.stderr.write({written!r}); time.sleep(60)"
    assert supervise(tmp_path, abort, one, stop) == 128 + 6
    assert capfd.readouterr().err == (
        "\nlaunch: process 2 has stopped answering, so process 0 ended with signal SIGABRT; "
        "all are ended\n"
    )


def test_an_abort_for_another_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervision, "LOG_SECONDS", 0.1)
    supervise(tmp_path, "import time; time.sleep(60)", "import os; os.abort()")
    assert "process 1 failed with signal SIGABRT; the others are" in capfd.readouterr().err


def test_a_process_that_does_not_want_to_end_is_ended(tmp_path: Path) -> None:
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    started = time.monotonic()
    assert supervise(tmp_path, "import time, sys; time.sleep(0.5); sys.exit(1)", deaf) == 1
    assert time.monotonic() - started < 10


def terminated(process: subprocess.Popen, ready: Path) -> bool:
    """Ends a process by SIGTERM once a file is there."""
    while not ready.exists():
        time.sleep(0.01)
    asked = types.SimpleNamespace(signal=signal.SIGTERM)
    return supervision.terminated([process], ["0"], asked)


@pytest.mark.parametrize("own", [0, 1])
def test_sigterm_succeeds_if_all_end_well(tmp_path: Path, own: int) -> None:
    ready = tmp_path / "ready"
    source = (
        f"import os, pathlib, signal, time; signal.signal(15, lambda *_: os._exit({own}));"
        # Several sleeps: a signal just before one is handled only after it.
        f"pathlib.Path({str(ready)!r}).touch(); [time.sleep(0.1) for _ in range(600)]"
    )
    process = subprocess.Popen([sys.executable, "-c", source])
    assert terminated(process, ready) == (own == 0)


def test_after_the_grace_processes_are_named_and_left_to_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervision, "GRACE_SECONDS", 0.3)
    ready = tmp_path / "ready"
    source = (
        "import pathlib, signal, time; signal.signal(15, signal.SIG_IGN);"
        f"pathlib.Path({str(ready)!r}).touch(); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", source])
    assert not terminated(process, ready) and process.poll() is None
    line = "launch: process 0 has not saved within 0.3 s; all that still run are killed\n"
    assert capfd.readouterr().err == line
    process.kill()
    process.wait()


def test_under_nohup_a_terminal_that_hangs_up_ends_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asked = supervision.Asked()
        os.kill(os.getpid(), signal.SIGHUP)
        assert asked.signal is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
