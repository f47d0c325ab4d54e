"""A chain of equal layers with a bucket for every three of them, compiled for eight GPUs.

`python -m gpu_aot.layers TARGET` prints, as JSON, the share of the bytes that travel
behind matrix products of the backward pass.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jaxcomm
from benchmarks.aot.overlap import overlap
from benchmarks.aot.targets import mesh_of, traced_for

LAYERS, WIDTH, BATCH = 12, 2048, 4096
BUCKET = 3 * WIDTH**2 * 4 / 2**20  # MiB

METHODS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "mean": lambda: jaxcomm.mean("data", bucket_mib=BUCKET),
    "bfloat16": lambda: jaxcomm.mean("data", "bfloat16", bucket_mib=BUCKET),
    "majority_vote": lambda: jaxcomm.majority_vote("data", bucket_mib=BUCKET),
}


def loss_fn(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    for name in sorted(params):
        x = jnp.tanh(x @ params[name])
    return jnp.mean(x)


def behind_products(mesh: Any, method: str) -> float:
    tx, gradient = METHODS[method](), jaxcomm.value_and_grad(loss_fn, "data")

    def placed(shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        loss, grads = gradient(params, x)
        updates, state = tx.update(grads, state, params)
        return loss, jax.tree.map(lambda p, u: p - 0.1 * u, params, updates), state

    everywhere = PartitionSpec()
    layer = placed((WIDTH, WIDTH), jnp.float32, everywhere)
    params = {f"layer{i:02}": layer for i in range(LAYERS)}
    state = jax.tree.map(
        lambda x, spec: placed(x.shape, x.dtype, spec),
        jax.eval_shape(tx.init, params),
        jaxcomm.state_spec(tx, params, mesh),
    )
    x = placed((mesh.size * BATCH, WIDTH), jnp.float32, PartitionSpec("data"))
    jitted = jax.jit(step, donate_argnums=(0, 1), compiler_options=jaxcomm.compiler_options())
    found = overlap(jitted.trace(params, state, x).lower().compile().as_text())
    return found.behind_products / found.sent


def main(target: str) -> None:
    mesh = mesh_of(target)
    with traced_for(mesh):
        print(json.dumps({method: behind_products(mesh, method) for method in METHODS}))


if __name__ == "__main__":
    main(*sys.argv[1:])
