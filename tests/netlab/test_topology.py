"""Topologies: what their files say, shortest paths, and what cannot be."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.netlab import topology
from benchmarks.netlab.topology import TOPOLOGIES


@pytest.mark.parametrize("path", sorted(TOPOLOGIES.glob("*.yaml")), ids=lambda p: p.stem)
@pytest.mark.parametrize("hosts", [None, 2, 4])
def test_every_file_has_paths_between_all_hosts(path: Path, hosts: int | None) -> None:
    made = topology.load(path.stem, hosts=hosts, rate="1Gbit")
    ends = {link.ends for link in made.links}
    assert all(link.rate in (1000, 25, 50) for link in made.links)
    for a in made.hosts:
        for b in made.hosts:
            steps = made.path(a, b)
            assert len(steps) == made.distances(b)[a]
            assert all((x, y) in ends or (y, x) in ends for x, y in steps)
            assert [x for x, _ in steps[1:]] == [y for _, y in steps[:-1]]


def test_what_a_file_means() -> None:
    made = topology.load("clusters", rate=200)
    assert len(made.hosts) == 8 and made.switches == ("s0", "s1") and len(made.links) == 9
    assert made.path("h0", "h7") == [("h0", "s0"), ("s0", "s1"), ("s1", "h7")]
    assert made.path("h4", "h7") == [("h4", "s1"), ("s1", "h7")]
    rates = [k.rate for k in topology.load("chain_heterogeneous").links if k.ends[0][0] == "s"]
    assert rates == [50, 25, 50, 25, 50, 25, 50]
    assert len(topology.load("star", links_per_host=2).links) == 8
    # Two targets behind the same switches are reached over two of them.
    tree = topology.load("fat_tree")
    assert tree.path("h0", "h6")[1] != tree.path("h0", "h7")[1]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("hosts: 2", "has no fabric; write one of star, chain"),
        ("fabric: torus\nhosts: 2", "unknown fabric 'torus'"),
        ("fabric: star\nhosts: 2\nrate: 5\nhops: 3", "a setting does not fit: .*'hops'"),
        ("fabric: star\nhosts: 2\nrate: 0", "has 0 Mbit/s; rates are 0.1 to 10000"),
        ("fabric: star\nhosts: 2\nrate: 40Gbit", "has 40000 Mbit/s; rates are"),
        ("fabric: star\nhosts: 2\nrate: quick", "a rate is a number of Mbit/s"),
        ("fabric: star\nhosts: 0\nrate: 5", "needs at least 1 hosts, got 0"),
        ("fabric: clusters\nhosts: 5\nrate: 5", "5 hosts do not divide into 2 equal groups"),
        (
            "fabric: explicit\nhosts: 3\nswitches: [s0]\nrate: 5\nlinks: [[h0, s0], [h1, s0]]",
            "no path leads from h0 to h2",
        ),
        (
            "fabric: explicit\nhosts: 2\nswitches: [h1]\nrate: 5\nlinks: [[h0, h1]]",
            "two nodes have the name 'h1'",
        ),
        ("fabric: explicit\nhosts: 2\nrate: 5\nlinks: [[h0, h2]]", "a link ends at 'h2'"),
        ("fabric: explicit\nhosts: 2\nrate: 5\nlinks: [[h0, h0]]", "joins 'h0' with itself"),
        ("fabric: explicit\nhosts: 2\nrate: 5\nlinks: [h0]", r"a link is \[end, end\]"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=error):
        topology.load(str(path))


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="no topology 'stars'; name a file, or one of .*'star'"):
        topology.load("stars")


@pytest.mark.parametrize(
    ("text", "mbit"), [(50, 50), ("50", 50), ("2.5Gbit", 2500), ("5Mbit", 5), ("unlimited", None)]
)
def test_rates(text: Any, mbit: float | None) -> None:
    assert topology.rate_of(text) == mbit
