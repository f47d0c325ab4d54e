"""Compaction reads everything once and moves little beside it, on GPUs that are not there."""

import pytest

from benchmarks.aot.targets import TARGETS
from gpu_aot.targets import compiled_in_a_process, needs_gpu_aot

N = 2**22
LIMIT = 1.05
XLA = 1.35  # its words and its marks of slots go through memory several times


@needs_gpu_aot
@pytest.mark.gpu_aot
@pytest.mark.parametrize("n", [N, N + 17])
@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("target", TARGETS)
def test_what_is_moved_beside_the_entries(
    target: str, is_long: bool, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_ENABLE_X64", str(int(is_long)))
    ratios = compiled_in_a_process("compaction", target, str(n), "0.01")
    assert 1 < ratios["triton"] < LIMIT < ratios["xla"] < XLA, ratios
