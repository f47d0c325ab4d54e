"""What each method costs on a cluster: the exchange, its exposed part, and the step."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxcomm.collectives.algorithms.hierarchical import Hierarchical
from jaxcomm.collectives.algorithms.native import Native
from jaxcomm.plan.families import FAMILIES, QUALITIES, Method, ending_of
from jaxcomm.plan.loads import Workload
from jaxcomm.plan.machines import Cluster
from jaxcomm.plan.messages import BetweenHosts, Lists, Reduction
from jaxcomm.plan.sending import Sent, buckets_of, sent, values_of_bucket
from jaxcomm.plan.simulate import Exchange

_MARGIN = 0.02  # how much slower a step may be for better quality
# The relative error that four of five predictions stayed within, by algorithm: `python -m
# benchmarks.planner --report`. For fewer than FEW values it is up to MORE times as large.
FEW, MORE = 1e6, 1.7
ERRORS = {
    "native": 0.05,
    "ring": 0.1,
    "two_way_ring": 0.1,
    "direct": 0.12,
    "halving_doubling": 0.13,
    "hierarchical": 0.13,
    "circulant": 0.15,
    "own": 0.2,
}
_PARTS_OF = ("link", "device", "local", "latency")  # of an exchange, in Prediction
BASELINE = Method("float32", "native")


def kind_of(method: Method) -> str:
    """The key in ERRORS: the algorithm, or "own" for a method that is more than one plain mean."""
    is_plain = FAMILIES[method.family].options["method"] in ("mean", "majority_vote")
    return method.algorithm if is_plain else "own"


def error_of(method: Method, values: float) -> float:
    """The relative error that predictions stayed within, between CPUs whose costs were measured."""
    return ERRORS[kind_of(method)] * (MORE if values < FEW else 1)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a method costs. Times are in seconds.

    Of a method that exchanges in every n-th step, `exposed` and what follows it are averages over
    steps; the others are those of one exchange, as are its bytes.

    Attributes:
      method: the method.
      exchange: the whole exchange, from the gradients to the updates.
      link: what the busiest link needs for its bytes.
      device: what the busiest device needs to send its bytes, however fast its links are.
      local: encoding, merging, decoding, feedback and selecting.
      latency: the latencies of all messages that wait for each other.
      exposed: the part of the exchange that the backward pass does not hide.
      step: a whole step, accumulated microbatches included.
      efficiency: the share of the step that computes.
      speedup: the speed-up over the same step with XLA's own float32 mean.
      bytes_busiest_link: the bytes that the busiest link carries.
      busiest_link: the nodes that it leads from and to; None where no link is limited.
      error: the relative error of `exchange`; the exchange takes between (1 - error) and
        (1 + error) times as long. 0 for an exchange that was timed (`jaxcomm.plan.timed`); None
        unless the costs were measured between CPU processes: only these predictions were compared.
    """

    method: Method
    exchange: float
    link: float
    device: float
    local: float
    latency: float
    exposed: float
    step: float
    efficiency: float
    speedup: float
    bytes_busiest_link: float
    busiest_link: tuple[str, str] | None
    error: float | None

    @property
    def limit(self) -> str:
        """What most of the exchange is spent on."""
        parts = {"encoding and decoding": self.local, "latency": self.latency}
        messages = self.exchange - sum(parts.values())
        if self.device > self.link:
            parts["what a device can send"] = messages
        else:
            link = "the link" if self.busiest_link is None else "-".join(self.busiest_link)
            parts |= {link: self.link, "messages that meet on links": messages - self.link}
        return max(parts, key=lambda part: parts[part])

    @property
    def _is_beyond_configs(self) -> bool:
        by_hosts = self.method.is_by_hosts and self.method.family != "float32"
        return self.method.algorithm == "hierarchical" and not by_hosts

    def as_json(self) -> dict[str, Any]:
        """Numbers in milliseconds and bytes, with names as in the table.

        `config` has the fields of `config.sync`; it is None for two levels of switches, and for
        float32 by hosts, which the training program does not support.
        """
        ms = {name: 1e3 * getattr(self, name) for name in ("exchange", "exposed", "step")}
        parts = {f"{name}_ms": 1e3 * getattr(self, name) for name in _PARTS_OF}
        return {
            "method": self.method.name,
            "quality": self.method.quality,
            "needs": self.method.needs,
            "exchange_ms": ms["exchange"],
            "interval_ms": self.error
            if self.error is None
            else [ms["exchange"] * (1 - self.error), ms["exchange"] * (1 + self.error)],
            **parts,
            "exposed_ms": ms["exposed"],
            "step_ms": ms["step"],
            "efficiency": self.efficiency,
            "speedup": self.speedup,
            "bytes_busiest_link": self.bytes_busiest_link,
            "busiest_link": self.busiest_link,
            "limit": self.limit,
            "config": None if self._is_beyond_configs else self.method.config,
        }


