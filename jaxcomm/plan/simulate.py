"""How long an exchange takes on a network, step by step.

A step begins when the one before has ended everywhere. Its messages have one size and begin at
once, and streams share links max-min fairly. Then no differential is to be followed: the share of a
stream on its busiest link only grows while others end, so it needs at most

    latency + bytes * max over its links of (streams on the link / rate of the link)

and exactly that where the link is the busiest of all. The slowest message makes the step. A step's
cost is therefore linear in the bytes between a few corners, and is worked out once for all sizes.
"""

import dataclasses

import numpy as np

from jaxcomm.collectives.algorithms import Algorithm
from jaxcomm.plan.steps import Pairs, Step, steps
from jaxcomm.plan.topology import Topology


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of a step: the largest of a few `latency + per_byte * bytes`.

    Attributes:
      latency: seconds, one for each corner.
      per_byte: seconds for a byte of each message.
    """

    latency: np.ndarray
    per_byte: np.ndarray

    def seconds(self, message_bytes: float) -> float:
        """How long the step takes with messages of so many bytes."""
        return float((self.latency + self.per_byte * message_bytes).max(initial=0.0))


@dataclasses.dataclass(frozen=True)
class Model:
    """What a message costs beside its bytes.

    Attributes:
      latency: seconds for each message.
      hop: seconds for each link on its way.
      takes_turns: whether two devices that send to each other in one step do so one after the
        other, as processes joined by gloo do.
    """

    latency: float = 0.0
    hop: float = 0.0
    takes_turns: bool = False


class Simulation:
    """Exchanges on a network: device r of an algorithm is host r, or host `hosts[r]`.

    Args:
      topology: the network.
      model: what a message costs.
      hosts: the numbers of the hosts of the devices, in order; None is all, in their order.

    Raises:
      ValueError: for hosts that do not exist or stand twice.
    """

    def __init__(self, topology: Topology, model: Model | None = None, hosts: object = None):
        self.topology = topology
        self.model = model or Model()
        number = len(topology.hosts)
        self.hosts = np.arange(number) if hosts is None else np.asarray(hosts, int)
        inside = (self.hosts >= 0) & (self.hosts < number)
        if not inside.all() or len(set(self.hosts.tolist())) < len(self.hosts):
            raise ValueError(f"hosts are numbers from 0 to {number - 1}, each once, got {hosts!r}.")
        with np.errstate(divide="ignore"):
            self._per_byte = 8e-6 / topology.rates

    def costs(
        self, algorithm: Algorithm, world: int | tuple[int, int] | None = None
    ) -> list[tuple[Cost, Step]]:
        """The cost of each step of an all-reduce; equal ones are worked out once.

        Args:
          algorithm: who talks to whom.
          world: the number of devices, or (far, near) for `hierarchical`; None is all hosts.
        """
        known: dict[int, tuple[Cost, Pairs]] = {}
        found = []
        for step in steps(algorithm, len(self.hosts) if world is None else world):
            if id(step.pairs) not in known:
                known[id(step.pairs)] = self.cost(step.pairs), step.pairs
            found.append((known[id(step.pairs)][0], step))
        return found

    def seconds(
        self, algorithm: Algorithm, vector_bytes: float, world: int | tuple[int, int] | None = None
    ) -> float:
        """How long an all-reduce takes whose every message is a share of so many bytes."""
        return total(self.costs(algorithm, world), vector_bytes)

    def cost(self, pairs: Pairs) -> Cost:
        """What it costs that all these devices send at once."""
        if not self.model.takes_turns:
            return self._cost(pairs.sources, pairs.targets)
        world = len(self.hosts)
        back = set((pairs.targets * world + pairs.sources).tolist())
        meets = np.asarray([key in back for key in pairs.sources * world + pairs.targets], bool)
        second = meets & (pairs.sources > pairs.targets)
        first = self._cost(pairs.sources[~second], pairs.targets[~second])
        if not second.any():
            return first
        other = self._cost(pairs.sources[second], pairs.targets[second])
        # One after the other: every corner with every corner.
        latency = (first.latency[:, None] + other.latency - self.model.latency).ravel()
        return Cost(latency, (first.per_byte[:, None] + other.per_byte).ravel())

    def _cost(self, sources: np.ndarray, targets: np.ndarray) -> Cost:
        messages, links = self.topology.routes(self.hosts[sources], self.hosts[targets])
        if not messages.size:
            return Cost(np.zeros(0), np.zeros(0))
        share = np.bincount(links, minlength=len(self._per_byte)) * self._per_byte
        first = np.flatnonzero(np.diff(messages, prepend=-1))
        slowest = np.maximum.reduceat(share[links], first)
        hops = np.diff(first, append=len(messages))
        # Of messages with as many hops, only the slowest counts.
        most = np.zeros(hops.max() + 1)
        np.maximum.at(most, hops, slowest)
        corners = np.unique(hops)
        return Cost(self.model.latency + self.model.hop * corners, most[corners])


def total(costs: list[tuple[Cost, Step]], vector_bytes: float) -> float:
    """The seconds of all steps, for a vector of so many bytes."""
    return sum(step.times * cost.seconds(step.share * vector_bytes) for cost, step in costs)
