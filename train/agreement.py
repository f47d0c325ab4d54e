"""Whether all processes were started with the same run.

Processes that are not would compile other programs. On GPUs they then wait for each other without
an end, and on CPUs their parameters drift apart.
"""

import importlib.metadata
import json
import platform
import zlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from train.check import flat
from train.errors import UserError

ROOM = 2**16  # bytes of a config as text
OWN = ("data.data_dir",)  # what may differ between machines


def check_same(config: Any) -> None:
    """Raises a UserError in every process if the config or a version is not that of process 0.

    The error of a process that differs names the fields.
    """
    if jax.process_count() == 1:
        return
    own = {name: str(value) for name, value in flat(config) if name not in OWN}
    own |= {name: importlib.metadata.version(name) for name in ("jax", "jaxcomm", "optax")}
    own |= {"Python": ".".join(platform.python_version_tuple()[:2])}
    text = json.dumps(own, sort_keys=True).encode()
    found = multihost_utils.process_allgather(np.uint32(zlib.crc32(text)))
    if (found == found[0]).all():
        return
    room = np.zeros(ROOM, np.uint8)
    room[: min(ROOM, len(text))] = np.frombuffer(text[:ROOM], np.uint8)
    first = json.loads(bytes(multihost_utils.broadcast_one_to_all(room)).rstrip(b"\0"))
    others = [i for i, other in enumerate(found) if other != found[0]]
    names = [n for n in sorted(first.keys() | own.keys()) if first.get(n) != own.get(n)]
    said = "; ".join(f"{n} is {own.get(n)} here and {first.get(n)} there" for n in names)
    raise UserError(
        f"all processes need the same config and versions, and {others} differ from process 0"
        + (f": {said}" if said else "; they say in what")
    )
