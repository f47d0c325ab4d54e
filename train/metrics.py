"""Metrics while a run runs: one line a step in metrics.jsonl, TensorBoard, a progress bar."""

import contextlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import jax
from tqdm import tqdm

from train.errors import RunError
from train.events import Events
from train.split import Split
from train.step import FINITE, STOP
from train.watchdog import Watchdog
from train.watched import FIELD
from train.workdir import METRICS

SENT = "bytes_per_param"  # of a step, a key of `known`


class Recorder:
    """Writes measurements on process 0; on other processes it only waits for the devices.

    Args:
      workdir: directory of `metrics.jsonl` and the TensorBoard events.
      start: steps taken before this run; an earlier run's lines about later steps are dropped.
      steps: steps after which the run ends.
      frozen_at: the step at which the optimizer's own warm-up ended in an earlier run, as
        `train.watched` reads it; 0 if it did not end.
      bad_steps: `RunError` is raised after this many steps in a row whose loss or gradient is not
        finite.
      batch: the size of a global batch, by the name of what is counted.
      known: what the host knows of a step, from its number and the `frozen_at` of the step before.
      again: kinds of lines that this run writes for the step `start`; those of an earlier run are
        dropped.
      watchdog: is told of every step that has ended, and of all work that is not a step.

    Attributes:
      frozen_at: the same, as of the last step written.
      stop: whether a device's process was asked to end before the last step written; the same on
        all processes.
      bad: how many of the last steps in a row had a loss or a gradient that is not finite.
      lost: whether the loss of the last step was not finite; then the parameters are no good.
    """

    def __init__(
        self,
        workdir: Path,
        start: int,
        steps: int,
        frozen_at: int = 0,
        bad_steps: int = 20,
        batch: Mapping[str, int] = MappingProxyType({}),
        known: Callable[[int, int], dict[str, float]] = lambda step, frozen_at: {},
        again: Sequence[str] = ("start",),
        watchdog: Watchdog | None = None,
    ):
        self.frozen_at = frozen_at
        self.stop = False
        self.bad, self.lost = 0, False
        self._bad_steps = bad_steps
        self._watchdog = watchdog or Watchdog()
        self._batch, self._known = batch, known
        self._step_ms: list[float] = []
        self._input_ms: list[float] = []
        self._sent: list[float] = []
        self._waited = 0.0
        self._looks: list[dict[str, float]] = []
        self._split = Split()
        self._late: tuple[int, dict[str, Any]] | None = None
        self._time = time.perf_counter()
        self._steps = steps
        self._primary = jax.process_index() == 0
        if not self._primary:
            return
        path = workdir / METRICS
        before = _keep_lines_until(path, start, again)
        self._sent += [line[SENT] for line in before if line["kind"] == "train" and SENT in line]
        self._looks += [_numbers(line) for line in before if line["kind"] == "exchange"]
        self._file = path.open("a", buffering=1)  # Line by line: a killed run leaves every line.
        self._events = Events(workdir, start)
        self._watchdog.below_bar = True
        interactive = sys.stderr.isatty()
        self._bar = tqdm(
            total=steps,
            initial=start,
            unit="step",
            mininterval=0.2 if interactive else 5.0,
            dynamic_ncols=interactive,
        )

    def __enter__(self) -> "Recorder":
        self._watchdog.start()
        self._time = time.perf_counter()  # Earlier compilation is not part of the first step.
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del kind, trace
        self._watchdog.close()
        if not self._primary:
            return
        self._bar.close()
        for file in (self._events, self._file):
            # A full disk fails here too; the first error is the one to report.
            with contextlib.suppress(OSError) if error else contextlib.nullcontext():
                file.close()

    def train(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Takes the metrics of a step just started and writes those of the one before.

        So the devices always have a step to run while the host writes.
        """
        self.flush()
        self._late = (step, metrics)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Surrounds the making of a batch, while the devices run the step before.

        If they have finished it by then, they may have waited all that time; otherwise they have
        not waited.
        """
        started = time.perf_counter()
        with self._watchdog.at("its data", ahead=0 if self._late is None else 1):
            yield
        if self._late is None or all(value.is_ready() for value in self._late[1].values()):
            self._waited += time.perf_counter() - started

    def input_share(self) -> float | None:
        """An upper bound on the share of the steps' time that devices have waited for batches."""
        total = sum(self._step_ms)
        return min(sum(self._input_ms) / total, 1.0) if total else None

    def flush(self) -> None:
        """Waits for the last step and writes it; its time runs from the end of the one before."""
        if self._late is None:
            return
        step, metrics = self._late
        values = {name: float(value) for name, value in metrics.items()}
        self._watchdog.ended(step)
        now = time.perf_counter()
        self.stop = values.pop(STOP, 0.0) > 0
        finite = values.get(FINITE, 1.0) == 1
        if finite:
            values.pop(FINITE, None)  # reported only for steps that were not finite
        values["step_ms"] = 1e3 * (now - self._time)
        self._step_ms.append(values["step_ms"])
        self._input_ms.append(1e3 * self._waited)
        self._split.step(now - self._time, self._waited)
        self._late, self._time, self._waited = None, now, 0.0
        frozen_at = int(values.pop(FIELD, self.frozen_at))
        ended = frozen_at > 0 and self.frozen_at == 0
        if self._primary:
            of_host = self._of_host(step)
            self._sent += [of_host[SENT]] if SENT in of_host else []
            with self._watchdog.at("its files"):
                self.write("train", step, values | of_host)
            self._bar.set_postfix(
                {name: f"{value:.4g}" for name, value in values.items()}, refresh=False
            )
            self._bar.update()
            if step == self._steps:
                self._bar.close()
        if step == self._steps:
            self._watchdog.close()  # what is measured at the end takes as long as it likes
        self.frozen_at = frozen_at
        if self._primary and ended:
            self._warmup_ended(step)
        self.lost = not math.isfinite(values["loss"])
        self.bad = self.bad + 1 if self.lost or not finite else 0
        if self.bad >= self._bad_steps:
            raise RunError(
                f"the loss or a gradient was not finite in steps {step - self.bad + 1} to "
                f"{step}: lower config.optimizer.learning_rate, or continue from the last "
                "checkpoint, which is from before"
            )

    def _of_host(self, step: int) -> dict[str, float]:
        """What the host knows of the last step."""
        times = {"input_ms": self._input_ms[-1]}
        for unit, size in self._batch.items():
            times[f"{unit}_per_second"] = 1e3 * size / self._step_ms[-1]
        return times | self._known(step, self.frozen_at)

    def _warmup_ended(self, step: int) -> None:
        """Says once in which step the optimizer's own warm-up ended."""
        self.write("warmup_ended", step, {FIELD: self.frozen_at})
        # Above the bar, which is redrawn below it.
        tqdm.write(f"step {step}: the optimizer's warm-up has ended", file=sys.stderr)

    def looked(self, step: int, values: dict[str, float]) -> None:
        """Writes what `train.inspection` has seen after a step."""
        self._looks.append(values)
        self.write("exchange", step, values)

    def looks(self) -> dict[str, float]:
        """The means over what was seen, by `exchange_NAME`."""
        names = self._looks[-1] if self._looks else ()  # an earlier run may have seen others
        return {
            f"exchange_{name}": statistics.fmean(x[name] for x in self._looks if name in x)
            for name in names
        }

    @contextlib.contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """Surrounds work that is not a step: writes the last step before, restarts the clock after.

        Args:
          name: the part of the run's time that this work belongs to; see `train.split`.
        """
        self.flush()
        if self._primary:  # A run that continues from a checkpoint has the earlier events.
            self._events.flush()
        with self._watchdog.paused(), self._split.part(name):
            yield
        self._time = time.perf_counter()

    def split(self, step: int, compute_ms: float | None = None) -> None:
        """Writes where the time has gone since the last such line; see `train.split`."""
        parts = self._split.line(compute_ms)
        if parts:
            self.write("split", step, parts)

    def summary(self) -> dict[str, Any]:
        """What is known at the end, on process 0: bytes of all steps, times since the last start.

        `loop_step_ms` is the time from the end of a step to the end of the next.
        """
        median = statistics.median(self._step_ms) if self._step_ms else None
        speeds = {
            f"{unit}_per_second": median and 1e3 * n / median for unit, n in self._batch.items()
        }
        return {
            "frozen_at": self.frozen_at or None,
            "loop_step_ms": median,
            **speeds,
            "input_share": self.input_share(),
            f"{SENT}_mean": statistics.fmean(self._sent) if self._sent else None,
            **self.looks(),
        }

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Writes one line of metrics.jsonl, and the numbers as TensorBoard scalars.

        Args:
          kind: "start", "train", "exchange", "split", "test", "summary" or "warmup_ended".
          step: the number of steps taken.
          values: by name; a number that is not finite becomes null in JSON.
        """
        if not self._primary:
            return
        line = {"kind": kind, "step": step, **finite(values)}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        numbers = {
            f"{kind}/{name}": value
            for name, value in values.items()
            if isinstance(value, int | float)
        }
        self._events.scalars(numbers, step)


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """Values that JSON can represent: None instead of NaN and infinity."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line, as they were before `finite`."""
    names = line.keys() - {"kind", "step"}
    return {name: math.nan if line[name] is None else line[name] for name in names}


def _keep_lines_until(path: Path, step: int, again: Sequence[str]) -> list[dict[str, Any]]:
    """Drops what an earlier run wrote after a step, and a line that it did not finish.

    Args:
      path: the path of the file.
      step: the last step to keep.
      again: kinds of lines that will be written anew for this step.

    Returns:
      The lines that are kept.
    """
    kept, said = [], []
    text = path.read_text(errors="replace") if path.exists() else ""
    for line in text.splitlines(keepends=True):
        try:
            found = json.loads(line)
            if found["step"] < step + (found["kind"] not in again):
                kept.append(line)
                said.append(found)
        except json.JSONDecodeError:
            continue
    scratch = path.with_suffix(".tmp")
    scratch.write_text("".join(kept))
    scratch.replace(path)
    return said
