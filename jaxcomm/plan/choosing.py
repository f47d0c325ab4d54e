"""The plan: every method ranked, the choice first, and a summary."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxcomm.plan.families import QUALITIES, QUALITY, Method, check_optimizer, methods
from jaxcomm.plan.loads import Workload
from jaxcomm.plan.machines import Cluster, near_of
from jaxcomm.plan.order import best_dimensions, best_order
from jaxcomm.plan.predict import BASELINE, Prediction, choose, predictions

_LITTLE = 0.02  # the share of a step that is not worth a word


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to use on a cluster.

    Attributes:
      cluster: the devices, in the planned order.
      load: what they exchange.
      rows: the choice, then all other methods, the fastest step first.
      given_order: the original order of the devices.
    """

    cluster: Cluster
    load: Workload
    rows: tuple[Prediction, ...]
    given_order: tuple[int, ...]

    @property
    def choice(self) -> Prediction:
        """The method of the best quality within 2 % of the fastest step."""
        return self.rows[0]

    @property
    def float32(self) -> Prediction:
        """XLA's own float32 mean, against which the others are compared."""
        return next(row for row in self.rows if row.method == BASELINE)

    def transformation(self, axis_name: Any = "data", **options: Any) -> Any:
        """The chosen exchange as an optax transformation.

        Args:
          axis_name: the mesh axis; on two levels of switches, for a hierarchical choice, two axes,
            (far, near), as in `mesh`.
          **options: arguments of the factory, such as `bucket_order`; `exempt` is the workload's
            unless it is given.
        """
        options = {"exempt": self.load.also_exempt, **options}
        return self.choice.method.transformation(axis_name, **options)

    def mesh(self, axis_name: Any = "data", devices: Sequence[Any] | None = None) -> Mesh:
        """The mesh with the devices in the planned order.

        Args:
          axis_name: the name of one axis, or a tuple of two, (far, near).
          devices: the devices in the order of the cluster's ranks; None means all of jax's.

        Raises:
          TypeError: for other names.
          ValueError: if the number of devices is not the cluster's.
        """
        is_name, pair = isinstance(axis_name, str), isinstance(axis_name, tuple | list)
        if not is_name and not (pair and [type(name) for name in axis_name] == [str, str]):
            wrong = f"('far', 'near'), got {axis_name!r}."
            raise TypeError(f"axis_name is the name of an axis, or two, such as {wrong}")
        devices = jax.devices() if devices is None else list(devices)
        if len(devices) != self.cluster.devices:
            raise ValueError(
                f"the cluster has {self.cluster.devices} devices, got {len(devices)}; plan for the "
                "hosts that take part."
            )
        names = (axis_name,) if is_name else tuple(axis_name)
        shape = (len(devices),) if len(names) == 1 else self.cluster.levels
        if shape is None:
            raise ValueError("this cluster has no two levels; name one axis.")
        rank = {host: i for i, host in enumerate(self.given_order)}
        ordered = np.asarray([devices[rank[i]] for i in self.cluster.order], object)
        types = (AxisType.Auto,) * len(names)
        return Mesh(ordered.reshape(shape), names, axis_types=types)  # as in `jaxcomm.data_mesh`

    @property
    def headline(self) -> str:
        """What to do, in a sentence."""
        best, dense = self.choice, self.float32
        gain = f"{_ms(dense.step)} -> {_ms(best.step)} ms a step"
        share = f"{dense.efficiency:.1%} -> {best.efficiency:.1%} of it computes"
        if self.cluster.devices == 1:
            return "Do not compress: float32; one device has nothing to exchange."
        needs = best.method.needs.replace(";", ",")
        said = f"{best.method.name}: {gain}, {share}{needs and f'; needs {needs}'}."
        if best.method.every > 1:
            return f"Exchange in one of {best.method.every} steps, {said}"
        if best.method.family == "float32":
            how = "" if best is dense else f", {best.method.algorithm}"
            computes = f"{best.efficiency:.1%} of a step computes"
            is_alone = all(row.method.family == "float32" for row in self.rows)
            answer = "Only float32 was compared" if is_alone else "Do not compress"
            return f"{answer}: float32{how}; {computes}{self._gained}."
        if best.method.quality == "16bit":
            return f"Send 16 bits, {said}"
        return f"Compress, {said}"

    @property
    def _gained(self) -> str:
        """What a family other than float32 would save, if one was considered."""
        others = [row for row in self.rows if row.method.family != "float32"]
        if not others:
            return ""
        others = [row for row in others if row.error == 0] or others  # prefer timed ones
        if self.load.exempt_values == self.load.values:
            return ", and all leaves are exempt from compression"
        other = min(others, key=_step_of)
        lowest = max(QUALITIES.index(row.method.quality) for row in others)
        what = "16 bits" if QUALITIES[lowest] == "16bit" else "compressing"
        if other.step >= self.choice.step:
            return f", and {what} would save nothing ({other.method.name})"
        gained = f"{1 - other.step / self.choice.step:.1%} of a step ({other.method.name})"
        return f", and {what} would save at most {gained}"

    @property
    def limits(self) -> str:
        """What the choice and the float32 mean spend their time on."""
        best, dense = self.choice, self.float32
        if self.cluster.devices == 1:
            return "what limits you: the step itself; nothing is exchanged."
        if dense.efficiency >= 1 - _LITTLE:
            adds = f"an exchange in float32 takes {_ms(dense.exchange)} ms and adds"
            return f"what limits you: the step itself; {adds} {_ms(dense.exposed)}."
        found = f"{dense.limit} with float32 ({_ms(dense.exchange)} ms an exchange)"
        if best is not dense:
            found += f", {best.limit} with {best.method.name} ({_ms(best.exchange)} ms)"
        fewer = "; fewer exchanges would help" if best.limit == "latency" else ""
        return f"what limits you: {found}{fewer}."

    @property
    def _rates(self) -> str:
        """The slowest and the fastest link, so that a wrong unit shows."""
        rates = self.cluster.topology.rates
        limited = rates[np.isfinite(rates)]
        if not limited.size:
            return ", links without limits"
        ends = dict.fromkeys(f"{rate:,.10g}" for rate in (limited.min(), limited.max()))
        return f", links of {' to '.join(ends)} Mbit/s"

    @property
    def _fastest(self) -> tuple[Prediction, ...]:
        """The choice, the fastest method of every other family, and what they are compared with."""
        first: dict[Any, Prediction] = {}
        for row in self.rows:
            own = row.method == BASELINE
            first.setdefault((row.method.family, row.method.every, own), row)
        return tuple(first.values())

    def lines(self, rows: int | None = None) -> list[str]:
        """The plan as lines of text, and a table of the methods, the choice first.

        Args:
          rows: at most so many rows, each of another family by its fastest algorithm, and XLA's own
            float32 mean; None means all methods.

        Raises:
          ValueError: for a negative number.
        """
        if rows is not None and rows < 0:
            raise ValueError(f"rows is 0 or more, got {rows}.")
        plural = "" if self.cluster.devices == 1 else "s"
        machines = (
            f"{self.cluster.devices} device{plural} on {self.cluster.topology.name}{self._rates}"
        )
        found = [
            self.headline,
            self.limits,
            f"{machines}; {_counted(self.load.values)}, {1e3 * self.load.step_seconds:.4g} ms "
            f"a step without exchange"
            + (f", {self.load.accumulate} accumulated" if self.load.accumulate > 1 else "")
            + f". Costs: {self.cluster.costs.source}, {1e6 * self.cluster.costs.latency:.3g} us a "
            "message.",
        ]
        if self.cluster.order != self.given_order:
            order = ", ".join(map(str, self.cluster.order[:32]))
            more = ", ..." if self.cluster.devices > 32 else ""
            found.append(f"order of the devices for faster messages: {order}{more}")
        shown = self.rows if rows is None else self._fastest[:rows]
        width = max([29, *(len(row.method.name) for row in shown)])
        head = (
            f"{'method':{width}}{'exchange ms':>14}{'+-':>6}{'exposed':>10}{'step ms':>10}"
            f"{'computes':>10}{'speed-up':>10}{'link MB':>10}  {'busiest link':14}{'needs'}"
        )
        return [*found, head, *(_line(row, width) for row in shown)]

    def as_json(self) -> list[dict[str, Any]]:
        """The rows, the choice first."""
        return [row.as_json() for row in self.rows]

    def save(self, path: Any) -> None:
        """Writes the rows, as JSON."""
        with open(path, "w") as file:
            json.dump({"headline": self.headline, "rows": self.as_json()}, file, indent=1)


