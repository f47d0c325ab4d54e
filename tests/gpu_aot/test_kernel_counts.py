"""Updates of many leaves take few kernels of each on GPUs, where a launch costs microseconds."""

import pytest

from benchmarks.aot.targets import TARGETS
from gpu_aot.targets import compiled_in_a_process, needs_gpu_aot

PAIRS = 12
# Adam alone takes 24.
MOST = {
    "float32": 48,
    "int4": 52,
    "bfloat16": 36,
    "vote": 62,
    "one_bit_adam": 52,
    "factored_adam": 120,
}


@needs_gpu_aot
@pytest.mark.gpu_aot
@pytest.mark.parametrize("target", TARGETS)
def test_leaves_cost_few_kernels(target: str) -> None:
    found = compiled_in_a_process("kernel_counts", target, str(PAIRS))
    assert found.keys() == MOST.keys()
    assert all(kernels <= MOST[method] for method, (kernels, _) in found.items()), found
    # A kernel that reads the residuals of other leaves too cannot write in the place of its own.
    assert found["int4"][1] == 0
