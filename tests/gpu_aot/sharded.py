"""HSDP for a target: `tx.init` and a step on a (data, fsdp) mesh of 2 x 4 GPUs; and FSDP.

`python -m gpu_aot.sharded TARGET` prints, as JSON, the bytes of the state that each device holds,
and what the step sends by kind of collective and over which groups. And, for each dtype of
residuals, the bytes that a device needs in a step of FSDP: of arguments and of temporaries. And
what one step of Muon of split matrices sends, by `orthogonalize` and by optax.
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
from benchmarks.aot.targets import mesh_of, placed, traced_for

SHAPES = {"dense": ((4096, 1024), PartitionSpec("fsdp")), "bias": ((1024,), PartitionSpec())}


def main(target: str) -> None:
    devices = np.asarray(mesh_of(target).devices).reshape(2, 4)
    mesh = Mesh(devices, ("data", "fsdp"), (AxisType.Auto,) * 2)
    with traced_for(mesh):
        found = compiled(mesh)
    mesh = mesh_of(target)
    with traced_for(mesh):
        found["memory"] = {dtype: memory(mesh, dtype) for dtype in ("float32", "bfloat16")}
        found["muon"] = muon(mesh)
    print(json.dumps(found))


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


LAYERS = (12, 512, 512)


def memory(mesh: Any, dtype: str) -> list[int]:
    """Of a step with four bits and error feedback, in a loop over layers."""

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ jaxcomm.gather(kernel)), None

        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params["layers"])[0] ** 2)

    mean = jaxcomm.mean("data", "int4", error_feedback=True, residual_dtype=dtype)
    tx = optax.chain(jaxcomm.sharded(mean, gather="int8"), optax.sgd(0.1))
    params = {"layers": jax.ShapeDtypeStruct(LAYERS, jnp.float32)}
    params = placed(mesh, params, PartitionSpec(None, "data"))
    state = jax.eval_shape(jaxcomm.with_param_specs(tx, params).init, params)
    state = placed(mesh, state, jaxcomm.state_spec(tx, params, mesh))

    def step(params: Any, state: Any, x: jax.Array) -> tuple[Any, Any]:
        at = jaxcomm.sharded_params(params, state)
        _, grads = jaxcomm.value_and_grad(loss_fn, "data")(at, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    x = placed(mesh, jax.ShapeDtypeStruct((16, LAYERS[-1]), jnp.float32), PartitionSpec("data"))
    found = jax.jit(step, donate_argnums=(0, 1)).trace(params, state, x).lower().compile()
    analysis = found.memory_analysis()
    return [analysis.argument_size_in_bytes, analysis.temp_size_in_bytes]


def muon(mesh: Any) -> dict[str, list[float]]:
    """Bytes that a device sends, and the bytes of its temporaries."""
    shape = jax.ShapeDtypeStruct(LAYERS, jnp.float32)
    params = placed(mesh, {"layers": shape}, PartitionSpec(None, "data"))
    matrices = {"layers": optax.contrib.MuonDimensionNumbers(1, 2)}
    by_optax = optax.contrib.scale_by_muon(weight_dimension_numbers=matrices)
    ours = jaxcomm.with_param_specs(jaxcomm.orthogonalize(matrices), params)
    states = {
        "optax": jax.eval_shape(by_optax.init, params)._replace(mu=params),
        "orthogonalize": jax.eval_shape(ours.init, params),
    }
    found = {}
    for name, tx in (("optax", by_optax), ("orthogonalize", ours)):
        update = jax.jit(tx.update).trace(params, states[name]).lower().compile()
        sent = jaxcomm.wire_report(update.as_text()).bytes_max
        found[name] = [float(sent), update.memory_analysis().temp_size_in_bytes]
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
