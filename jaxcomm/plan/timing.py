"""The leading methods of a plan, timed where they will run."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxcomm.plan.choosing import Plan
from jaxcomm.plan.compiling import compiled
from jaxcomm.plan.exchanges import Exchange, Repeated
from jaxcomm.plan.families import Method
from jaxcomm.plan.predict import BASELINE, Prediction, choose, is_usual, with_exchange
from jaxcomm.plan.probing import TIMED, max_over

WITHIN, FIRST = 1.3, 3  # at most FIRST rivals within this factor of the fastest predicted step
MOST = 8  # with the best of each quality, and those that lead once the first are timed
QUICK, LONG = 3, 1.0  # quick exchanges that show which may lead; one of this many seconds is enough
SECONDS, REPEATS = 1.0, (3, 50)  # how long these are repeated in the end, and how often

Measure = Callable[[Sequence[Method], float | None], dict[Method, float]]


def timed(found: Plan, devices: Sequence[Any] | None = None) -> Plan:
    """The plan, with its leading methods timed instead of predicted.

    Timed first are the choice and the methods predicted to take at most 1.3 times the fastest step,
    three in all, XLA's own float32 mean, and the fastest of each quality. Predictions of the others
    are corrected by the results for their family, or for all methods. If one of them then leads, it
    is timed too, up to eight in all. Methods within 1.3 times the fastest step then exchange random
    gradients of the workload's shapes again, in turn. Their medians decide as predictions do: the
    best quality within 2 % of the fastest step. Every process calls this. Each method takes seconds
    to compile, and a few exchanges.

    Args:
      found: a plan from `plan`.
      devices: the devices in the order of the cluster's ranks; None means all of jax's.

    Returns:
      The plan with the measured choice first, the same on all processes. Timed rows have an `error`
      of 0. A plan of one device is returned unchanged.

    Raises:
      TypeError: for anything but a plan, and for devices that are not jax's.
      ValueError: if the number of devices is not the cluster's.
    """
    if not isinstance(found, Plan):
        raise TypeError(
            f"timed takes a plan, such as plan(cluster, workload), got {type(found).__name__}."
        )
    given = () if devices is None else devices
    if wrong := [d for d in given if not isinstance(d, jax.Device)]:
        raise TypeError(f"devices are jax's, such as jax.devices()[:4], got {wrong[0]!r}.")
    mesh = found.mesh("data", devices)
    if mesh.size == 1:
        return found
    runs: dict[Method, Repeated] = {}

    def measure(methods: Sequence[Method], longest: float | None) -> dict[Method, float]:
        new = [method for method in methods if method not in runs]
        runs.update(zip(new, _exchanges(found, mesh, new, devices), strict=True))
        some = {method: runs[method] for method in methods}
        if longest is not None:
            return _medians(mesh, some, int(np.clip(SECONDS / longest, *REPEATS)))
        return {m: _medians(mesh, {m: run}, _quick(mesh, run))[m] for m, run in some.items()}

    with jax.set_mesh(mesh):  # a mesh that is set already may have other devices
        return settle(found, measure)


def settle(found: Plan, measure: Measure) -> Plan:
    """The plan with the measured choice first.

    Args:
      found: the predicted plan.
      measure: from methods to the seconds of their exchanges. It is called quickly first, then once
        more for those that may be chosen, with the longest of their times as the second argument.
    """
    medians: dict[Method, float] = {}

    def is_other(row: Prediction) -> bool:
        return not is_usual(found.cluster, found.load, row.method)

    # Among methods with equal predictions the default comes first, so it is timed and chosen.
    leading = [r.method for r in finalists([found.choice, *sorted(found.rows[1:], key=is_other)])]
    while leading:
        medians |= measure(leading, None)
        rows = _corrected(found, medians)
        first = min(rows, key=lambda row: row.step)
        leading = [] if first.method in medians or len(medians) >= MOST else [first.method]
    known = [row for row in rows if row.method in medians]
    fastest = min(row.step for row in known)
    again = {row.method: row.exchange for row in known if row.step <= WITHIN * fastest}
    medians |= measure(list(again), max(again.values()))
    rows = _corrected(found, medians)
    base = next((row.step for row in rows if row.method == BASELINE), 0.0)
    rows = [dataclasses.replace(row, speedup=base / row.step) for row in rows]
    may_be_chosen = [row for row in rows if row.method in again]
    choice = choose(may_be_chosen, found.load, found.cluster)[0]
    others = sorted((row for row in rows if row is not choice), key=lambda row: row.step)
    return dataclasses.replace(found, rows=(choice, *others))


def finalists(rows: Sequence[Prediction]) -> list[Prediction]:
    """What is timed first: the choice, its rivals, float32, and the fastest of each quality.

    Of rivals with equal predictions, such as both 16-bit formats, one is enough.
    """
    by_step = sorted(rows, key=lambda row: row.step)
    unlike = {row.step: row for row in reversed(by_step) if row.step != rows[0].step}
    near = [row for step, row in sorted(unlike.items()) if step <= WITHIN * by_step[0].step]
    best = {row.method.quality: row for row in reversed(by_step)}
    base = [row for row in rows if row.method == BASELINE]
    chosen = [rows[0], *near[: FIRST - 1], *base, *best.values()]
    return list({row.method: row for row in chosen}.values())


def _corrected(found: Plan, medians: Mapping[Method, float]) -> list[Prediction]:
    """The rows: those that were timed, and others in proportion to those of their family or all."""
    # Costs may be zero, which gives no proportions.
    predicted = {row.method: max(row.exchange, 1e-9) for row in found.rows}
    ratios: dict[str, list[float]] = {}
    for method, seconds in medians.items():
        ratios.setdefault(_probed(method), []).append(seconds / predicted[method])
    every = [statistics.median(of) for of in ratios.values()]

    def corrected(row: Prediction) -> Prediction:
        if row.method in medians:
            seconds, error = medians[row.method], 0.0
        else:
            of = ratios.get(_probed(row.method), every)
            ratio = statistics.median(of)
            seconds, error = row.exchange * ratio, row.error
            error = None if error is None else max(error, max(of) / ratio - 1)
        return with_exchange(found.cluster, found.load, row, seconds, error)

    return [corrected(row) for row in found.rows]


def _probed(method: Method) -> str:
    """The family whose codes are probed to stand for a method's."""
    return next((name for name, others in TIMED.items() if method.family in others), method.family)


