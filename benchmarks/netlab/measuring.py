"""A measurement as the network sees it: rates, bytes of links, floors, and what is kept of it."""

import datetime
import importlib.metadata
import itertools
import json
import math
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks.netlab.calibrate import calibrated
from benchmarks.netlab.hosts import HostError, run_everywhere
from benchmarks.netlab.methods import COMPILED
from benchmarks.netlab.network import Network, NetworkError
from benchmarks.netlab.worker import COUNTED, MARK
from jaxcomm import plan

RESULTS = Path(__file__).parents[1] / "results"
Sent = dict[tuple[str, str, int], int]

# What `train.launch` sets too: without it, the kernel maps a step's memory afresh in every step.
WORKER_VARIABLES = {
    "XLA_FLAGS": "",  # a device for each host, and programs as users have them
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**28),
}


class Lab:
    """An open network, and what a TCP stream reaches on it.

    Attributes:
      network: it.
      rates: Mbit/s of each directed link from the first host to the last, as calibrated.
      share: of the rate that a link is shaped to, what a stream reaches; None without a limit.
    """

    def __init__(self, network: Network):
        self.network = network
        self.rates = calibrated(network)
        stream = min(self.rates.values(), default=math.inf)
        print(f"one TCP stream from the first host to the last: {stream:.1f} Mbit/s", flush=True)
        # The slowest link of the path was full: what it carried, of what it is shaped to.
        limits = [_rate_between(network.topology, *step) for step in self.rates]
        slowest = min(limits, default=math.inf)
        self.share = None if slowest == math.inf else stream / slowest

    def rows(
        self,
        command: list[str],
        seconds: float,
        show_lines: bool = False,
        programs: str | None = None,
    ) -> list[dict[str, Any]]:
        """Runs a worker that ends in `worker.measure` on every host; returns its rows.

        Each gets bytes_busiest_link, floor_ms and over_floor, of the direction of a link that was
        busiest in a step, without the barriers around it; the median of several runs. `programs` is
        a folder of compiled programs, from a run of the same cases before; None is a new one.

        Raises:
          HostError: if a process fails, or does not end in time.
        """
        counted: list[Sent] = []
        rows: list[dict[str, Any]] = []

        def on_line(line: str, stdin: IO[str]) -> None:
            if line == MARK:
                counted.append(self.network.bytes_sent())
                stdin.write("\n")
                stdin.flush()
            elif line.startswith(MARK):
                rows.extend(json.loads(line.removeprefix(MARK)))
            elif show_lines:
                print(line, file=sys.stderr, flush=True)

        with tempfile.TemporaryDirectory(prefix="netlab-") as folder:
            # A program that jax has from its own cache cannot be passed on.
            own = {COMPILED: programs or folder, "JAX_ENABLE_COMPILATION_CACHE": "false"}
            variables = {**WORKER_VARIABLES, **own}
            run_everywhere(self.network, command, seconds, variables, on_line)
        runs = [
            {key: after[key] - before[key] for key in after}
            for before, after in zip(counted[::2], counted[1::2], strict=True)
        ]
        each = [runs[start : start + COUNTED] for start in range(0, len(runs), COUNTED)]
        barriers, *sent_by = map(_usual, each)
        for row, sent in zip(rows, sent_by, strict=True):
            sent = {key: max(sent[key] - barriers[key], 0) / row["steps"] for key in sent}
            row["bytes_busiest_link"] = round(max(sent.values()))
            row["floor_ms"] = self.floor_ms(sent)
            row["stream_mbit"] = min(self.rates.values(), default=None)
            row["over_floor"] = row["floor_ms"] and row["ms"] / row["floor_ms"]
        return rows

    def floor_ms(self, sent: dict[tuple[str, str, int], float]) -> float | None:
        """How long the slowest link needs for what it carried, at the rate of a stream."""
        links = self.network.topology.links
        times = [
            8 * count / (links[i].rate * 1e3 * self.share)
            for (_, _, i), count in sent.items()
            if links[i].rate is not None and self.share
        ]
        return max(times, default=None)


def _usual(runs: Sequence[Sent]) -> Sent:
    """The run whose busiest link carried the median."""
    return sorted(runs, key=lambda sent: max(sent.values(), default=0))[len(runs) // 2]


def _rate_between(made: plan.Topology, a: str, b: str) -> float:
    """Mbit/s of a link between two neighbours; infinite without a limit.

    A stream stays on one of several links.
    """
    rates = [link.rate for link in made.links if set(link.ends) == {a, b}]
    return max(math.inf if rate is None else rate for rate in rates)


def guarded(name: str, body: Callable[[], None]) -> int:
    """Runs the body of a command; bad input is a line and status 2, a failed host status 1."""
    try:
        body()
    except (ValueError, NetworkError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except HostError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    return 0


def circumstances(program: str) -> dict[str, Any]:
    """What a number means nothing without."""
    packages = {"jax", "jaxlib", "numpy", "pyroute2"}  # the last one only for networks
    packages &= set(itertools.chain(*importlib.metadata.packages_distributions().values()))
    return {
        "command": " ".join([f"python -m {program}", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in sorted(packages)},
        },
    }


def keep(path: Path | None, program: str, part: str, rows: list[Any], **more: Any) -> None:
    """Writes one part of an experiment into a file, if there is one; other parts stay."""
    if path is None:
        return
    parts = json.loads(path.read_text())["parts"] if path.exists() else {}
    parts[part] = {**circumstances(program), **more, "rows": rows}
    path.write_text(json.dumps({"parts": dict(sorted(parts.items()))}, indent=1) + "\n")
