"""What sparse all-reduces selected, delivered and missed in runs of the training program.

    python -m benchmarks.sparse_run --out=PNG [--window=20] name=RUN name=RUN

Each name has a working directory of `python -m train` with `--config.sync.measure_xi=True`. The
table holds means over all sparse steps, and for xi the median and the 95th percentile; the plot has
the same over time.
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

# What of a step's report is divided by what.
RATIOS = {
    "selected / k": ("selected", "k"),
    "delivered / selected": ("delivered", "selected"),
    "applied / k": ("applied", "k"),
    "xi": ("xi", None),
}


def reports(workdir: str) -> dict[str, np.ndarray]:
    """The ratios of every sparse step of a run, and the numbers of these steps."""
    with Path(workdir, "metrics.jsonl").open() as file:
        lines = [json.loads(line) for line in file]
    lines = [line for line in lines if line["kind"] == "train" and line.get("report/k", 0) > 0]
    if not lines:
        raise SystemExit(f"{workdir} has no sparse steps; train with sync.method=sparse_mean.")

    def of(name: str) -> np.ndarray:
        return np.array([line[f"report/{name}"] for line in lines])

    ratios = {k: of(a) / of(b) if b else of(a) for k, (a, b) in RATIOS.items()}
    return {"step": np.array([line["step"] for line in lines]), **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", help="name=workdir")
    parser.add_argument("--out", type=new_file, required=True)
    parser.add_argument("--window", type=count, default=20, help="steps that a curve averages")
    arguments = parser.parse_args()
    runs = {name: reports(workdir) for name, workdir in (r.split("=", 1) for r in arguments.runs)}

    print(f"{'':28}" + "".join(f"{name:>22}" for name in [*RATIOS, "xi: median", "95 %"]))
    figure, panels = plt.subplots(1, len(RATIOS), figsize=(14, 3.2), layout="constrained")
    for name, run in runs.items():
        numbers = [run[ratio].mean() for ratio in RATIOS]
        numbers += [np.median(run["xi"]), np.quantile(run["xi"], 0.95)]
        print(f"{name:28}" + "".join(f"{number:22.4f}" for number in numbers))
        for panel, ratio in zip(panels, RATIOS, strict=True):
            curve = running_mean(run[ratio], arguments.window)
            panel.plot(run["step"][arguments.window - 1 :], curve, label=name, linewidth=1)
            panel.set(xlabel="step", title=ratio)
    panels[-1].legend()
    figure.savefig(arguments.out, dpi=110)


if __name__ == "__main__":
    main()
