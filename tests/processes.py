"""Starts real processes that jax joins over TCP on this machine, as several machines would be."""

import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent

# For exchanges in conditionals and loops: a program that is read back has lost their order.
COMPILED_ANEW = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
OPTIMIZED = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}  # as users compile
# Gloo's threads write to file descriptor 1, in pieces that mix with each other's and with ours.
_OWN_STDOUT = """\
import os, sys
sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
"""
_JOIN = """\
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize({coordinator!r}, num_processes={n}, process_id={rank})
"""


def flags_of(devices: int) -> dict[str, str]:
    """Variables of processes of so many devices each, which compile as quickly as the tests."""
    flags = os.environ.get("XLA_FLAGS", "")
    return {"XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}"}


class Finished(NamedTuple):
    """What one process has printed; gloo's own lines are in `stderr`."""

    stdout: str
    stderr: str


class ProcessError(AssertionError):
    """A process failed or none of them ended in time; says which one and shows its last lines."""


def free_port() -> int:
    """Returns a TCP port of 127.0.0.1 that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_processes(
    n: int,
    script: str,
    *,
    timeout: float = 120,
    join: bool = True,
    env: dict[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> list[Finished]:
    """Runs `script` in n Python processes at once; returns what they printed, by rank.

    Args:
        n: number of processes, each with one CPU device.
        script: Python source, indented or not, that every process runs; with `join`, after
            `import jax` and `jax.distributed.initialize`. `RANK` and `WORLD_SIZE` are in its
            environment.
        timeout: seconds after which all are ended and the test fails.
        join: whether to join the processes with jax.
        env: further environment variables.
        prefix: a command that starts each of them, such as `ip netns exec NAME`.

    Raises:
        ProcessError: a process exited with another status than 0, or the time was over. Every
            process has ended by then.
    """
    coordinator = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        try:
            for rank in range(n):
                source = _JOIN.format(coordinator=coordinator, n=n, rank=rank) if join else ""
                path = Path(folder, f"rank{rank}.py")
                path.write_text(_OWN_STDOUT + source + textwrap.dedent(script))
                processes.append(_start(path, _environment(rank, n, env or {}), prefix))
            _wait(processes, Path(folder), timeout)
        finally:
            for process in processes:
                _kill(process)
        return [_output(Path(folder), rank) for rank in range(n)]


@functools.cache
def as_a_machine() -> list[str]:
    """What makes of a process one on a machine of its own to XLA, which goes by the boot id.

    Jax refuses some things only of several machines. Empty where nothing can be mounted.
    """
    random = "/proc/sys/kernel/random"  # what is read from `uuid` is another one every time
    mount = f'mount --bind {random}/uuid {random}/boot_id && exec "$@"'
    command = ["unshare", "-m" if os.geteuid() == 0 else "-rm", "sh", "-c", mount, "sh"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*command, "true"], stderr=subprocess.DEVNULL).returncode
    ):
        return []
    return command


def _environment(rank: int, n: int, env: dict[str, str]) -> dict[str, str]:
    # NPROC, the size of XLA's thread pool, is there for eight devices in one process.
    return {
        **{name: value for name, value in os.environ.items() if name != "NPROC"},
        "JAX_PLATFORMS": "cpu",
        **flags_of(devices=1),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "RANK": str(rank),
        "WORLD_SIZE": str(n),
        **env,
    }


def _start(path: Path, env: dict[str, str], prefix: Sequence[str]) -> subprocess.Popen[bytes]:
    # Files rather than pipes: a pipe that nobody reads fills up and stops its writer. A session of
    # its own, so that whatever the process starts can be ended with it.
    with path.with_suffix(".out").open("wb") as out, path.with_suffix(".err").open("wb") as err:
        return subprocess.Popen(
            [*as_a_machine(), *prefix, sys.executable, "-u", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=env,
            start_new_session=True,
        )


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, timeout: float) -> None:
    """Returns when all have exited with 0; raises as soon as one has not."""
    deadline = time.monotonic() + timeout
    while True:
        statuses = [process.poll() for process in processes]
        for rank, status in enumerate(statuses):
            if status:
                raise ProcessError(f"rank {rank} exited with {status}\n{_tail(folder, rank)}")
        if None not in statuses:
            return
        if time.monotonic() > deadline:
            late = [rank for rank, status in enumerate(statuses) if status is None]
            tails = "\n".join(_tail(folder, rank) for rank in late)
            raise ProcessError(f"ranks {late} did not end in {timeout} seconds\n{tails}")
        time.sleep(0.05)


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _output(folder: Path, rank: int) -> Finished:
    path = folder / f"rank{rank}"
    return Finished(*(path.with_suffix(x).read_text(errors="replace") for x in (".out", ".err")))


def _tail(folder: Path, rank: int, lines: int = 15) -> str:
    shown = "".join(_output(folder, rank)).splitlines()[-lines:]
    return f"--- last lines of rank {rank}:\n" + "\n".join(shown)
