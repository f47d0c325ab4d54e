"""The finished runs: files, the choice of rates, a table and a plot."""

import collections
import json
import math
import re
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
FOLDER = Path(__file__).resolve().parents[1] / "results" / "pareto"
BASELINE = "float32"
# Of optimizers, and a method, with Nesterov's momentum, in tasks whose other rows have none.
NESTEROV = (
    "nadam",
    "local nadam",
    "factored nadam",
    "4 local steps, scaled_sign, outer momentum",
    "4 local steps, top-k of chunks, outer momentum",
)
BASELINE_OF_NESTEROV = "Nadam, float32"
OF_MUON, BASELINE_OF_MUON = ("muon", "local muon"), "Muon, float32"
BASELINES = BASELINE, BASELINE_OF_NESTEROV, BASELINE_OF_MUON
TITLES = {  # of the panels of the plot
    "gpt": "GPT of 1 M parameters, tiny Shakespeare",
    "gpt_small": "GPT of 0.24 M parameters, tiny Shakespeare",
    "lstm": "LSTM with SGD, tiny Shakespeare",
    "lstm_nesterov": "LSTM with SGD and Nesterov's momentum, tiny Shakespeare",
    "resnet20": "ResNet-20 with SGD, CIFAR-10",
    "resnet20_nesterov": "ResNet-20 with SGD and Nesterov's momentum, CIFAR-10",
}


def path(folder: Path, task: str, method: str, rate: float, seed: int) -> Path:
    """The file of a run."""
    name = re.sub(r"[^a-z0-9]+", "_", method.lower()).strip("_")
    return folder / task / f"{name}_{rate:g}_{seed}.json"


def write(file: Path, row: dict[str, Any]) -> None:
    """Keeps a run; a broken-off write leaves no file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(row, indent=1) + "\n")
    part.rename(file)


def read(folder: Path) -> Rows:
    """All runs, with `chosen` and `minus_float32`; by task, bytes, method, rate and seed.

    A row is compared with float32 at its best rate, in front of an optimizer of the same kind.
    """
    rows = [json.loads(file.read_text()) for file in sorted(folder.glob("*/*.json"))]
    rates = {
        key: _chosen([row for row in rows if _key(row) == key]) for key in set(map(_key, rows))
    }
    base = {}
    for row in rows:
        row["chosen"] = row["rate"] == rates[_key(row)]
        if row["method"] in BASELINES and row["chosen"]:
            base[row["task"], row["method"], row["seed"]] = row["loss"]
    for row in rows:
        has_nesterov = {row["optimizer"], row["method"]}.intersection(NESTEROV)
        baseline = BASELINE_OF_NESTEROV if has_nesterov else BASELINE
        if row["optimizer"] in OF_MUON:
            baseline = BASELINE_OF_MUON
        pair = row["loss"], base.get((row["task"], baseline, row["seed"]))
        row["minus_float32"] = None if None in pair else pair[0] - pair[1]
    order = ("task", "bytes_per_step", "method", "rate", "seed")
    return sorted(rows, key=lambda row: tuple(row[name] for name in order))


def _key(row: dict[str, Any]) -> tuple[str, str]:
    return row["task"], row["method"]


def _chosen(rows: Rows) -> float:
    """The rate of the lowest mean validation loss, of those that most seeds have."""
    losses: dict[float, list[float]] = {}
    for row in rows:  # a run that diverged has no losses
        loss = math.inf if row["validation_loss"] is None else row["validation_loss"]
        losses.setdefault(row["rate"], []).append(loss)
    return min(_compared(rows), key=lambda rate: sum(losses[rate]))


def _compared(rows: Rows) -> list[float]:
    """The rates that most seeds have."""
    seeds = collections.Counter(row["rate"] for row in rows)
    return [rate for rate, count in seeds.items() if count == max(seeds.values())]


def summaries(rows: Rows) -> Rows:
    """One line for each task and method: means over the seeds at the chosen rate."""
    lines = []
    for key in dict.fromkeys(map(_key, rows)):
        of_method = [row for row in rows if _key(row) == key]
        tried = sorted({row["rate"] for row in of_method})
        own = [row for row in rows if _key(row) == key and row["chosen"]]
        line = {name: own[0][name] for name in ("task", "method", "optimizer", "rate")}
        for name in ("bytes_per_step", "loss", "minus_float32"):
            line[name] = _mean([row[name] for row in own])
        at_an_end = len(tried) > 1 and line["rate"] in (tried[0], tried[-1])
        line |= {"rates": len(_compared(of_method)), "seeds": len(own)}
        lines.append(line | {"note": "best rate at an end" if at_an_end else ""})
    return lines


def _mean(numbers: list[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return sum(known) / len(known) if known else None


def table(rows: Rows) -> str:
    """The chosen runs as text."""
    layout = "{:<10} {:<43} {:<12} {:>8} {:>8} {:>9} {:>8} {:>6} {:>6}  {}"
    names = "task", "method", "optimizer", "bytes", "loss", "- float32"
    lines = [layout.format(*names, "rate", "rates", "seeds", "")]
    for line in summaries(rows):
        words = line["task"], line["method"], line["optimizer"]
        numbers = f"{line['bytes_per_step']:.3f}", _nats(line["loss"], ".3f")
        numbers += _nats(line["minus_float32"], "+.3f"), f"{line['rate']:g}"
        lines.append(layout.format(*words, *numbers, line["rates"], line["seeds"], line["note"]))
    return "\n".join(text.rstrip() for text in lines)


def _nats(number: float | None, form: str) -> str:
    return "-" if number is None else format(number, form)


def _is_beaten(line: dict[str, Any], lines: Rows) -> bool:
    """Whether another row has a lower loss with no more bytes."""
    return any(
        other["loss"] < line["loss"] and other["bytes_per_step"] <= line["bytes_per_step"]
        for other in lines
    )


def plot(rows: Rows, file: Path) -> None:
    """Losses in the order of bytes, a panel for each task; rows that another one beats are grey."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = [line for line in summaries(rows) if line["loss"] is not None]
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    of = {task: [line for line in lines if line["task"] == task] for task in tasks}
    heights = [1.2 + 0.24 * len(of[task]) for task in tasks]
    figure, panels = plt.subplots(
        len(tasks),
        1,
        figsize=(9, sum(heights)),
        height_ratios=heights,
        layout="constrained",
        squeeze=False,
    )
    for panel, task in zip(panels[:, 0], tasks, strict=True):
        for place, line in enumerate(of[task]):
            color = "0.7" if _is_beaten(line, of[task]) else "C0"
            panel.plot(line["loss"], place, "o", color=color, markersize=6)
        for base in (line for line in of[task] if line["method"] in BASELINES):
            panel.axvline(base["loss"], color="0.8", linewidth=1, zorder=0)
        names = [f"{line['method']}   {line['bytes_per_step']:.2f}" for line in of[task]]
        panel.set_yticks(range(len(names)), names, fontsize=9)
        panel.tick_params(axis="y", length=0)
        panel.grid(axis="y", color="0.93")
        panel.set(ylim=(len(names) - 0.4, -0.6), xlabel="test loss, nats", title=TITLES[task])
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.set_axisbelow(True)
    figure.savefig(file, dpi=110)
