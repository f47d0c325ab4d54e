"""The training program on every host of a network."""

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.netlab.hosts import run_everywhere
from benchmarks.netlab.measuring import WORKER_VARIABLES
from benchmarks.netlab.network import Network
from jaxcomm.plan.fabrics import rate_of


def trained(
    network: Network, config: str, rate: str, options: Mapping[str, Any], seconds: float
) -> list[dict[str, Any]]:
    """The metrics of a run.

    Args:
      network: an open one.
      config: a file of `configs`.
      rate: of the network's links, which the run takes as known, unless it is unlimited.
      options: values of the config's fields, by their names.
      seconds: after which everything is ended.

    Returns:
      The lines of its `metrics.jsonl`.
    """
    if (known := rate_of(rate)) is not None:
        options = {"network.gigabits": known / 1e3, **options}
    with tempfile.TemporaryDirectory(prefix="netlab-") as folder:
        command = [sys.executable, "-m", "train", f"--config={config}"]
        command += [f"--config.{name}={value}" for name, value in options.items()]
        command += [f"--workdir={folder}/run"]
        run_everywhere(network, command, seconds, WORKER_VARIABLES)
        lines = Path(folder, "run/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
