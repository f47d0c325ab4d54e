"""What a GPU does and for how long, as jax's profiler records it."""

import argparse
import contextlib
import importlib.metadata
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

# The profiler knows what a kernel belongs to only where it is launched alone. Read when jax starts.
ALONE = "--xla_gpu_enable_command_buffer="


def launch_alone() -> None:
    """Has XLA launch each kernel alone; to be called before jax starts its backend."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ALONE}"


class Kernel(NamedTuple):
    """One kernel, copy or fill that a GPU ran.

    Attributes:
      name: of the kernel.
      module: the compiled program that it belongs to, such as "jit_step".
      op: the instruction of this program. Both are "" where the profiler lost them, as it does in
        what XLA launches as a CUDA graph (a command buffer).
      start: in seconds.
      seconds: how long it took.
    """

    name: str
    module: str
    op: str
    start: float
    seconds: float


@contextlib.contextmanager
def recorded() -> Iterator[list[Kernel]]:
    """A list that has all kernels of the block, in the order in which they began, at its end.

    The block has to wait for its results (`jax.block_until_ready`). On a CPU the list stays empty.
    """
    found: list[Kernel] = []
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level, options.python_tracer_level = 1, 0
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            yield found
        finally:
            jax.profiler.stop_trace()
        for file in Path(folder).rglob("*.xplane.pb"):
            found += _kernels(jax.profiler.ProfileData.from_file(str(file)))
    found.sort(key=lambda kernel: kernel.start)


def _kernels(data: jax.profiler.ProfileData) -> Iterator[Kernel]:
    for plane in data.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if line.name is not None and line.name.startswith("Stream"):
                for event in line.events:
                    facts = dict(event.stats)
                    module, op = (str(facts.get(key, "")) for key in ("hlo_module", "hlo_op"))
                    seconds = 1e-9 * event.duration_ns
                    yield Kernel(event.name, module, op, 1e-9 * event.start_ns, seconds)


def per_call(kernels: list[Kernel], calls: int) -> list[float]:
    """The seconds of each of several calls of one program, which run one after the other.

    Raises:
      ValueError: if the kernels cannot be those of so many equal calls.
    """
    each, rest = divmod(len(kernels), calls)
    if rest or not each:
        raise ValueError(f"{len(kernels)} kernels are not those of {calls} equal calls.")
    return [sum(k.seconds for k in kernels[i * each :][:each]) for i in range(calls)]


def keep(
    path: Path | None,
    facts: dict[str, str],
    part: str,
    rows: list[dict[str, Any]],
    key: tuple[str, ...],
) -> None:
    """Writes rows into a part of a JSON file, if there is one, in place of those of the same key.

    Rows that were not measured now stay.

    Raises:
      ValueError: if the file is of another machine.
    """
    if path is None:
        return
    kept = json.loads(path.read_text()) if path.exists() else {"machine": facts}
    if kept["machine"] != facts:
        raise ValueError(f"{path} has results of {kept['machine']}, and this is {facts}")
    both = {tuple(row[name] for name in key): row for row in [*kept.get(part, []), *rows]}
    kept[part] = list(both.values())
    path.write_text(json.dumps(kept, indent=1) + "\n")


def refused(parser: argparse.ArgumentParser, save: Callable[..., None]) -> None:
    """Ends the command before anything is measured that `save` could not add to its file."""
    try:
        save([])
    except ValueError as error:
        parser.error(f"--out: {error}")


def machine() -> dict[str, str]:
    """What a measurement holds for: the device, its driver, and the versions of what runs on it."""
    device = jax.devices()[0]
    facts = {"device": device.device_kind, "platform": device.client.platform_version}
    for package in ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[package] = importlib.metadata.version(package)
    with contextlib.suppress(OSError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        facts["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return facts
