"""Runs side by side: a table, and the loss against steps, time and bytes as plots."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from train.errors import UserError

WINDOW = 20  # Steps over which a curve is averaged.


class Run(NamedTuple):
    """What a run has left in its directory.

    Attributes:
      name: the last part of the directory that tells it from the others.
      steps: numbers of the steps.
      loss: of each step; NaN where it was not finite.
      seconds: time from the first step to the end of each, evaluation and checkpoints left out.
      tested: the last line of a test, or {}.
      summary: the line at its end, or {} if it has not ended.
    """

    name: str
    steps: np.ndarray
    loss: np.ndarray
    seconds: np.ndarray
    tested: dict[str, Any]
    summary: dict[str, Any]

    @property
    def megabytes(self) -> np.ndarray | None:
        """What a device has sent until each step, by the compiled program."""
        if not self.summary:
            return None
        return self.steps * self.summary["bytes_per_param_mean"] * self.summary["params"] / 1e6


def read(workdir: Path) -> Run:
    """Reads metrics.jsonl.

    Raises:
      UserError: if there is none, or no step in it.
    """
    path = workdir / "metrics.jsonl"
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    except OSError as error:
        raise UserError(f"{workdir} is not the directory of a run: {error}") from error
    except ValueError as error:
        raise UserError(f"{path} has a line that is not JSON: {error}") from error
    kinds = {kind: [line for line in lines if line["kind"] == kind] for kind in ("train", "test")}
    train = kinds["train"]
    if not train:
        raise UserError(f"{path} has no step")
    ends = [line for line in lines if line["kind"] == "summary"]
    return Run(
        name=str(workdir),
        steps=np.array([line["step"] for line in train]),
        loss=np.array([line["loss"] for line in train], float),
        seconds=np.cumsum([line["step_ms"] for line in train]) / 1e3,
        tested=kinds["test"][-1] if kinds["test"] else {},
        summary=ends[-1] if ends else {},
    )


def named(runs: Sequence[Run]) -> list[Run]:
    """The runs without the folders that all of them share."""
    parts = [Path(run.name).parts for run in runs]
    shared = 0
    while all(len(p) > shared + 1 and p[shared] == parts[0][shared] for p in parts):
        shared += 1
    return [run._replace(name="/".join(p[shared:])) for run, p in zip(runs, parts, strict=True)]


def table(runs: Sequence[Run]) -> Table:
    """One row for each run."""
    shown = Table("run", "steps", "last loss", "test loss", "test accuracy", "step ms", "computes")
    for column in ("bytes/param", "MB sent", "seconds of steps"):
        shown.add_column(column)
    for run in runs:
        s, sent = run.summary, run.megabytes
        shown.add_row(
            run.name,
            str(run.steps[-1]) + ("" if s else " so far"),
            f"{smoothed(run.loss)[-1]:.4f}",
            _shown(run.tested.get("test_loss"), ".4f"),
            _shown(run.tested.get("test_accuracy"), ".2%"),
            _shown(s.get("step_ms"), ".2f"),
            _shown(s.get("efficiency") and min(s["efficiency"], 1.0), ".1%"),
            _shown(s.get("bytes_per_param_mean"), ".3f"),
            _shown(None if sent is None else float(sent[-1]), ".1f"),
            f"{run.seconds[-1]:.1f}",
        )
    return shown


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def smoothed(loss: np.ndarray) -> np.ndarray:
    """The mean of the last WINDOW steps at every step, those that are not finite left out."""
    return np.array(
        [
            np.mean(part[np.isfinite(part)]) if np.isfinite(part).any() else np.nan
            for part in (loss[max(0, i - WINDOW + 1) : i + 1] for i in range(len(loss)))
        ]
    )


def plot(runs: Sequence[Run], path: Path) -> None:
    """Writes the loss against steps, against seconds, and against what a device has sent."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), sharey=True, layout="constrained")
    labels = ("steps", "seconds of steps", "MB that a device has sent")
    for axis, label in zip(axes, labels, strict=True):
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(f"training loss, mean of {WINDOW} steps")
    for run in runs:
        loss = smoothed(run.loss)
        for axis, x in zip(axes, (run.steps, run.seconds, run.megabytes), strict=True):
            if x is not None:
                axis.plot(x, loss, label=run.name)
    if any(run.megabytes is not None for run in runs):
        axes[2].set_xscale("log")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def compare(workdirs: Sequence[str], out: Path) -> None:
    """Prints the table and writes the plots.

    Raises:
      UserError: if a directory is not one of a run, or the plot cannot be written.
    """
    runs = named([read(Path(workdir)) for workdir in workdirs])
    Console(width=140, soft_wrap=True).print(table(runs))
    try:
        plot(runs, out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error}") from error
    print(out)