def _ms(seconds: float) -> str:
    """Milliseconds, with at least three digits."""
    ms = 1e3 * seconds
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def _step_of(row: Prediction) -> float:
    return row.step


def _line(row: Prediction, width: int) -> str:
    link = "-".join(row.busiest_link) if row.busiest_link else ""
    error = "?" if row.error is None else f"{row.error:.0%}" if row.error else "timed"
    return (
        f"{row.method.name:{width}} {1e3 * row.exchange:13.1f} {error:>5} {1e3 * row.exposed:9.1f}"
        f" {1e3 * row.step:9.1f} {row.efficiency:9.1%} {row.speedup:9.2f}"
        f" {row.bytes_busiest_link / 1e6:9.2f}  {link:14}{row.method.needs}"
    ).rstrip()


def plan(
    cluster: Cluster,
    load: Workload,
    quality: str | None = None,
    chosen: Sequence[Method] | None = None,
    reorder: bool = True,
    optimizer: str | None = None,
) -> Plan:
    """Predicts every method on a cluster, and chooses.

    The choice is the method of the best quality whose step takes at most 2 % longer than the
    fastest. A method's effect on accuracy is not predicted: `quality` sets what is allowed.

    Args:
      cluster: `load_cluster("cluster.yaml")`, or `cluster(topology)`.
      load: `workload(params, step_ms)`.
      quality: "exact", "16bit", "unbiased" or "any"; each also allows the ones before it. None is
        "16bit", which trains like float32; with `chosen` it is "any".
      chosen: the methods to compare; None means all of that quality.
      reorder: whether devices may get other ranks if that makes a ring faster, or makes
        halving-doubling faster and a ring no slower. The order of halving-doubling's dimensions is
        chosen in any case.
      optimizer: "sgd", "adam" or "muon", to leave out methods that lost accuracy with it; None
        leaves out none.

    Returns:
      The plan: the choice, then all other methods, and one sentence with the recommendation.

    Raises:
      TypeError: for anything but a cluster and a workload, such as the name of a file.
      ValueError: for an unknown quality or optimizer, or a chosen method that these do not allow or
        that needs two levels.

    Example:
      >>> from jaxcomm import plan
      >>> room = plan.cluster(plan.fabrics.star("room", hosts=4, rate="1Gbit"))
      >>> found = plan.plan(room, plan.workload(25.6e6, step_ms=234))
      >>> found.choice.method.name
      'bfloat16/ring'
      >>> tx = found.transformation("data")
    """
    if not isinstance(cluster, Cluster):
        raise TypeError(
            f"plan takes a cluster, such as plan.load_cluster('star'), got {cluster!r}."
        )
    if not isinstance(load, Workload):
        raise TypeError(
            f"plan takes a workload, such as plan.workload(25.6e6, step_ms=234), got {load!r}."
        )
    if isinstance(chosen, Method):
        raise TypeError(f"chosen is a sequence of methods; write chosen=[plan.{chosen!r}].")
    if wrong := [m for m in chosen or () if not isinstance(m, Method)]:
        raise TypeError(f"chosen are methods, such as those of plan.methods(), got {wrong[0]!r}.")
    if quality is None:
        quality = QUALITY if chosen is None else "any"
    if quality not in QUALITIES:
        raise ValueError(f"quality is one of {', '.join(QUALITIES)}, got {quality!r}.")
    allowed = QUALITIES[: QUALITIES.index(quality) + 1]
    if below := [m for m in chosen or () if m.quality not in allowed]:
        raise ValueError(f"{below[0].name} is of lower quality than {quality!r}; leave it out.")
    check_optimizer(optimizer)
    if unfit := [m for m in chosen or () if optimizer not in (None, *m.about.optimizers)]:
        raise ValueError(f"{unfit[0].name} lost accuracy with {optimizer!r}; leave it out.")
    given = cluster.order
    model = cluster.network.model
    if reorder and cluster.devices > 2:
        order = best_order(cluster.topology, model, cluster.order)
        near = near_of(cluster.topology, order)
        cluster = dataclasses.replace(cluster, order=order, near=near)
    if chosen is None:
        dimensions = best_dimensions(cluster.topology, model, cluster.order)
        two_levels, per_host = cluster.levels is not None, cluster.devices_per_host
        chosen = methods(quality, two_levels, dimensions, optimizer, per_host)
    found = predictions(cluster, load, chosen)
    rows = choose(found, load, cluster)
    return Plan(cluster, load, tuple(rows), given)


def _counted(values: int) -> str:
    return f"{values:,} parameter" + ("" if values == 1 else "s")
