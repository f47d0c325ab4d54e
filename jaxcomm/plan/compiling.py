"""Programs that every process of a job needs, each compiled by one process.

On CPUs, every process compiles a share of the programs and loads those of the others. Four
processes that share the cores of a machine then wait for one compilation instead of four, and
separate machines compile in parallel.

Every process compiles all programs
 - on GPUs: what runs fastest is measured there while a program is traced, by all processes together
   (`jaxcomm.kernels`);
 - where jax keeps programs in a cache folder: one loaded from there cannot be sent;
 - where processors differ.

Every process also compiles programs that exchange in a conditional or a loop, because loading loses
the order of such exchanges.
"""

import os
import pickle
import platform
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils, serialize_executable
from jax.sharding import Mesh

from jaxcomm.wire import wire_report

Lower = Callable[[], jax.stages.Lowered]


def compiled(mesh: Mesh, programs: Sequence[Lower]) -> list[Any]:
    """The programs, compiled. Every process calls it, with the same programs.

    Args:
      mesh: the mesh whose devices they run on; its axes do not matter.
      programs: functions that each trace one program; a process may not call all of them.

    Returns:
      What `Lowered.compile` returns, in the same order.
    """
    devices = list(mesh.devices.flat)
    count, own = jax.process_count(), jax.process_index()
    on_cpus_of_all = {(device.platform, device.process_index) for device in devices} == {
        ("cpu", process) for process in range(count)
    }
    if count == 1 or not on_cpus_of_all or not _can_send():
        return _compile(programs)
    mine = range(own, len(programs), count)
    made = dict(zip(mine, _compile([programs[i] for i in mine]), strict=True))
    sent = {i: serialize_executable.serialize(x) for i, x in made.items() if keeps_order(x)}
    for shared in _of_all(pickle.dumps(sent)):
        for i, parts in pickle.loads(shared).items():
            if i not in made:
                made[i] = serialize_executable.deserialize_and_load(
                    *parts, execution_devices=devices
                )
    rest = [i for i in range(len(programs)) if i not in made]
    made |= zip(rest, _compile([programs[i] for i in rest]), strict=True)
    return [made[i] for i in range(len(programs))]


def keeps_order(program: Any) -> bool:
    """Whether a compiled program keeps the order of its collectives when it is loaded on CPUs."""
    return all(not c.branch and c.times == 1 for c in wire_report(program).collectives)


def _compile(programs: Sequence[Lower]) -> list[Any]:
    """Traces one program after another, and on CPUs compiles the traced ones meanwhile.

    Not on GPUs, where compilers choose by timing.
    """
    is_cpu = jax.default_backend() == "cpu"
    with ThreadPoolExecutor(None if is_cpu else 1) as threads:
        started = [threads.submit(lower().compile) for lower in programs]
        return [each.result() for each in started]


def _can_send() -> bool:
    """Whether every process can load what others compile: equal instruction sets and cores."""
    info, lines = Path("/proc/cpuinfo"), []
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("flags")]
    described = f"{platform.machine()} {os.cpu_count()} {''.join(lines[:1])}"
    options = ("jax_enable_compilation_cache", "jax_compilation_cache_dir")
    is_kept = all(getattr(jax.config, option) for option in options)
    number = 0 if is_kept else zlib.crc32(described.encode()) | 1
    numbers = multihost_utils.process_allgather(np.array([number], np.uint32)).ravel()
    return set(numbers.tolist()) == {number} != {0}


def _of_all(packed: bytes) -> list[bytes]:
    """What each process gives, on all processes."""
    sizes = multihost_utils.process_allgather(np.array([len(packed)], np.int32)).ravel()
    own = np.frombuffer(packed.ljust(int(sizes.max()), b"\0"), np.uint8)
    rows = multihost_utils.process_allgather(own).reshape(len(sizes), -1)
    return [row[:size].tobytes() for row, size in zip(rows, sizes.tolist(), strict=True)]