def predictions(cluster: Cluster, load: Workload, chosen: Sequence[Method]) -> list[Prediction]:
    """What each of these methods costs, the fastest first, and XLA's own float32 mean.

    Args:
      cluster: the devices.
      load: what they exchange.
      chosen: the methods to predict.
    """
    candidates = list(dict.fromkeys([BASELINE, *chosen]))
    exchanged = _exchanges(cluster, load, candidates)
    base = _seconds(cluster, load, BASELINE, exchanged[BASELINE])
    local = _local(cluster, load, BASELINE)
    with_float32 = _step(cluster, load, base, local, BASELINE)[1]
    found = [
        _prediction(cluster, load, method, exchanged[method], with_float32) for method in candidates
    ]
    return sorted(found, key=lambda prediction: prediction.step)


Made = list[tuple[Sent, Exchange]]


def _exchanges(
    cluster: Cluster, load: Workload, candidates: Iterable[Method]
) -> dict[Method, Made]:
    """The exchanges of each method; those by one algorithm are simulated together."""
    asked = [(m, part) for m in candidates for part in _sent(cluster, m, load)]

    def alike(item: tuple[Method, Sent]) -> str:
        owner, part = item
        return repr((part.algorithm, part.values, owner.algorithm == "own"))

    asked.sort(key=alike)
    made: dict[Method, Made] = {method: [] for method in candidates}
    for _, group in itertools.groupby(asked, alike):
        items = list(group)
        method, part = items[0]
        reductions = [item.reduction for _, item in items]
        world = _world(cluster, method, part)
        # Sparse exchanges are all-to-alls and all-gathers, except gTopk, which goes by pairs.
        gathers = method.algorithm == "own" and not _goes_by_pairs(part.reduction)
        network = cluster.network_of(part.algorithm, gathers)
        found = network.exchanges(part.algorithm, reductions, part.values, world)
        for (owner, item), exchange in zip(items, found, strict=True):
            made[owner].append((item, exchange))
    return made


def _sent(cluster: Cluster, method: Method, load: Workload) -> Iterator[Sent]:
    between_cpus, per_host = cluster.costs.is_between_cpus, cluster.devices_per_host
    return sent(method, load, cluster.devices, between_cpus, per_host)


def _goes_by_pairs(reduction: Reduction) -> bool:
    between = reduction.part if isinstance(reduction, BetweenHosts) else reduction
    return isinstance(between, Lists)


def _world(cluster: Cluster, method: Method, part: Sent) -> int | tuple[int, int]:
    """The number of devices of an all-reduce, or both levels of one over two axes."""
    if not isinstance(part.algorithm, Hierarchical):  # that of the exempt leaves never is
        return cluster.devices
    if cluster.levels is None:
        raise ValueError(
            f"{method.name} needs a cluster of two levels, such as machines of several devices; "
            f"{cluster.topology.name} has one."
        )
    if part.algorithm.devices_per_host not in (None, cluster.levels[1]):
        raise ValueError(
            f"{method.name} needs hosts of {part.algorithm.devices_per_host} devices in a row, and "
            f"those of {cluster.topology.name} have {cluster.levels[1]}."
        )
    return cluster.levels


def _is_left_out(cluster: Cluster, method: Method) -> bool:
    """Whether XLA leaves out the exchange: its own mean over one device."""
    return cluster.devices == 1 and method == BASELINE


def _call(cluster: Cluster, method: Method) -> float:
    """The fixed seconds of an exchange, whatever it sends."""
    return 0.0 if _is_left_out(cluster, method) else cluster.costs.call


def _seconds(cluster: Cluster, load: Workload, method: Method, made: Made) -> float:
    """Seconds of a whole exchange, from the gradients to the updates."""
    on_the_way = sum(part.times * exchange.seconds for part, exchange in made)
    return _call(cluster, method) + _local(cluster, load, method) + on_the_way


def _local(cluster: Cluster, load: Workload, method: Method) -> float:
    """Seconds for the values that the method compresses, and for those that are exempt."""
    if _is_left_out(cluster, method):
        return 0.0
    exempt = 0 if method.family == "float32" else load.exempt_values
    ending = ending_of(method.algorithm, method.is_by_hosts)
    compressed = cluster.costs.local_seconds(method.family, load.values - exempt, ending)
    return compressed + cluster.costs.local_seconds("float32", exempt)


