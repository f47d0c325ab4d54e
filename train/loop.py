"""One run, from the config to its report: read this module first."""

import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import jaxcomm
from train import (
    agreement,
    check,
    checkpoint,
    inspection,
    measure,
    metrics,
    plain,
    predicting,
    profiling,
    programs,
    replicas,
    report,
    signals,
    step,
    sync,
    watchdog,
    watched,
)
from train.errors import RunError
from train.run import Run, assemble
from train.state import TrainState, learning_rates
from train.workdir import CHECKPOINTS, changes, keep_config, keep_data, naming_changes


def train(
    config: Any, workdir: Path, started: float, restarted: bool = False
) -> dict[str, Any] | None:
    """Trains, evaluates, measures what the exchange costs, and reports.

    Args:
      config: a config of `configs/`.
      workdir: the directory of metrics, events and checkpoints, the same for all processes.
      started: `time.perf_counter()` at the start of the program.
      restarted: whether the launcher has started the run again; it then continues from its last
        checkpoint, or begins anew if it has none.

    Returns:
      The summary, or None if SIGTERM asked the run to end.

    Raises:
      train.errors.UserError: if the config, the data, the directory or a checkpoint does not fit.
      train.errors.RunError: if the run cannot continue, even after a restart.
      train.signals.StoppedError: if SIGTERM came while several processes measured at the end.
    """
    check.fields(config)
    agreement.check(config, workdir)
    check.fit(config, jax.device_count())
    saved = saved_step(config, workdir, restarted)
    run = assemble(config, workdir, goes_on=saved is not None)
    test = step.make_test(run.forward, run.rows.test)

    # Where the run is: at its beginning, or at its last checkpoint.
    now = run.begin()
    folder, kept = workdir / CHECKPOINTS, config.checkpoint
    checkpoints = checkpoint.Checkpoints(folder, kept.keep, kept.best)
    if saved is not None:
        with naming_changes(workdir, config) as other:
            now = checkpoints.restore(saved, now, run.rows.train, run.tx, other)
    start = int(now.step)
    keep_data(workdir, config, run.rows.identity, resumed=saved is not None)
    keep_config(workdir, config, resumed=saved is not None)

    # One or two compiled steps serve the whole run; what they send is read from them.
    compiled, without = programs.Programs(run, now, config.steps), plain.Plain(run)
    sent = compiled.sent()

    # What watches the run.
    recorder = recorder_of(config, workdir, run, now, sent)
    look = look_where_due(run, config, now, without, recorder)
    check_replicas = replicas.make_check(now.params, run.sync.method)
    profile = profiling.Profile(workdir, start, config.profile.steps)
    with checkpoints, recorder:
        recorder.write("start", start, measure.sizes(sent))
        signals.ask_to_stop()
        tests = functools.partial(write_test, test, recorder, checkpoints)
        tested = tests(start, now) if tests_at(start, config) else None
        for number in range(start + 1, config.steps + 1):
            profile.before(number, now)
            with recorder.waiting():
                batch = run.batch(signals.stop.is_set())
            now, values = compiled.next(number, now)(now, batch)
            recorder.train(number, values)
            checkpoints.check()

            look(number, now, batch)
            stop = recorder.stop  # Read once: a pause below may change it for the next step.
            last = number == config.steps or stop
            is_test = number % config.eval_every == 0 and not last
            scored = kept.best and (is_test or (last and not stop))
            tested = tests(number, now) if scored else None
            save = number % kept.every == 0 or last or scored
            if save or number % config.guard.replicas_every == 0:
                with recorder.pause("replicas"):
                    check_replicas(now.params, number)
                if save and not (recorder.lost if last else recorder.bad):
                    with recorder.pause("checkpoint"):
                        checkpoints.save(number, now, run.rows.train, tested)
            if stop and not recorder.lost:
                profile.close(now)
                complete(checkpoints, recorder)
                return report.stopped(number, workdir)
            if is_test:
                tested = tested or tests(number, now)
                recorder.split(number)
        with recorder.pause("test"):
            profile.close(now)
        tested = tested or tests(config.steps, now)
        complete(checkpoints, recorder)
        recorder.split(config.steps)
        require_finite(recorder, tested)
        signals.all_is_saved(alone=jax.process_count() == 1)
        summary = {
            **tested,
            f"test_{run.rows.unit}": run.rows.test_size,
            **recorder.summary(),
            **costs_of(config, run, sent, compiled.last(), now, without),
            "seconds": time.perf_counter() - started,
        }
        recorder.write("summary", config.steps, summary)
    report.show(summary, workdir)
    return summary


