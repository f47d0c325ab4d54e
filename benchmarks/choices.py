"""How good a method is that somebody chooses: the planner, its timing, or one who times all."""

import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxcomm import plan
from jaxcomm.plan.families import QUALITIES, Method
from jaxcomm.plan.predict import Prediction, choose
from jaxcomm.plan.timing import settle

STEP = 1e-6  # seconds: the exchange is all that is chosen by


def load_of(size: float) -> plan.Workload:
    """So many values, as the planner takes them: matrices."""
    return plan.workload(size, 1e3 * STEP)


def as_method(name: str) -> Method:
    """The planner's name for it."""
    family, _, algorithm = name.partition("/")
    algorithm, _, per_host = algorithm.partition("/")
    if per_host:
        return Method(family, algorithm, (("devices_per_host", int(per_host)),))
    return Method(family, algorithm or ("native" if family.startswith("powersgd") else "own"))


class Choice(NamedTuple):
    """The method that is taken among those of a quality, and how good it is.

    Attributes:
      over: its measured time over that of `best`, the fastest one.
    """

    quality: str
    method: str
    best: str
    over: float


def choices(
    case: dict[str, Any], found: dict[str, Prediction], room: plan.Cluster
) -> Iterator[Choice]:
    """The planner's, one for each quality."""

    def planned(names: list[str]) -> str:
        rows = [found[name] for name in names]
        first = choose(rows, load_of(case["size"]), room)[0]
        return next(name for name in names if found[name] is first)

    yield from judged(planned, {row["method"]: row["ms"] for row in case["rows"]})


def timed_choices(case: dict[str, Any]) -> Iterator[Choice]:
    """Those of one who times all methods in the odd repeats, judged by the even ones."""
    own, others = halves(case)
    yield from judged(lambda names: min(names, key=lambda name: own[name]), others)


def leaders_choices(
    case: dict[str, Any], found: dict[str, Prediction], room: plan.Cluster
) -> Iterator[Choice]:
    """Those of `jaxcomm.plan.timed`, by the odd repeats, judged by the even ones."""
    own, others = halves(case)
    load = load_of(case["size"])

    def settled(names: list[str]) -> str:
        rows = choose([found[name] for name in names], load, room)
        planned = plan.Plan(room, load, tuple(rows), room.order)
        by_method = {found[name].method: name for name in names}
        seconds = {method: own[name] / 1e3 for method, name in by_method.items()}
        chosen = settle(planned, lambda methods, _: {m: seconds[m] for m in methods}).choice
        return by_method[chosen.method]

    yield from judged(settled, others)


def halves(case: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """The median milliseconds of each method in the odd repeats, and in the even ones."""
    own, others = (
        {row["method"]: statistics.median(row["all_ms"][start::2]) for row in case["rows"]}
        for start in (0, 1)
    )
    return own, others


def judged(chooser: Callable[[list[str]], str], measured: dict[str, float]) -> Iterator[Choice]:
    """What is chosen of each quality, beside what took least."""
    for quality in QUALITIES:
        allowed = QUALITIES[: QUALITIES.index(quality) + 1]
        names = [n for n in measured if as_method(n).about.quality in allowed]
        if not names:  # of the methods that were asked for
            continue
        chosen, best = chooser(names), min(names, key=lambda n: measured[n])
        yield Choice(quality, chosen, best, measured[chosen] / measured[best])
