"""States beside gradients of convolutions are neither transposed nor copied on GPUs."""

import pytest

from gpu_aot.convolutions import METHODS
from gpu_aot.targets import compiled_in_a_process, needs_gpu_aot


@needs_gpu_aot
@pytest.mark.gpu_aot
def test_states_stay_where_they_are() -> None:
    found = compiled_in_a_process("convolutions", "h100")
    assert found.keys() == METHODS.keys()
    # There are 16 matrices and 31 other leaves. A gradient may be transposed once.
    assert all(copies <= 6 and turned <= 16 for copies, turned in found.values()), found
