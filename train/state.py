"""The state that a run carries from step to step, and its optimizer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomm
from train.errors import choose
from train.models.transformer import STACK

OUTER_LAYERS = ("stem", "embed", "head")  # as the models of `train.models` call them


class TrainState(NamedTuple):
    """The state of a run; all of it is in every checkpoint, together with the input position.

    Attributes:
      step: number of steps taken, int32.
      params: nested dict of float32 arrays, equal on all devices.
      opt_state: the state of the exchange and the optimizer; what differs from device to device has
        a leading device axis.
    """

    step: jax.Array
    params: Any
    opt_state: optax.OptState


class Optimizer(NamedTuple):
    """An optimizer in three parts.

    Attributes:
      step: from gradients to a step; each device's own with `config.sync.local_optimizer`.
      decay: what the parameters add to the step.
      rate: the learning rate. It counts skipped steps too, so that it is that of the step's number.
    """

    step: optax.GradientTransformation
    decay: optax.GradientTransformation
    rate: optax.GradientTransformation


def sgd(config: Any, rate: optax.Schedule) -> Optimizer:
    """Nesterov momentum with the weight decay inside the gradient, as ResNets are trained."""
    decay = optax.add_decayed_weights(config.weight_decay, mask=decayed)
    momentum = optax.trace(config.momentum, nesterov=True)
    step = optax.chain(decay, momentum)
    return Optimizer(step, optax.identity(), optax.scale_by_learning_rate(rate))


def adamw(config: Any, rate: optax.Schedule) -> Optimizer:
    """Adam with decoupled weight decay, as transformers are trained."""
    decay = optax.add_decayed_weights(config.weight_decay, mask=decayed)
    return Optimizer(
        optax.scale_by_adam(config.momentum, config.b2, nesterov=config.nesterov),
        decay,
        optax.scale_by_learning_rate(rate),
    )


def muon(config: Any, rate: optax.Schedule, parts: Any = "float32") -> Optimizer:
    """Muon for the matrices of hidden layers, Adam for the rest; decoupled weight decay for both.

    Steps of both are as large as Adam's, so they have one learning rate, and the momenta are equal
    and Nesterov's. Parts of matrices that are split are sent in the codec `parts`.
    """
    orthogonal = jaxcomm.orthogonalize(
        hidden_matrices,
        consistent_rms=0.2,  # steps as large as Adam's
        codec=parts,
    )
    matrices = optax.chain(optax.trace(config.momentum, nesterov=True), orthogonal)
    others = optax.scale_by_adam(config.momentum, config.b2, nesterov=True)
    step = optax.partition({"matrix": matrices, "other": others}, _matrices_and_others)
    decay = optax.add_decayed_weights(config.weight_decay, mask=decayed)
    return Optimizer(step, decay, optax.scale_by_learning_rate(rate))


def scale(config: Any, rate: optax.Schedule) -> Optimizer:
    """The learning rate alone, after a method of `train.sync` that is an optimizer itself."""
    del config
    return Optimizer(optax.identity(), optax.identity(), optax.scale_by_schedule(rate))


OPTIMIZERS = {"sgd": sgd, "adamw": adamw, "muon": muon, "scale": scale}


def decayed(params: Any) -> Any:
    """Selects weights to decay, not biases or scales, which have several axes in a stack of layers.

    Biases of attention have an axis of heads too.
    """

    def is_weight(path: Any, x: Any) -> bool:
        return x.ndim > 1 and str(getattr(path[-1], "key", "")) not in ("bias", "scale")

    return jax.tree_util.tree_map_with_path(is_weight, params)


def hidden_matrices(params: Any) -> Any:
    """What Muon makes orthogonal: all kernels but those of a stem, an embedding and the head.

    Each is a matrix from its inputs to its outputs: those of a convolution are all values of its
    window, and those of attention have axes of heads. A stack of layers has a matrix for each.

    Args:
      params: the parameters of a model of `train.models`.

    Returns:
      `optax.contrib.MuonDimensionNumbers` for each of them, None for all other leaves.
    """

    def matrix(path: Any, x: Any) -> optax.contrib.MuonDimensionNumbers | None:
        names = [str(getattr(key, "key", "")) for key in path]
        if names[-1] != "kernel" or names[0] in OUTER_LAYERS:
            return None
        first = int(names[0] == STACK)
        splits_heads = "attention" in names and names[-2] != "out"
        outputs = first + 1 if splits_heads else x.ndim - 1
        return optax.contrib.MuonDimensionNumbers(
            tuple(range(first, outputs)), tuple(range(outputs, x.ndim))
        )

    return jax.tree_util.tree_map_with_path(matrix, params)


def _matrices_and_others(params: Any) -> Any:
    """Labels of what Muon makes orthogonal, and of all other leaves."""
    return jax.tree.map(
        lambda axes: "other" if axes is None else "matrix",
        hidden_matrices(params),
        is_leaf=lambda x: x is None or isinstance(x, optax.contrib.MuonDimensionNumbers),
    )


def make_optimizer(config: Any, steps: int, parts: Any = "float32") -> Optimizer:
    """The optimizer that a config names; its learning rate warms up and then falls as a cosine.

    With `clip_norm` it first clips the gradient to that norm, taken over all values.

    Args:
      config: `config.optimizer`: `name`, `learning_rate` (the peak), `warmup_steps` and the
        options of that optimizer.
      steps: length of the run, where the cosine reaches zero.
      parts: the codec in which an optimizer sends parts of matrices that are split, such as the
        result of `train.sync.parts_codec`.
    """
    rule = choose(OPTIMIZERS, config.name, "config.optimizer.name")
    options = {"parts": parts} if rule is muon else {}  # no other one sends anything
    found = rule(config, schedule(config, steps), **options)
    if config.clip_norm is not None:
        clip = optax.clip_by_global_norm(config.clip_norm)
        found = found._replace(step=optax.chain(clip, found.step))
    return found


def skipping(*parts: optax.GradientTransformation) -> optax.GradientTransformation:
    """A chain that skips updates that are not finite; the recorder counts them and ends the run."""
    return optax.apply_if_finite(optax.chain(*parts), np.iinfo(np.int32).max)


def whole(optimizer: Optimizer) -> optax.GradientTransformation:
    """All parts of an optimizer; it skips steps that are not finite, but the rate counts them."""
    return optax.chain(skipping(optimizer.step, optimizer.decay), optimizer.rate)


def schedule(config: Any, steps: int) -> optax.Schedule:
    """The learning rate of a step, counted from 0: a linear rise, then half a cosine to zero."""
    warmup = min(config.warmup_steps, steps - 1)
    return optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, warmup, steps)


def learning_rates(config: Any, steps: int) -> np.ndarray:
    """The learning rates of all steps of a run, float32 `[steps]`."""
    return np.asarray(jax.jit(schedule(config, steps))(np.arange(steps)))


def init(
    params: Any, tx: optax.GradientTransformation, place: Callable[[Any], Any] = jaxcomm.replicate
) -> TrainState:
    """The state before the first step, on all devices of the mesh, the parameters as placed."""
    params = place(params)
    return TrainState(jaxcomm.replicate(jnp.zeros((), jnp.int32)), params, tx.init(params))
