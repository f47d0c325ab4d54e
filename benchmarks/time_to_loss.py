"""A transformer trained with Adam on hosts joined by slow links: its loss, and when it has it.

    python -m benchmarks.time_to_loss [--rate=50] [--methods=float32,int4] [--seeds=0,1]
        [--steps=600] [--out=JSON]

Four hosts (`benchmarks.netlab`; needs root) run the training program with each method in turn: the
same model and data, Nesterov momentum, and the learning rate that was the best of two to four for
the method on simulated devices. Methods of few bits, whose steps are short, take more of them:
MORE times --steps. Time is that of the steps, without tests. Beside the loss at the end stands when
a run has the loss that float32's has after four fifths of its steps.
"""

import argparse
import statistics
import sys
from typing import Any

from benchmarks.arguments import count, new_file, one_of, positive, several, whole
from benchmarks.netlab.measuring import guarded, keep
from benchmarks.netlab.network import Network
from benchmarks.netlab.training import trained
from jaxcomm import plan

NAME = "benchmarks.time_to_loss"
CONFIG = "configs/lm_transformer.py:nano"
TESTS, SHARE = 15, 0.8  # of a run; and of float32's steps, whose loss is the goal

NADAM = {"optimizer.nesterov": True, "optimizer.learning_rate": 2e-3}
SIGNS = {"sync.codec": "scaled_sign", "sync.error_feedback": True}
METHODS: dict[str, dict[str, Any]] = {
    "float32": {**NADAM, "sync.codec": "float32"},
    "bfloat16": {**NADAM, "sync.codec": "bfloat16"},
    "cnat": {**NADAM, "sync.codec": "cnat"},
    "int4": {**NADAM, "sync.codec": "int4", "sync.error_feedback": True},
    "factored_nadam": {
        **SIGNS,
        "sync.method": "factored_adam",
        "sync.codec": "scaled_sign(block_size=128)",
        "sync.nesterov": True,
        "sync.b2": 0.99,
        "sync.weight_decay": 0.1,
        "optimizer.name": "scale",
        "optimizer.learning_rate": 4e-3,
    },
    "local_nadam": {
        **SIGNS,
        "sync.local_optimizer": True,
        "optimizer.nesterov": True,
        "optimizer.learning_rate": 4e-3,
    },
    "local_steps": {
        **SIGNS,
        "sync.every": 4,
        "sync.outer_momentum": 0.75,
        "optimizer.momentum": 0.5,
        "optimizer.learning_rate": 1e-3,
    },
}
MORE = {"factored_nadam": 1.5, "local_nadam": 1.5, "local_steps": 2.0}
TITLES = {
    "int4": "int4 with error feedback",
    "factored_nadam": "factored Nadam, scaled_sign(128)",
    "local_nadam": "each device's Nadam, then scaled signs",
    "local_steps": "scaled signs in every 4th step, outer momentum",
}


def main() -> int:
    args = parse()
    return guarded("time_to_loss", lambda: run(args))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {NAME}", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--methods", type=several(one_of(METHODS)), default=",".join(METHODS))
    parser.add_argument("--rate", default="50", help="Mbit/s of the links")
    parser.add_argument("--hosts", type=count, default=4)
    parser.add_argument("--seeds", type=several(whole), default="0,1")
    parser.add_argument("--steps", type=count, default=600, help="of float32")
    parser.add_argument("--batch_size", type=count, default=16, help="rows of 64 bytes")
    parser.add_argument("--depth", type=count, default=4, help="layers of the transformer")
    parser.add_argument("--seconds", type=positive, default=1800, help="after which a run is ended")
    parser.add_argument("--out", type=new_file, help="a JSON file that the rows are kept in")
    return parser.parse_args()


