"""Compares runs: a table, and plots of the loss and of how close exchanges are to the mean."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from train.errors import UserError
from train.workdir import METRICS

WINDOW = 20  # Steps over which a curve is averaged.


class Run(NamedTuple):
    """What a run wrote to its directory.

    Attributes:
      name: the part of the directory that tells it from the others.
      steps: numbers of the steps.
      loss: the loss of each step; NaN where it was not finite.
      seconds: time from the first step to the end of each, evaluation and checkpoints left out.
      megabytes: what a device has sent up to each step, by the compiled program.
      looks: lines of `train.inspection`.
      tested: the last line of a test, or {}.
      summary: the line at its end, or {} if it has not ended.
    """

    name: str
    steps: np.ndarray
    loss: np.ndarray
    seconds: np.ndarray
    megabytes: np.ndarray
    looks: list[dict[str, Any]]
    tested: dict[str, Any]
    summary: dict[str, Any]

    def seen(self, name: str) -> float | None:
        """The mean of a number over all looks."""
        found = [look[name] for look in self.looks if look.get(name) is not None]
        return float(np.mean(found)) if found else None


def read(workdir: Path) -> Run:
    """Reads metrics.jsonl.

    Raises:
      UserError: if there is none, or no step in it, or a line of something else.
    """
    path = workdir / METRICS
    names = ("start", "train", "exchange", "test", "summary")
    lines = _lines(path)
    kinds = {kind: [line for line in lines if line["kind"] == kind] for kind in names}
    train, starts, ends = kinds["train"], kinds["start"], kinds["summary"]
    if not train or not starts:
        raise UserError(f"{path} has no step")
    last = train[-1]["step"]  # A continued run also has the summary of its earlier end.
    ends = [line for line in ends if line["step"] >= last]
    sent = starts[-1]["params"] * np.cumsum([line["bytes_per_param"] for line in train])
    return Run(
        name=str(workdir),
        steps=np.array([line["step"] for line in train]),
        loss=np.array([line["loss"] for line in train], float),
        seconds=np.cumsum([line["step_ms"] for line in train]) / 1e3,
        megabytes=sent / 1e6,
        looks=kinds["exchange"],
        tested=kinds["test"][-1] if kinds["test"] else {},
        summary=ends[-1] if ends else {},
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without an unfinished last one."""
    try:
        texts = path.read_text().splitlines()
    except OSError as error:
        raise UserError(f"{path.parent} is not the directory of a run: {error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text: {error}") from error
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            if number == len(texts):  # The run is writing it, or was killed while it did.
                break
            raise UserError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(line, dict) or not {"kind", "step"} <= line.keys():
            raise UserError(f"{path}, line {number} is not of a run: {text[:40]}")
        lines.append(line)
    return lines


def named(runs: Sequence[Run]) -> list[Run]:
    """The runs, named without the folders that all of them share."""
    parts = [Path(run.name).parts for run in runs]
    shared = 0
    while all(len(p) > shared + 1 and p[shared] == parts[0][shared] for p in parts):
        shared += 1
    return [run._replace(name="/".join(p[shared:])) for run, p in zip(runs, parts, strict=True)]


def table(runs: Sequence[Run]) -> Table:
    """One row for each run."""
    shown = Table("run", "steps", "last loss", "test loss", "test accuracy", "step ms", "computes")
    for column in ("bytes/param", "MB sent", "seconds of steps", "error", "cosine", "ties"):
        shown.add_column(column)
    for run in runs:
        s = run.summary
        shown.add_row(
            run.name,
            str(run.steps[-1]) + ("" if s else " so far"),
            f"{smoothed(run.loss)[-1]:.4f}",
            _shown(run.tested.get("test_loss"), ".4f"),
            _shown(run.tested.get("test_accuracy"), ".2%"),
            _shown(s.get("step_ms"), ".2f"),
            _shown(s.get("efficiency") and min(s["efficiency"], 1.0), ".1%"),
            _shown(s.get("bytes_per_param_mean"), ".3f"),
            f"{run.megabytes[-1]:.1f}",
            f"{run.seconds[-1]:.1f}",
            _shown(run.seen("error"), ".1%"),
            _shown(run.seen("cosine"), ".4f"),
            _shown(run.seen("ties"), ".1%"),
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
    """Writes the loss against steps, seconds and bytes, and the cosine with the exact mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(16, 4), layout="constrained")
    labels = ("steps", "seconds of steps", "MB that a device has sent", "steps")
    for axis, label in zip(axes, labels, strict=True):
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    for axis in axes[1:3]:
        axis.sharey(axes[0])
    axes[0].set_ylabel(f"training loss, mean of {WINDOW} steps")
    axes[3].set_ylabel("cosine of exchanged and exact mean")
    for run in runs:
        loss = smoothed(run.loss)
        for axis, x in zip(axes, (run.steps, run.seconds, run.megabytes), strict=False):
            axis.plot(x, loss, label=run.name)
        near = [(look["step"], look["cosine"]) for look in run.looks if look.get("cosine")]
        axes[3].plot(*zip(*near, strict=True) if near else ([], []), marker=".")
    axes[3].set_ylim(-0.05, 1.05)
    if any(run.megabytes[-1] > 0 for run in runs):
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
    Console(width=160, soft_wrap=True).print(table(runs))
    try:
        plot(runs, out)
    except (OSError, ValueError) as error:  # matplotlib does not know the file's ending.
        raise UserError(f"cannot write {out}: {error}") from error
    print(out)
