"""The directory of a run: its name, its lock, and the config that it was started with."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from train.check import flat
from train.errors import UserError

CONFIG, DATA, METRICS = "config.json", "data.json", "metrics.jsonl"
CHECKPOINTS = "checkpoints"
IS_FOLDER = {CONFIG: False, DATA: False, METRICS: False, CHECKPOINTS: True}
# Fields that may change when a run continues: what is trained does not depend on them.
FREE = ("checkpoint.", "data.data_dir", "eval_every", "guard.", "inspect.", "measure_steps")
FREE += ("network.gigabits", "network.probe_mib", "network.quality", "profile.")


def new(name: str) -> Path:
    """A new folder for a run that was given none; all processes agree on it."""
    now = np.array(time.localtime()[:6], np.int32)  # machines may be in different time zones
    year, month, day, *clock = multihost_utils.broadcast_one_to_all(now).tolist()
    return Path("workdir", name, "{}{:02}{:02}-{:02}{:02}{:02}".format(year, month, day, *clock))


@contextlib.contextmanager
def claimed(workdir: Path) -> Iterator[None]:
    """Makes the directory and keeps other runs out of it.

    Process 0 does so for all. The lock is of the operating system and ends with the process,
    however that ends. The file stays, and has no meaning on its own.

    Raises:
      UserError: if the directory cannot be written, has something else where a run writes, or
        another run writes into it.
    """
    if jax.process_index() != 0:
        yield
        return
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        for name, is_folder in IS_FOLDER.items():
            path, kind = workdir / name, "folder" if is_folder else "file"
            if path.exists() and path.is_dir() != is_folder:
                raise UserError(f"{path} is no {kind}, as a run makes it; choose another --workdir")
        lock = (workdir / ".lock").open("a+")
    except OSError as error:
        raise UserError(f"cannot write to --workdir={workdir}: {error}") from error
    with lock:
        _lock(lock, workdir)
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
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):
            raise UserError(f"--workdir={workdir} cannot be locked: {error}") from error
        print(f"--workdir={workdir} has no locks; let no other run use it", file=sys.stderr)
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()


def keep_config(workdir: Path, config: Any, resumed: bool) -> None:
    """Writes the config of a run that has passed all checks; process 0 does so for all.

    A run that continues names the fields in which it differs from `config.json`, on one line.

    Args:
      workdir: the directory of the run.
      config: a config of `configs/`.
      resumed: whether the run continues from a checkpoint.
    """
    if jax.process_index() != 0:
        return
    path, text = workdir / CONFIG, config.to_json_best_effort(indent=2) + "\n"
    if resumed and (changed := changes(workdir, config)):
        print(f"the run continues with another config: {', '.join(changed)}", file=sys.stderr)
    write_whole(path, text)


def keep_data(workdir: Path, config: Any, identity: Mapping[str, str], resumed: bool) -> None:
    """Writes what identifies the data of a run; process 0 does so for all.

    A run that continues with other data of the same name prints what differs, on one line. Where
    fields of the config's data differ, `keep_config` names these.

    Args:
      workdir: the directory of the run, with its earlier config.
      config: a config of `configs/`.
      identity: the `identity` of `train.data.Data`.
      resumed: whether the run continues from a checkpoint.
    """
    if jax.process_index() != 0:
        return
    try:
        before = dict(json.loads((workdir / DATA).read_text())) if resumed else {}
    except (OSError, TypeError, ValueError):  # Runs of earlier versions have none.
        before = {}
    differ = [name for name, value in identity.items() if before.get(name, value) != value]
    if differ and not any(change.startswith("data.") for change in changes(workdir, config)):
        print(
            f"the run continues with other data: another {', '.join(differ)} than before; look at "
            "--config.data.data_dir or TFDS_DATA_DIR",
            file=sys.stderr,
        )
    write_whole(workdir / DATA, json.dumps(dict(identity), indent=2) + "\n")


def changes(workdir: Path, config: Any, added: bool = True) -> list[str]:
    """The fields that differ from `config.json`; none if that cannot be read.

    Fields that do not affect what is trained are left out; unless `added`, so are those that the
    file does not have, as a newer version of the program adds some.
    """
    try:
        before = dict(flat(json.loads((workdir / CONFIG).read_text())))
    except (AttributeError, OSError, ValueError):
        return []
    return [
        f"{name}={value!r} (was {before.get(name)!r})"
        for name, value in flat(json.loads(config.to_json_best_effort()))
        if before.get(name) != value and (added or name in before) and not name.startswith(FREE)
    ]


@contextlib.contextmanager
def naming_changes(workdir: Path, config: Any) -> Iterator[list[str]]:
    """Surrounds the reading of a checkpoint: if it does not fit, says what changed in the config.

    Yields:
      The fields that the file has and that differ.

    Raises:
      UserError: the one that was raised, with the changed fields added.
    """
    try:
        yield changes(workdir, config, added=False)
    except UserError as error:
        if not (changed := changes(workdir, config)):
            raise
        fields = ", ".join(f"config.{change}" for change in changed)
        cure = (
            ""
            if "--workdir" in str(error)
            else "; set back what does not fit, or choose another --workdir"
        )
        raise UserError(f"{error}; changed since then: {fields}{cure}") from error


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that it is never seen half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(text)
    scratch.replace(path)
