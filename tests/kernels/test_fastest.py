"""What None stands for: the implementation that was the fastest where it was timed."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks import on_gpu
from jaxcomm import _compat
from jaxcomm.kernels import _fastest, _implementations


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the first device be an H100, for what is asked and not run."""
    device = SimpleNamespace(compute_capability="9.0", platform="gpu")
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [device])


def test_the_file_is_what_was_measured() -> None:
    assert on_gpu.fastest() == _fastest.FILE.read_text(), "run python -m benchmarks.tables"


def test_a_kernel_has_to_win_by_a_margin() -> None:
    def rows(us: float) -> dict[float, dict[str, Any]]:
        return {16.0: {"us": us}}

    for kernel, wanted in ((94.0, "mosaic"), (96.0, "xla"), (120.0, "xla")):
        times = {("f", "xla"): rows(100.0), ("f", "mosaic"): rows(kernel)}
        assert on_gpu._best(times, "f", ("xla", "mosaic"), 16.0) == wanted


def test_a_cpu_has_the_plain_version() -> None:
    for operation in _implementations.OPERATIONS:
        assert _implementations.choose(operation, None, 2**20) == "xla"


def test_a_gpu_that_was_not_timed_has_the_plain_version(
    h100: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax.local_devices()[0], "compute_capability", "8.6")
    monkeypatch.setattr(_compat, "jax_version", lambda: (0, 12, 0))
    assert _implementations.choose("integers.encode", None, 2**20) == "xla"


def test_a_gpu_that_was_timed_has_the_fastest_at_the_nearest_size(h100: None) -> None:
    choose = _implementations.choose
    assert choose("integers.encode", None, 2**20) == "mosaic"
    assert choose("integers.encode", {"select.compact": "xla"}, 2**20) == "mosaic"
    assert choose("integers.encode", "xla", 2**20) == "xla"
    assert choose("select.compact", None, 2**20) == "triton"
    sizes = {n: choose("nine_bits.decode_and_sum", None, n) for n in (100, 2**22, 2**26, 2**30)}
    assert sizes == {100: "xla", 2**22: "xla", 2**26: "mosaic", 2**30: "mosaic"}
    assert choose("integers.encode", None, 2**31) == "xla"  # more than kernels can number


def test_what_the_fastest_does_not_take_is_left_to_the_plain_version(h100: None) -> None:
    def run(name: str, x: jax.Array) -> jax.Array:
        if name == "mosaic":
            raise NotImplementedError("too many messages")
        return x + 1

    def called(option: str | None) -> jax.Array:
        return _implementations.call("integers.encode", option, run, (jnp.zeros(3),), elements=3)

    assert called(None).tolist() == [1, 1, 1]
    with pytest.raises(NotImplementedError, match="too many messages"):
        called("mosaic")


def test_a_program_for_a_cpu_beside_a_gpu_has_the_plain_version(h100: None) -> None:
    """As on a mesh of CPUs, where the default device is the GPU."""
    run = lambda name, x: x + (1 if name == "mosaic" else 2)  # noqa: E731
    call = partial(_implementations.call, "integers.encode", None, run, elements=8)
    assert jax.jit(lambda x: call((x,)))(jnp.zeros(2)).tolist() == [2, 2]
    on_gpu = jax.jit(lambda x: call((x,))).trace(jnp.zeros(2)).lower(lowering_platforms=("cuda",))
    assert "dense<1.0" in on_gpu.as_text() and "dense<2.0" not in on_gpu.as_text()
