"""How many kernels an update of many leaves launches, compiled for a target.

`python -m gpu_aot.kernel_counts TARGET PAIRS` prints, as one line of JSON, for each method how many
kernels an update launches, and how many of them copy a state that could be written in its place.
The parameters are so many pairs of a matrix and a bias. The optimizer is Adam, or the method's own;
the dense steps of 1-bit Adam are not counted.
"""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jaxcomm
from benchmarks.aot.program import read_program
from benchmarks.aot.targets import mesh_of, traced_for

P = PartitionSpec
KERNELS = ("fusion", "custom-call", "sort", "copy")
SIGNS = jaxcomm.mean("data", jaxcomm.codecs.scaled_sign(128), error_feedback=True)
METHODS = {
    "float32": optax.chain(jaxcomm.mean("data"), optax.adam(1e-3)),
    "int4": optax.chain(jaxcomm.mean("data", "int4", error_feedback=True), optax.adam(1e-3)),
    "bfloat16": optax.chain(jaxcomm.mean("data", "bfloat16"), optax.adam(1e-3)),
    "vote": optax.chain(jaxcomm.majority_vote("data"), optax.adam(1e-3)),
    "one_bit_adam": jaxcomm.one_bit_adam("data", 1e-3, dense_steps=1),
    "factored_adam": jaxcomm.factored_adam(SIGNS, 1e-3),
}


def kernels(text: str) -> tuple[int, int]:
    """Those of a program and of what it calls, outside of loops and branches; and the copies."""
    program = read_program(text)

    def of(name: str) -> list[str]:
        found = program.computations[name]
        called = [op for one in found if one.op == "call" for op in of(one.calls[0])]
        return called + [one.op for one in found if one.op in KERNELS]

    return len(of(program.entry)), of(program.entry).count("copy")


def compiled(tx: Any, shapes: dict[str, jax.ShapeDtypeStruct], mesh: Any) -> str:
    def placed(x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(jaxcomm.mark_local(grads), state, params)
        return optax.apply_updates(params, updates), state

    params = {name: placed(x, P()) for name, x in shapes.items()}
    grads = {name: placed(x.update(shape=(1, *x.shape)), P("data")) for name, x in shapes.items()}
    state = jax.eval_shape(tx.init, params)
    specs = jax.tree.broadcast(jaxcomm.state_spec(tx, params, mesh), state)
    state = jax.tree.map(placed, state, specs)
    step = jax.jit(update, donate_argnums=(0, 1))
    return step.trace(params, state, grads).lower().compile().as_text()


def main(target: str, pairs: str) -> None:
    shapes = {}
    for i in range(int(pairs)):
        shapes[f"w{i}"] = jax.ShapeDtypeStruct((128, 256 + i), jnp.float32)
        shapes[f"b{i}"] = jax.ShapeDtypeStruct((256 + i,), jnp.float32)
    mesh = mesh_of(target, 1)
    with traced_for(mesh):
        print(json.dumps({m: kernels(compiled(tx, shapes, mesh)) for m, tx in METHODS.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
