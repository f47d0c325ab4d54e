"""Topologies: what their files say, shortest paths, and what cannot be."""

import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxcomm.plan import TOPOLOGIES, Link, Topology, load
from jaxcomm.plan.fabrics import chain, dln, dln_2d, explicit, fat_tree, rate_of


def distances(made: Topology, target: str) -> dict[str, int]:
    """How many links each node is from one: breadth first."""
    found, queue = {target: 0}, collections.deque([target])
    while queue:
        node = queue.popleft()
        for link in made.links:
            for a, b in (link.ends, link.ends[::-1]):
                if a == node and b not in found:
                    found[b] = found[node] + 1
                    queue.append(b)
    return found


@pytest.mark.parametrize("path", sorted(TOPOLOGIES.glob("*.yaml")), ids=lambda p: p.stem)
@pytest.mark.parametrize("hosts", [None, 2, 4])
def test_every_file_has_shortest_paths_between_all_hosts(path: Path, hosts: int | None) -> None:
    made = load(path.stem, hosts=hosts, rate="1Gbit")
    ends = {link.ends for link in made.links}
    assert all(link.rate in (1000, 500) for link in made.links)
    for b in made.hosts:
        far, hops = distances(made, b), made.next_hops(b)
        for a in made.hosts:
            if a == b:
                continue
            steps = made.path(a, b)
            assert len(steps) == far[a] and steps[0][0] == a and steps[-1][1] == b
            assert all((x, y) in ends or (y, x) in ends for x, y in steps)
            assert [x for x, _ in steps[1:]] == [y for _, y in steps[:-1]]
            assert all(hops[x] == y for x, y in steps)


def test_what_a_file_means() -> None:
    made = load("clusters", rate=200)
    assert len(made.hosts) == 8 and made.switches == ("s0", "s1") and len(made.links) == 9
    assert made.path("h0", "h7") == [("h0", "s0"), ("s0", "s1"), ("s1", "h7")]
    assert made.path("h4", "h7") == [("h4", "s1"), ("s1", "h7")]
    rates = [k.rate for k in load("chain_heterogeneous", rate="1Gbit").links if k.ends[0][0] == "s"]
    assert rates == [1000, 500, 1000, 500, 1000, 500, 1000]
    assert len(load("star", links_per_host=2).links) == 8
    # Two targets behind the same switches are reached over two of them.
    tree = load("fat_tree")
    assert tree.path("h0", "h6")[1] != tree.path("h0", "h7")[1]


