"""The training program as a process of its own, and reading what it leaves behind."""

import dataclasses
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from ml_collections import config_dict

ROOT = Path(__file__).parents[2]


def read_config(name: str, *arguments: str) -> config_dict.ConfigDict:
    """A config of `configs/`, as its file has it."""
    return runpy.run_path(str(ROOT / "configs" / f"{name}.py"))["get_config"](*arguments)


def python(*sources: str) -> list[list[str]]:
    """A command for each of some programs."""
    return [[sys.executable, "-c", source] for source in sources]


@dataclasses.dataclass
class Program:
    """Starts `python -m train` and `python -m train.launch`, and ends what it has started."""

    data_dir: str
    started: list[subprocess.Popen[str]] = dataclasses.field(default_factory=list)

    def start(
        self, module: str, *arguments: str, devices: int = 1, **variables: str
    ) -> subprocess.Popen[str]:
        """Starts a module of the training program ; each process has this many CPU devices."""
        flags = os.environ.get("XLA_FLAGS", "")  # of the tests, such as those for quick compiling
        env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}",
            "TFDS_DATA_DIR": self.data_dir,
            **variables,
        }
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def run(
        self, module: str, *arguments: str, devices: int = 1, timeout: float | None = 150
    ) -> subprocess.CompletedProcess[str]:
        """Starts a module and waits for its end."""
        process = self.start(module, *arguments, devices=devices)
        stdout, stderr = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def children(pid: int) -> list[int]:
    """The processes that a process has started and that still run (Linux)."""
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def read_lines(workdir: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind in metrics.jsonl."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def checkpoint_bits(workdir: Path, step: int) -> dict[str, bytes]:
    """Every array of a checkpoint as bytes, by its name."""
    path = workdir / "checkpoints" / str(step) / "state"
    checkpointer = ocp.PyTreeCheckpointer()
    tree = checkpointer.metadata(path).item_metadata.tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    arrays = checkpointer.restore(path, restore_args=as_numpy)
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}
