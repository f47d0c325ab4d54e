"""The plots of what benchmarks have kept, for `python -m benchmarks.tables`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

Rows = dict[str, dict[str, Any]]  # method -> rate -> row
Names = Mapping[str, str]
# Lines of the plot of steps.
STEPS = ("torch/float32", "float32", "bfloat16", "int4", "torch/bfloat16", "scaled_sign")
STEPS += ("torch/powersgd1", "powersgd1", "vote")


def plot_exchanges(path: Path, rows: Rows, rates: Sequence[str], names: Names) -> None:
    """A panel for each rate: what was measured, and the floor."""
    order = sorted(rows, key=lambda m: rows[m]["200"]["step_less_compute_ms"])
    figure, panels = plt.subplots(1, len(rates), sharey=True, figsize=(11, 5), layout="constrained")
    for rate, axes in zip(rates, panels, strict=True):
        for peer, colour, label in ((False, "C0", "jaxcomm"), (True, "C1", "PyTorch DDP")):
            ours = [i for i, m in enumerate(order) if m.startswith("torch/") == peer]
            places = [i for i in ours if rate in rows[order[i]]]
            ms = [rows[order[i]][rate]["step_less_compute_ms"] for i in places]
            axes.plot(ms, places, "o", color=colour, markersize=5, label=label)
        floors = {i: rows[m][rate]["floor_ms"] for i, m in enumerate(order) if rate in rows[m]}
        mark = {"color": "black", "markersize": 11, "label": "link's floor"}
        axes.plot(list(floors.values()), list(floors), "|", **mark)
        axes.set_xscale("log")
        axes.set(xlabel="ms, step less compute", title=f"{rate} Mbit/s")
        axes.grid(axis="both", linewidth=0.3)
    panels[0].set_yticks(range(len(order)), [names[m].replace("`", "") for m in order])
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_steps(path: Path, found: Rows, rates: Sequence[str], names: Names) -> None:
    """A line for each method: the step by the rate of the links."""
    figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
    ends = {}
    for method in STEPS:
        peer = method.startswith("torch/")
        colour = {"float32": "C3", "bfloat16": "C0"}.get(method.removeprefix("torch/"))
        colour = colour or {"int4": "C2", "vote": "C4", "scaled_sign": "C5"}.get(method, "C1")
        ms = [found[method][rate]["step_ms"] for rate in rates]
        style = {"linestyle": "--" if peer else "-", "marker": "s" if peer else "o"}
        axes.plot([float(r) for r in rates], ms, color=colour, markersize=4, **style)
        ends[method] = float(rates[-1]), ms[-1], colour
    axes.set(xscale="log", yscale="log", xlim=(45, 4800))
    axes.set(xlabel="rate of each link, Mbit/s", ylabel="step, ms")
    axes.set_xticks([float(r) for r in rates], rates)
    axes.set_yticks([50, 100, 200, 500, 1000, 2000], ["50", "100", "200", "500", "1000", "2000"])
    axes.minorticks_off()
    axes.grid(linewidth=0.3)
    _name_ends(figure, axes, ends, names)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _name_ends(figure: Any, axes: Any, ends: dict[str, Any], names: Names) -> None:
    """The name of each line at its end, higher where it would be written over another one."""
    figure.draw_without_rendering()  # What follows needs the place of the axes.
    taken = float("-inf")
    for method, (x, y, colour) in sorted(ends.items(), key=lambda end: end[1][1]):
        height = axes.transData.transform((x, y))[1] * 72 / figure.dpi
        placed = max(height - 3, taken + 11)  # in points
        axes.annotate(
            names[method],
            (x, y),
            (8, placed - height),
            textcoords="offset points",
            color=colour,
            fontsize=9,
            va="center",
        )
        taken = placed


def plot_cnat(path: Path, found: dict[str, Any]) -> None:
    """Violins: elements aggregated a second."""
    figure, panels = plt.subplots(
        1, len(found), sharey=True, figsize=(8, 3.6), layout="constrained"
    )
    for (part, rows), axes in zip(found.items(), panels, strict=True):
        data = [[rate / 1e6 for rate in row["elements_per_second"]] for row in rows]
        axes.violinplot(data, showmedians=True)
        axes.set_xticks(range(1, len(rows) + 1), [row["method"] for row in rows])
        axes.set_ylim(0)
        axes.set_title(part)
        axes.grid(axis="y", linewidth=0.3)
    panels[0].set_ylabel("million elements a second")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_training(path: Path, rows: Sequence[dict[str, Any]], names: Names) -> None:
    """A line for each method: the test loss by the seconds of training, means over seeds."""
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    for method in dict.fromkeys(row["method"] for row in rows):
        curves = [row["curve"] for row in rows if row["method"] == method]
        seconds, losses = np.mean(np.array(curves), axis=0).T
        axes.plot(seconds, losses, ".-", linewidth=1, label=names.get(method, method))
    axes.set(xscale="log", xlabel="seconds of training", ylabel="test loss, nats a byte")
    marks = (5, 10, 20, 50, 100, 200, 500)
    axes.set_xticks(marks, map(str, marks))
    axes.minorticks_off()
    axes.grid(linewidth=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_predictions(
    path: str | Path, points: Mapping[str, tuple[Sequence[float], Sequence[float]]]
) -> None:
    """Of each kind of method, predicted over measured milliseconds."""
    figure, axes = plt.subplots(figsize=(6, 5), layout="constrained")
    measured = [x for xs, _ in points.values() for x in xs]
    ends = [min(measured), max(measured)]
    axes.plot(ends, ends, color="0.7", linewidth=1)
    for name, (x, y) in points.items():
        axes.plot(x, y, ".", label=name)
    axes.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="predicted, ms")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=100)


def running_mean(x: np.ndarray, window: int) -> np.ndarray:
    """The means of `window` neighbours; a ValueError if there are fewer."""
    if len(x) < window:
        raise ValueError(f"a run of {len(x)} steps is shorter than --window={window}.")
    return np.convolve(x, np.ones(window) / window, mode="valid")
