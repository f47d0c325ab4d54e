"""Simulated devices, as many as one likes, on the cores that there are."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import jaxcomm

ROOT = Path(__file__).parents[1]


def run_python(source: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script of somebody who has set nothing."""
    ours = ("NPROC", "XLA_FLAGS", "JAX_PLATFORMS")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(
        [sys.executable, "-c", source],
        cwd=ROOT,
        env={**env, **variables},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.multiprocess
@pytest.mark.parametrize("flags", ["", "--xla_force_host_platform_device_count=3 --xla_dump_to="])
def test_a_script_that_runs_far_ahead(flags: str) -> None:
    """More programs in flight than the machine has cores; XLA would end the process after 10 s."""
    done = run_python(
        "import jaxcomm\n"
        "jaxcomm.simulate_devices(8)\n"
        "import jax, jax.numpy as jnp\n"
        "jax.set_mesh(jaxcomm.data_mesh())\n"
        "f = jax.jit(jax.shard_map(lambda x: jaxcomm.pmean(x, 'data'), in_specs=jax.P('data'),"
        " out_specs=jax.P(), check_vma=False))\n"
        "x = jnp.arange(8.0)\n"
        "for last in [f(x) for _ in range(300)]: pass\n"
        "print(jax.device_count(), float(last[0]))\n",
        XLA_FLAGS=f"{flags} --xla_cpu_collective_call_terminate_timeout_seconds=10",
    )
    assert done.stdout == "8 3.5\n", done.stderr


def test_too_late() -> None:
    assert jax.devices()  # jax has started
    with pytest.raises(RuntimeError, match=r"simulate_devices\(4\) comes too late.*call it first"):
        jaxcomm.simulate_devices(4)


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "8"])
def test_a_count_that_is_none(count: int) -> None:
    with pytest.raises(ValueError, match="a positive number of devices, got"):
        jaxcomm.simulate_devices(count)
