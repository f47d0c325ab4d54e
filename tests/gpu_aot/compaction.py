"""Compaction for a target inside of a checked `jax.shard_map`: what both implementations move.

`python -m gpu_aot.compaction TARGET N DENSITY` prints, as JSON, moved over ideal of each.
The compiler was told to fail where registers are spilled.
"""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks.aot.program import read_program
from benchmarks.aot.targets import mesh_of
from gpu_aot.traffic import kernels
from jaxcomm.kernels import select
from jaxcomm.kernels.select import triton

PLACE = 2  # bytes of a place in a tile


def moved(implementation: str, mesh: Any, n: int, density: float) -> float:
    capacity = round(density * n)

    def f(x: jax.Array, threshold: jax.Array) -> select.Selected:
        found = select.compact(x, threshold, capacity, implementation=implementation)
        return jax.tree.map(lambda leaf: leaf[None], found)

    split = jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    x, threshold = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((mesh.size * n,), ()))
    with jax.default_device(mesh.devices.flat[0]):
        lowered = jax.jit(split).trace(x, threshold).lower()
    compiled = lowered.compile({"xla_gpu_fail_ptx_compilation_on_register_spilling": True})
    found = kernels(read_program(compiled.as_text()))
    total = sum(kernel.read + kernel.written for kernel in found)
    if implementation == "triton":
        # The second kernel reads of x what is selected, and of the lists of tiles only what is
        # filled is touched.
        lists = -(-n // triton.TILE) * triton.TILE
        total -= 4 * (n - capacity) + 2 * PLACE * (lists - capacity)
    return total / (4 * n + 8 * capacity)


def main(target: str, n: str, density: str) -> None:
    mesh = mesh_of(target)
    with jax.set_mesh(mesh):
        ratios = {
            implementation: moved(implementation, mesh, int(n), float(density))
            for implementation in ("xla", "triton")
        }
    print(json.dumps(ratios))


if __name__ == "__main__":
    main(*sys.argv[1:])
