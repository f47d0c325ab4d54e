"""HSDP for a target: `tx.init` and a step on a (data, fsdp) mesh of 2 x 4 GPUs.

`python -m gpu_aot.sharded TARGET` prints, as JSON, the bytes of the state that each device holds,
and what the step sends by kind of collective and over which groups.
"""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxcomm
from benchmarks.aot.targets import mesh_of

SHAPES = {"dense": ((4096, 1024), PartitionSpec("fsdp")), "bias": ((1024,), PartitionSpec())}


def main(target: str) -> None:
    devices = np.asarray(mesh_of(target).devices).reshape(2, 4)
    mesh = Mesh(devices, ("data", "fsdp"), (AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        print(json.dumps(compiled(mesh)))


def compiled(mesh: Any) -> dict[str, Any]:
    tx = optax.chain(jaxcomm.mean("data", "int8", error_feedback=True), optax.adam(1e-3))
    tx = jaxcomm.with_param_specs(tx, {name: spec for name, (_, spec) in SHAPES.items()})
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for name, (shape, spec) in SHAPES.items()
    }
    specs = jaxcomm.state_spec(tx, params, mesh)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    init = jax.jit(tx.init, out_shardings=shardings).trace(params).lower().compile()
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(tx.init, params),
        shardings,
    )
    grads = {
        name: jax.ShapeDtypeStruct(
            (2, *shape), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data", *spec))
        )
        for name, (shape, spec) in SHAPES.items()
    }
    step = jax.jit(tx.update).trace(grads, state, params).lower().compile()
    report = jaxcomm.wire_report(step.as_text())
    return {
        "state": init.memory_analysis().output_size_in_bytes,
        "sent": [[c.op, float(max(c.sent)), c.group_size] for c in report.collectives],
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
