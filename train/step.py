"""The two compiled programs: one training step, one step of evaluation."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxcomm
from train.models.transformer import SPLIT, STACK
from train.state import TrainState
from train.sync import AXIS, for_loss, global_batch

Metrics = dict[str, jax.Array]
FINITE = "finite"  # A metric of a step: 1 if its gradient was finite on all devices, else 0.
STOP = "stop"  # In a batch: 1 where the process that read the row was asked to end, else 0.
Forward = Callable[[Any, jax.Array], jax.Array]


def whole(params: Any) -> Any:
    """Gathers parameters that are split over the devices; a stack gathers its layers itself."""
    return {
        name: part if name == STACK else jaxcomm.gather(part, within=SPLIT)
        for name, part in params.items()
    }


def make_forward(graph: nnx.GraphDef, mean: Any = None, std: Any = 1.0) -> Forward:
    """From a model to `forward(params, inputs) -> float32 logits`.

    Args:
      graph: the model without its parameters.
      mean: the mean of the pixels of uint8 images, or of each channel's; None for tokens.
      std: their standard deviation, likewise.
    """

    def forward(params: Any, inputs: jax.Array) -> jax.Array:
        if mean is None:
            inputs = inputs.astype(jnp.int32)
        else:
            inputs = (inputs.astype(jnp.float32) - jnp.float32(mean)) / jnp.float32(std)
        return nnx.merge(graph, whole(params))(inputs).astype(jnp.float32)

    return forward


def make_loss(
    forward: Forward, smoothing: float
) -> Callable[[Any, Any], tuple[jax.Array, Metrics]]:
    """The mean cross entropy of one device's part of a batch, and its accuracy.

    If the batch has weights, these are weighted means; every device's weights have the same sum.
    The metrics also carry whether a process was asked to end, if the batch has that, so all
    processes see it in the same step.
    """

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, Metrics]:
        with jax.named_scope("forward"):  # The backward pass is "transpose(jvp(forward))".
            logits = forward(params, _over_group(batch["image"]))
        labels = jax.nn.one_hot(batch["label"], logits.shape[-1])
        losses = optax.softmax_cross_entropy(logits, optax.smooth_labels(labels, smoothing))
        accuracy = (logits.argmax(-1) == batch["label"]).astype(jnp.float32)
        asked = {STOP: batch[STOP].mean()} if STOP in batch else {}
        loss, accuracy = (jnp.average(x, weights=batch.get("weight")) for x in (losses, accuracy))
        return loss, {"accuracy": accuracy, **asked}

    return loss_fn


def _over_group(rows: jax.Array) -> jax.Array:
    """Rows, split over the devices of a group that shares the parameters."""
    if SPLIT not in jax.sharding.get_abstract_mesh().axis_names:
        return rows
    return jax.lax.with_sharding_constraint(rows, jax.P(SPLIT))


def make_gradient(forward: Forward, smoothing: float, microbatches: int) -> Any:
    """Loss, metrics and the gradient of each device's own part of a batch.

    Args:
      forward: what `make_forward` returned.
      smoothing: the share of the label that is spread evenly over all classes.
      microbatches: equal parts of a device's batch; only one at a time needs memory.

    Returns:
      `f(params, global_batch) -> ((loss, metrics), local gradients)`.
    """
    value_and_grad = jaxcomm.value_and_grad(make_loss(forward, smoothing), AXIS, has_aux=True)
    return jaxcomm.accumulate(value_and_grad, microbatches)


def make_train_step(
    gradient: Callable[..., Any], tx: optax.GradientTransformation, **said: bool
) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """The training step: local gradients, their exchange inside `tx`, the update.

    Args:
      gradient: what `make_gradient` returned.
      tx: the exchange and the optimizer.
      **said: what its `update` is told of the step, such as `dense=True`.

    Returns:
      `step(state, global_batch) -> (state, metrics)`, which reuses the old state's memory when it
      is jitted with `donate_argnums=0`. Metrics are means over the global batch.
    """

    def step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, Metrics]:
        at = for_loss(state.params, state.opt_state)
        with jax.named_scope("gradient"):
            (loss, metrics), grads = gradient(at, batch)
        with jax.named_scope("exchange_and_optimizer"):
            updates, opt_state = tx.update(grads, state.opt_state, state.params, **said)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, **metrics, FINITE: _was_finite(grads, updates, opt_state)}
        return TrainState(state.step + 1, params, opt_state), metrics

    return step


def _was_finite(grads: Any, updates: Any, opt_state: Any) -> jax.Array:
    """1 if the gradient was finite, by the optimizer's account if it skips others; else 0.

    Each device skips its local steps alone, so the gradients are checked there.
    """
    named = jax.tree_util.tree_leaves_with_path(opt_state)
    seen = [x for path, x in named if getattr(path[-1], "name", None) == "last_finite"]
    local = isinstance(opt_state, jaxcomm.LocalStepsState)
    if seen and not local:
        return seen[0].astype(jnp.float32)
    leaves = jax.tree.leaves(jaxcomm.unmark_local(grads) if local else updates)
    return jnp.stack([jnp.isfinite(x).all() for x in leaves]).all().astype(jnp.float32)


def compile_step(step: Callable[..., Any], state: TrainState, batch: Any) -> Any:
    """Compiles a training step for a state and a batch like these; it reuses the state's memory."""
    jitted = jax.jit(step, donate_argnums=0, compiler_options=jaxcomm.compiler_options())
    return jitted.lower(state, batch).compile()


def make_eval_step(forward: Forward) -> Callable[[Any, Any], Metrics]:
    """The evaluation step: weighted sums over a global batch, in which padding has weight 0.

    Returns:
      `step(params, global_batch) -> sums` of `loss`, `accuracy` and `weight`, jitted.
    """

    def step(params: Any, batch: dict[str, jax.Array]) -> Metrics:
        logits = forward(params, batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        correct = (logits.argmax(-1) == batch["label"]).astype(jnp.float32)
        weight = batch["weight"]
        return {
            "loss": (losses * weight).sum(),
            "accuracy": (correct * weight).sum(),
            "weight": weight.sum(),
        }

    return jax.jit(step)


def placed(batches: Any) -> Any:
    """Test batches on the devices: all of them at once if they are in memory, else one by one."""
    if isinstance(batches, list):
        return [global_batch(batch) for batch in batches]
    return batches.map(global_batch)


def make_test(forward: Forward, batches: Any) -> Callable[[Any], dict[str, float]]:
    """From parameters to what `evaluate` returns, on these batches of `data.load`."""
    return functools.partial(evaluate, make_eval_step(forward), batches=placed(batches))


def evaluate(
    eval_step: Callable[[Any, Any], Metrics], params: Any, batches: Any
) -> dict[str, float]:
    """Mean loss and accuracy over the whole test set.

    Args:
      eval_step: what `make_eval_step` returned.
      params: the parameters.
      batches: what `placed` returned.

    Returns:
      `test_loss` and `test_accuracy`, equal in all processes.
    """
    parts = [eval_step(params, batch) for batch in batches]
    sums = {name: sum(float(part[name]) for part in parts) for name in parts[0]}
    return {f"test_{name}": sums[name] / sums["weight"] for name in ("loss", "accuracy")}
