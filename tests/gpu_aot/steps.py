"""ResNet-50's training step with each method, compiled for eight GPUs of a target.

`python -m gpu_aot.steps TARGET [METHOD ...]` prints a row for each, and last all of them as JSON.
"""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxcomm
from benchmarks.aot import resnet
from benchmarks.aot.overlap import overlap
from benchmarks.aot.targets import mesh_of
from train.state import TrainState
from train.step import compile_step, make_forward, make_gradient, make_train_step

BATCH = 64  # images a device
SGD = optax.sgd(0.1, momentum=0.9)
Order = Sequence[str]

METHODS: dict[str, Callable[[Order], optax.GradientTransformation]] = {
    "mean": lambda o: optax.chain(jaxcomm.mean("data", bucket_order=o), SGD),
    "bfloat16": lambda o: optax.chain(jaxcomm.mean("data", "bfloat16", bucket_order=o), SGD),
    "cnat": lambda o: optax.chain(jaxcomm.mean("data", "cnat", bucket_order=o), SGD),
    "int8": lambda o: optax.chain(jaxcomm.mean("data", "int8", bucket_order=o), SGD),
    "scaled_sign": lambda o: optax.chain(
        jaxcomm.mean("data", "scaled_sign", error_feedback=True, bucket_order=o), SGD
    ),
    "majority_vote": lambda o: optax.chain(jaxcomm.majority_vote("data", bucket_order=o), SGD),
    "majority_vote, direct": lambda o: optax.chain(
        jaxcomm.majority_vote("data", "direct", bucket_order=o), SGD
    ),
    "low_rank_mean": lambda o: optax.chain(jaxcomm.low_rank_mean("data", 4, bucket_order=o), SGD),
    "one_bit_adam": lambda o: jaxcomm.one_bit_adam("data", 1e-3, dense_steps=100, bucket_order=o),
}


def sparse(algorithm: str) -> Callable[[Order], optax.GradientTransformation]:
    return lambda order: optax.chain(
        jaxcomm.sparse_mean("data", 0.01, algorithm, bucket_order=order), SGD
    )


SPARSE = ("oktopk", "topk_allgather", "topk_dsa", "gtopk", "gaussiank")
METHODS |= {algorithm: sparse(algorithm) for algorithm in SPARSE}


def shaped(tree: Any, mesh: Any, specs: Any) -> Any:
    """Shapes on a mesh, each sharded as its spec says."""
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        tree,
        jax.tree.broadcast(specs, tree),
    )


def resnet50(mesh: Any) -> tuple[Any, Any]:
    """The model without its parameters, and these."""

    graph, params = nnx.split(nnx.eval_shape(resnet.resnet50))
    return graph, shaped(nnx.to_pure_dict(params), mesh, PartitionSpec())


def compiled_step(mesh: Any, method: str) -> Any:
    """The training step as `train` compiles it."""
    graph, params = resnet50(mesh)
    gradient = make_gradient(make_forward(graph, 127.0, 64.0), 0.1, 1)
    n = BATCH * mesh.size
    batch = {
        "image": jax.ShapeDtypeStruct((n, 224, 224, 3), jnp.uint8),
        "label": jax.ShapeDtypeStruct((n,), jnp.int32),
    }
    batch = shaped(batch, mesh, PartitionSpec("data"))
    tx = METHODS[method](jaxcomm.backward_order(gradient, params, batch))
    opt_state = shaped(jax.eval_shape(tx.init, params), mesh, jaxcomm.state_spec(tx, params, mesh))
    step = shaped(jax.ShapeDtypeStruct((), jnp.int32), mesh, PartitionSpec())
    state = TrainState(step, params, opt_state)
    return compile_step(make_train_step(gradient, tx), state, batch)


def row(compiled: Any) -> dict[str, Any]:
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    report = jaxcomm.wire_report(text)
    found = overlap(text)
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "MB sent": round(found.sent / 1e6, 3),
        "hidden": round(found.hidden / found.sent, 3),
        "behind products": round(found.behind_products / found.sent, 3),
        "MB in conditionals": round(found.in_conditionals / 1e6, 3),
        "collectives": len(report.collectives),
        "blocking": len(found.blocking),
        "dtypes": sorted({dtype for c in report.collectives for dtype in c.dtypes}),
        "peak MiB": round(
            (memory.argument_size_in_bytes + memory.temp_size_in_bytes + results) / 2**20
        ),
    }


def main(target: str, *methods: str) -> None:
    mesh, rows = mesh_of(target), {}
    with jax.set_mesh(mesh):
        for method in methods or METHODS:
            rows[method] = row(compiled_step(mesh, method))
            print(method, rows[method], flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