def test_loop_networks_have_shortcuts_at_powers_of_two() -> None:
    made = dln("loop", 32, 10, hosts_per_switch=2, cables=3, shortcut=40)
    found = collections.Counter(k.ends for k in made.links if k.ends[0][0] == "s")
    assert set(found.values()) == {3} and {k.rate for k in made.links[32:]} == {40}
    apart = [(int(b[1:]) - int(a[1:])) % 16 for a, b in found]
    assert collections.Counter(apart) == {1: 16, 2: 16, 4: 16, 8: 8}
    assert made.path("h0", "h31") == [("h0", "s0"), ("s0", "s15"), ("s15", "h31")]

    flat = dln_2d("grid", 32, 10, grid=[4, 8])
    apart = collections.Counter()
    for link in flat.links[32:]:
        a, b = (int(end[1:]) for end in link.ends)
        near, far = (b - a) % 4, (b // 4 - a // 4) % 8
        assert near == 0 or far == 0
        apart[near, far] += 1
    assert apart == {(1, 0): 32, (2, 0): 16, (0, 1): 32, (0, 2): 32, (0, 4): 16}
    assert len(dln_2d("grid", 64, 10).switches) == 32


def test_many_messages_at_once_are_spread_over_equal_ways() -> None:
    """D-mod-k never doubles up where sources and targets shift; a hash does, and stays put."""
    n = 64
    sources, targets = np.arange(n), (np.arange(n) + 16) % n
    for routing, loads in (("d_mod_k", {1}), ("hashed", {1, 2, 3, 4, 5, 6})):
        made = fat_tree("tree", n, 100, 8, routing=routing)
        messages, links = made.routes(sources, targets)
        assert np.bincount(messages).tolist() == [4] * n
        used = np.bincount(links)
        assert set(used[used > 0].tolist()) <= loads
        assert (made.routes(sources, targets)[1] == links).all()
    assert used.max() > 1


def test_cables_to_one_neighbour_are_shared_out_by_targets() -> None:
    made = dln("loop", 64, 10, hosts_per_switch=16, cables=2)
    _, links = made.routes(np.arange(16), np.arange(16, 32))
    assert sorted(collections.Counter(links.tolist()).values()) == [1] * 32 + [8, 8]


def test_hosts_pass_on_where_files_say_so() -> None:
    links = tuple(Link(ends, None) for ends in (("a", "b"), ("b", "c"), ("c", "d")))
    made = Topology("row", ("a", "b", "c", "d"), (), links)
    assert made.path("a", "d") == [("a", "b"), ("b", "c"), ("c", "d")]
    assert np.isinf(made.rates).all()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("hosts: 2", "wrong.yaml: it has no fabric; write one of star, chain"),
        ("- star", "has no settings; write `key: value` lines, as fabric: star"),
        ("hosts: 2\nfabric: torus", "line 2: unknown fabric 'torus'"),
        ("fabric: star\nhosts: 2\nrate: 5\nhops: 3", "line 4: unknown key 'hops'; star takes"),
        ("fabric: star\nname: a\nhosts: 2\nrate: 5", "line 2: unknown key 'name'"),
        ("fabric: star\nhosts: 2", "yaml: star needs 'rate'"),
        ("version: 2\nfabric: star\nhosts: 2\nrate: 5", "line 1: the file is version 2; this"),
        ("fabric: [star]\nhosts: 2\nrate: 5", r"line 1: unknown fabric \['star'\]; write one of"),
        ("fabric: {a: b}\nhosts: 2\nrate: 5", r"line 1: unknown fabric \{'a': 'b'\}; write one"),
        ("fabric: chain\nhosts: 2\nrate: 5\nrates: 5", "line 4: rates is a list of rates, got 5"),
        (
            "fabric: chain\nhosts: 3\nrate: 5\nclosed: 'no'",
            "line 4: closed is true or false, got 'no'",
        ),
        (
            "fabric: explicit\nhosts: 2\nswitches: 1\nlinks: []",
            "line 3: switches is a list of names, got 1",
        ),
        (
            "fabric: explicit\nhosts: 2\nlinks: 3",
            "line 3: links is a list of .end, end, rate.*, got 3",
        ),
        ("fabric: star\nhosts: 2\0\nrate: 5", "line 2: this is not YAML: special characters"),
        ("fabric: star\nhosts: 2\nrate: 2024-13-01", "this is not YAML: month must be in 1..12"),
        ("fabric: star\nhosts: 2\nhosts: 3\nrate: 5", "line 3: the key 'hosts' appears twice"),
        ("fabric: star\nrates: [{a: 1,\n a: 2}]", "line 3: the key 'a' appears twice"),
        ("fabric: star\nhosts: [2\nrate: 5", "line 3: this is not YAML"),
        ("fabric: star\nhosts: 2\nrate: 0", "line 3: rate is 0 Mbit/s; rates are positive"),
        ("fabric: star\nhosts: 2\nrate: -5Gbit", "line 3: rate is -5000 Mbit/s"),
        ("fabric: star\nhosts: 2\nrate: .nan", "line 3: rate is nan Mbit/s"),
        ("fabric: star\nhosts: 2\nrate: 5 furlongs", "line 3: a rate is a number of Mbit/s"),
        ("fabric: chain\nhosts: 2\nrate: 5\nrates:\n- 3\n- 0", "line 6: rates is 0 Mbit/s"),
        ("fabric: clusters\nhosts: 2\nrate: 5\nmiddle: 0", "line 4: middle is 0 Mbit/s"),
        ("fabric: star\nhosts: 0\nrate: 5", "this fabric has 1 to 4096 hosts, got 0"),
        ("fabric: star\nhosts: 10000000\nrate: 5", "this fabric has 1 to 4096 hosts, got 10000000"),
        ("fabric: star\nhosts: two\nrate: 5", "hosts is a whole number, got 'two'"),
        ("fabric: clusters\nhosts: 5\nrate: 5", "5 hosts do not divide into 2 equal groups"),
        ("fabric: dln\nhosts: 12\nrate: 5", "2, 4, 8, ... switches in a ring, got 6"),
        ("fabric: dln\nhosts: 7\nrate: 5", "7 hosts do not divide among 4 switches"),
        ("fabric: dln\nhosts: 8\nrate: 5\ncables: 0", "the number of cables is a positive number"),
        ("fabric: dln_2d\nhosts: 8\nrate: 5\ngrid: 4", r"a grid is \[4, 8\] or such"),
        ("fabric: dln_2d\nhosts: 9\nrate: 5\ngrid: [3, 3]", "switches in a ring, got 3"),
        ("fabric: fat_tree\nhosts: 8\nrate: 5\nrouting: best", "unknown routing 'best'; write"),
        (
            "fabric: explicit\nhosts: 3\nswitches: [s0]\nrate: 5\nlinks: [[h0, s0], [h1, s0]]",
            "no path leads from h0 to h2",
        ),
        (
            "fabric: explicit\nhosts: 2\nswitches: [h1]\nrate: 5\nlinks: [[h0, h1]]",
            "two nodes have the name 'h1'",
        ),
        (
            "fabric: explicit\nhosts: 2\nrate: 5\nlinks:\n- [h0, h1]\n- [h0, h2]",
            "line 6: a link ends at 'h2'",
        ),
        (
            "fabric: explicit\nhosts: 2\nrate: 5\nlinks: [[h0, h1],\n [h0, h1, 0]]",
            "line 5: the link h0-h1 has 0 Mbit/s",
        ),
        ("fabric: explicit\nhosts: 2\nrate: 5\nlinks: [[h0, h0]]", "joins 'h0' with itself"),
        ("fabric: explicit\nhosts: 2\nrate: 5\nlinks: [h0]", r"a link is \[end, end\]"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=error) as raised:
        load(str(path))
    assert str(raised.value).startswith(str(path)) and "\n" not in str(raised.value)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_bytes("fabric: star\nname: Büro".encode("latin-1"))
    with pytest.raises(ValueError, match="wrong.yaml, line 2: this is not UTF-8 text"):
        load(str(path))


def test_what_cannot_be_instead_of_a_files_setting() -> None:
    with pytest.raises(ValueError, match="no topology 'stars'; name a file, or one of .*, star"):
        load("stars")
    with pytest.raises(ValueError, match="^there is no file 'no/star.yaml'; name a file"):
        load("no/star.yaml")
    with pytest.raises(ValueError, match="^/ is a folder; name a file"):
        load("/")
    with pytest.raises(ValueError, match="^rate=0: rate is 0 Mbit/s; rates are positive"):
        load("star", rate=0)
    with pytest.raises(ValueError, match="star.yaml with hosts=0: this fabric has 1 to"):
        load("star", hosts=0)
    with pytest.raises(ValueError, match="^groups=3: unknown key 'groups'; star takes hosts"):
        load("star", groups=3)


def test_what_is_no_list_is_refused_in_calls_too() -> None:
    with pytest.raises(ValueError, match="^rates is a list, such as .*, got '50%'"):
        chain("row", 4, "1Gbit", rates="50%")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="^links is a list, such as .*, got 3"):
        explicit("own", 2, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="^switches is a list, such as .*, got 's0'"):
        explicit("own", 2, [], "s0")


@pytest.mark.parametrize(
    ("text", "mbit"), [(50, 50), ("50", 50), ("2.5Gbit", 2500), ("5Mbit", 5), ("unlimited", None)]
)
def test_rates(text: Any, mbit: float | None) -> None:
    assert rate_of(text) == mbit


@pytest.mark.parametrize(("rates", "together"), [((2, 3), 5), ((None, 3), None), ((3, None), None)])
def test_cables_together_are_as_fast_as_all_of_them(rates: Any, together: float | None) -> None:
    links = tuple(Link(("h0", "s0"), rate) for rate in rates)
    (link,) = Topology("one host", ("h0",), ("s0",), links).striped().links
    assert link.rate == together
