"""The parts of a run, made from its config: data, model, exchange, optimizer."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import jaxcomm
from train import agreement, data, models, planned, state, step, sync, watched
from train.errors import UserError, memory_for

# What may run out of memory, and what to do then.
DATA = ("the data", "take a part of it, such as --config.data.train_split='train[:10%]'")
MODEL = (
    "the parameters and the optimizer's state",
    "make config.model smaller, such as its width, or split them over devices with "
    "--config.sync.fsdp or --config.sync.gather",
)


@dataclasses.dataclass(frozen=True)
class Run:
    """What does not change while a run trains.

    Attributes:
      rows: the batches that this process reads; only the position of `rows.train` advances.
      example: a global batch.
      asked: from whether this process was asked to end to its rows of `step.STOP` in a batch, so
        that all processes learn of it in the same step.
      params: the parameters at the beginning, before they are placed.
      forward: the result of `step.make_forward`.
      gradient: the result of `step.make_gradient`.
      order: the paths of the parameters, as `jaxcomm.backward_order` finds them.
      sync: `config.sync` with the method that is in use.
      exchange: the result of `sync.build`.
      optimizer: the result of `state.make_optimizer`.
      tx: exchange and optimizer together.
    """

    rows: data.Data
    example: dict[str, jax.Array]
    asked: Callable[[bool], jax.Array]
    params: Any
    forward: step.Forward
    gradient: Any
    order: tuple[str, ...]
    sync: Any
    exchange: optax.GradientTransformation
    optimizer: state.Optimizer
    tx: optax.GradientTransformation

    def place(self, params: Any) -> Any:
        """Puts parameters on the devices, whole or split."""
        return sync.place(params, self.sync)

    def begin(self) -> state.TrainState:
        """The state before the first step.

        Raises:
          train.errors.UserError: if the exchange refuses these parameters.
        """
        try:
            with memory_for(*MODEL):
                return state.init(self.params, self.tx, self.place)
        except ValueError as error:
            raise UserError(f"config.sync: {' '.join(str(error).split())}") from error

    def compile(self, now: state.TrainState, **said: bool) -> Any:
        """The compiled training step; it reuses the memory of its state.

        Args:
          now: the state.
          **said: what the exchange is told of the step; otherwise its state counts.
        """
        train_step = watched.watched(step.make_train_step(self.gradient, self.tx, **said))
        return step.compile_step(train_step, now, self.example)

    def batch(self, stop: bool) -> dict[str, jax.Array]:
        """The next global batch; `stop` says whether this process was asked to end."""
        return {**sync.global_batch(next(self.rows.train)), step.STOP: self.asked(stop)}


def data_and_model(config: Any) -> tuple[data.Data, step.Forward, Any]:
    """What a test of a model needs, on a mesh that becomes the current one.

    Args:
      config: a config of `configs/`, as `train.check` lets it pass.

    Returns:
      The batches of this process; `step.make_forward` of the model; the parameters at the
      beginning, before they are placed.

    Raises:
      train.errors.UserError: if data and model do not fit together, or do not exist.
    """
    # All devices of all processes, along one axis, or in groups that share the parameters.
    mesh = sync.make_mesh(config.sync)
    jax.set_mesh(mesh)

    # The data: this process reads the shards of its own devices.
    own = [i for i, d in enumerate(mesh.devices.flat) if d.process_index == jax.process_index()]
    with memory_for(*DATA):
        rows = data.load(config.data, config.batch_size, own, mesh.size, config.seed)
    agreement.check_data(rows.identity)

    pixels = data.pixels(config.data, rows.shape[-1]) if rows.unit == "images" else ()
    with memory_for(*MODEL):
        graph, params = models.build(config.model, rows.shape, rows.classes, config.seed)
    return rows, step.make_forward(graph, *pixels), params


def assemble(config: Any, workdir: Path, goes_on: bool = False) -> Run:
    """Makes the mesh, which becomes the current one, and on it all parts of a run.

    Args:
      config: a config of `configs/`, as `train.check` lets it pass.
      workdir: where a run keeps the exchange that the planner chose.
      goes_on: whether the run continues from a checkpoint.

    Raises:
      train.errors.UserError: if the parts of the config do not fit together, or do not fit the
        data.
    """
    rows, forward, params = data_and_model(config)
    first = next(iter(rows.test))
    asked = functools.cache(functools.partial(_asked_rows, len(first["label"])))
    like = sync.global_batch({name: first[name] for name in rows.names})
    example = {**like, step.STOP: asked(False)}

    # The model's gradient, the exchange, and the optimizer.
    gradient = step.make_gradient(forward, config.label_smoothing, config.microbatches)
    order = jaxcomm.backward_order(gradient, params, example)
    optimizer = state.make_optimizer(config.optimizer, config.steps, sync.parts_codec(config.sync))
    how = planned.resolved(config, workdir, gradient, params, example, optimizer, goes_on)
    exchange = sync.build(how, order, config.steps, config.seed)
    tx = sync.joined(how, exchange, optimizer)
    return Run(rows, example, asked, params, forward, gradient, order, how, exchange, optimizer, tx)


def _asked_rows(rows: int, stop: bool) -> jax.Array:
    """The values in this process's rows that say whether it was asked to end."""
    return sync.global_batch(np.full(rows, stop, np.float32))
