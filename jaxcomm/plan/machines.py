"""A cluster: machines, the network between them, the order of their devices, and costs.

A cluster is a topology file with a few more keys:

    fabric: clusters        # as in `files`
    hosts: 4                # machines
    rate: 1Gbit             # of a network card
    nodes:                  # what a machine has
      devices: 8
      nics: 2               # another name for links_per_host
      bandwidth: 300Gbit    # of each device within its machine
    order: [0, 2, 1, 3]     # machines in the order of their ranks
    device: gpu             # which default costs to use: cpu or gpu
    costs: costs.yaml       # measured costs, in the folder of this file; with --set, in the current

`--set` and `overrides` change any of them by its name, such as nodes.nics=2, and single links by
their ends, such as link[s0,s1].bandwidth=1Gbit.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxcomm._numbers import is_integer
from jaxcomm.collectives.algorithms import Algorithm
from jaxcomm.collectives.algorithms.direct import Direct
from jaxcomm.collectives.algorithms.hierarchical import Hierarchical
from jaxcomm.collectives.algorithms.native import Native
from jaxcomm.plan import costs as costs_
from jaxcomm.plan.costs import Costs
from jaxcomm.plan.fabrics import MOST_HOSTS, rate_of
from jaxcomm.plan.files import File, find, topology_of, value_of
from jaxcomm.plan.simulate import Model, Simulation
from jaxcomm.plan.topology import Link, Topology

_NODE_KEYS = ("devices", "nics", "bandwidth")
_LINK = re.compile(r"link\[\s*([^,\]]+?)\s*,\s*([^,\]]+?)\s*\](?:\.(?:bandwidth|rate))?")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Devices on a network.

    Attributes:
      topology: the network; its hosts are the devices.
      order: the numbers of the devices in the order of their ranks.
      near: how many devices in a row share a machine or a switch; 1 if there are no two levels.
      costs: the costs of messages and codecs.
      per_machine: how many devices a machine has.
    """

    topology: Topology
    order: tuple[int, ...]
    near: int
    costs: Costs
    per_machine: int = 1

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(len(self.topology.hosts))):
            raise ValueError(
                f"order names every device from 0 to {len(self.topology.hosts) - 1} once, got "
                f"{list(self.order)}."
            )

    @property
    def devices(self) -> int:
        """The number of devices."""
        return len(self.order)

    @property
    def levels(self) -> tuple[int, int] | None:
        """(far, near), if there are two levels."""
        has_two = 1 < self.near < self.devices and self.devices % self.near == 0
        return (self.devices // self.near, self.near) if has_two else None

    @property
    def devices_per_host(self) -> int:
        """The devices of each host, if these follow each other in the order of ranks; else 1."""
        return self.near if self.near == self.per_machine and self.levels else 1

    @functools.cached_property
    def network(self) -> Simulation:
        """A simulation of exchanges on its links, by its costs."""
        return self._network_on(self.topology, self.costs.latency)

    @functools.cached_property
    def _striped(self) -> Simulation:
        return self._network_on(self.topology.striped(), self.costs.latency)

    @functools.cached_property
    def _native(self) -> Simulation:
        if self.costs.stripes:
            return self._network_on(self.topology.striped(), self.native_latency)
        # In gloo's ring both directions of a pair are busy at once, also on two devices.
        costs = dataclasses.replace(self.costs, half_duplex=False, swap=0.0)
        return self._network_on(self.topology, costs.latency, costs)

    def network_of(self, algorithm: Algorithm, is_collective: bool = False) -> Simulation:
        """The network for an algorithm.

        Args:
          algorithm: who talks to whom.
          is_collective: whether XLA's own collectives carry it out, although it is not one of
            XLA's.
        """
        if isinstance(algorithm, Native):
            return self._native
        levels = [algorithm]
        if isinstance(algorithm, Hierarchical):
            levels = [algorithm.near, algorithm.far]
        is_collective |= all(isinstance(level, Direct) for level in levels)
        if self.costs.stripes and is_collective:
            return self._striped
        return self.network

    @property
    def native_latency(self) -> float:
        """The latency per step of XLA's own all-reduce, counted as a ring.

        NCCL goes up and down a tree of machines where a ring would have a longer latency.
        """
        n, latency = self.devices, self.costs.latency
        if not self.costs.stripes or n == 1:
            return latency
        levels = math.ceil(math.log2(n // self.per_machine)) + (self.per_machine > 1)
        return latency * min(1.0, levels / (n - 1))

    def _network_on(
        self, topology: Topology, latency: float, costs: Costs | None = None
    ) -> Simulation:
        c = costs or self.costs
        model = Model(latency, 0.0, c.half_duplex, c.swap, c.per_byte, c.efficiency)
        return Simulation(topology, model, self.order)


def cluster(topology: Topology, costs: Costs | None = None) -> Cluster:
    """The cluster of a topology, whose hosts are devices in the order of their ranks.

    Args:
      topology: one from `jaxcomm.plan.fabrics` or `jaxcomm.plan.load`.
      costs: the costs of messages and codecs; None means `defaults("cpu")`.

    Returns:
      The cluster, for `jaxcomm.plan.plan`.

    Raises:
      TypeError: for anything else.
    """
    if not isinstance(topology, Topology):
        raise TypeError(
            "a cluster is made of a topology of plan.fabrics or plan.load, got "
            f"{topology!r}; a name or a file is read by plan.load_cluster."
        )
    _check_costs(costs)
    order = tuple(range(len(topology.hosts)))
    return Cluster(topology, order, near_of(topology, order), costs or costs_.defaults("cpu"))


def load_cluster(
    name: str, overrides: Mapping[str, Any] | None = None, costs: Costs | None = None
) -> Cluster:
    """Reads a cluster.

    Args:
      name: the name of a topology, or the path of a file.
      overrides: settings to change, by name, as `--set` takes them.
      costs: costs that replace the file's.

    Returns:
      The cluster, for `jaxcomm.plan.plan`.

    Raises:
      TypeError: for costs that were not read with `read_costs`, and other wrong types.
      ValueError: for an unknown name or invalid settings, in one line with the file and line.
    """
    _check_costs(costs)
    if not isinstance(name, str | Path):
        raise TypeError(f"load_cluster takes a file, or the name of a topology, got {name!r}.")
    if not isinstance(overrides or {}, Mapping):
        raise TypeError(
            f'overrides are settings by name, such as {{"rate": "1Gbit"}}, got {overrides!r}.'
        )
    file = File(find(str(name)))
    links, others = _sorted_out(overrides or {})
    settings = {**file.settings, **{k: v for k, v in others.items() if "." not in k}}
    nodes = settings.pop("nodes", None) or {}
    if not isinstance(nodes, dict):
        raise file.error("nodes", f"nodes has {', '.join(_NODE_KEYS)}, got {nodes!r}.", others)
    for key, value in others.items():
        if "." in key:
            nodes = {**nodes, key.removeprefix("nodes."): value}
    for key in nodes:
        if key not in _NODE_KEYS:
            wrong = f"unknown key {key!r} of nodes; there are {', '.join(_NODE_KEYS)}."
            raise _node_error(file, key, wrong, others)
    for key in ("devices", "nics"):
        number = nodes.get(key, 1)
        if not is_integer(number) or number < 1:
            wrong = f"{key} is a positive number, got {number!r}."
            raise _node_error(file, key, wrong, others)
    order, device = settings.pop("order", None), settings.pop("device", "cpu")
    measured = settings.pop("costs", None)
    if "device" in others and not (costs is None and measured is None):
        wrong = "device chooses default costs, but measured ones are given; leave out one."
        raise file.error("device", wrong, others)
    if "nics" in nodes and settings.get("fabric") != "explicit":
        if settings.get("links_per_host", nodes["nics"]) != nodes["nics"]:
            wrong = f"nics is {nodes['nics']}, but links_per_host {settings['links_per_host']}."
            raise _node_error(file, "nics", wrong, others)
        settings["links_per_host"] = nodes["nics"]
    elif nodes.get("nics", 1) != 1:
        wrong = "an explicit network has its cards in links: list a cable of a host once for each."
        raise _node_error(file, "nics", wrong, others)
    given = {key: value for key, value in others.items() if key in settings}
    machines = topology_of(file, settings, given)
    for ends, rate in links.items():
        machines = _changed(machines, ends, rate)
    if costs is None:
        costs = _costs_of(file, device, measured, others)
    return _of_machines(file, machines, nodes, order, costs, others)


def _check_costs(costs: Any) -> None:
    if costs is not None and not isinstance(costs, Costs):
        raise TypeError(f"costs are those of plan.read_costs({costs!r}), or None, got {costs!r}.")


def _node_error(file: File, key: str, message: str, given: Mapping[str, Any]) -> ValueError:
    """What is wrong with a machine, in the file or in the override."""
    name = f"nodes.{key}"
    return file.error(name if name in given else "nodes", message, given)


def _costs_of(file: File, device: Any, measured: Any, given: Mapping[str, Any]) -> Costs:
    if measured is not None:
        path = (Path() if "costs" in given else file.path.parent) / str(measured)
        if not path.is_file():
            wrong = f"there is no file {path}; jaxcomm.probe writes one."
            raise file.error("costs", wrong, given)
        return costs_.read(path)
    try:
        return costs_.defaults(device)
    except ValueError as error:
        raise file.error("device", str(error), given) from None


def _of_machines(
    file: File,
    machines: Topology,
    nodes: Mapping[str, Any],
    order: Any,
    costs: Costs,
    given: Mapping[str, Any],
) -> Cluster:
    """The cluster whose machines are the hosts of a topology."""
    each, number = nodes.get("devices", 1), len(machines.hosts)
    if each * number > MOST_HOSTS:
        wrong = f"{number} machines of {each} devices are more than {MOST_HOSTS} devices."
        raise _node_error(file, "devices", wrong, given)
    if order is None:
        order = list(range(number))
    if not _is_order(order, number):
        wrong = f"order names every host from 0 to {number - 1} once, got {order!r}."
        raise file.error("order", wrong, given)
    try:
        inside = rate_of(nodes.get("bandwidth"))
    except ValueError as error:
        raise _node_error(file, "bandwidth", str(error), given) from None
    if inside is not None and not 0 < inside < float("inf"):
        wrong = f"bandwidth is {inside:g} Mbit/s; it is positive, or unlimited."
        raise _node_error(file, "bandwidth", wrong, given)
    ranks = tuple(each * host + device for host in order for device in range(each))
    if each == 1 and inside is not None:
        wrong = (
            "bandwidth is that of several devices within a machine; with one device, write the "
            "lower of both as the rate of its links."
        )
        raise _node_error(file, "bandwidth", wrong, given)
    if each == 1:
        return Cluster(machines, ranks, near_of(machines, ranks), costs)
    devices = tuple(f"{host}.{i}" for host in machines.hosts for i in range(each))
    links = [Link((f"{h}.{i}", h), inside) for h in machines.hosts for i in range(each)]
    switches = (*machines.hosts, *machines.switches)
    joined = Topology(machines.name, devices, switches, (*links, *machines.links), machines.routing)
    return Cluster(joined, ranks, each, costs, each)


def _is_order(order: Any, number: int) -> bool:
    """Whether a list has the number of each host once."""
    if not isinstance(order, list) or any(type(host) is not int for host in order):
        return False
    return sorted(order) == list(range(number))


def _sorted_out(overrides: Mapping[str, Any]) -> tuple[dict[tuple[str, str], Any], dict[str, Any]]:
    """Overrides of rates of links, and all others."""
    links, others = {}, {}
    for key, value in overrides.items():
        try:
            value = value_of(value) if isinstance(value, str) else value
        except ValueError as error:
            raise ValueError(f"{key}={value}: {error}") from None
        found = _LINK.fullmatch(key)
        if found:
            links[found[1], found[2]] = value
        elif re.match(r"link(\W|$)", key):
            raise ValueError(f"{key}: write link[s0,s1].bandwidth=1Gbit, with the ends of a link.")
        elif "." in key and not key.startswith("nodes."):
            raise ValueError(f"{key}: unknown setting; nodes has {', '.join(_NODE_KEYS)}.")
        else:
            others[key] = value
    return links, others


def _changed(topology: Topology, ends: tuple[str, str], rate: Any) -> Topology:
    """The topology with another rate for the links between two nodes."""
    names = [next((n for n in (end, f"s{end}") if n in topology.number), end) for end in ends]
    same = [set(link.ends) == set(names) for link in topology.links]
    if not any(same):
        known = ", ".join("-".join(k.ends) for k in topology.links[:12])
        more = " ..." if len(topology.links) > 12 else ""
        raise ValueError(f"link[{','.join(ends)}]: there is no such link; there are {known}{more}.")
    try:
        mbit = rate_of(rate)
        if mbit is not None and not 0 < mbit < float("inf"):
            raise ValueError(f"{mbit:g} Mbit/s; rates are positive, or unlimited.")
    except ValueError as error:
        raise ValueError(f"link[{','.join(ends)}]={rate}: {error}") from None
    links = tuple(
        dataclasses.replace(link, rate=mbit) if hit else link
        for link, hit in zip(topology.links, same, strict=True)
    )
    return dataclasses.replace(topology, links=links)


def near_of(topology: Topology, order: Sequence[int]) -> int:
    """How many hosts in a row are on one switch, if all switches have equally many."""
    first: dict[int, int] = {}
    for link in topology.links:
        a, b = (topology.number[end] for end in link.ends)
        for host, other in ((a, b), (b, a)):
            if host < len(topology.hosts):
                first.setdefault(host, other)
    switches = [first.get(host, -1) for host in order]
    starts = np.flatnonzero(np.diff(switches, prepend=-2))
    sizes = set(np.diff(starts, append=len(switches)).tolist())
    in_rows = len(starts) == len(set(switches))
    return sizes.pop() if len(sizes) == 1 and in_rows else 1


def path_of(text: str) -> tuple[str, str]:
    """The setting and the value in an argument of `--set`."""
    key, is_there, value = text.rpartition("=")
    if not is_there or not key or not value:
        raise ValueError(f"--set {text}: write name=value, such as nodes.nics=2.")
    return key.strip(), value.strip()