def _exchanges(
    found: Plan, mesh: Mesh, methods: Sequence[Method], devices: Sequence[Any] | None
) -> list[Repeated]:
    """The exchange of each method; `mesh` has the devices of all."""
    asked = [_exchange(found, method, devices) for method in methods]
    programs = compiled(mesh, [each.lower for each in asked])
    return [each.run_by(program) for each, program in zip(asked, programs, strict=True)]


def _exchange(found: Plan, method: Method, devices: Sequence[Any] | None) -> Exchange:
    has_two = method.algorithm == "hierarchical" and not method.is_by_hosts
    axes = ("far", "near") if has_two else "data"
    mesh, flags = found.mesh(axes, devices), found.load.exempt
    # Leaves are in a list, whose paths are their numbers.
    options = {"exempt": lambda path, shape: flags[int(path)]} if flags else {}
    tx = method.transformation(axes, **options)
    return Exchange(mesh, axes, tx, found.load.shapes)


def _medians(mesh: Mesh, runs: Mapping[Method, Repeated], repeats: int) -> dict[Method, float]:
    """Seconds of each on the slowest process; they take turns, because speed drifts."""
    times = [[_once(mesh, run) for run in runs.values()] for _ in range(repeats)]
    return dict(zip(runs, np.median(times, axis=0).tolist(), strict=True))


def _quick(mesh: Mesh, run: Repeated) -> int:
    """How often to repeat an exchange to see whether it may lead; also warms it up."""
    return 1 if _once(mesh, run) > LONG else QUICK


def _once(mesh: Mesh, run: Repeated) -> float:
    run.prepare()
    max_over(mesh, 0.0)  # all start together
    start = time.perf_counter()
    jax.block_until_ready(run())
    return max_over(mesh, time.perf_counter() - start)
