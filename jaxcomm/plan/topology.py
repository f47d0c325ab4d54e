"""Who is linked to whom, how fast, and which paths messages take.

A message takes a shortest path. Where several neighbours are as near, or several cables lead to
one, the number of its target decides (`d_mod_k`: the target modulo the number of choices), or a
hash of its source and its target (`hashed`). A message travels over one cable at a time.

Links are numbered by direction: 2i leads from the first end of link i to its second end, and 2i + 1
leads back.
"""

import collections
import dataclasses
import functools
from typing import Any

import numpy as np

ROUTINGS = ("d_mod_k", "hashed")


@dataclasses.dataclass(frozen=True)
class Link:
    """A cable between two nodes.

    Attributes:
      ends: the names of both nodes.
      rate: Mbit/s in each direction; None means unlimited.
    """

    ends: tuple[str, str]
    rate: float | None


class LinkError(ValueError):
    """What is wrong with a link.

    Attributes:
      link: its number.
    """

    def __init__(self, link: int, message: str):
        super().__init__(message)
        self.link = link


@dataclasses.dataclass(frozen=True)
class Topology:
    """Hosts, switches and links; two nodes may have several links.

    Attributes:
      name: what messages call it.
      hosts: the names of the hosts, in the order of their ranks.
      switches: the names of the switches.
      links: the cables.
      routing: "d_mod_k" or "hashed".

    Raises:
      ValueError: for equal names, a link to an unknown node or from a node to itself, a rate that
        is not positive, or nodes without a path between them.
    """

    name: str
    hosts: tuple[str, ...]
    switches: tuple[str, ...]
    links: tuple[Link, ...]
    routing: str = "d_mod_k"

    def __post_init__(self) -> None:
        twice = [name for name, n in collections.Counter(self.nodes).items() if n > 1]
        if twice:
            raise ValueError(f"two nodes have the name {twice[0]!r}; rename one.")
        if self.routing not in ROUTINGS:
            raise ValueError(f"unknown routing {self.routing!r}; write {' or '.join(ROUTINGS)}.")
        for i, link in enumerate(self.links):
            self._check(i, link)
        if not self.hosts:
            raise ValueError("a network needs at least one host.")
        from scipy.sparse import csgraph  # here because importing it takes long

        apart = np.flatnonzero(csgraph.connected_components(self.joined)[1] != 0)
        if apart.size:
            names = ", ".join(self.nodes[i] for i in apart[:5]) + (" ..." if apart.size > 5 else "")
            raise ValueError(f"no path leads from {self.hosts[0]} to {names}.")

    def _check(self, i: int, link: Link) -> None:
        for end in link.ends:
            if end not in self.number:
                known = ", ".join(self.nodes[:20]) + (" ..." if len(self.nodes) > 20 else "")
                raise LinkError(i, f"a link ends at {end!r}; the nodes are {known}.")
        if link.ends[0] == link.ends[1]:
            raise LinkError(i, f"a link joins {link.ends[0]!r} with itself.")
        if link.rate is not None and not 0 < link.rate < float("inf"):
            raise LinkError(
                i,
                f"the link {link.ends[0]}-{link.ends[1]} has {link.rate:g} Mbit/s; "
                "rates are positive, or unlimited.",
            )

    @property
    def nodes(self) -> tuple[str, ...]:
        """Hosts, then switches."""
        return (*self.hosts, *self.switches)

    @functools.cached_property
    def number(self) -> dict[str, int]:
        """The place of each node among the nodes."""
        return {name: i for i, name in enumerate(self.nodes)}

    @functools.cached_property
    def rates(self) -> np.ndarray:
        """Mbit/s of each direction of each link, `(2 links,)`; infinite without a limit."""
        rates = [np.inf if link.rate is None else link.rate for link in self.links]
        return np.repeat(np.asarray(rates, float), 2)

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        """From and to, for each direction of each link: `(2 links, 2)`."""
        ends = [[self.number[end] for end in link.ends] for link in self.links]
        both = np.asarray(ends, int).reshape(-1, 2)
        return np.stack([both, both[:, ::-1]], axis=1).reshape(-1, 2)

    @functools.cached_property
    def joined(self) -> Any:
        from scipy import sparse

        n, ends = len(self.nodes), self._ends
        return sparse.csr_matrix((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(n, n))

    @functools.cached_property
    def _ways(self) -> "_Ways":
        return _Ways(len(self.nodes), self._ends, len(self.hosts), self.routing == "hashed")

    def routes(self, sources: Any, targets: Any) -> tuple[np.ndarray, np.ndarray]:
        """The directed links of many messages at once.

        Args:
          sources: the numbers of the nodes that the messages come from.
          targets: the numbers of the nodes that they go to, each different from its source.

        Returns:
          Message numbers and directed links, two arrays as long as all paths together.
        """
        return self._ways.routes(np.asarray(sources, int), np.asarray(targets, int))

    def striped(self) -> "Topology":
        """The same with one link between two nodes, as fast as all their cables together."""
        rates: dict[tuple[str, str], float | None] = {}
        for link in self.links:
            a, b = sorted(link.ends)
            before = rates.get((a, b), 0.0)
            rates[a, b] = None if before is None or link.rate is None else before + link.rate
        links = tuple(Link(ends, rate) for ends, rate in rates.items())
        return dataclasses.replace(self, links=links)

    def next_hops(self, target: str) -> dict[str, str]:
        """The neighbour to which each other node sends messages for `target`.

        Such routes do not depend on the source, so a static routing table can hold them.
        """
        goal = self.number[target]
        others = np.asarray([i for i in range(len(self.nodes)) if i != goal], int)
        hops, _ = self._ways.step(others, np.full(len(others), goal), np.full(len(others), goal))
        return {self.nodes[i]: self.nodes[hop] for i, hop in zip(others, hops, strict=True)}

    def ends_of(self, link: int) -> tuple[str, str]:
        """The nodes that a directed link leads from and to."""
        a, b = self._ends[link]
        return self.nodes[a], self.nodes[b]

    def path(self, source: str, target: str) -> list[tuple[str, str]]:
        """The nodes that each link of a message's path leads from and to."""
        _, links = self.routes([self.number[source]], [self.number[target]])
        return [self.ends_of(link) for link in links]


class _Ways:
    """Shortest paths between all nodes, chosen for many messages at once.

    A host with one neighbour, a switch, is a leaf and is left out of the tables: the entries of its
    switch apply to it. `slots` are the neighbours of an inner node, in the order of the links.
    """

    def __init__(self, nodes: int, ends: np.ndarray, hosts: int, hashed: bool):
        self._hashed = hashed
        by_pair: dict[tuple[int, int], list[int]] = {}
        for i, (a, b) in enumerate(ends.tolist()):
            by_pair.setdefault((a, b), []).append(i)
        neighbours: list[list[int]] = [[] for _ in range(nodes)]
        for a, b in by_pair:
            neighbours[a].append(b)
        leaf = [i < hosts and len(n) == 1 and n[0] >= hosts for i, n in enumerate(neighbours)]
        # A leaf's only slot is the way to its switch.
        slots = [[b for b in n if leaf[a] or not leaf[b]] for a, n in enumerate(neighbours)]
        self._neighbours = np.full((nodes, max([1, *map(len, slots)])), -1)
        self._first, self._cables = np.zeros_like(self._neighbours), np.ones_like(self._neighbours)
        self._links = np.asarray([i for found in by_pair.values() for i in found], int)
        start = 0
        for (a, b), found in by_pair.items():
            if leaf[a] or not leaf[b]:
                slot = slots[a].index(b)
                self._neighbours[a, slot] = b
                self._first[a, slot], self._cables[a, slot] = start, len(found)
            start += len(found)
        self._leaf = np.asarray(leaf, bool)
        self._switch = np.where(self._leaf, self._neighbours[:, 0], np.arange(nodes))
        self._choose(np.flatnonzero(~self._leaf), ends)

    def _choose(self, inner: np.ndarray, ends: np.ndarray) -> None:
        """For each pair of inner nodes, the slots that lead nearer, and how many there are."""
        from scipy import sparse
        from scipy.sparse import csgraph

        n = len(inner)
        self._place = np.full(len(self._leaf), -1)
        self._place[inner] = np.arange(n)
        a, b = self._place[ends[(self._place[ends] >= 0).all(axis=1)]].T
        joined = sparse.csr_matrix((np.ones(len(a)), (a, b)), shape=(n, n))
        far = csgraph.shortest_path(joined, unweighted=True).astype(np.int32)
        self._ways = np.zeros((n, n), np.int16)
        nearer = []
        for slot in range(self._neighbours.shape[1]):
            other = self._neighbours[inner, slot]
            exists = np.flatnonzero(other >= 0)
            rows, to = np.nonzero(far[self._place[other[exists]]] == far[exists] - 1)
            nearer.append((exists[rows], to, slot))
            self._ways[exists[rows], to] += 1
        self._slots = np.zeros((n, n, int(self._ways.max(initial=1))), np.int16)
        filled = np.zeros((n, n), np.int16)
        for rows, to, slot in nearer:
            self._slots[rows, to, filled[rows, to]] = slot
            filled[rows, to] += 1

    def step(
        self, nodes: np.ndarray, targets: np.ndarray, keys: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The next node of each message, and the directed link to it."""
        spread = keys if not self._hashed else _mixed(keys, nodes)
        last = nodes == self._switch[targets]  # or the target is inner, and so its own switch
        # The way from a switch to a leaf is that of the leaf to its switch, backwards.
        starts = np.where(last, targets, nodes)
        slots, ways = np.zeros_like(nodes), np.ones_like(nodes)
        inner = np.flatnonzero(~last & ~self._leaf[nodes])
        a, b = self._place[nodes[inner]], self._place[self._switch[targets[inner]]]
        ways[inner] = self._ways[a, b]
        slots[inner] = self._slots[a, b, spread[inner] % ways[inner]]
        cable = spread // ways % self._cables[starts, slots]
        links = self._links[self._first[starts, slots] + cable]
        return np.where(last, targets, self._neighbours[starts, slots]), links ^ last

    def routes(self, sources: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `Topology.routes`."""
        keys = _mixed(sources, targets) if self._hashed else targets
        messages, nodes = np.arange(len(sources)), sources
        passed: list[tuple[np.ndarray, np.ndarray]] = []
        while messages.size:
            nodes, links = self.step(nodes, targets[messages], keys[messages])
            passed.append((messages, links))
            on = nodes != targets[messages]
            messages, nodes = messages[on], nodes[on]
        if not passed:
            return np.zeros(0, int), np.zeros(0, int)
        order = np.argsort(np.concatenate([m for m, _ in passed]), kind="stable")
        return (
            np.concatenate([m for m, _ in passed])[order],
            np.concatenate([links for _, links in passed])[order],
        )


def _mixed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A hash of two numbers, of 31 bits: the finalizer of MurmurHash3."""
    x = (a.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) ^ b.astype(np.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = (x ^ (x >> np.uint64(33))) * np.uint64(factor)
    return (x >> np.uint64(33)).astype(int)
