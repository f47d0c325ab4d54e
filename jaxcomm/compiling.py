"""Compiler options that let exchanges overlap with the backward pass."""

from typing import Any

import jax

_GPUS = ("gpu", "cuda", "rocm")
_OVERLAP: dict[str, bool | int] = {"xla_gpu_enable_latency_hiding_scheduler": True}
# XLA would join a layer's reduce-scatters within groups, to start them after its last gradient. The
# exchange between groups follows them, and no computation would be left to hide it.
_IN_GROUPS: dict[str, bool | int] = {"xla_gpu_reduce_scatter_combine_threshold_bytes": 1}


def compiler_options() -> dict[str, bool | int]:
    """Options for the `jax.jit` of a training step: `jax.jit(step, compiler_options=...)`.

    On GPUs they turn on XLA's latency-hiding scheduler. Below compute capability 9.0 it is off by
    default, and the program waits for every collective as soon as it starts. On a mesh of several
    axes, such as groups of devices (HSDP), they also keep reduce-scatters from being merged.

    Returns:
      A dict for the platform of the current mesh, or of the default backend if no mesh is set;
      empty where no option is needed.

    Example:
      >>> import jax, jaxcomm
      >>> options = jaxcomm.compiler_options()
      >>> options  # of CPU devices
      {}
      >>> step = jax.jit(lambda params: params, compiler_options=options)
    """
    mesh = jax.sharding.get_mesh()
    device: Any = jax.devices()[0] if mesh.empty else mesh.devices.flat[0]
    if device.platform not in _GPUS:
        return {}
    in_groups = not mesh.empty and sum(size > 1 for size in mesh.devices.shape) > 1
    return _OVERLAP | (_IN_GROUPS if in_groups else {})
