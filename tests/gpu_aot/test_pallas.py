"""Mosaic kernels compile for GPUs that are not there, spill nothing and move what they must."""

import re
from pathlib import Path

import pytest

from benchmarks.aot.targets import TARGETS
from gpu_aot.targets import compiled_in_a_process, needs_gpu_aot
from jaxcomm import _compat

pytestmark = [needs_gpu_aot, pytest.mark.gpu_aot]
KERNELS = (
    *("int8", "int8 random", "int4 random", "fp8 e4m3", "fp8 e5m2"),
    *("cnat", "cnat random", "cnat all", "cnat all random", "cnat all sum"),
)
# Below capability 9.0 the oldest Mosaic ends the process, so it must not be asked.
REFUSED = {"a10": "needs compute capability 9.0"} if _compat.jax_version() < (0, 11) else {}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("target", TARGETS)
def test_one_kernel_that_spills_nothing(
    target: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in (("TO", str(tmp_path)), ("PTX", "1"), ("PTXAS", "1")):
        monkeypatch.setenv(f"MOSAIC_GPU_DUMP_{variable}", value)
    report = compiled_in_a_process("pallas", target, name, str(2**20))
    if target in REFUSED:
        assert REFUSED[target] in report["refused"]
        return
    least = report["ideal"] / 100  # more than keys, and than what is left of a reduction
    large = [kernel for kernel in report["kernels"] if kernel[1] + kernel[2] > least]
    assert report["moved"] / report["ideal"] < 1.001 and len(large) == report["passes"], report
    ptxas = "".join(path.read_text() for path in tmp_path.glob("*.ptxas"))
    assert re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", ptxas) == [("0", "0")]
    assert "sm_90" in ptxas if target == "h100" else "sm_86" in ptxas


# Of which the rows or the blocks are cut short, or begin anywhere.
CUT = ("int8 random", "fp8 e4m3", "cnat random", "cnat all random", "cnat all sum")


@pytest.mark.parametrize("name", CUT)
def test_odd_lengths_cost_no_more(name: str) -> None:
    for n in (2**20 + 17, 2**20 + 32):
        report = compiled_in_a_process("pallas", "h100", name, str(n))
        assert report["moved"] / report["ideal"] < 1.05, report
    assert "kernels" in compiled_in_a_process("pallas", "h100", name, "17")


@pytest.mark.parametrize(
    "name", ["int8 messages", "fp8 messages", "cnat messages", "cnat all messages"]
)
def test_messages_whose_ends_are_put_in_later_are_not_copied(name: str) -> None:
    report = compiled_in_a_process("pallas", "h100", name, str(8 * (2**17 + 17)))
    assert report["moved"] / report["ideal"] < 1.05, report


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_with_64_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    report = compiled_in_a_process("pallas", "h100", name, str(2**20))
    assert report["moved"] / report["ideal"] < 1.001, report
