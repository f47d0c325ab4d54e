"""Whether all processes were started with the same run, and see the same directory.

Processes that differ would compile different programs. On GPUs they would then wait for each other
for ever, and on CPUs their parameters would drift apart.
"""

import hashlib
import importlib.metadata
import inspect
import platform
import secrets
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import jaxcomm
from jaxcomm import plan
from train.check import flat
from train.errors import UserError

PATIENCE = 20.0  # seconds; network file systems cache that a file does not exist
OWN = ("data.data_dir",)  # what may differ between machines
PACKAGES = ("jax", "jaxlib", "jaxcomm", "optax", "flax")
SOURCES = (Path(inspect.getfile(jaxcomm)).parent, Path(__file__).parent)


def check(config: Any, workdir: Path) -> None:
    """Raises a UserError in every process unless all were started with the same run."""
    check_same(config)
    check_shared(workdir)


def check_flags(given: Mapping[str, bool]) -> None:
    """Raises a UserError in every process unless all were given the same flags, by name.

    This comes first: with different flags, processes would wait for each other in different places.
    """
    if odd := _others(map(repr, given.values())):
        process, flags = odd[0]
        names = " and ".join(f"--{list(given)[i]}" for i in flags)
        raise UserError(
            f"all processes need the same flags, and either process 0 or process {process} was "
            f"started without {names}"
        )


def check_same(config: Any) -> None:
    """Raises a UserError in every process if the config or a version is not that of process 0."""
    if jax.process_count() == 1:
        return
    own = {name: repr(value) for name, value in flat(config.to_dict()) if name not in OWN}
    own |= {f"version of {name}": _version(name) for name in PACKAGES}
    # The texts of `python_topics` come with the running Python.
    parts = 3 if own.get("data.name") == repr("python_topics") else 2
    own |= {"version of Python": ".".join(platform.python_version_tuple()[:parts])}
    own |= {"source of jaxcomm or train": source_digest(SOURCES)} | _network(
        config.get("network") or {}
    )
    names = sorted(own)
    # Names come first: where they differ, the number of values may differ too.
    if odd := _others(["".join(names)]):
        raise UserError(f"process {odd[0][0]} has other fields of the config than process 0")
    if odd := _others(own[name] for name in names):
        process, fields = odd[0]
        raise UserError(
            f"all processes need the same config and versions, and process {process} has another "
            f"{', '.join(names[i] for i in fields)} than process 0"
        )


def _network(network: Any) -> dict[str, str]:
    """What this process reads in the files of the network."""
    read = {"cluster": plan.load_cluster, "costs": plan.read_costs}
    found = {}
    for field, of in read.items():
        if network.get(field):
            try:
                found[f"contents of network.{field}"] = repr(of(network[field]))
            except (ValueError, OSError) as error:  # said where it is used, if it is so everywhere
                found[f"contents of network.{field}"] = str(error)
    return found


def check_data(identity: Mapping[str, str]) -> None:
    """Raises a UserError in every process if the data are not those of process 0.

    Args:
      identity: the `identity` of `train.data.Data`.
    """
    if odd := _others(identity.values()):
        process, differ = odd[0]
        names = list(identity)
        raise UserError(
            f"all processes need the same data, and process {process} has another "
            f"{', '.join(names[i] for i in differ)} than process 0; look at "
            "--config.data.data_dir or TFDS_DATA_DIR on that machine"
        )


def source_digest(folders: Iterable[Path]) -> str:
    """A digest of all Python files below some folders, and of their relative names."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            source = path.read_bytes()
            digest.update(f"{path.relative_to(folder)} {len(source)}\n".encode() + source)
    return digest.hexdigest()


def check_shared(workdir: Path) -> None:
    """Raises a UserError in every process unless all see the directory that process 0 sees."""
    if jax.process_count() == 1:
        return
    number = np.uint32(secrets.randbits(32))
    mark = workdir / f".shared-{int(multihost_utils.broadcast_one_to_all(number)):08x}"
    if jax.process_index() == 0:
        workdir.mkdir(parents=True, exist_ok=True)
        mark.touch()
    multihost_utils.sync_global_devices("workdir")
    until = time.monotonic() + PATIENCE
    while not (sees := mark.exists()) and time.monotonic() < until:
        time.sleep(0.2)
    own = np.asarray([jax.process_index(), sees], np.int32)
    rows = np.asarray(multihost_utils.process_allgather(own))
    if jax.process_index() == 0:
        mark.unlink()
    if blind := sorted(rows[rows[:, 1] == 0, 0].tolist()):
        raise UserError(
            f"--workdir={workdir} is not the same directory in all processes: process {blind[0]} "
            "does not see what process 0 writes there; name one on a file system that all machines "
            "share"
        )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return "unknown"


def _others(texts: Iterable[str]) -> list[tuple[int, list[int]]]:
    """The processes whose texts differ from those of process 0, and which texts."""
    if jax.process_count() == 1:
        return []
    digests = [hashlib.sha256(text.encode()).digest()[:4] for text in texts]
    words = np.frombuffer(b"".join(digests), np.uint32)
    numbered = np.concatenate([np.asarray([jax.process_index()], np.uint32), words])
    rows = np.asarray(multihost_utils.process_allgather(numbered))
    rows = rows[np.argsort(rows[:, 0])]
    differs = rows[:, 1:] != rows[:1, 1:]
    return [(i, np.flatnonzero(row).tolist()) for i, row in enumerate(differs) if row.any()]
