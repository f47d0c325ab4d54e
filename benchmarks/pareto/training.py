"""One training run on simulated devices, and the bytes that it sends."""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomm
from benchmarks.pareto.methods import Method
from benchmarks.pareto.tasks import Data, Task

WORLD = 4


def schedule(rate: float, steps: int) -> optax.Schedule:
    """A linear warm-up over a tenth of the steps, then a cosine down to a tenth of the rate."""
    return optax.warmup_cosine_decay_schedule(
        rate / (0.1 * steps), rate, steps // 10, steps, rate / 10
    )


@functools.cache
def loaded(task: Task, data_dir: str | None) -> Data:
    return task.load(data_dir, WORLD)


def mean_loss(task: Task, params: Any, batches: Any) -> jax.Array:
    """Over whole batches, each split over the devices where they divide it, or else on one."""
    devices = jax.devices()
    if jax.tree.leaves(batches)[0].shape[1] % len(devices):
        devices = devices[:1]
    with jax.set_mesh(jaxcomm.data_mesh(devices=devices)):
        params = jaxcomm.replicate(jax.device_get(params))
        loss, losses = jax.jit(task.loss), []
        for rows in zip(*jax.tree.leaves(batches), strict=True):
            batch = jax.tree.unflatten(jax.tree.structure(batches), rows)
            losses.append(loss(params, jaxcomm.global_batch(batch, "data")))
        return jnp.mean(jnp.stack(losses))


def finite(loss: Any) -> float | None:
    """A loss; None if the run diverged."""
    return float(loss) if np.isfinite(loss) else None


def train(
    task: Task, method: Method, rate: float, seed: int, data_dir: str | None
) -> dict[str, Any]:
    """The losses at the end of a run, and what a device sent in a step.

    Bytes are those of the compiled step: of every branch as often as the run takes it.
    """
    began, data = time.monotonic(), loaded(task, data_dir)
    with jax.set_mesh(jaxcomm.data_mesh()):
        tx = method.make(schedule(rate, task.steps), task.steps)
        params = jaxcomm.replicate(jax.jit(task.init)(jax.random.key(seed)))
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        state = tx.init(params)
        shards = jax.device_put(
            data.shards, jax.sharding.NamedSharding(jax.sharding.get_mesh(), jax.P("data"))
        )
        draws = np.random.default_rng(seed).integers(
            0, 2**31 - 1, (task.steps, WORLD, task.share), np.int32
        )

        def loss_fn(params: Any, batch: Any) -> jax.Array:
            shard, numbers = jax.tree.map(lambda x: x[0], batch)
            return task.loss(params, task.batch(shard, numbers))

        def step(carry: Any, numbers: jax.Array, shards: Any) -> Any:
            params, state = carry
            is_local = isinstance(state, jaxcomm.LocalStepsState)
            own = jaxcomm.local_params(state) if is_local else params
            loss, grads = jaxcomm.value_and_grad(loss_fn, "data")(own, (shards, numbers))
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        one = jax.jit(step).lower((params, state), draws[0], shards).compile()
        sent = jaxcomm.wire_report(one)
        carry, losses = (params, state), []
        for numbers in draws:
            carry, loss = one(carry, numbers, shards)
            losses.append(float(loss))
        test, validation = (mean_loss(task, carry[0], x) for x in (data.test, data.validation))
    return {
        "loss": finite(test),
        "validation_loss": finite(validation),
        "training_loss": finite(np.mean(losses[-50:])),
        "bytes_per_step": method.bytes_per_step(sent, task.steps) / size,
        "parameters": size,
        "steps": task.steps,
        "seconds": round(time.monotonic() - began, 1),
    }
