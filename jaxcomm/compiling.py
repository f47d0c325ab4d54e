"""What the compiler has to be told, so that exchanges travel while gradients are computed."""

from typing import Any

import jax

_GPUS = ("gpu", "cuda", "rocm")


def compiler_options() -> dict[str, bool]:
    """Options for the `jax.jit` of a training step: `jax.jit(step, compiler_options=...)`.

    On GPUs they ask for XLA's latency-hiding scheduler. Below compute capability 9.0 it is off
    by default, and every collective is waited for as soon as it has begun.

    Returns:
      A dict for the platform of the current mesh, or without one of the default device; empty
      where nothing has to be said.
    """
    mesh = jax.sharding.get_mesh()
    device: Any = jax.devices()[0] if mesh.empty else mesh.devices.flat[0]
    return {"xla_gpu_enable_latency_hiding_scheduler": True} if device.platform in _GPUS else {}
