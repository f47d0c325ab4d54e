"""What every host does in a measurement: the same cases in turn, between barriers.

It imports neither jax nor the network's side (`measuring`), so that other frameworks' processes run
it too. The first host prints MARK before and after COUNTED runs of each case, and waits for a line:
while it waits, the bytes of every link are counted. The first runs do nothing, and tell what the
barriers send. In the end it prints MARK and the rows.
"""

import functools
import itertools
import json
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

MARK, MANY = "@@", 100
COUNTED = 3  # runs: in one of them TCP may send something twice


class Case:
    """Something to be timed.

    Attributes:
      name: unique.
      steps: how many steps a run has; times and bytes are of one step.
      warm: how many runs come before those that count.
      row: what is known of it beforehand.
    """

    name: str
    steps: int = 1
    warm: int = 1
    row: dict[str, Any]

    def prepare(self) -> None:
        """What comes before every run and is not timed: nothing, for most."""

    def run(self) -> None:
        """Runs it once, and waits for its end."""
        raise NotImplementedError


class Together(Protocol):
    """How the processes wait for each other and see each other's numbers."""

    rank: int

    def barrier(self, name: str) -> None:
        """Waits for all; they name the same barriers in the same order."""
        ...

    def gather(self, numbers: list[float]) -> Sequence[Sequence[float]]:
        """The numbers of all processes; each has equally many."""
        ...


class Jax:
    """Processes joined by `jax.distributed`."""

    def __init__(self) -> None:
        import jax
        import numpy as np

        jax.distributed.initialize()
        self.rank = jax.process_index()
        mesh = jax.sharding.Mesh(np.asarray(jax.devices(), object), ("all",))
        rows = np.zeros(jax.local_device_count(), np.float32)
        split, whole = jax.P("all"), jax.P()
        rows = jax.make_array_from_process_local_data(jax.NamedSharding(mesh, split), rows)
        total = jax.jit(lambda x: x.sum(), out_shardings=jax.NamedSharding(mesh, whole))
        self._meet = functools.partial(total.lower(rows).compile(), rows)

    def barrier(self, name: str) -> None:
        """By a sum of one number, whose end is near the same moment for all."""
        import jax
        from jax.experimental import multihost_utils

        # This compares the names, and works on after its sum, on each host for a different time.
        multihost_utils.sync_global_devices(name)
        jax.block_until_ready(self._meet())

    def gather(self, numbers: list[float]) -> Sequence[Sequence[float]]:
        import numpy as np
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(np.asarray(numbers, np.float32)).tolist()


def measure(cases: Sequence[Case], together: Together, repeats: int, seconds: float = 0.0) -> None:
    """Warms each case up, runs it COUNTED times for its bytes, then all in turn for their times.

    Those that are short are repeated more often, until each has run for so many seconds, or
    MANY times: what is short varies most.

    The first host prints a row of each: what the case knows, and ms and cpu_ms, medians over the
    repeats of the slowest host's time and of all hosts' CPU time; `all_ms` has the slowest host's
    time of each repeat.
    """
    for case in cases:
        for _ in range(case.warm):
            case.prepare()
            case.run()
    for case, count in itertools.product((None, *cases), range(COUNTED)):
        name = f"{'nothing' if case is None else case.name} {count}"
        if case is not None:
            case.prepare()
        for moment in ("before", "after"):
            together.barrier(f"{name} {moment}")
            if together.rank == 0:
                print(MARK, flush=True)
                sys.stdin.readline()
            together.barrier(f"{name} {moment} counted")
            if moment == "before" and case is not None:
                case.run()
    times: dict[str, list[float]] = {case.name: [] for case in cases}
    used: dict[str, list[float]] = {case.name: [] for case in cases}
    rounds, repeat = dict.fromkeys(times, repeats), 0
    while repeat < max(rounds.values(), default=0):
        for case in cases:
            if repeat >= rounds[case.name]:
                continue
            case.prepare()
            together.barrier(f"{case.name} {repeat}")
            cpu, start = cpu_seconds(), time.perf_counter()
            case.run()
            times[case.name].append(1e3 * (time.perf_counter() - start) / case.steps)
            used[case.name].append(1e3 * (cpu_seconds() - cpu) / case.steps)
        repeat += 1
        if repeat == repeats:
            for case in cases:
                slowest = max(map(statistics.median, together.gather(times[case.name])))
                wanted = int(1e3 * seconds / (slowest * case.steps))
                rounds[case.name] = max(repeats, min(MANY, wanted))
    rows = []
    for case in cases:
        slowest = [max(column) for column in zip(*together.gather(times[case.name]), strict=True)]
        cpu = [sum(column) for column in zip(*together.gather(used[case.name]), strict=True)]
        timed = {"ms": statistics.median(slowest), "cpu_ms": statistics.median(cpu)}
        rows.append({**case.row, **timed, "all_ms": slowest, "steps": case.steps})
    if together.rank == 0:
        print(MARK, json.dumps(rows), flush=True)


def cpu_seconds() -> float:
    """Of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
