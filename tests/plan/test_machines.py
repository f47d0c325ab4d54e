"""Clusters: what their files and settings say, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from jaxcomm import plan

FREE = plan.Costs("none", 0.0, 0.0, 1.0, False, 0.0, False, False, 0.0, {})
STAR = "fabric: star\nhosts: 4\nrate: 1\ndevice: gpu\n"


@pytest.mark.parametrize(
    ("text", "sets", "message"),
    [
        ("fabric: star\nhosts: 4\nrate: 0\n", {}, "line 3: rate is 0 Mbit/s"),
        ("fabric: star\nhosts: 4\nrate: 1 parsec\n", {}, "line 3: a rate is a number of Mbit/s"),
        ("fabric: star\nhosts: 4\nrate: 1\nnodes: 3\n", {}, "line 4: nodes has devices, nics"),
        ("fabric: star\nhosts: 4\nrate: 1\nnodes: {gpus: 3}\n", {}, "line 4: unknown key 'gpus'"),
        ("fabric: star\nhosts: 4\nrate: 1\norder: [0, 1]\n", {}, "line 4: order names every host"),
        (
            "fabric: star\nhosts: 4\nrate: 1\ndevice: abacus\n",
            {},
            "line 4: unknown device 'abacus'",
        ),
        ("fabric: star\nhosts: 4\nrate: 1\ncosts: no.yaml\n", {}, "line 4: there is no file"),
        (
            "version: 9\nfabric: star\nhosts: 4\nrate: 1\n",
            {},
            "line 1: the file is version 9; this",
        ),
        ("fabric: star\nhosts: 2\nrate: 1\norder: [0, '1']\n", {}, "line 4: order names every"),
        ("fabric: star\nhosts: 2\nrate: 1\norder: [0, yes]\n", {}, "line 4: order names every"),
        ("fabric: star\nhosts: 4\nrate: 1\ndevice: [a]\n", {}, r"line 4: unknown device \['a'\]"),
        (STAR, {"device": "tpu"}, "^device=tpu: unknown device 'tpu'; write cpu or gpu"),
        (STAR + "costs: no.yaml\n", {"device": "cpu"}, "^device=cpu: device chooses default costs"),
        (STAR, {"order": "[0, 0]"}, r"^order=\[0, 0\]: order names every host from 0 to 3 once"),
        (STAR, {"costs": "no.yaml"}, "^costs=no.yaml: there is no file"),
        (STAR, {"nodes.devices": "0"}, "^nodes.devices=0: devices is a positive number, got 0"),
        (STAR, {"nodes.nics": "0"}, "^nodes.nics=0: nics is a positive number, got 0"),
        (STAR, {"nodes.bandwidth": "foo"}, "^nodes.bandwidth=foo: a rate is a number of Mbit/s"),
        (STAR, {"nodes.bandwidth": "-1"}, "^nodes.bandwidth=-1: bandwidth is -1 Mbit/s"),
        (STAR, {"nodes.gpus": "1"}, "^nodes.gpus=1: unknown key 'gpus' of nodes"),
        (STAR, {"link[h0,s0].rate": "foo"}, r"^link\[h0,s0\]=foo: a rate is a number of Mbit/s"),
        (STAR, {"rate": "[1"}, r"^rate=\[1: this is no YAML: "),
        ("fabric: star\nhosts: 4\nrate: 1\n", {"link[s0,h9].rate": 5}, "there is no such link"),
        ("fabric: star\nhosts: 4\nrate: 1\n", {"link.rate": 5}, r"write link\[s0,s1\]"),
        ("fabric: star\nhosts: 4\nrate: 1\n", {"gpus.rate": 5}, "gpus.rate: unknown setting"),
        ("fabric: star\nhosts: 4\nrate: 1\n", {"rate": "-3"}, "rate=-3: rate is -3 Mbit/s"),
        ("fabric: explicit\nhosts: 3\nlinks: [[h0, h1, 5]]\n", {}, "no path leads from h0 to h2"),
    ],
)
def test_a_wrong_cluster_is_one_line(
    text: str, sets: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        plan.load_cluster(str(path), sets)
    assert "\n" not in str(error.value)


def test_settings_change_a_link() -> None:
    slow = plan.load_cluster("clusters", {"link[0,1].bandwidth": "10Mbit", "hosts": "4"}, FREE)
    rates = {link.ends: link.rate for link in slow.topology.links}
    assert rates["s0", "s1"] == 10 and rates["h0", "s0"] == 50
    doubled = plan.load_cluster("star", {"links_per_host": "2"}, FREE)
    assert len(doubled.topology.links) == 2 * doubled.devices
