"""Processes that belong together: all end well, or the first failure ends the others."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from train.signals import ENDED, LAUNCHER

# Statuses of `python -m train` after which a restart would not help or is not wanted.
FINAL = (0, 2, 3, ENDED + signal.SIGINT)
LAST_LINES = 15
POLL_SECONDS = 0.01
# Between SIGTERM, which makes processes save, and their end: Kubernetes and SLURM wait for 30 s.
GRACE_SECONDS = 25.0
# What a process writes before it aborts because jax has lost another one, whose number follows.
SILENT = re.compile(r"stopped sending heartbeats\):\s*((?:\S*\d\s+)+)The tasks")
LOG_SECONDS = 2.0  # Within this time all that abort have written it.
ASKED = {
    signal.SIGHUP: "the terminal has closed; all processes end",
    signal.SIGINT: "interrupted; all processes end",
    signal.SIGTERM: "SIGTERM: all processes save and end",
}


class Asked:
    """The last signal that asked this program to end, or None.

    It is a flag because an exception could lose a process that is just being started.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        for number in ASKED:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._take)

    def _take(self, number: int, frame: object) -> None:
        del frame
        self.signal = signal.Signals(number)


def supervise(
    commands: list[list[str]],
    environments: list[dict[str, str]],
    names: Sequence[str],
    logs: Path,
    asked: Asked,
) -> int:
    """Runs the commands until all have ended well, one has not, or a signal comes.

    Args:
      commands: the commands of the processes.
      environments: for each, the variables to add to those of this program.
      names: the names of the processes, for messages.
      logs: the folder for the output of all but the first.
      asked: whether a signal has come.

    Returns:
      0, the status of the first process that failed, or 128 + the signal
      that came, or 0 if it was SIGTERM and all have saved. By then all have ended.
    """
    running: list[subprocess.Popen] = []
    reading, writing = os.pipe()  # For `train.signals`: closes however this program ends.
    try:
        for i, (command, environment) in enumerate(zip(commands, environments, strict=True)):
            log = logs / f"{i}.log" if i else None
            running.append(start(command, {**environment, LAUNCHER: str(reading)}, log, reading))
        return wait(running, names, logs, asked)
    finally:
        end_all(running)
        os.close(reading)
        os.close(writing)


def end_all(running: list[subprocess.Popen]) -> None:
    """Ends all that still run, and waits for them."""
    for process in running:
        process.kill()  # Does nothing to those that have ended.
        process.wait()


def start(
    command: list[str], environment: dict[str, str], log: Path | None, pipe: int
) -> subprocess.Popen:
    """Starts one process; it writes to a file, or to where this program writes.

    It gets its own session: Ctrl-C in a terminal reaches only this program, which ends the others.
    """
    with log.open("wb") if log else contextlib.nullcontext() as output:
        return subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            pass_fds=(pipe,),
            start_new_session=True,
        )


def wait(running: list[subprocess.Popen], names: Sequence[str], logs: Path, asked: Asked) -> int:
    """Waits until all processes have ended well or the first has failed, and says which."""
    while asked.signal is None:
        statuses = [process.poll() for process in running]
        failed = [(status, rank) for rank, status in enumerate(statuses) if status]
        if failed:
            status, rank = min(failed, key=_cause)
            lost = silent(running, logs) if status == -signal.SIGABRT else []
            end_all(running)  # Otherwise the bar of process 0 could be written after the report.
            report(names[rank], status, logs / f"{rank}.log", lost)
            return status if status > 0 else ENDED - status  # as shells say it
        if None not in statuses:
            return 0
        time.sleep(POLL_SECONDS)
    print("launch: " + ASKED[asked.signal], file=sys.stderr)
    saved = asked.signal == signal.SIGTERM and terminated(running, names, asked)
    return 0 if saved else ENDED + asked.signal


def _cause(failed: tuple[int, int]) -> tuple[int, int, int]:
    """Orders processes that have failed: others may have failed because the first was missing.

    First come those that a signal has ended, which have negative statuses; then those that would
    fail again after a restart.
    """
    status, rank = failed
    kinds = (status < 0, status in FINAL)
    return 2 - 2 * kinds[0] - kinds[1], status, rank


def terminated(running: list[subprocess.Popen], names: Sequence[str], asked: Asked) -> bool:
    """Asks all processes to save and end, and waits; returns whether all have ended well.

    Another signal, such as Ctrl-C, ends the wait.
    """
    for process in running:
        process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    while any(process.poll() is None for process in running) and time.monotonic() < deadline:
        if asked.signal is not None and asked.signal != signal.SIGTERM:
            print("launch: " + ASKED[asked.signal], file=sys.stderr)
            return False
        time.sleep(POLL_SECONDS)
    late = [name for name, x in zip(names, running, strict=True) if x.poll() is None]
    if late:
        which = f"process {', '.join(late)} has not saved within {GRACE_SECONDS:g} s"
        print(f"launch: {which}; all that still run are killed", file=sys.stderr)
    return all(process.poll() == 0 for process in running)


def silent(running: list[subprocess.Popen], logs: Path) -> list[int]:
    """The processes that have stopped answering: others have reported it, or they are stopped."""
    deadline = time.monotonic() + LOG_SECONDS
    while time.monotonic() < deadline:
        written = [logs / f"{rank}.log" for rank in range(1, len(running))]  # others may be older
        for log in written:
            if found := SILENT.search(log.read_text(errors="replace")):
                return [int(task) for task in re.findall(r"(\d+)\s", found[1])]
        time.sleep(POLL_SECONDS)
    return [rank for rank, process in enumerate(running) if is_stopped(process.pid)]


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process, on Linux; only process 0 may have reported it."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "tT"
    return False


def report(name: str, status: int, log: Path, lost: Sequence[int] = ()) -> None:
    """Names the process that failed; the output of the first one has been seen already.

    Args:
      name: the name of the first process that ended with a status other than 0.
      status: that status.
      log: the file of its output, if that was not shown.
      lost: the processes that have stopped answering, because of which it ended.
    """
    print(file=sys.stderr)  # The bar of process 0 may be on the line.
    how = f"status {status}" if status > 0 else f"signal {signal.Signals(-status).name}"
    if lost:
        which = f"process {', '.join(map(str, lost))} has stopped answering"
        why = f"so process {name} ended with {how}"
        print(f"launch: {which}, {why}; all are ended", file=sys.stderr)
        return
    print(f"launch: process {name} failed with {how}; the others are ended", file=sys.stderr)
    if status == -signal.SIGKILL:
        cure = "raise --config.microbatches, or lower --config.batch_size"
        print(f"launch: if nobody did, the system was short of memory: {cure}", file=sys.stderr)
    lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:] if log.exists() else []
    if lines:
        print("\n".join([f"launch: last lines of process {name}:", *lines]), file=sys.stderr)
