"""The training step without its exchange, against which the exchange is timed."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

from train import measure, state, step, sync
from train.run import Run


class Plain:
    """A step that computes the same gradient and gives each device's own to the optimizer.

    It is compiled when it is first needed.

    Args:
      run: whose step it is.
    """

    def __init__(self, run: Run):
        self._run = run
        self._tx = self._followed_by(optax.identity())
        self._step: Any = None

    def start(self, params: Any) -> tuple[Any, state.TrainState]:
        """The compiled step, and a state with a copy of these parameters, which it uses up."""
        begin = state.init(jax.tree.map(jnp.copy, params), self._tx, self._run.place)
        if self._step is None:
            self._step = self._compiled(self._tx, begin)
        return self._step, begin

    def sending(self, messages: optax.GradientTransformation, begin: state.TrainState) -> Any:
        """The compiled step with stateless messages, for a state like that of `start`."""
        return self._compiled(self._followed_by(messages), begin)

    def _followed_by(self, messages: optax.GradientTransformation) -> optax.GradientTransformation:
        how = self._run.sync
        sent = optax.chain(sync.no_exchange(how), messages)
        return sync.chained(how, sent, self._run.optimizer)

    def _compiled(self, tx: optax.GradientTransformation, begin: state.TrainState) -> Any:
        train_step = step.make_train_step(self._run.gradient, tx)
        return step.compile_step(train_step, begin, self._run.example)

    def milliseconds(self, params: Any, batch: Any) -> float:
        """The time of one step on the slowest process, after one to warm up."""
        train_step, now = self.start(params)
        seconds = 0.0
        for _ in range(2):
            jax.block_until_ready(now)
            started = time.perf_counter()
            now, _ = jax.block_until_ready(train_step(now, batch))
            seconds = time.perf_counter() - started
        return 1e3 * measure.slowest(seconds)
