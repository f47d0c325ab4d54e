"""Who is linked with whom, and how fast: small YAML files, and the paths through them.

A file names a fabric and its settings, each of which may be overridden:

    fabric: star            # star, chain, ring, clusters, fat_tree, or explicit
    hosts: 4
    rate: 50                # Mbit/s in each direction of a link
    links_per_host: 1

`clusters` takes `groups` (default 2) and `middle`, the rate between them (default `rate`). `chain`
takes `rates`, those of the links between its switches in turn. `explicit` has `switches` and
`links`, a list of `[end, end, rate]`, in which hosts are h0, h1, ...
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

TOPOLOGIES = Path(__file__).parent / "topologies"
FASTEST = 10_000.0  # Mbit/s; beyond it a veth pair is the limit, not its shaping


@dataclasses.dataclass(frozen=True)
class Link:
    """A cable between two nodes.

    Attributes:
      ends: the names of both.
      rate: Mbit/s in each direction; None is unlimited.
    """

    ends: tuple[str, str]
    rate: float | None


@dataclasses.dataclass(frozen=True)
class Topology:
    """Hosts, switches and links; two nodes may have several links."""

    name: str
    hosts: tuple[str, ...]
    switches: tuple[str, ...]
    links: tuple[Link, ...]

    def __post_init__(self) -> None:
        nodes = [*self.hosts, *self.switches]
        twice = [name for name, n in collections.Counter(nodes).items() if n > 1]
        if twice:
            raise ValueError(f"two nodes have the name {twice[0]!r}; rename one.")
        for link in self.links:
            for end in link.ends:
                if end not in nodes:
                    raise ValueError(f"a link ends at {end!r}; the nodes are {', '.join(nodes)}.")
            if link.ends[0] == link.ends[1]:
                raise ValueError(f"a link joins {link.ends[0]!r} with itself.")
            if link.rate is not None and not 0.1 <= link.rate <= FASTEST:
                raise ValueError(
                    f"the link {link.ends[0]}-{link.ends[1]} has {link.rate:g} Mbit/s; "
                    f"rates are 0.1 to {FASTEST:g}, or unlimited."
                )
        if not self.hosts:
            raise ValueError("a network needs at least one host.")
        reached = self.distances(self.hosts[0])
        apart = [node for node in nodes if node not in reached]
        if apart:
            raise ValueError(f"no path leads from {self.hosts[0]} to {', '.join(apart)}.")

    def neighbours(self, node: str) -> list[str]:
        """The nodes at the other ends of a node's links, each once."""
        ends = [b if a == node else a for a, b in (k.ends for k in self.links) if node in (a, b)]
        return list(dict.fromkeys(ends))

    def distances(self, target: str) -> dict[str, int]:
        """How many links each node is from one, of those that have a path to it."""
        found, queue = {target: 0}, collections.deque([target])
        while queue:
            node = queue.popleft()
            for other in self.neighbours(node):
                if other not in found:
                    found[other] = found[node] + 1
                    queue.append(other)
        return found

    def next_hops(self, target: str) -> dict[str, str]:
        """The neighbour to which each other node sends what is for `target`, on a shortest path.

        Where several are as near, targets take them in turn, as in D-mod-k routing.
        """
        far = self.distances(target)
        number = (*self.hosts, *self.switches).index(target)
        hops = {}
        for node in far:
            nearer = [b for b in self.neighbours(node) if far[b] < far[node]]
            if nearer:
                hops[node] = nearer[number % len(nearer)]
        return hops

    def path(self, source: str, target: str) -> list[tuple[str, str]]:
        """The directed links from one host to another."""
        hops, node, steps = self.next_hops(target), source, []
        while node != target:
            steps.append((node, hops[node]))
            node = hops[node]
        return steps


def load(name: str, **overrides: Any) -> Topology:
    """Reads a topology: the name of a file here, or a path; None does not override."""
    path = TOPOLOGIES / f"{name}.yaml"
    path = path if path.exists() else Path(name)
    if not path.exists():
        known = sorted(p.stem for p in TOPOLOGIES.glob("*.yaml"))
        raise ValueError(f"there is no topology {name!r}; name a file, or one of {known}.")
    settings = yaml.safe_load(path.read_text())
    if not isinstance(settings, Mapping) or "fabric" not in settings:
        raise ValueError(f"{path} has no fabric; write one of {', '.join(FABRICS)}.")
    settings = dict(settings) | {k: v for k, v in overrides.items() if v is not None}
    fabric = settings.pop("fabric")
    if fabric not in FABRICS:
        raise ValueError(f"{path}: unknown fabric {fabric!r}; write one of {', '.join(FABRICS)}.")
    try:
        return FABRICS[fabric](path.stem, **settings)
    except TypeError as error:
        raise ValueError(f"{path}: a setting does not fit: {error}.") from None


