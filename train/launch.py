"""Starts the processes of one machine: `python -m train.launch --processes=4 -- --config=...`.

Flags: --processes=N on this machine; --cluster=FILE, one of configs/cluster; --port=P of process 0,
by default a free one. The flags of `python -m train` follow `--`.

Process 0 writes to this terminal, the others to files whose last lines are shown if they fail. The
first failure ends the others; so does Ctrl-C.

Variables that must be set before jax starts come from a cluster file, and are printed; so are
settings of glibc that spare CPUs page faults. If a machine has several processes, this program also
tells them how to find each other. If it has one, the flags after `--` or the scheduler do.
"""

import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags

from train.distributed import check_port
from train.errors import UserError

LAST_LINES = 15
GRACE_SECONDS = 5.0  # Between asking a process to end and ending it.


class Launch(NamedTuple):
    """What is to be started: how many processes, which port, which variables, which flags."""

    processes: int
    port: int
    settings: dict[str, str]
    arguments: Sequence[str]


def main(argv: Sequence[str]) -> int:
    """Starts the processes and waits for them; returns the exit status."""
    try:
        if "--help" in argv[1:2]:
            print(__doc__)
            return 0
        processes, port, settings, arguments = parse(argv)
    except (flags.Error, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, value in settings.items():
        print(f"launch: {name}={value}", file=sys.stderr)
    environments = [
        {name: value.format(process_id=i) for name, value in settings.items()}
        for i in range(processes)
    ]
    # A flag rather than an exception, which could lose a process that is just being started.
    interrupted = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: interrupted.set())
    commands = commands_of(processes, port, arguments)
    with tempfile.TemporaryDirectory(prefix="jaxcomm-") as logs:
        return supervise(commands, environments, Path(logs), interrupted)


def parse(argv: Sequence[str]) -> Launch:
    """Reads the launcher's flags, which end at `--`.

    Raises:
      UserError, flags.Error: if they make no sense.
    """
    values = flags.FlagValues()  # Of its own: what follows `--` belongs to train.main.
    flags.DEFINE_integer(
        "processes", None, "Processes on this machine.", lower_bound=1, flag_values=values
    )
    flags.DEFINE_string("cluster", None, "A file of configs/cluster.", flag_values=values)
    flags.DEFINE_integer("port", 0, "Port of process 0; 0 finds a free one.", flag_values=values)
    split = argv.index("--") if "--" in argv else len(argv)
    rest = values(list(argv[:split]))[1:]
    if rest:
        raise UserError(f"not a flag: {rest[0]}; flags of the training program follow `--`")
    cluster = read_cluster(values.cluster) if values.cluster else {}
    processes = values.processes or cluster.get("processes")
    if not processes:
        raise UserError("--processes is missing")
    if values.port:
        check_port(values.port)
    settings = {**cluster.get("env", {}), **memory_settings()}
    if processes > 1:  # On a machine with GPUs, one for each process; on others without effect.
        settings = {"JAX_LOCAL_DEVICE_IDS": "{process_id}", **settings}
    return Launch(processes, values.port or free_port(), settings, argv[split + 1 :])


def memory_settings() -> dict[str, str]:
    """How processes without a GPU keep the memory of a step for the next one.

    XLA's temporaries are larger than what glibc keeps by default, so in every step the kernel maps
    them afresh, page by page. What the user has set stays.
    """
    if Path("/dev/nvidia0").exists() or any(name.startswith("MALLOC_") for name in os.environ):
        return {}
    return {
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**34),
        "MALLOC_TOP_PAD_": str(2**28),
    }


def read_cluster(path: str) -> dict:
    """Reads a cluster file: `processes` and `env`, whose values may hold `{process_id}`."""
    if not Path(path).is_file():
        raise UserError(f"--cluster={path}: there is no such file")
    return runpy.run_path(path)["get_config"]().to_dict()


def commands_of(processes: int, port: int, arguments: Sequence[str]) -> list[list[str]]:
    """The command line of each process."""
    command = [sys.executable, "-m", "train", *arguments]
    if processes == 1:
        return [command]
    together = [f"--coordinator=127.0.0.1:{port}", f"--num_processes={processes}"]
    return [[*command, *together, f"--process_id={i}"] for i in range(processes)]


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def supervise(
    commands: list[list[str]],
    environments: list[dict[str, str]],
    logs: Path,
    interrupted: threading.Event,
) -> int:
    """Runs the commands until all have ended well, one has not, or an interrupt comes.

    Returns:
      0, the status of the first process that failed, or 130; by then all have ended.
    """
    running: list[subprocess.Popen] = []
    try:
        for i, (command, environment) in enumerate(zip(commands, environments, strict=True)):
            running.append(start(command, environment, logs / f"{i}.log" if i else None))
        return wait(running, logs, interrupted)
    finally:
        end(running)


def start(command: list[str], environment: dict[str, str], log: Path | None) -> subprocess.Popen:
    """Starts one process; it writes to a file, or to where this program writes."""
    env = {**os.environ, **environment}
    if log is None:
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL)
    with log.open("wb") as output:
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )


def wait(running: list[subprocess.Popen], logs: Path, interrupted: threading.Event) -> int:
    """Waits until all processes have ended well or the first has failed, and says which."""
    while not interrupted.wait(0.01):
        statuses = [process.poll() for process in running]
        for rank, status in enumerate(statuses):
            if status:
                report(rank, status, logs)
                # What a signal has ended has a negative status, for which shells say 128 + signal.
                return status if status > 0 else 128 - status
        if None not in statuses:
            return 0
    print("launch: interrupted; all processes end", file=sys.stderr)
    return 130


def report(rank: int, status: int, logs: Path) -> None:
    """Names the process that failed; the output of process 0 has been seen already."""
    how = f"status {status}" if status > 0 else f"signal {signal.Signals(-status).name}"
    print(f"launch: process {rank} failed with {how}; the others are ended", file=sys.stderr)
    log = logs / f"{rank}.log"
    if log.exists():
        lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        print("\n".join([f"launch: last lines of process {rank}:", *lines]), file=sys.stderr)


def end(running: list[subprocess.Popen]) -> None:
    """Asks the processes that still run to end, then ends them."""
    for process in running:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv))
