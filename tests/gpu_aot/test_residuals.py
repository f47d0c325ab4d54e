"""Errors of formats of 16 bits are kept on GPUs, where XLA drops a conversion and its reverse."""

import pytest

from benchmarks.aot.targets import TARGETS
from gpu_aot.targets import compiled_in_a_process, needs_gpu_aot


@needs_gpu_aot
@pytest.mark.gpu_aot
@pytest.mark.parametrize("target", TARGETS)
def test_what_rounding_leaves_behind_is_computed(target: str) -> None:
    rounds = compiled_in_a_process("residuals", target)
    assert not rounds.pop("control")  # of which XLA makes x - x
    assert all(rounds.values()), rounds
