"""A command on every host of a network: started, watched, and ended together."""

import contextlib
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from benchmarks.netlab.network import Network

PORT = 29500
LAST_LINES = 15
JOB = 24_576  # Open MPI's variable has a job id, from which jax derives the port


class HostError(Exception):
    """Which host's process failed or hung, and its last lines."""


def environment(network: Network, rank: int) -> dict[str, str]:
    """What a host's process sees: `jax.distributed.initialize()` finds the others by itself.

    The variables are those of Open MPI, which jax reads. NETLAB_RANK, NETLAB_HOSTS and
    NETLAB_COORDINATOR are for everything else.
    """
    hosts = network.topology.hosts
    first = network.address(hosts[0])
    return {
        "OMPI_MCA_orte_hnp_uri": f"{JOB << 16}.0;tcp://{first}:{PORT}",
        "OMPI_COMM_WORLD_SIZE": str(len(hosts)),
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "NETLAB_RANK": str(rank),
        "NETLAB_HOSTS": str(len(hosts)),
        "NETLAB_COORDINATOR": f"{first}:{PORT}",
        "JAX_PLATFORMS": "cpu",
    }


def run_everywhere(
    network: Network,
    command: list[str],
    seconds: float,
    variables: Mapping[str, str] | None = None,
    on_line: Callable[[str, IO[str]], None] | None = None,
) -> list[str]:
    """Runs a command on all hosts; returns what each printed.

    Args:
      network: an open one.
      command: the program and its arguments.
      seconds: after which everything is ended.
      variables: added to every process's environment.
      on_line: called with each line that the first host prints, and with what it reads.

    Raises:
      HostError: if a process fails, or does not end in time. All others are ended first.
    """
    with tempfile.TemporaryDirectory(prefix="netlab-") as folder:
        outputs = [Path(folder, host) for host in network.topology.hosts]
        with _batch_scheduling():
            processes = [
                _start(network, rank, command, output, variables or {}, rank == 0 and on_line)
                for rank, output in enumerate(outputs)
            ]
        reader = None
        if on_line is not None:
            reader = threading.Thread(target=_read, args=(processes[0], outputs[0], on_line))
            reader.start()
        try:
            _wait(network, processes, outputs, time.monotonic() + seconds)
        finally:
            for process in processes:
                process.kill()
                process.wait()
            if reader is not None:
                reader.join()
        return [output.read_text() for output in outputs]


@contextlib.contextmanager
def _batch_scheduling() -> Iterator[None]:
    """Processes that start meanwhile do not interrupt each other when they wake up.

    Hosts share this machine's cores. By default each of them would interrupt the others, even in
    the middle of sending, whenever something arrives for it.
    """
    usual = os.sched_getscheduler(0)
    if usual == os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, usual, os.sched_getparam(0))


def _start(
    network: Network,
    rank: int,
    command: list[str],
    output: Path,
    variables: Mapping[str, str],
    is_watched: Any,
) -> subprocess.Popen[str]:
    host = network.topology.hosts[rank]
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE} if is_watched else {}
    with output.open("w") as file:
        return subprocess.Popen(
            network.command(host, command),
            env={**os.environ, **environment(network, rank), **variables},
            text=True,
            stderr=subprocess.STDOUT,
            **({"stdin": subprocess.DEVNULL, "stdout": file} | pipe),
        )


def _read(process: Any, output: Path, on_line: Callable[[str, IO[str]], None]) -> None:
    """Passes on what a process prints, and keeps it."""
    with output.open("w") as file:
        for line in process.stdout:
            file.write(line)
            file.flush()
            on_line(line.rstrip("\n"), process.stdin)


def _wait(network: Network, processes: list[Any], outputs: list[Path], deadline: float) -> None:
    running = dict(enumerate(processes))
    while running:
        for rank, process in list(running.items()):
            status = process.poll()
            if status is None:
                continue
            del running[rank]
            if status:
                raise HostError(_failure(network, rank, outputs, f"ended with status {status}"))
        if running and time.monotonic() > deadline:
            rank = min(running)
            raise HostError(_failure(network, rank, outputs, "did not end in time"))
        time.sleep(0.02)


def _failure(network: Network, rank: int, outputs: list[Path], what: str) -> str:
    lines = outputs[rank].read_text(errors="replace").splitlines()[-LAST_LINES:]
    shown = "\n".join(f"  {line}" for line in lines) or "  (nothing was printed)"
    return f"the process of {network.topology.hosts[rank]} (rank {rank}) {what}:\n{shown}"
