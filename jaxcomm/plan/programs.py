"""What the messages of any compiled program cost."""

import collections
import dataclasses
from collections.abc import Callable

import numpy as np

from jaxcomm.plan.costs import Costs
from jaxcomm.plan.machines import Cluster
from jaxcomm.wire import Collective, WireReport

# The number of messages that wait for each other in a group of g devices, as between CPU processes,
# where XLA's own collectives are rings.
ROUNDS: dict[str, Callable[[int], int]] = {
    "all-reduce": lambda g: 2 * (g - 1),
    "all-gather": lambda g: g - 1,
    "reduce-scatter": lambda g: g - 1,
    "all-to-all": lambda g: g - 1,
    "ragged-all-to-all": lambda g: g - 1,
    "collective-permute": lambda g: 1,
    "collective-broadcast": lambda g: 1,
}


def seconds_of(report: WireReport, costs: Costs | Cluster) -> float:
    """How long the collectives of a program take, one after the other, on a network of equal links.

    Each collective takes the latency of its rounds, plus `per_byte` for what its busiest device
    sends; twice the latter where two devices send to each other and `half_duplex` says that they
    take turns. Encoding is not counted: it is part of the program's other operations.

    Args:
      report: what the program sends, from `jaxcomm.wire_report`; all branches of conditionals
        count.
      costs: the costs of messages, as `probe()` measures them; or a cluster of one device and one
        card a machine, whose slowest link then counts for all devices. Costs that were probed with
        a cluster do not include its links.

    Returns:
      The time, in seconds.

    Raises:
      TypeError: for another report or other costs.
      ValueError: for a loop whose trip count is not in the program, and for machines of several
        devices or cards.
    """
    if not isinstance(report, WireReport):
        wrong = f"got {type(report).__name__}."
        raise TypeError(f"seconds_of takes a report, jaxcomm.wire_report(compiled), {wrong}")
    if isinstance(costs, Cluster):
        _check_machines(costs)
        link = 8e-6 / (float(costs.topology.rates.min(initial=np.inf)) * costs.costs.efficiency)
        costs = dataclasses.replace(costs.costs, per_byte=max(costs.costs.per_byte, link))
    if not isinstance(costs, Costs):
        raise TypeError(f"costs are those of plan.read_costs, or a cluster, got {costs!r}.")
    return sum(_seconds(collective, costs) for collective in report.collectives)


def _check_machines(cluster: Cluster) -> None:
    hosts = set(cluster.topology.hosts)
    ends = collections.Counter(end for link in cluster.topology.links for end in link.ends)
    cards = max((ends[host] for host in hosts), default=1)
    if cluster.per_machine > 1 or cards > 1:
        raise ValueError(
            "seconds_of is for one device and one card a machine, where links are alike; this "
            f"cluster has {cluster.per_machine} and {cards}. plan(...) compares methods on it."
        )


def _seconds(collective: Collective, costs: Costs) -> float:
    if collective.times is None:
        raise ValueError(
            f"{collective.name} is in a loop whose number of trips is not in the program: "
            f"{', '.join(collective.unknown_loops)}."
        )
    most = float(max(collective.sent, default=0))
    if not most:
        return 0.0
    ways = 2 if costs.half_duplex and _is_both_ways(collective) else 1
    rounds = ROUNDS[collective.op](collective.group_size)
    return collective.times * (rounds * costs.latency + ways * most * costs.per_byte)


def _is_both_ways(collective: Collective) -> bool:
    pairs = {tuple(group) for group in collective.groups}
    return collective.op == "collective-permute" and any(pair[::-1] in pairs for pair in pairs)
