"""Accelerators that programs are compiled for where there is none: what the compiler must know.

Compiling for a target takes the packages of the `gpu-aot` or `tpu-aot` extra, and a process of its
own for each target: Pallas keeps the kernels that it has compiled, whatever they were compiled for,
and takes the architecture of the first device that it sees.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding

# Left out: what the compiler does not ask for. Numbers are from the vendor's data sheets.
_LIMITS = """
  threads_per_block_limit: 1024 threads_per_warp: 32 fpus_per_core: 128
  shared_memory_per_block: 49152 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
"""
_H100 = """
  cuda_compute_capability { major: 9 minor: 0 }
  core_count: 132 threads_per_core_limit: 2048 clock_rate_ghz: 1.98
  shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448 l2_cache_size: 52428800
  memory_bandwidth: 3352320000000 device_memory_size: 84978434048
"""
_A10 = """
  cuda_compute_capability { major: 8 minor: 6 }
  core_count: 72 threads_per_core_limit: 1536 clock_rate_ghz: 1.695
  shared_memory_per_core: 102400 shared_memory_per_block_optin: 101376 l2_cache_size: 6291456
  memory_bandwidth: 600096000000 device_memory_size: 23609475072
"""
# Capability 8.6 is an A10, because newer jax refuses an RTX 3090 that it cannot look at.
TARGETS = {"h100": ("NVIDIA H100 80GB HBM3", _H100), "a10": ("NVIDIA A10", _A10)}
TPU = "v5e"


def mesh_of(target: str, devices: int = 8, within: int = 1) -> Any:
    """A mesh of accelerators that are not there.

    Args:
      target: a name of TARGETS, or TPU.
      devices: how many.
      within: so many neighbours along an axis "fsdp", after "data"; 1 for "data" alone.
    """
    if target == TPU:
        topology = topologies.get_topology_desc(f"{TPU}:2x4", "tpu")
    else:
        topology = _gpus(target)
    own = np.array(topology.devices[:devices]).reshape(-1, within)
    if within > 1:
        mesh = Mesh(own, ("data", "fsdp"), (AxisType.Auto,) * 2)
    else:
        mesh = Mesh(own[:, 0], ("data",), (AxisType.Auto,))
    assert jax.devices()[0].platform == "cpu"  # nothing runs on these
    return mesh


@contextlib.contextmanager
def traced_for(mesh: Mesh) -> Iterator[None]:
    """The mesh, with all that is traced traced for its devices; nothing may run in here."""
    with jax.default_device(mesh.devices.flat[0]), jax.set_mesh(mesh):
        yield


def _gpus(target: str) -> Any:
    name, limits = TARGETS[target]
    config = (
        f"gpu_device_info {{ {limits} {_LIMITS} }} "
        f'platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }} '
        f'device_description_str: "{name}"'
    )
    return topologies.get_topology_desc(target, "cuda", target_config=config, topology="1x1x8")


def placed(mesh: Mesh, tree: Any, specs: Any) -> Any:
    """Shapes on a mesh, each sharded as its spec says."""

    def of(x: Any, spec: jax.P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(of, tree, jax.tree.broadcast(specs, tree))
