"""Programs compiled for GPUs or TPUs that are not there, each target in a process of its own."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent.parent

needs_gpu_aot = pytest.mark.skipif(
    find_spec("jax_cuda13_plugin") is None,
    reason='compiling for GPUs needs the gpu-aot extra: pip install "jaxcomm[gpu-aot]"',
)

needs_tpu_aot = pytest.mark.skipif(
    find_spec("libtpu") is None,
    reason='compiling for TPUs needs the tpu-aot extra: pip install "jaxcomm[tpu-aot]"',
)
_NO_TPU = {  # so that libtpu does not look for a machine with TPUs
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def compiled_in_a_process(module: str, *args: str, timeout: float = 600) -> Any:
    """What a program of this folder, or of another, prints as its last line, read as JSON."""
    finished = subprocess.run(
        [sys.executable, "-m", module if "." in module else f"gpu_aot.{module}", *args],
        env={
            **{name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
            "JAX_PLATFORMS": "cpu",
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
            **_NO_TPU,
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
        },
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    return json.loads(finished.stdout.splitlines()[-1])
