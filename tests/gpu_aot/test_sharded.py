"""Parameters sharded over a further axis: state is made sharded, and travels along `data` alone."""

import math

import pytest

from benchmarks.aot.targets import TARGETS
from gpu_aot.sharded import LAYERS
from gpu_aot.targets import compiled_in_a_process, needs_gpu_aot

DENSE, BIAS = 4 * 4096 * 1024, 4 * 1024  # bytes


@needs_gpu_aot
@pytest.mark.gpu_aot
@pytest.mark.parametrize("target", TARGETS)
def test_init_and_step_on_two_by_four(target: str) -> None:
    found = compiled_in_a_process("sharded", target)
    # A residual and two moments, a quarter each; of the bias the moments.
    assert 0 <= found["state"] - (3 * DENSE / 4 + 2 * BIAS) < 2048
    pairs = [sent for op, sent, size in found["sent"] if size == 2]
    over_fsdp = [sent for op, sent, size in found["sent"] if size != 2]
    # Both hops of int8 between two devices: half of a quarter each; and the bias with the flag.
    assert sum(pairs) == pytest.approx(2 * DENSE / 4 / 4 / 2 + BIAS, rel=0.04)
    assert sum(over_fsdp) <= 8  # whether the other shards are finite too
    # A copy of the residuals comes with the state, and one leaves the loop over layers, where a
    # kernel of Mosaic takes a layer's sum with the residual in float32.
    half, layer = 2 * math.prod(LAYERS), 4 * math.prod(LAYERS[1:])
    floats, halves = found["memory"]["float32"], found["memory"]["bfloat16"]
    state, temporaries = (a - b for a, b in zip(floats, halves, strict=True))
    assert state >= 0.99 * half and temporaries >= half - layer
    # Of 12 matrices 8 devices make 2 each: parts of 16 there and back.
    (by_optax, memory), (ours, less) = found["muon"]["optax"], found["muon"]["orthogonalize"]
    assert ours == 2 * 4 * 16 * math.prod(LAYERS[1:]) / 8 * 7 / 8
    assert ours < by_optax / 10 and less < memory
