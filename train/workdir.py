"""The directory of a run: its name, its lock, and the config that it was started with."""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from train.errors import UserError


def new(name: str) -> Path:
    """A folder of its own for a run that was given none; all processes agree on it."""
    seconds = int(multihost_utils.broadcast_one_to_all(np.uint32(time.time())))
    return Path("workdir", name, time.strftime("%Y%m%d-%H%M%S", time.localtime(seconds)))


@contextlib.contextmanager
def claimed(workdir: Path, config: Any) -> Iterator[None]:
    """Makes the directory, keeps other runs out of it, and writes the config into it.

    Process 0 does so for all. The lock is of the operating system and ends with the process,
    however that ends. The file stays and means nothing by itself.

    Raises:
      UserError: if the directory cannot be written, or another run writes into it.
    """
    if jax.process_index() != 0:
        yield
        return
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock = (workdir / ".lock").open("a+")
    except OSError as error:
        raise UserError(f"cannot write to --workdir={workdir}: {error}") from error
    with lock:
        _lock(lock, workdir)
        (workdir / "config.json").write_text(config.to_json_best_effort(indent=2) + "\n")
        yield


def _lock(lock: Any, workdir: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        raise UserError(
            f"another run ({lock.read().strip()}) writes to --workdir={workdir}; end it, or choose "
            "another directory"
        ) from error
    except OSError as error:
        raise UserError(f"--workdir={workdir} cannot be locked: {error}") from error
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
