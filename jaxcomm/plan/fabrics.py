"""Regular networks by name: how many hosts and switches, and which links join them."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxcomm._numbers import is_integer
from jaxcomm.plan.topology import Link, LinkError, Topology

MOST_HOSTS = 4096
_UNITS = {"M": 1, "G": 1000}  # of Mbit/s
_RATE = re.compile(r"(.*?)\s*(?:([GM])(?:bit|bps|bit/s|b/s))?")


def rate_of(text: Any, whole: Any = None) -> float | None:
    """Mbit/s from a number or a text: 50Mbit, 1Gbit, 1Gb/s, unlimited, or 50% of `whole`."""
    if text is None or text == "unlimited":
        return None
    if whole is not None and str(text).endswith("%"):
        rate, share = rate_of(whole), rate_of(str(text).removesuffix("%"))
        return None if rate is None or share is None else rate * share / 100
    if found := _RATE.fullmatch("" if isinstance(text, bool) else str(text)):
        try:
            return float(found[1]) * _UNITS[found[2] or "M"]
        except ValueError:
            pass
    raise ValueError(
        f"a rate is a number of Mbit/s, or such as 50Mbit, 1Gbit, 1Gbps or unlimited, got {text!r}."
    )


def star(name: str, hosts: int, rate: Any, links_per_host: int = 1) -> Topology:
    """All hosts on one switch.

    Args:
      name: the name in messages.
      hosts: the number of hosts.
      rate: the rate of each link in each direction: a number of Mbit/s, "50Mbit", "1Gbit" or
        "unlimited".
      links_per_host: the number of network cards of a host.

    Returns:
      The topology.

    Raises:
      ValueError: for an invalid rate, or fewer than one host.
    """
    names = _hosts(hosts)
    return Topology(name, names, ("s0",), tuple(_uplinks(names, ["s0"], rate, links_per_host)))


def chain(
    name: str,
    hosts: int,
    rate: Any,
    rates: list[Any] | None = None,
    closed: bool = False,
    links_per_host: int = 1,
) -> Topology:
    """A switch for each host, in a row.

    Args:
      name: as for `star`.
      hosts: likewise.
      rate: likewise.
      rates: the rates between switches, in order and from the start again if there are fewer than
        links, or shares of `rate` such as "50%". None means `rate` for all of them.
      closed: whether the last switch is linked to the first.
      links_per_host: as for `star`.

    Returns:
      The topology.

    Raises:
      ValueError: as for `star`.
    """
    names, switches = _hosts(hosts), _switches(hosts)
    links = _uplinks(names, switches, rate, links_per_host)
    between = _listed("rates", [] if rates is None else rates, '["1Gbit", "50%"]') or [rate]
    pairs = list(zip(switches, switches[1:], strict=False))
    if closed and hosts > 2:
        pairs.append((switches[-1], switches[0]))
    for i, (a, b) in enumerate(pairs):
        links += _cables(a, b, rate_of(between[i % len(between)], rate))
    return Topology(name, names, switches, tuple(links))


def ring(name: str, hosts: int, rate: Any, links_per_host: int = 1) -> Topology:
    """A switch for each host, in a circle: `chain`, closed.

    Args:
      name: as for `star`.
      hosts: likewise.
      rate: likewise.
      links_per_host: likewise.

    Returns:
      The topology.

    Raises:
      ValueError: as for `star`.
    """
    return chain(name, hosts, rate, None, True, links_per_host)


def clusters(
    name: str,
    hosts: int,
    rate: Any,
    groups: int = 2,
    middle: Any = None,
    links_per_host: int = 1,
) -> Topology:
    """Stars of equally many hosts, whose switches stand in a row.

    Args:
      name: as for `star`.
      hosts: the number of hosts in all stars together.
      rate: as for `star`.
      groups: the number of stars.
      middle: the rate between switches; None means `rate`.
      links_per_host: as for `star`.

    Returns:
      The topology.

    Raises:
      ValueError: if the hosts do not divide into the groups.
    """
    names = _hosts(hosts, _count("groups", groups))
    if hosts % groups:
        raise ValueError(f"{hosts} hosts do not divide into {groups} equal groups.")
    switches = _switches(groups)
    links = _uplinks(names, switches, rate, links_per_host)
    for a, b in zip(switches, switches[1:], strict=False):
        links += _cables(a, b, rate if middle is None else middle)
    return Topology(name, names, switches, tuple(links))


def fat_tree(
    name: str,
    hosts: int,
    rate: Any,
    hosts_per_switch: int = 4,
    links_per_host: int = 1,
    routing: str = "d_mod_k",
) -> Topology:
    """Two levels of switches: each lower switch has as many links up as hosts.

    Args:
      name: as for `star`.
      hosts: likewise.
      rate: the rate of every link.
      hosts_per_switch: the number of hosts on each lower switch.
      links_per_host: as for `star`.
      routing: which of several shortest paths a message takes: "d_mod_k", by the number of its
        target, or "hashed".

    Returns:
      The topology.

    Raises:
      ValueError: as for `star`.
    """
    names = _hosts(hosts)
    leaves = _switches(-(-hosts // _count("hosts_per_switch", hosts_per_switch)))
    spines = tuple(f"t{i}" for i in range(hosts_per_switch if len(leaves) > 1 else 0))
    links = [
        k
        for i, host in enumerate(names)
        for k in _cables(host, leaves[i // hosts_per_switch], rate, links_per_host)
    ]
    links += [
        k for leaf in leaves for spine in spines for k in _cables(leaf, spine, rate, links_per_host)
    ]
    return Topology(name, names, (*leaves, *spines), tuple(links), routing)


def dln(
    name: str,
    hosts: int,
    rate: Any,
    hosts_per_switch: int = 2,
    cables: int = 1,
    shortcut: Any = None,
    links_per_host: int = 1,
) -> Topology:
    """A distributed loop network: 2^q switches in a ring, with shortcuts.

    Switch s is joined to s + 1, s + 2, s + 4, ..., s + 2^(q-1).

    Args:
      name: as for `star`.
      hosts: likewise.
      rate: likewise.
      hosts_per_switch: the number of hosts on each switch.
      cables: the number of cables of each shortcut.
      shortcut: the rate of a cable between switches; None means `rate`.
      links_per_host: as for `star`.

    Returns:
      The topology.

    Raises:
      ValueError: if the number of switches is not a power of two.

    References:
      M. Koibuchi, H. Matsutani, H. Amano, D. F. Hsu and H. Casanova, "A case for random shortcut
      topologies for HPC interconnects", ISCA 2012 (their DLN-x has the x - 2 longest shortcuts
      besides the ring).
    """
    switches = -(-hosts // _count("hosts_per_switch", hosts_per_switch))
    return _loops(name, hosts, rate, (switches,), cables, shortcut, links_per_host)


def dln_2d(
    name: str,
    hosts: int,
    rate: Any,
    hosts_per_switch: int = 2,
    grid: Sequence[int] | None = None,
    cables: int = 1,
    shortcut: Any = None,
    links_per_host: int = 1,
) -> Topology:
    """The product of two distributed loop networks: each row and each column is one.

    Switch (i, j) of a `grid` of m x n has the number i + m j: the first dimension is the near one.

    Args:
      name: as for `star`.
      hosts: likewise.
      rate: likewise.
      hosts_per_switch: the number of hosts on each switch; ignored where there is a grid.
      grid: m and n, two powers of two; None makes n m or 2 m.
      cables: as for `dln`.
      shortcut: likewise.
      links_per_host: as for `star`.

    Returns:
      The topology.

    Raises:
      ValueError: if a number of switches is not a power of two.
    """
    if grid is None:
        switches = -(-hosts // _count("hosts_per_switch", hosts_per_switch))
        near = 1 << (switches.bit_length() - 1) // 2
        grid = (near, -(-switches // near))
    if not isinstance(grid, list | tuple) or len(grid) != 2:
        raise ValueError(f"a grid is [4, 8] or such, two powers of two, got {grid!r}.")
    return _loops(name, hosts, rate, tuple(grid), cables, shortcut, links_per_host)


def explicit(
    name: str, hosts: int, links: list[Any], switches: Any = (), rate: Any = None
) -> Topology:
    """A network of explicitly listed links.

    Args:
      name: as for `star`.
      hosts: the number of hosts, which are named h0, h1, ...
      links: each [end, end] or [end, end, rate].
      switches: the names of the switches.
      rate: the rate of links that give none.

    Returns:
      The topology.

    Raises:
      ValueError: for links or switches that are not listed, and for a link of another form, or
        without a rate.
    """
    made = []
    between = _listed("switches", switches, '["s0", "s1"]')
    for i, link in enumerate(_listed("links", links, '[["h0", "s0"], ["h1", "s0"]]')):
        if not isinstance(link, list | tuple) or len(link) not in (2, 3):
            raise LinkError(i, f"a link is [end, end] or [end, end, rate], got {link!r}.")
        own = link[2] if len(link) == 3 else rate
        if own is None:
            raise LinkError(i, f"{link!r} has no rate; add one, such as 1Gbit, or a rate for all.")
        try:
            made += _cables(str(link[0]), str(link[1]), own)
        except ValueError as error:
            raise LinkError(i, str(error)) from None
    return Topology(name, _hosts(hosts), tuple(map(str, between)), tuple(made))


def _loops(
    name: str,
    hosts: int,
    rate: Any,
    grid: tuple[int, ...],
    cables: int,
    shortcut: Any,
    links_per_host: int,
) -> Topology:
    """Rings with shortcuts along each dimension of a grid of switches."""
    for size in grid:
        if not is_integer(size) or size < 1 or size & (size - 1):
            raise ValueError(f"a loop network has 2, 4, 8, ... switches in a ring, got {size!r}.")
    names, switches = _hosts(hosts, math.prod(grid)), _switches(math.prod(grid))
    if hosts % len(switches):
        raise ValueError(f"{hosts} hosts do not divide among {len(switches)} switches.")
    links = _uplinks(names, switches, rate, links_per_host)
    stride = 1
    for size in grid:
        for distance in (1 << k for k in range(size.bit_length() - 1)):
            for s in range(len(switches)):
                along = s // stride % size
                if 2 * distance == size and along >= distance:
                    continue  # both ends are at this distance: one link, not two
                t = s + ((along + distance) % size - along) * stride
                a, b = switches[s], switches[t]
                links += _cables(a, b, rate if shortcut is None else shortcut, cables)
        stride *= size
    return Topology(name, names, switches, tuple(links))


def _count(name: str, number: Any) -> int:
    if not is_integer(number) or number < 1:
        raise ValueError(f"{name} is a positive number, got {number!r}.")
    return int(number)


def _listed(name: str, values: Any, example: str) -> Sequence[Any]:
    if not isinstance(values, list | tuple):
        raise ValueError(f"{name} is a list, such as {example}, got {values!r}.")
    return values


def _hosts(number: Any, least: int = 1) -> tuple[str, ...]:
    if not is_integer(number):
        raise ValueError(f"hosts is a whole number, got {number!r}.")
    if not least <= number <= MOST_HOSTS:
        raise ValueError(f"this fabric has {least} to {MOST_HOSTS} hosts, got {number!r}.")
    return tuple(f"h{i}" for i in range(number))


def _switches(number: int) -> tuple[str, ...]:
    return tuple(f"s{i}" for i in range(number))


def _uplinks(
    hosts: Sequence[str], switches: Sequence[str], rate: Any, links_per_host: int
) -> list[Link]:
    """Equally many neighbouring hosts on each switch."""
    return [
        link
        for i, host in enumerate(hosts)
        for link in _cables(host, switches[i * len(switches) // len(hosts)], rate, links_per_host)
    ]


def _cables(a: str, b: str, rate: Any, number: int = 1) -> list[Link]:
    return [Link((a, b), rate_of(rate))] * _count("the number of cables", number)


FABRICS: dict[str, Callable[..., Topology]] = {
    f.__name__: f for f in (star, chain, ring, clusters, fat_tree, dln, dln_2d, explicit)
}
