"""What would have no effect, or not go together, is refused before anything starts."""

from typing import Any

import jax
import pytest
from running import read_config

from train import agreement, check, groups, metrics, profiling, workdir
from train.errors import UserError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sync.outer_momentum": 0.9}, "outer_momentum=0.9 has no effect with config.sync.every=1"),
        ({"sync.outer_rate": 0.5}, "outer_rate=0.5 has no effect"),
        ({"sync.fragments": 3}, "fragments=3 has no effect"),
        ({"network.costs": "costs.yaml"}, "costs=costs.yaml has no effect without config.network"),
        ({"network.quality": "any"}, "quality=any is for --config.sync.method=auto"),
        ({"network.probe_mib": 8, "network.gigabits": 1.0}, "gigabits=1.0 says how fast it is"),
        (
            {"sync.gather": "bfloat16", "sync.dense_steps": 2},
            "gather=bfloat16 splits parameters, and does not go with config.sync.dense_steps=2",
        ),
        ({"sync.gather": "int8", "sync.local_momentum": 0.9}, "config.sync.local_momentum=0.9;"),
        (
            {"network.cluster": "a.yaml", "sync.algorithm": "ring"},
            "config.network.cluster=a.yaml is for choosing the algorithm, .*=ring names it; leave",
        ),
    ],
)
def test_fields(fields: dict[str, Any], message: str) -> None:
    config = read_config("digits_resnet")
    config.update_from_flattened_dict(fields)
    with pytest.raises(UserError, match=message):
        check.fit(config, 4)
    if "network" in next(iter(fields)):
        config.sync.algorithm = None
        config.sync.method, config.network.gigabits = "auto", None
        check.fit(config, 4)
    elif "sync.gather" not in fields:
        config.sync.every, config.steps = 4, 400
        check.fit(config, 4)


def test_what_is_unsaid_is_the_default() -> None:
    network = read_config("digits_resnet").network.to_dict()
    assert check.NETWORK == {name: network[name] for name in check.NETWORK}


def test_a_test_needs_only_what_it_uses() -> None:
    config = read_config("digits_resnet")
    config.sync.every, config.steps, config.optimizer.warmup_steps = 2, 3, 9
    with pytest.raises(UserError):
        check.fit(config, 4)
    check.fit_to_evaluate(config, 4)
    config.sync.fsdp = 2
    assert [groups.can_form(config.sync, n) for n in (1, 2, 3, 4, 8)] == [0, 0, 0, 1, 1]


def test_files_of_the_network_are_compared_by_what_is_in_them(tmp_path: Any) -> None:
    network = read_config("digits_resnet").network
    assert agreement._network(network) == {}
    network.cluster, network.costs = str(tmp_path / "cluster.yaml"), str(tmp_path / "no.yaml")
    found = []
    for rate in (100, 200):
        (tmp_path / "cluster.yaml").write_text(f"fabric: star\nhosts: 4\nrate: {rate}\n")
        found.append(agreement._network(network))
    cluster, costs = "contents of network.cluster", "contents of network.costs"
    assert found[0].keys() == {cluster, costs} and "there is no file" in found[0][costs]
    assert found[0][cluster] != found[1][cluster]


def test_a_cluster_changes_what_is_trained() -> None:
    free = [name for name in workdir.FREE if name.startswith("network.")]
    assert free and not any("network.cluster".startswith(name) for name in free)


def test_a_torn_line_that_is_no_text(tmp_path: Any) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "kind": "train"}\n\xff\xfe{"kind"')
    assert metrics._keep_lines_until(path, 5, ()) == [{"step": 1, "kind": "train"}]
    assert path.read_text() == '{"step": 1, "kind": "train"}\n'


def test_a_profile_that_did_not_begin_is_said(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = profiling.Profile(tmp_path, 0, 2)
    for number in range(1, 9):
        profile.before(number, jax.numpy.zeros(()))
    profile.close(None)
    assert "no profile was written: it begins with step 11" in capsys.readouterr().err
    silent = profiling.Profile(tmp_path, 0, 0)
    silent.close(None)
    assert not capsys.readouterr().err
