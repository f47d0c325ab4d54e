"""Training losses of several runs side by side, from the metrics that they wrote.

    python -m benchmarks.loss_curves --out=losses.png float32=RUN,RUN cnat=RUN,RUN

Each name has one or more working directories of `python -m train`; a curve is the mean over them of
a running mean over `--window` steps. The table gives the last one, and the largest distance of each
curve to the first name's, over the steps that all runs have.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from benchmarks.arguments import count, new_file
from benchmarks.plots import running_mean


def named_run(text: str) -> tuple[str, list[str]]:
    """A name and the working directories of its runs."""
    name, _, workdirs = text.partition("=")
    for workdir in workdirs.split(","):
        if not Path(workdir, "metrics.jsonl").is_file():
            wrong = f"expected name=workdir,workdir, got {text!r}: {workdir!r} has no metrics.jsonl"
            raise argparse.ArgumentTypeError(wrong)
    return name, workdirs.split(",")


def losses(workdir: str) -> np.ndarray:
    """The training loss of every step of a run."""
    with Path(workdir, "metrics.jsonl").open() as file:
        lines = [json.loads(line) for line in file]
    return np.array([line["loss"] for line in lines if line["kind"] == "train"])


def curve(workdirs: list[str], window: int) -> np.ndarray:
    """The mean over runs of their running means."""
    runs = [losses(workdir) for workdir in workdirs]
    length = min(map(len, runs))
    return running_mean(np.mean([run[:length] for run in runs], axis=0), window)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=named_run, help="name=workdir,workdir")
    parser.add_argument("--out", type=new_file, required=True)
    parser.add_argument("--window", type=count, default=100)
    parser.add_argument("--title", default="")
    arguments = parser.parse_args()
    curves = {name: curve(dirs, arguments.window) for name, dirs in arguments.runs}

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    first = next(iter(curves.values()))
    print(f"{'':20} {'last':>8} {'largest distance':>18}")
    for name, values in curves.items():
        length = min(len(values), len(first))
        distance = np.abs(values[:length] - first[:length]).max()
        print(f"{name:20} {values[-1]:8.4f} {distance:18.4f}")
        axes.plot(np.arange(len(values)) + arguments.window, values, label=name, linewidth=1)
    axes.set(xlabel="step", ylabel=f"training loss in nats, mean of {arguments.window} steps")
    axes.set_title(arguments.title)
    axes.legend()
    figure.savefig(arguments.out, dpi=120)


if __name__ == "__main__":
    main()
