"""Natural compression on the wire: elements aggregated a second, and time to an accuracy.

    python -m benchmarks.seed_cnat [--parts=4,8,train] [--repeats=30] [--out=JSON]

Parts `4` and `8`: so many workers reduce a vector, again and again; an exchange of n values in t
seconds aggregates n/t elements a second. `train`: four hosts run the training program on digits
until its test accuracy is --accuracy, with float32 and with natural compression, on links of
--train_rate Mbit/s. Time is that of the steps, without evaluation. The paper's is of AlexNet on
eight workers.
"""

import argparse
import math
import statistics
import sys
from typing import Any

from benchmarks.arguments import count, new_file, positive, several, share, values, whole
from benchmarks.netlab.measuring import Lab, guarded, keep
from benchmarks.netlab.methods import Exchange, shapes_of
from benchmarks.netlab.network import Network
from benchmarks.netlab.training import trained
from benchmarks.netlab.worker import Jax, measure
from jaxcomm import plan

NAME = "benchmarks.seed_cnat"
METHODS = "float32,bfloat16,int8,cnat"
PAPER = -66.0  # per cent of float32's time
CONFIG = "configs/digits_cnat.py"


def main() -> int:
    args = parse()
    if args.worker:
        work(args)
        return 0
    return guarded("seed_cnat", lambda: run(args))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {NAME}", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--parts", default="4,8,train")
    parser.add_argument("--rate", default="100", help="Mbit/s of the links of 4 and 8")
    parser.add_argument("--params", type=values, default=1e6)
    parser.add_argument("--repeats", type=count, default=30)
    parser.add_argument("--train_rate", default="10", help="Mbit/s of the links of train")
    parser.add_argument("--accuracy", type=share, default=0.97)
    parser.add_argument("--steps", type=count, default=200, help="of a training run at most")
    parser.add_argument(
        "--seeds", type=several(whole), default="0,1,2", help="of the training runs"
    )
    parser.add_argument("--width", type=count, default=32, help="of the network that is trained")
    parser.add_argument("--seconds", type=positive, default=600)
    parser.add_argument("--out", type=new_file, help="a JSON file that the rows are kept in")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def run(args: argparse.Namespace) -> None:
    for part in args.parts.split(","):
        if part != "train" and not (part.isdigit() and int(part) > 1):
            raise ValueError(f"a part is a number of workers above 1, or train, got {part!r}.")
    for part in args.parts.split(","):
        if part == "train":
            train(args)
        else:
            aggregate(args, int(part))


def aggregate(args: argparse.Namespace, hosts: int) -> None:
    """Elements a second of each method."""
    command = [sys.executable, "-m", NAME, "--worker", f"--params={args.params}"]
    with Network(plan.load("star", hosts=hosts, rate=args.rate)) as network:
        rows = Lab(network).rows([*command, f"--repeats={args.repeats}"], args.seconds)
    elements = sum(a * b for a, b in shapes_of(round(args.params)).values())
    print(f"{hosts} workers, {args.rate} Mbit/s, {elements} values, millions aggregated a second")
    print(f"{'':12}{'median':>9}{'least':>9}{'most':>9}{'of float32':>12}{'over floor':>12}")
    for row in rows:
        row["elements_per_second"] = [1e3 * elements / ms for ms in row["all_ms"]]
        rates = [r / 1e6 for r in row["elements_per_second"]]
        row["of_float32"] = rows[0]["ms"] / row["ms"]
        print(
            f"{row['method']:12}{statistics.median(rates):9.2f}{min(rates):9.2f}{max(rates):9.2f}"
            f"{row['of_float32']:12.2f}{row['over_floor'] or math.nan:12.2f}"
        )
    keep(args.out, NAME, f"{hosts} workers", rows, rate=args.rate, params=elements)


def work(args: argparse.Namespace) -> None:
    """What one host does to aggregate."""
    together = Jax()
    import jax

    import jaxcomm

    jax.set_mesh(jaxcomm.data_mesh())
    shapes = shapes_of(round(args.params))
    measure([Exchange(m, shapes) for m in METHODS.split(",")], together, args.repeats)


def train(args: argparse.Namespace) -> None:
    """Seconds to the accuracy, with float32 and with natural compression, for each seed."""
    rows = []
    with Network(plan.load("star", hosts=4, rate=args.train_rate)) as network:
        for seed in args.seeds:
            for codec in ("float32", "cnat"):
                options = options_of(args, codec, seed)
                lines = trained(network, CONFIG, args.train_rate, options, args.seconds)
                rows.append({"codec": codec, "seed": seed, **reached(lines, args.accuracy)})
    print(f"digits, 4 workers, {args.train_rate} Mbit/s, to {100 * args.accuracy:.0f} %")
    for row in rows:
        print(f"{row['codec']:12}" + ", ".join(f"{k} {v}" for k, v in row.items() if k != "codec"))
    float32, cnat = (median_seconds(rows, codec) for codec in ("float32", "cnat"))
    change = 100 * (cnat / float32 - 1) if max(cnat, float32) < math.inf else None
    if change is not None:
        print(f"natural compression: {change:+.0f} % of the time; the paper: {PAPER:+.0f} %")
    more = {"rate": args.train_rate, "accuracy": args.accuracy, "width": args.width}
    keep(args.out, NAME, "train", rows, change=change, paper=PAPER, **more)


def median_seconds(rows: list[dict[str, Any]], codec: str) -> float:
    """To the accuracy; a run that did not reach it counts as infinitely long."""
    found = [row["seconds"] for row in rows if row["codec"] == codec]
    return statistics.median(math.inf if s is None else s for s in found)


def options_of(args: argparse.Namespace, codec: str, seed: int) -> dict[str, Any]:
    """The fields of the training program's config."""
    return {
        "seed": seed,
        "sync.codec": codec,
        "steps": args.steps,
        "optimizer.warmup_steps": min(50, args.steps // 2),
        "eval_every": 5,
        "measure_steps": 8,
        "model.width": args.width,
        "checkpoint.every": args.steps,
    }


def reached(lines: list[dict[str, Any]], accuracy: float) -> dict[str, Any]:
    """When a run first had an accuracy, in seconds of its steps, and how it ended."""
    seconds, found = 0.0, None
    for line in lines:
        if line["kind"] == "train":
            seconds += line["step_ms"] / 1e3
        if line["kind"] == "test" and found is None and line["test_accuracy"] >= accuracy:
            found = (round(seconds, 2), line["step"])
    summary = next(line for line in lines if line["kind"] == "summary")
    names = ("test_accuracy", "step_ms", "compute_ms", "bytes_per_param", "params")
    reached_at = dict(zip(("seconds", "steps"), found or (None, None), strict=True))
    return reached_at | {name: summary[name] for name in names}


if __name__ == "__main__":
    sys.exit(main())
