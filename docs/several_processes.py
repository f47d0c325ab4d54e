"""Data-parallel training of several processes: HOST:PORT PROCESSES NUMBER."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomm

address, processes, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.distributed.initialize(address, processes, number)  # before anything else of jax
jax.set_mesh(jaxcomm.data_mesh())
tx = optax.chain(jaxcomm.mean("data", "int8"), optax.sgd(0.1))


@jax.jit
def step(params, state, x):
    """One step, on the rows of all processes."""
    loss, grads = jaxcomm.value_and_grad(lambda p, x: jnp.mean((x @ p - 1) ** 2), "data")(params, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


params = jaxcomm.replicate(jnp.ones((8, 8)))
state = tx.init(params)
rows = np.random.default_rng(number).standard_normal((4, 8), np.float32)  # what this process reads
for _ in range(3):
    params, state, loss = step(params, state, jaxcomm.global_batch(rows, "data"))
print(f"process {number} of {processes}: loss {loss:.6f}, weights {params.sum():.6f}")
