"""How long an exchange takes on a network, step by step.

A step begins when the one before has ended everywhere. Its messages have one size and begin at
once, and streams share links max-min fairly. Rates need not be followed over time: a stream's share
of its busiest link only grows as others end, so the stream needs at most

    latency + bytes * max over its links of (streams on the link / rate of the link)

and exactly that where the link is the busiest of all. The slowest message determines the step. A
step's cost is therefore piecewise linear in the bytes, with a few corners, and is worked out once
for all sizes.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxcomm.collectives._sending import LEAST_SWAPPED
from jaxcomm.collectives.algorithms import Algorithm
from jaxcomm.plan.messages import Reduction, Shares, Votes
from jaxcomm.plan.steps import Pairs, Step, steps
from jaxcomm.plan.topology import Topology

_KEPT = 256  # costs of steps; an all-to-all of thousands of devices repeats none


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of a step: the largest of a few terms `latency + per_byte * bytes`.

    Attributes:
      latency: seconds, one number for each term.
      per_byte: seconds for a byte of each message, one number for each term.
      swapped: the cost of messages that are long enough to be swapped; None if none are.
    """

    latency: np.ndarray
    per_byte: np.ndarray
    swapped: "Cost | None" = None

    def seconds(self, message_bytes: float) -> float:
        """How long the step takes with messages of this many bytes."""
        if self.swapped is not None and message_bytes >= LEAST_SWAPPED:
            return self.swapped.seconds(message_bytes)
        return float((self.latency + self.per_byte * message_bytes).max(initial=0.0))