def rate_of(text: Any) -> float | None:
    """Mbit/s of a number, or of a text such as 50Mbit, 1Gbit or unlimited."""
    if text is None or str(text) == "unlimited":
        return None
    for unit, factor in (("Gbit", 1000), ("Mbit", 1), ("", 1)):
        if str(text).endswith(unit):
            try:
                return float(str(text).removesuffix(unit)) * factor
            except ValueError:
                break
    raise ValueError(f"a rate is a number of Mbit/s, 50Mbit, 1Gbit or unlimited, got {text!r}.")


def _hosts(number: int, least: int = 1) -> tuple[str, ...]:
    if not isinstance(number, int) or number < least:
        raise ValueError(f"this fabric needs at least {least} hosts, got {number!r}.")
    return tuple(f"h{i}" for i in range(number))


def _cables(a: str, b: str, rate: Any, number: int = 1) -> list[Link]:
    return [Link((a, b), rate_of(rate))] * number


def star(name: str, hosts: int, rate: Any, links_per_host: int = 1) -> Topology:
    """All hosts on one switch."""
    names = _hosts(hosts)
    links = [k for host in names for k in _cables(host, "s0", rate, links_per_host)]
    return Topology(name, names, ("s0",), tuple(links))


def chain(
    name: str,
    hosts: int,
    rate: Any,
    rates: list[Any] | None = None,
    closed: bool = False,
    links_per_host: int = 1,
) -> Topology:
    """A switch for each host, in a row."""
    names, switches = _hosts(hosts), tuple(f"s{i}" for i in range(hosts))
    links = [
        k for h, s in zip(names, switches, strict=True) for k in _cables(h, s, rate, links_per_host)
    ]
    pairs = list(zip(switches, switches[1:], strict=False))
    if closed and hosts > 2:
        pairs.append((switches[-1], switches[0]))
    for i, (a, b) in enumerate(pairs):
        links += _cables(a, b, rates[i % len(rates)] if rates else rate)
    return Topology(name, names, switches, tuple(links))


def ring(name: str, hosts: int, rate: Any, links_per_host: int = 1) -> Topology:
    """A switch for each host, in a circle."""
    return chain(name, hosts, rate, None, True, links_per_host)


def clusters(
    name: str,
    hosts: int,
    rate: Any,
    groups: int = 2,
    middle: Any = None,
    links_per_host: int = 1,
) -> Topology:
    """Stars of equally many hosts, whose switches stand in a row."""
    names = _hosts(hosts, groups)
    if hosts % groups:
        raise ValueError(f"{hosts} hosts do not divide into {groups} equal groups.")
    switches = tuple(f"s{i}" for i in range(groups))
    links = [
        k
        for i, host in enumerate(names)
        for k in _cables(host, switches[i * groups // hosts], rate, links_per_host)
    ]
    for a, b in zip(switches, switches[1:], strict=False):
        links += _cables(a, b, middle or rate)
    return Topology(name, names, switches, tuple(links))


def fat_tree(
    name: str, hosts: int, rate: Any, hosts_per_switch: int = 4, links_per_host: int = 1
) -> Topology:
    """Two levels: each lower switch has as many links up as it has hosts."""
    names = _hosts(hosts)
    leaves = tuple(f"s{i}" for i in range(-(-hosts // hosts_per_switch)))
    spines = tuple(f"t{i}" for i in range(hosts_per_switch if len(leaves) > 1 else 0))
    links = [
        k
        for i, host in enumerate(names)
        for k in _cables(host, leaves[i // hosts_per_switch], rate, links_per_host)
    ]
    links += [k for leaf in leaves for spine in spines for k in _cables(leaf, spine, rate)]
    return Topology(name, names, (*leaves, *spines), tuple(links))


def explicit(name: str, hosts: int, links: list[Any], switches: Any = (), rate: Any = None) -> Any:
    """Links that a file lists."""
    cables = []
    for link in links:
        if not isinstance(link, list) or len(link) not in (2, 3):
            raise ValueError(f"a link is [end, end] or [end, end, rate], got {link!r}.")
        cables += _cables(link[0], link[1], link[2] if len(link) == 3 else rate)
    return Topology(name, _hosts(hosts), tuple(switches), tuple(cables))


FABRICS: dict[str, Callable[..., Topology]] = {
    f.__name__: f for f in (star, chain, ring, clusters, fat_tree, explicit)
}