def run(args: argparse.Namespace) -> None:
    if args.steps % (4 * TESTS):
        raise ValueError(f"steps are a multiple of {4 * TESTS}, got {args.steps}.")
    rows = []
    with Network(plan.load("star", hosts=args.hosts, rate=args.rate)) as network:
        for seed in args.seeds:
            for method in args.methods:
                options = {**options_of(args, seed, method), **METHODS[method]}
                lines = trained(network, CONFIG, args.rate, options, args.seconds)
                rows.append({"method": method, "seed": seed, **summary_of(lines)})
                found = ", ".join(f"{k} {v}" for k, v in rows[-1].items() if k != "curve")
                print(found, flush=True)
    show(rows)
    for method in args.methods:
        own = [row for row in rows if row["method"] == method]
        keep(args.out, NAME, method, own, rate=args.rate)


def options_of(args: argparse.Namespace, seed: int, method: str) -> dict[str, Any]:
    """Fields of the config besides those of the method."""
    steps = round(args.steps * MORE.get(method, 1))
    return {
        "seed": seed,
        "steps": steps,
        "batch_size": args.batch_size,
        "data.sequence_length": 64,
        "model.depth": args.depth,
        "optimizer.warmup_steps": args.steps // 10,
        "optimizer.b2": 0.99,
        "eval_every": args.steps // TESTS,
        "checkpoint.every": steps,
        "measure_steps": 8,
        "inspect.every": 0,
    }


def summary_of(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """How a run ended, and its curve: seconds of its steps, and the test loss after them."""
    seconds, curve = 0.0, []
    for line in lines:
        if line["kind"] == "train":
            seconds += line["step_ms"] / 1e3
        if line["kind"] == "test":
            curve.append((round(seconds, 3), round(line["test_loss"], 4)))
    last = next(line for line in lines if line["kind"] == "summary")
    names = ("step_ms", "compute_ms", "bytes_per_param_mean", "params")
    return {
        "steps": last["step"],
        "loss": curve[-1][1],
        "seconds": curve[-1][0],
        **{name: last[name] for name in names},
        "curve": curve,
    }


def rows_of(parts: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that were kept, in the order of the methods."""
    return [row for method in METHODS if method in parts for row in parts[method]["rows"]]


def goals(rows: list[dict[str, Any]]) -> dict[int, float]:
    """For each seed, the loss that is waited for, if float32 was run."""
    curves = {row["seed"]: row["curve"] for row in rows if row["method"] == "float32"}
    return {seed: curve[round(SHARE * len(curve)) - 1][1] for seed, curve in curves.items()}


def until(curve: list[tuple[float, float]], goal: float) -> float | None:
    """Seconds until a test loss is at most the goal."""
    return next((seconds for seconds, loss in curve if loss <= goal), None)


def means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each method: means over its seeds, and what they are to float32's."""
    found, aims = [], goals(rows)
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        mean = {k: statistics.mean(row[k] for row in own) for k in ("loss", "seconds", "step_ms")}
        waits = [until(row["curve"], aims[row["seed"]]) for row in own if row["seed"] in aims]
        is_reached = bool(waits) and None not in waits
        mean["until"] = statistics.mean(waits) if is_reached else None
        mean["bytes"] = statistics.mean(row["bytes_per_param_mean"] for row in own)
        mean["compute_ms"] = statistics.mean(row["compute_ms"] for row in own)
        found.append({"method": method, "steps": own[0]["steps"], **mean})
    return found


def show(rows: list[dict[str, Any]]) -> None:
    names = f"{'bytes':>7}{'steps':>7}{'loss':>8}{'seconds':>9}{'to the goal':>13}{'step, ms':>10}"
    print(f"{'':16}{names}")
    for row in means(rows):
        wait = "-" if row["until"] is None else f"{row['until']:.0f}"
        print(
            f"{row['method']:16}{row['bytes']:7.2f}{row['steps']:7}{row['loss']:8.3f}"
            f"{row['seconds']:9.0f}{wait:>13}{row['step_ms']:10.0f}"
        )


if __name__ == "__main__":
    sys.exit(main())
