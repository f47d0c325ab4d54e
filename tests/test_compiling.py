"""What the compiler is told on each platform."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxcomm


@pytest.mark.newest
def test_on_cpu_there_is_nothing_to_say() -> None:
    assert jaxcomm.compiler_options() == {}
    with jax.set_mesh(jaxcomm.data_mesh()):
        options = jaxcomm.compiler_options()
        assert options == {}
        assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2


@pytest.mark.parametrize("platform", ["gpu", "cuda"])
def test_on_gpus_of_the_mesh_work_is_scheduled(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def options(*shape: int) -> dict[str, bool | int]:
        devices = np.full(shape, SimpleNamespace(platform=platform))
        mesh = SimpleNamespace(empty=False, devices=devices)
        monkeypatch.setattr(jax.sharding, "get_mesh", lambda: mesh)
        return jaxcomm.compiler_options()

    overlap = {"xla_gpu_enable_latency_hiding_scheduler": True}
    assert options(1) == options(8) == options(8, 1) == overlap
    groups = options(2, 4)
    assert groups.pop("xla_gpu_reduce_scatter_combine_threshold_bytes") == 1
    assert groups == overlap
