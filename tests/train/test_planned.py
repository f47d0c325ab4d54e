"""What the training program takes from a description of the network."""

import jax
import pytest
from running import read_config

import jaxcomm
from jaxcomm import plan
from jaxcomm.collectives.algorithms import _default
from train import planned
from train.errors import UserError


@pytest.fixture
def config(tmp_path):
    config = read_config("digits_resnet")
    config.network.cluster = str(tmp_path / "cluster.yaml")
    (tmp_path / "cluster.yaml").write_text("fabric: star\nhosts: 4\nrate: 1Gbit\n")
    yield config
    plan.use(None)


def resolved(config, workdir, devices):
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:devices])):
        return planned.resolved(config, workdir, None, None, None, None)


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