def _latency(cluster: Cluster, part: Sent) -> float:
    """The latency of a step of an all-reduce."""
    is_native = isinstance(part.algorithm, Native)
    return cluster.native_latency if is_native else cluster.costs.latency


def _step(
    cluster: Cluster, load: Workload, seconds: float, local: float, method: Method
) -> tuple[float, float]:
    """The seconds of an exchange that nothing hides, and those of the whole step, a step.

    The messages of a bucket are hidden by what is computed after its last gradient is ready. The
    devices' own work for the bucket is not hidden. Nothing is computed after local steps.
    """
    if method.every > 1:
        return seconds / method.every, load.compute_seconds + seconds / method.every
    if not cluster.costs.overlap:
        return seconds, load.compute_seconds + seconds
    sizes = buckets_of(method, load, cluster.costs.is_between_cpus) or (1,)
    end, done, total = 0.0, 0, sum(sizes)
    for size in sizes:
        done += size
        end = max(end, load.ready(done / total)) + (seconds - local) * size / total
    exposed = local + max(end - load.compute_seconds, 0.0)
    return exposed, load.compute_seconds + exposed


def _prediction(
    cluster: Cluster, load: Workload, method: Method, made: Made, with_float32: float
) -> Prediction:
    seconds = _seconds(cluster, load, method, made)
    local = _local(cluster, load, method)
    exposed, step = _step(cluster, load, seconds, local, method)
    links = [(part.times * e.busiest_link_seconds, e.busiest_link) for part, e in made]
    busiest = max(links, key=lambda link: link[0], default=(0.0, None))
    return Prediction(
        method=method,
        exchange=seconds,
        link=sum(seconds for seconds, _ in links),
        device=cluster.costs.per_byte * sum(part.times * e.sent for part, e in made),
        local=local,
        latency=_call(cluster, method)
        + sum(part.times * e.steps * _latency(cluster, part) for part, e in made),
        exposed=exposed,
        step=step,
        efficiency=load.compute_seconds / step,
        speedup=with_float32 / step,
        bytes_busiest_link=sum(part.times * e.bytes_busiest_link for part, e in made),
        busiest_link=busiest[1],
        error=error_of(method, load.values) if cluster.costs.are_measured else None,
    )


def with_exchange(
    cluster: Cluster, load: Workload, row: Prediction, seconds: float, error: float | None
) -> Prediction:
    """A row with another time of its exchange; its parts keep their proportions.

    Args:
      cluster: the devices.
      load: what they exchange.
      row: the prediction.
      seconds: the new time of the exchange.
      error: the relative error of these seconds: 0 if they were timed, None if unknown.
    """
    scale = seconds / row.exchange if row.exchange else 1.0
    exposed, step = _step(cluster, load, seconds, scale * row.local, row.method)
    parts = {name: scale * getattr(row, name) for name in _PARTS_OF}
    return dataclasses.replace(
        row,
        **parts,
        exchange=seconds,
        exposed=exposed,
        step=step,
        efficiency=load.compute_seconds / step,
        error=error,
    )


def is_usual(cluster: Cluster, load: Workload, method: Method) -> bool:
    """Whether the method's algorithm is what None stands for."""
    between_cpus = cluster.costs.is_between_cpus
    values = values_of_bucket(method, load, between_cpus)
    return method.is_usual(cluster.devices, between_cpus, values, cluster.devices_per_host)


def choose(found: Sequence[Prediction], load: Workload, cluster: Cluster) -> list[Prediction]:
    """The predictions with the choice first: the best quality within 2 % of the fastest step.

    Among methods of that quality those that exchange in every step come before others. Among these
    the first in FAMILIES wins; within the family, the default algorithm if it is as near, or else
    the fastest.

    Args:
      found: the predictions.
      load: what is exchanged.
      cluster: the devices.
    """
    order = list(FAMILIES)

    def preferred(prediction: Prediction) -> tuple[int, int, int, bool, float]:
        method = prediction.method
        quality, family = QUALITIES.index(method.quality), order.index(method.family)
        is_other = not is_usual(cluster, load, method)
        return quality, method.every, family, is_other, prediction.step

    fastest = min(prediction.step for prediction in found)
    near = [p for p in found if p.step <= fastest * (1 + _MARGIN)]
    best = min(near, key=preferred)
    return [best, *(p for p in sorted(found, key=lambda p: p.step) if p is not best)]
