"""Label-skewed shards: with the mean all devices learn all classes, without exchange none does."""

from pathlib import Path
from typing import Any

from ml_collections import config_dict
from running import read_lines

from train import loop


def train(config: config_dict.ConfigDict, workdir: Path, method: str, steps: int) -> dict[str, Any]:
    """Eight devices; device i holds the digits congruent to i, one or two of the ten."""
    config.steps = config.eval_every = config.checkpoint.every = steps
    config.data.shards = "by_label"
    config.sync.method = method
    return loop.train(config, workdir, 0.0)


def test_the_mean_learns_what_no_device_has_seen(
    config: config_dict.ConfigDict, tmp_path: Path
) -> None:
    assert config.sync.codec == "bfloat16"
    summary = train(config, tmp_path, "mean", 300)
    assert summary["devices"] == 8
    assert summary["test_accuracy"] >= 0.97


def test_the_control_without_exchange_fails(config: config_dict.ConfigDict, tmp_path: Path) -> None:
    summary = train(config, tmp_path, "none", 100)
    assert summary["test_accuracy"] < 0.6
    # It has learned all the same: what its own device shows it.
    assert read_lines(tmp_path, "train")[-1]["accuracy"] > 0.95