def saved_step(config: Any, workdir: Path, restarted: bool) -> int | None:
    """The step of the checkpoint from which the run continues; None if it begins anew."""
    folder = workdir / CHECKPOINTS
    changed = changes(workdir, config, added=False) if restarted else ()
    saved = checkpoint.where_to_continue(folder, config.checkpoint.resume, restarted, changed)
    check.steps_left(config.steps, saved)
    return saved


def recorder_of(
    config: Any, workdir: Path, run: Run, now: TrainState, sent: measure.Sent
) -> metrics.Recorder:
    """The recorder of a run that is at this state."""
    rates = learning_rates(config.optimizer, config.steps)
    return metrics.Recorder(
        workdir,
        int(now.step),
        config.steps,
        watched.step_of(now.opt_state),
        config.guard.bad_steps,
        {run.rows.unit: run.example["label"].size},
        lambda number, frozen_at: {
            "learning_rate": float(rates[number - 1]),
            "bytes_per_param": sent.in_step(number, frozen_at),
        },
        written_again(int(now.step), config),
        watchdog.Watchdog(config.guard.step_seconds, alone=jax.process_count() == 1),
    )


def look_where_due(
    run: Run, config: Any, now: TrainState, without: plain.Plain, recorder: metrics.Recorder
) -> Callable[[int, TrainState, Any], None]:
    """A function of a step, the state after it and its batch; it does nothing where none is due.

    Its programs are compiled here: in the loop, a run that was asked to end would end too late.
    """
    look = inspection.of_run(run, config, now)
    if look:
        without.start(now.params)

    def look_at(number: int, now: TrainState, batch: Any) -> None:
        if look is None or number % config.inspect.every:
            return
        with recorder.pause("look"):
            if not recorder.stop:
                recorder.looked(number, look(now, batch))
                recorder.split(number, without.milliseconds(now.params, batch))

    return look_at


def tests_at(start: int, config: Any) -> bool:
    """Whether a run that continues at a step begins with the test of that step.

    The earlier run may have been asked to end, with no time for the test.
    """
    return 0 < start < config.steps and start % config.eval_every == 0


def written_again(start: int, config: Any) -> tuple[str, ...]:
    """Kinds of lines that a run writes for the step at which it continues."""
    if start == config.steps:
        return "start", "test", "summary"
    return ("start", "test") if tests_at(start, config) else ("start",)


def write_test(
    test: Callable[[Any], dict[str, float]],
    recorder: metrics.Recorder,
    checkpoints: checkpoint.Checkpoints,
    number: int,
    now: TrainState,
) -> dict[str, float]:
    """Tests the parameters after a step, and writes the results.

    A checkpoint that was saved without a test, for lack of time, gets it now.
    """
    with recorder.pause("test"):
        tested = test(now.params)
        recorder.write("test", number, tested)
        checkpoints.score(number, tested)
    return tested


def complete(checkpoints: checkpoint.Checkpoints, recorder: metrics.Recorder) -> None:
    """Waits until the last checkpoint is on disk."""
    with recorder.pause("checkpoint"):
        checkpoints.close()


def require_finite(recorder: metrics.Recorder, tested: dict[str, float]) -> None:
    """Raises if the last loss or the test loss is not finite: such a run has failed."""
    if recorder.lost or not math.isfinite(tested["test_loss"]):
        raise RunError(
            f"the final loss is not finite (test loss {tested['test_loss']}): lower "
            "config.optimizer.learning_rate"
        )


def costs_of(
    config: Any,
    run: Run,
    sent: measure.Sent,
    train_step: Any,
    now: TrainState,
    without: plain.Plain,
) -> dict[str, Any]:
    """What the exchange costs: the same step without it, from the same parameters; uses up `now`.

    The cost is also predicted, except where links within groups of devices are faster, where both
    steps gather parameters, and where most steps exchange nothing.
    """
    count, gigabits = config.measure_steps, config.network.gigabits
    plain_step, begin = without.start(now.params)
    steps, network = (train_step, now, plain_step, begin, run.example, count), config.network
    one_exchange = run.sync.every == 1 and run.sync.fsdp <= 1 and not run.sync.gather
    period = math.lcm(run.sync.every, run.sync.get("correct_every") or 1)
    if jax.device_count() == 1 or not one_exchange:
        times = measure.measure_steps(*steps, period=period)
        return measure.costs(times, sent, measure.bandwidth(network))
    wires = sent.wire, jaxcomm.wire_report(plain_step)
    messages_step = without.sending(predicting.messages(*wires), begin)
    at = sync.state_of_exchange(run.sync, now.opt_state)
    local_ms = predicting.codes_ms(run.exchange, at, now.params)
    times = measure.measure_steps(*steps, messages_step, period)
    predicted = predicting.predicted(*wires, times.messages_ms, local_ms, gigabits)
    return measure.costs(times, sent, measure.bandwidth(network), predicted)
