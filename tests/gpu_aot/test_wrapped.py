"""State of each device stays where it is in steps without an exchange, also on GPUs."""

import pytest

from benchmarks.aot.targets import TARGETS
from gpu_aot.targets import compiled_in_a_process, needs_gpu_aot


@needs_gpu_aot
@pytest.mark.gpu_aot
@pytest.mark.parametrize("target", TARGETS)
def test_wrappers_send_what_is_explained_and_move_no_state(target: str) -> None:
    """XLA gathers what a branch passes on, unless it is told how that is sharded."""
    found = compiled_in_a_process("wrapped", target)
    for name, row in found.items():
        assert row["moved"] == [], name
        assert row["sent"] == pytest.approx(row["explained"], rel=0.01), name
        assert row["copied"] == 0, name
