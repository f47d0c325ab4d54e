"""One run, from the config to its report: read this page first."""

import functools
import math
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxcomm
from train import (
    check,
    checkpoint,
    data,
    inspection,
    measure,
    metrics,
    models,
    plain,
    planned,
    profiling,
    replicas,
    report,
    signals,
    state,
    step,
    sync,
    watched,
)
from train.errors import RunError


def train(
    config: Any, workdir: Path, started: float, restarted: bool = False
) -> dict[str, Any] | None:
    """Trains, evaluates, measures what the exchange costs, and reports.

    Args:
      config: a config of `configs/`.
      workdir: directory of metrics, events and checkpoints; all processes see the same one.
      started: `time.perf_counter()` at the start of the program.
      restarted: whether the launcher has started the run again: it continues at its last
        checkpoint, or begins anew if it had none.

    Returns:
      The summary, or None if SIGTERM asked the run to end.

    Raises:
      train.errors.UserError: if the config, the data, the directory or a checkpoint do not fit.
      train.errors.RunError: if the run cannot go on, and could not after a restart.
    """
    # All devices of all processes, along one axis, or in groups that hold the parameters together.
    check.fields(config)
    check.fit(config, jax.device_count())
    mesh = sync.make_mesh(config.sync)
    jax.set_mesh(mesh)

    # The data: this process reads the shards of its own devices.
    own = [i for i, d in enumerate(mesh.devices.flat) if d.process_index == jax.process_index()]
    rows = data.load(config.data, config.batch_size, own, mesh.size, config.seed)
    test = step.placed(rows.test)
    first = next(iter(rows.test))
    like = sync.global_batch({name: first[name] for name in rows.names})
    # Whether this process was asked to end, which all learn in the same step.
    asked = functools.cache(functools.partial(asked_rows, len(first["label"])))
    example = {**like, step.STOP: asked(False)}

    # The model, its gradient, the exchange of gradients and behind it the optimizer.
    graph, params = models.build(config.model, rows.shape, rows.classes, config.seed)
    pixels = (config.data.mean, config.data.std) if rows.unit == "images" else ()
    forward = step.make_forward(graph, *pixels)
    gradient = step.make_gradient(forward, config.label_smoothing, config.microbatches)
    order = jaxcomm.backward_order(gradient, params, example)
    optimizer = state.make_optimizer(config.optimizer, config.steps)
    how = planned.resolved(config, workdir, gradient, params, example, optimizer)
    exchange = sync.build(how, order, config.steps)
    tx = sync.joined(how, exchange, optimizer)

    # Where the run stands: at its beginning, or at its last checkpoint.
    place = functools.partial(sync.place, config=config.sync)
    train_state = state.init(params, tx, place)
    folder = workdir / "checkpoints"
    saved = checkpoint.where_to_continue(folder, config.checkpoint.resume, restarted)
    checkpoints = checkpoint.Checkpoints(folder, config.checkpoint.keep)
    if saved is not None:
        train_state = checkpoints.restore(saved, train_state, rows.train, tx)
    start = int(train_state.step)

    # One compiled step serves the whole run; what it sends is read from it.
    watched_step = watched.watched(step.make_train_step(gradient, tx))
    train_step = step.compile_step(watched_step, train_state, example)
    eval_step = step.make_eval_step(forward)
    check_replicas = replicas.make_check(train_state.params, how.method)

    # What is said of the run while it runs.
    frozen_at = watched.step_of(train_state.opt_state)
    rates = state.learning_rates(config.optimizer, config.steps)
    sent = measure.Sent(jaxcomm.wire_report(train_step), how, params)
    recorder = metrics.Recorder(
        workdir,
        start,
        config.steps,
        frozen_at,
        config.guard.bad_steps,
        {rows.unit: example["label"].size},
        lambda number, frozen_at: {
            "learning_rate": float(rates[number - 1]),
            "bytes_per_param": sent.in_step(number, frozen_at),
        },
    )
    without = plain.Plain(config.sync, gradient, optimizer, place, example)
    look = inspection.make_look(how, gradient, exchange, order, config.steps)
    profile = profiling.Profile(workdir, start, config.profile.steps)
    with checkpoints, recorder:
        recorder.write("start", start, measure.sizes(sent))
        signals.ask_to_stop()
        for number in range(start + 1, config.steps + 1):
            profile.before(number, train_state)
            with recorder.waiting():
                batch = sync.global_batch(next(rows.train))
                batch[step.STOP] = asked(signals.stop.is_set())
            train_state, values = train_step(train_state, batch)
            recorder.train(number, values)
            checkpoints.check()

            if config.inspect.every and number % config.inspect.every == 0:
                with recorder.pause("look"):
                    recorder.looked(number, look(train_state, batch))
                    recorder.split(number, without.milliseconds(train_state.params, batch))
            last = number == config.steps or recorder.stop
            if number % config.eval_every == 0 and not last:
                with recorder.pause("test"):
                    tested = step.evaluate(eval_step, train_state.params, test)
                    recorder.write("test", number, tested)
                recorder.split(number)
            save = number % config.checkpoint.every == 0 or last
            if save or number % config.guard.replicas_every == 0:
                with recorder.pause("replicas"):
                    check_replicas(train_state.params, number)
                if save and not recorder.bad:
                    with recorder.pause("checkpoint"):
                        checkpoints.save(number, train_state, rows.train)
            if recorder.stop and not recorder.bad:
                checkpoints.close()
                report.stopped(number, workdir)
                return None
        with recorder.pause("test"):
            profile.close(train_state)
            tested = step.evaluate(eval_step, train_state.params, test)
            recorder.write("test", config.steps, tested)
        with recorder.pause("checkpoint"):
            checkpoints.close()
        recorder.split(config.steps)
        require_finite(recorder, tested)
        signals.all_is_saved()

        # What the exchange costs: the same step without it, from the same parameters.
        times = measure.measure_steps(
            train_step,
            train_state,
            *without.start(train_state.params),
            example,
            config.measure_steps,
        )
        network, loop_ms = measure.bandwidth(config.network), recorder.median_step_ms()
        in_one_piece = how.every == 1 and not how.gather
        usual = exchange if in_one_piece else None  # Else it is not behind the gradient.
        in_groups = how.fsdp > 1  # The links within them are faster.
        gigabits = config.network.gigabits
        predicted = None if in_groups else planned.predicted(sent.wire, usual, params, gigabits)
        summary = {
            **tested,
            f"test_{rows.unit}": rows.test_size,
            "frozen_at": recorder.frozen_at or None,
            "loop_step_ms": loop_ms,
            f"{rows.unit}_per_second": loop_ms and 1e3 * example["label"].size / loop_ms,
            "input_share": recorder.input_share(),
            **recorder.looks(),
            **measure.costs(times, sent, network, predicted),
            "bytes_per_param_mean": sent.on_average(config.steps, recorder.frozen_at),
            "seconds": time.perf_counter() - started,
        }
        recorder.write("summary", config.steps, summary)
    report.show(summary, workdir)
    return summary


def require_finite(recorder: metrics.Recorder, tested: dict[str, float]) -> None:
    """Raises if the last steps were bad, or the model is: such a run has failed."""
    if recorder.bad or not math.isfinite(tested["test_loss"]):
        raise RunError(
            f"at the end the loss is not finite (test loss {tested['test_loss']}): lower "
            "config.optimizer.learning_rate"
        )


def asked_rows(rows: int, stop: bool) -> jax.Array:
    """What stands in rows that this process has read, to say whether it was asked to end."""
    return sync.global_batch(np.full(rows, stop, np.float32))
