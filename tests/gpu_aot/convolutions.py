"""What steps of a network of convolutions copy and transpose, compiled for a target.

`python -m gpu_aot.convolutions TARGET` prints, as one line of JSON, for each method how many
kernels copy an array, and how many transpose one outside of the gradient. cuDNN gives gradients of
convolutions in an order in memory that parameters and states do not have, so each of them has to
be transposed once: in the gradient, or behind it. Nothing is timed to choose among kernels here, as
it is where there is a GPU.
"""

import json
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec

import jaxcomm
from benchmarks.aot import resnet
from benchmarks.aot.program import read_program
from benchmarks.aot.targets import mesh_of, placed, traced_for
from train.step import make_forward, make_loss

IMAGE, STAGES = 32, (2, 2)
SGD = optax.sgd(0.1, momentum=0.9)
METHODS = {
    "int4": optax.chain(jaxcomm.mean("data", "int4", error_feedback=True), SGD),
    "vote": optax.chain(jaxcomm.majority_vote("data"), SGD),
    "low_rank": optax.chain(jaxcomm.low_rank_mean("data", 2), SGD),
    "one_bit_adam": jaxcomm.one_bit_adam("data", 1e-3, dense_steps=1),
}


def counts(text: str) -> tuple[int, int]:
    """Copies, and transposes that are no part of the gradient."""
    program = read_program(text)
    entry = program.computations[program.entry]
    turned = [i.text for i in entry if re.match(r"\s*(ROOT )?%?input_\w*transpose", i.text)]
    return [i.op for i in entry].count("copy"), sum("jvp(" not in text for text in turned)


def compiled(tx: Any, mesh: Any) -> str:
    graph, params = nnx.split(nnx.eval_shape(lambda: resnet.resnet50(IMAGE, STAGES)))
    loss = make_loss(make_forward(graph, 127.0, 64.0), 0.1)
    gradient = jaxcomm.value_and_grad(loss, "data", has_aux=True)

    def step(params: Any, state: Any, batch: Any) -> Any:
        (loss, _), grads = gradient(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = placed(mesh, nnx.to_pure_dict(params), PartitionSpec())
    state = placed(mesh, jax.eval_shape(tx.init, params), jaxcomm.state_spec(tx, params, mesh))
    batch = {
        "image": jax.ShapeDtypeStruct((8, IMAGE, IMAGE, 3), jnp.uint8),
        "label": jax.ShapeDtypeStruct((8,), jnp.int32),
    }
    batch = placed(mesh, batch, PartitionSpec("data"))
    untimed = {"xla_gpu_autotune_level": 0}
    lowered = jax.jit(step, donate_argnums=(0, 1)).trace(params, state, batch).lower()
    return lowered.compile(untimed).as_text()


def main(target: str) -> None:
    mesh = mesh_of(target, 1)
    with traced_for(mesh):
        print(json.dumps({name: counts(compiled(tx, mesh)) for name, tx in METHODS.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
