"""The leading methods of a plan, timed where they will run."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcomm import mesh as mesh_
from jaxcomm.plan.choosing import Plan
from jaxcomm.plan.families import Method
from jaxcomm.plan.predict import Prediction, choose, with_exchange
from jaxcomm.plan.probing import TIMED, max_over

WITHIN, FIRST = 1.3, 3  # of the fastest step as predicted: so near, and so many, are timed
MOST = 5  # with those that lead once the first are known
QUICK = 3  # exchanges that tell whether another method leads
SECONDS, REPEATS = 1.0, (3, 50)  # that each is repeated in the end, and how often, least and most

Run = Callable[[], Any]


def timed(found: Plan, devices: Sequence[Any] | None = None) -> Plan:
    """The plan, with its leading methods timed in place of predicted.

    The first are the choice and those predicted to take at most 1.3 of the fastest step, three in
    all. What is not timed keeps its proportion to others of its family that are. If it is then
    the fastest, it is timed too, up to five. Then all exchange random gradients of the workload's
    shapes in turn, and their medians decide as predictions do: the best quality within 2 % of the
    fastest step. Every process calls this. Compiling takes longer than timing: seconds a method,
    more for sparse ones.

    Args:
      found: of `plan`.
      devices: in the order of the cluster's hosts; None is all of jax.

    Returns:
      The plan with the fastest of what was timed first, the same on all processes. Rows that were
      timed have an `error` of 0. A plan of one device is returned as it is.

    Raises:
      ValueError: for another number of devices than the cluster has.
    """
    mesh = found.mesh("data", devices)
    if mesh.size == 1:
        return found
    runs: dict[Method, Run] = {}

    def measure(methods: Sequence[Method], longest: float | None) -> dict[Method, float]:
        for method in methods:
            if method not in runs:
                runs[method] = _exchange(found, method, devices)
        repeats = QUICK if longest is None else int(np.clip(SECONDS / longest, *REPEATS))
        return _medians(mesh, {method: runs[method] for method in methods}, repeats)

    with jax.set_mesh(mesh):  # a mesh that is set already may have other devices
        settled = settle(found, measure)
    base = settled.float32.step
    rows = tuple(dataclasses.replace(row, speedup=base / row.step) for row in settled.rows)
    return dataclasses.replace(settled, rows=rows)


def settle(
    found: Plan, measure: Callable[[Sequence[Method], float | None], dict[Method, float]]
) -> Plan:
    """The plan with the measured choice first.

    Args:
      found: as it was predicted.
      measure: from methods to the seconds of their exchanges: first quickly, then once more of all
        that were measured, when the second argument is what the longest of them took.
    """
    medians: dict[Method, float] = {}
    leading = [row.method for row in finalists(found.rows)]
    while leading:
        medians |= measure(leading, None)
        first = min(_corrected(found, medians), key=lambda row: row.step).method
        leading = [] if first in medians or len(medians) >= MOST else [first]
    medians = measure(list(medians), max(medians.values()))
    rows = _corrected(found, medians)
    known, between_cpus = [r for r in rows if r.method in medians], found.cluster.costs.half_duplex
    choice = choose(known, found.cluster.devices, between_cpus)[0]
    others = sorted((row for row in rows if row is not choice), key=lambda row: row.step)
    return dataclasses.replace(found, rows=(choice, *others))


def finalists(rows: Sequence[Prediction]) -> list[Prediction]:
    """The choice, which is the first, and the fastest others that may well be faster.

    Of others that are predicted alike, such as both formats of 16 bits, one is enough.
    """
    fastest = min(row.step for row in rows)
    unlike = {row.step: row for row in reversed(rows[1:]) if row.step != rows[0].step}
    near = sorted(step for step in unlike if step <= WITHIN * fastest)
    return [rows[0], *(unlike[step] for step in near[: FIRST - 1])]


def _corrected(found: Plan, medians: Mapping[Method, float]) -> list[Prediction]:
    """The rows, with what was timed, and others of its family in proportion to that."""
    predicted = {row.method: row.exchange for row in found.rows}
    ratios: dict[str, list[float]] = {}
    for method, seconds in medians.items():
        ratios.setdefault(_probed(method), []).append(seconds / predicted[method])

    def corrected(row: Prediction) -> Prediction:
        if row.method in medians:
            seconds, error = medians[row.method], 0.0
        else:
            ratio = statistics.median(ratios.get(_probed(row.method), [1.0]))
            seconds, error = row.exchange * ratio, row.error
        return with_exchange(found.cluster, found.load, row, seconds, error)

    return [corrected(row) for row in found.rows]


def _probed(method: Method) -> str:
    """The family whose codes are probed for those of a method."""
    return next((name for name, others in TIMED.items() if method.family in others), method.family)


def _exchange(found: Plan, method: Method, devices: Sequence[Any] | None) -> Run:
    """A method's exchange of random gradients, compiled; each has the state of the one before."""
    axes = ("far", "near") if method.algorithm == "hierarchical" else "data"
    mesh, flags = found.mesh(axes, devices), found.load.exempt
    # Leaves are in a list, whose paths are their numbers.
    options = {"exempt": lambda path, shape: flags[int(path)]} if flags else {}
    tx = method.transformation(axes, **options)
    rng = np.random.default_rng(jax.process_index())
    sharding = NamedSharding(mesh, PartitionSpec(axes))
    with jax.set_mesh(mesh):
        zeros = [jnp.zeros(shape, jnp.float32) for shape in found.load.shapes]
        state = tx.init(mesh_.replicate(zeros))
        count = len(mesh.local_devices)
        grads = [
            jax.make_array_from_process_local_data(
                sharding, rng.standard_normal((count, *shape), np.float32)
            )
            for shape in found.load.shapes
        ]
        program = jax.jit(tx.update).lower(grads, state).compile()
    kept = [state]

    def run() -> Any:
        updates, kept[0] = program(grads, kept[0])
        return updates, kept[0]

    jax.block_until_ready(run())
    return run


def _medians(mesh: Mesh, runs: Mapping[Method, Run], repeats: int) -> dict[Method, float]:
    """Seconds of each, of the slowest process; they take turns, as machines have moods."""
    times = [[_once(mesh, run) for run in runs.values()] for _ in range(repeats)]
    return dict(zip(runs, np.median(times, axis=0).tolist(), strict=True))


def _once(mesh: Mesh, run: Run) -> float:
    max_over(mesh, 0.0)  # all start together
    start = time.perf_counter()
    jax.block_until_ready(run())
    return max_over(mesh, time.perf_counter() - start)
