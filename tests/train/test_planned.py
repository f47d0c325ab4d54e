"""What the training program takes from a description of the network."""

import jax
import pytest
from running import read_config

import jaxcomm
from jaxcomm import plan
from jaxcomm.collectives.algorithms import _default
from jaxcomm.plan.families import QUALITY, Method
from train import planned
from train.errors import UserError


@pytest.fixture
def config(tmp_path):
    config = read_config("digits_resnet")
    config.network.cluster = str(tmp_path / "cluster.yaml")
    (tmp_path / "cluster.yaml").write_text("fabric: star\nhosts: 4\nrate: 1Gbit\n")
    yield config
    plan.use(None)


def resolved(config, workdir, devices, goes_on=False):
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:devices])):
        return planned.resolved(config, workdir, None, None, None, None, goes_on)


def test_a_cluster_chooses_the_algorithm_of_any_method(config, tmp_path):
    sync = resolved(config, tmp_path, 4)
    assert (sync.method, sync.algorithm) == (config.sync.method, None)
    assert _default._chooser is not None
    config.network.cluster = ""
    resolved(config, tmp_path, 4)
    assert _default._chooser is None


def test_a_cluster_of_another_size_is_refused(config, tmp_path):
    with pytest.raises(UserError, match=r"cluster.yaml has 4 devices, this run 2\."):
        resolved(config, tmp_path, 2)


def test_one_device_needs_no_plan_and_a_network_that_is_there(config, tmp_path):
    config.sync.method = "auto"
    with pytest.raises(UserError, match=r"cluster.yaml has 4 devices, this run 1\."):
        resolved(config, tmp_path, 1)
    config.network.cluster, config.network.costs = "", "no/such/costs.yaml"
    with pytest.raises(UserError, match=r"config.network: .*no/such/costs.yaml"):
        resolved(config, tmp_path, 1)
    config.network.costs = ""
    assert resolved(config, tmp_path, 1).method == "mean"


def test_a_choice_is_of_one_run(config, tmp_path):
    config.sync.method, config.network.cluster = "auto", ""
    (tmp_path / "exchange.json").write_text('{"config": {"method": "majority_vote"}}')
    assert resolved(config, tmp_path, 1, goes_on=True).method == "majority_vote"
    assert resolved(config, tmp_path, 1).method == "mean"  # a new run in the same directory
    for text in ('{"conf', "[]", "{}"):
        (tmp_path / "exchange.json").write_text(text)
        with pytest.raises(UserError, match="exchange.json, the exchange that the run chose at"):
            resolved(config, tmp_path, 1, goes_on=True)
    (tmp_path / "exchange.json").write_text('{"config": {"method": "mean", "of_later": 3}}')
    with pytest.raises(UserError, match=r"json is of another version: .*by --config.sync.method"):
        resolved(config, tmp_path, 1, goes_on=True)


def test_measuring_is_announced(config, tmp_path, capsys, monkeypatch):
    config.sync.method = "auto"

    def probe(cluster):
        raise ValueError("as far as it comes")

    monkeypatch.setattr(plan, "probe", probe)
    with pytest.raises(UserError, match="as far as it comes"):
        resolved(config, tmp_path, 4)
    said = capsys.readouterr().err
    assert said == (
        "config.sync.method=auto measures a step without exchange, messages, codes and the leading "
        "exchanges, which may take minutes\n"
    )


def test_the_planner_keeps_the_order_of_the_devices_and_knows_of_local_steps(
    config, tmp_path, monkeypatch
):
    config.sync.method, config.sync.every = "auto", 4
    rooms = "fabric: clusters\nhosts: 4\nrate: 1Gbit\nmiddle: 100Mbit\norder: [0, 2, 1, 3]"
    (tmp_path / "cluster.yaml").write_text(rooms)
    config.network.costs = str(tmp_path / "costs.yaml")
    plan.defaults("cpu").save(config.network.costs)
    timed = []
    monkeypatch.setattr(plan, "timed", lambda found, devices: timed.append(found) or found)
    monkeypatch.setattr(planned, "_step_seconds", lambda *_: 0.1)
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
        planned.resolved(config, tmp_path, None, {"w": jax.numpy.zeros((64, 64))}, None, None)
    assert timed[0].cluster.order == (0, 2, 1, 3) and timed[0].load.accumulate == 4


def test_nothing_is_left_of_another_method(config):
    """What is trained is what was timed, whatever the config was written for."""
    config.sync.update(codec="scaled_sign", error_feedback=True, second_hop="int8", exempt=("b",))
    for method, expected in (
        (Method("float32", "native"), {"method": "mean", "codec": "float32"}),
        (Method("int4", "ring"), {"codec": "int4", "error_feedback": True, "algorithm": "ring"}),
        (
            Method("vote", "ring"),
            {"method": "majority_vote", "algorithm": "ring", "local_optimizer": True},
        ),
        (Method("powersgd4", "native"), {"method": "low_rank_mean", "rank": 4}),
    ):
        sync = config.sync.copy_and_resolve_references()
        sync.update(planned._fields(sync, method))
        made = {name: value for name, value in sync.items() if value is not None}
        assert made.items() >= expected.items() and made["exempt"] == ("b",)
        assert "second_hop" not in made
        assert ("codec" in made) == (method.about.options["method"] == "mean")
        assert ("error_feedback" in made) == (method.family == "int4")


def test_the_quality_is_that_of_the_command_line(config):
    assert config.network.quality == QUALITY


def test_only_methods_that_fit_the_rest_of_the_config_are_compared(config):
    def fitting(optimizer="sgd", shards="shuffled", **fields):
        changed = config.copy_and_resolve_references()
        changed.optimizer.name, changed.data.shards = optimizer, shards
        changed.sync.update(fields)
        changed.network.quality = "any"
        fit = planned._allowed(changed, 4, 1)
        assert all(m.every == 1 for m in fit)
        found = {m.family for m in fit}
        assert {"float32", "int8"} <= found and "float16" not in found
        return found

    assert {"vote", "oktopk", "powersgd4", "int4", "cnat"} <= fitting()
    assert not {"vote", "oktopk", "powersgd4"} & fitting("adamw")
    assert {"int4", "cnat"} <= fitting("adamw")
    means = {"float32", "bfloat16", "int8", "fp8_e4m3"}
    assert fitting("muon") == {*means, "int2", "scaled_sign"}
    assert fitting("muon", "by_label") == means
    assert "vote" not in fitting(every=4) and "oktopk" in fitting(every=4)
    assert not {"oktopk", "powersgd4", "scaled_sign"} & fitting(gather="bfloat16")
    assert "scaled_sign" in fitting("adamw") and "scaled_sign" in fitting("adamw", every=4)
    assert "vote" in fitting(correct_every=8)
    by_label = fitting("sgd", "by_label")
    assert "vote" not in by_label and "scaled_sign" in by_label
    assert not {"vote", "scaled_sign", "int2"} & fitting("adamw", "by_label")
    assert "int2" not in fitting("adamw", "by_position")
    assert "int2" in fitting("adamw", "by_label", local_optimizer=True)  # as it was asked for
    assert "scaled_sign" in fitting("adamw", "by_label", every=4)


def test_few_bits_come_behind_each_devices_own_optimizer(config):
    signs = Method("scaled_sign", "direct")
    assert planned._fields(config.sync, signs)["local_optimizer"]
    config.sync.every = 4  # each device has one of its own already
    assert "local_optimizer" not in planned._fields(config.sync, signs)