@dataclasses.dataclass(frozen=True)
class Model:
    """What a message costs besides its bytes on the links.

    Long messages of two devices to each other are swapped (docs/algorithms.md) where
    `half_duplex` or `swap` says that devices are CPU processes.

    Attributes:
      latency: seconds for each message.
      hop: seconds for each link on its path.
      half_duplex: whether both directions between the same two devices share the rate of one, as
        between processes connected by gloo; not in a swap.
      swap: seconds for a byte that is swapped, beyond its transmission: devices copy, add and
        subtract.
      per_byte: the least seconds that a device needs to send a byte, however fast its links are.
      efficiency: the share of a link's rate that messages reach; headers take the rest.
    """

    latency: float = 0.0
    hop: float = 0.0
    half_duplex: bool = False
    swap: float = 0.0
    per_byte: float = 0.0
    efficiency: float = 1.0


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What an all-reduce takes on a network.

    Attributes:
      seconds: from its first message to its last.
      sent: the bytes that the busiest device sends.
      busiest_link: the nodes that the link with the most bytes for its rate leads from and to; None
        where no link is limited.
      bytes_busiest_link: the bytes that it carries.
      busiest_link_seconds: how long that takes; no order of these messages is faster.
      steps: the number of steps.
    """

    seconds: float
    sent: float
    busiest_link: tuple[str, str] | None
    bytes_busiest_link: float
    busiest_link_seconds: float
    steps: int


class Simulation:
    """Exchanges on a network: device r of an algorithm is host r, or host `hosts[r]`.

    Args:
      topology: the network.
      model: what a message costs.
      hosts: the number of each device's host, in order; None means all hosts in their order.

    Raises:
      TypeError: for anything but a topology.
      ValueError: for hosts that do not exist or are listed twice.

    Example:
      >>> from jaxcomm import algorithms, plan
      >>> room = plan.fabrics.star("room", hosts=4, rate="1Gbit")
      >>> round(plan.Simulation(room).seconds(algorithms.ring(), vector_bytes=100e6), 3)
      1.2
    """

    def __init__(
        self,
        topology: Topology,
        model: Model | None = None,
        hosts: Sequence[int] | np.ndarray | None = None,
    ):
        if not isinstance(topology, Topology):
            raise TypeError(
                f"Simulation takes a topology, such as plan.load('star'), got {topology!r}."
            )
        self.topology = topology
        self.model = model or Model()
        number = len(topology.hosts)
        self.hosts = np.arange(number) if hosts is None else np.asarray(hosts, int)
        inside = (self.hosts >= 0) & (self.hosts < number)
        if not inside.all() or len(set(self.hosts.tolist())) < len(self.hosts):
            raise ValueError(f"hosts are numbers from 0 to {number - 1}, each once, got {hosts!r}.")
        with np.errstate(divide="ignore"):
            self._per_byte = 8e-6 / (topology.rates * self.model.efficiency)

    def exchange(
        self,
        algorithm: Algorithm,
        reduction: Reduction,
        n: int,
        world: int | tuple[int, int] | None = None,
    ) -> Exchange:
        """What an all-reduce of n values takes.

        Args:
          algorithm: who talks to whom.
          reduction: how many bytes messages have, such as `Coded(jaxcomm.codecs.int8())`.
          n: the length of the vector.
          world: the number of devices, or (far, near) for `hierarchical`; None means all hosts.

        Raises:
          ValueError: for a negative number of values, or if there are not as many devices as hosts.
        """
        return self.exchanges(algorithm, [reduction], n, world)[0]

    def exchanges(
        self,
        algorithm: Algorithm,
        reductions: Sequence[Reduction],
        n: int,
        world: int | tuple[int, int] | None = None,
    ) -> list[Exchange]:
        """See `exchange`; for several reductions by one algorithm, whose routes are found once."""
        if not n >= 0:
            raise ValueError(f"n is a number of values, 0 or more, got {n!r}.")
        with_counts = any(isinstance(reduction, Votes) for reduction in reductions)
        known: dict[int, tuple[Cost, np.ndarray, Pairs]] = {}
        seconds, number = np.zeros(len(reductions)), np.zeros(len(reductions), int)
        carried = np.zeros((len(reductions), len(self._per_byte)))
        sent = np.zeros((len(reductions), len(self.hosts)))
        for step in steps(algorithm, self._world(world), with_counts):
            found = known.get(id(step.pairs))
            if found is None:
                found = *self._cost_and_loads(step.pairs), step.pairs
                if len(known) < _KEPT:
                    known[id(step.pairs)] = found
            cost, loads, _ = found
            for i, reduction in enumerate(reductions):
                size = reduction.bytes_of(step, n)
                if size == 0:  # nothing is sent
                    continue
                seconds[i] += step.times * cost.seconds(size)
                number[i] += step.times
                carried[i] += step.times * size * loads
                sent[i, step.pairs.sources] += step.times * size
        found = zip(seconds, sent, carried, number, strict=True)
        return [self._summed(*parts) for parts in found]

    def _summed(
        self, seconds: float, sent: np.ndarray, carried: np.ndarray, number: int
    ) -> Exchange:
        times = carried * self._per_byte
        busiest, carries, needs = None, 0.0, 0.0
        if times.max(initial=0.0) > 0:
            link = int(times.argmax())
            busiest = self.topology.ends_of(link)
            carries, needs = float(carried[link]), float(times[link])
        most = float(sent.max(initial=0.0))
        return Exchange(float(seconds), most, busiest, carries, needs, int(number))

    def costs(
        self, algorithm: Algorithm, world: int | tuple[int, int] | None = None
    ) -> list[tuple[Cost, Step]]:
        """The cost of each step of an all-reduce; equal steps are worked out once."""
        known: dict[int, tuple[Cost, Pairs]] = {}
        found = []
        for step in steps(algorithm, self._world(world)):
            if id(step.pairs) not in known:
                known[id(step.pairs)] = self.cost(step.pairs), step.pairs
            found.append((known[id(step.pairs)][0], step))
        return found

    def seconds(
        self, algorithm: Algorithm, vector_bytes: float, world: int | tuple[int, int] | None = None
    ) -> float:
        """How long an all-reduce takes in which every message is a share of this many bytes."""
        return self.exchange(algorithm, Shares(vector_bytes), 0, world).seconds

    def cost(self, pairs: Pairs) -> Cost:
        """What it costs when all these devices send at once."""
        return self._cost_and_loads(pairs)[0]

    def _world(self, world: int | tuple[int, int] | None) -> int | tuple[int, int]:
        """The sizes of the axes, checked against the number of hosts."""
        chosen = len(self.hosts) if world is None else world
        if math.prod(chosen if isinstance(chosen, tuple) else (chosen,)) != len(self.hosts):
            raise ValueError(
                f"an exchange of {chosen} devices needs as many hosts; there are {len(self.hosts)}."
            )
        return chosen

    def _cost_and_loads(self, pairs: Pairs) -> tuple[Cost, np.ndarray]:
        """The cost, and how many messages each directed link carries."""
        messages, links = self.topology.routes(self.hosts[pairs.sources], self.hosts[pairs.targets])
        loads = np.bincount(links, minlength=len(self._per_byte))
        if not messages.size:
            return Cost(np.zeros(0), np.zeros(0)), loads
        first = np.flatnonzero(np.diff(messages, prepend=-1))
        hops = np.diff(first, append=len(messages))
        slowest = np.maximum.reduceat((loads * self._per_byte)[links], first)
        at_once = self._cost(slowest, hops)
        if not self.model.half_duplex and not self.model.swap:
            return at_once, loads
        alone = np.maximum.reduceat(self._per_byte[links], first)
        alone = np.maximum(alone, self.model.per_byte)
        back = _of_the_way_back(pairs, alone)
        cost = at_once
        if self.model.half_duplex:
            cost = self._cost(np.maximum(slowest, alone + back), hops)
        if back.any():  # a swap is two messages of half the size, one after the other
            swapped = Cost(2 * at_once.latency, at_once.per_byte + self.model.swap)
            cost = dataclasses.replace(cost, swapped=swapped)
        return cost, loads

    def _cost(self, slowest: np.ndarray, hops: np.ndarray) -> Cost:
        """The cost of messages with these seconds for a byte and these numbers of links."""
        slowest = np.maximum(slowest, self.model.per_byte)
        # Among messages with equally many hops, only the slowest counts.
        most = np.zeros(hops.max() + 1)
        np.maximum.at(most, hops, slowest)
        corners = np.unique(hops)
        return Cost(self.model.latency + self.model.hop * corners, most[corners])


def _of_the_way_back(pairs: Pairs, numbers: np.ndarray) -> np.ndarray:
    """For each message, the number of the message in the other direction; 0 where there is none."""
    size = int(max(pairs.sources.max(), pairs.targets.max())) + 1
    there = pairs.sources * size + pairs.targets
    order = np.argsort(there)
    place = np.searchsorted(there, back := pairs.targets * size + pairs.sources, sorter=order)
    other = order[np.minimum(place, len(order) - 1)]
    return np.where(there[other] == back, numbers[other], 0.0)


def total(costs: list[tuple[Cost, Step]], vector_bytes: float) -> float:
    """The seconds of all steps, for a vector of this many bytes."""
    return sum(step.times * cost.seconds(step.share * vector_bytes) for cost, step in costs)
