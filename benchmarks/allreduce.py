"""How long one exchange takes on a network, beside its floor, XLA's float32 mean and PyTorch.

    python -m benchmarks.allreduce --topology=star --hosts=4 --rate=50 --params=8e6
        [--methods=float32,bfloat16,vote/ring] [--devices=1] [--repeats=5] [--peers] [--json]

Hosts are real processes in namespaces of their own (`benchmarks.netlab`; needs root). Gradients are
matrices of 1024 x 1024. A repeat starts after a barrier and takes as long as its slowest host;
repeats of all methods alternate; medians are shown. `link MB` is what the busiest direction of a
link carried in one exchange, headers and the flag included and barriers not, and the floor is that
over the rate that one TCP stream reached on this network just before. Without a limit there is no
floor. `over sum` is over the floor and the CPU time of all hosts, TCP's included, spread over the
cores: what a program needs that never sends while it computes.

`--peers` adds a whole step of a perceptron with so many weights (forward, backward, exchange, SGD;
32 rows a host), and the same step under PyTorch's DistributedDataParallel with its hooks, over gloo
on the same network. PyTorch runs in a Python of its own (`make peers`; `--peers=PYTHON` names
another). Its rows have as `ms` the step less the same step without DDP; `step_ms` is the step, and
`step_less_compute_ms` for ours what PyTorch's `ms` is.

`--out=FILE` keeps the rows as JSON, with the command, the date, versions and the machine; `--json`
prints them as the last line: method, codec, algorithm, ms, floor_ms, over_floor, over_sum,
bytes_busiest_link, native_ms (a bare `jax.lax.psum` of the same gradients), compile_s (on one
host), cpu_ms (of all hosts together), and peer for PyTorch's.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.arguments import count, new_file, positive, values
from benchmarks.netlab.flags import add_flags, chosen
from benchmarks.netlab.measuring import Lab, circumstances, guarded
from benchmarks.netlab.methods import (
    BARE,
    COMPUTE,
    Exchange,
    Step,
    axes_of,
    check_method,
    shapes_of,
    warm_of,
    with_sgd,
)
from benchmarks.netlab.network import Network
from benchmarks.netlab.worker import Jax, measure
from jaxcomm import plan

USUAL = "float32,bfloat16,cnat,int8,int4,scaled_sign,vote,vote/direct,vote/ring,oktopk"
STEP = "step "  # in names of cases
CORES = len(os.sched_getaffinity(0))
PEERS = str(Path(__file__).parents[1] / ".venv-peers/bin/python")


def main() -> int:
    args = parse()
    if args.worker:
        work(args)
        return 0
    return guarded("allreduce", lambda: run(args))


def run(args: argparse.Namespace) -> None:
    made = chosen(args)
    methods = [BARE, *(m for m in args.methods.split(",") if m != BARE)]
    levels = plan.cluster(made).levels
    for method in methods:
        check_method(method)
        if axes_of(method) != "data" and levels is None:
            raise ValueError(f"{method} needs a network of two levels; {made.name} has one.")
        if axes_of(method) != "data" and args.devices > 1:
            raise ValueError(f"{method} is between hosts of one device; leave out --devices.")
    if args.devices > 1 and args.peers:
        raise ValueError("--peers compares processes of one device; leave out --devices.")
    peers = args.peers is not None and has_torch(args.peers)
    with Network(made) as network:
        lab = Lab(network)
        rows = our_rows(lab, methods, levels, args)
        if peers:
            rows += peer_rows(lab, args, rows[0]["ms"])
    show(rows, made, args)
    if args.out:
        kept = {**circumstances("benchmarks.allreduce"), "rows": rows}
        if peers:
            kept["versions"]["torch"] = version_of_torch(args.peers)
        Path(args.out).write_text(json.dumps(kept, indent=1) + "\n")
    if args.json:
        print(json.dumps(rows))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allreduce", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_flags(parser)
    parser.add_argument("--params", type=values, default=8e6, help="values of the gradients")
    parser.add_argument("--methods", default=USUAL, help="codec, or codec/algorithm; separate by ,")
    parser.add_argument("--devices", type=count, default=1, help="of each host")
    parser.add_argument("--repeats", type=count, default=5)
    parser.add_argument("--seconds", type=positive, default=1800, help="after which all is ended")
    parser.add_argument("--peers", nargs="?", const=PEERS, metavar="PYTHON", help="beside PyTorch")
    parser.add_argument("--json", action="store_true", help="print the rows as the last line")
    parser.add_argument("--out", type=new_file, help="a file for the rows")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--levels", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def version_of_torch(python: str) -> str | None:
    """The version that an interpreter finds, or None."""
    try:
        script = "import torch; print(torch.__version__)"
        done = subprocess.run([python, "-c", script], capture_output=True, text=True)
    except OSError:  # no such file, or one that is no program
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def has_torch(python: str) -> bool:
    """Whether PyTorch can be measured; says so if not."""
    found = version_of_torch(python) is not None
    if not found:
        print(f"PyTorch is skipped: {python} has no torch; `make peers` installs it.", flush=True)
    return found


def our_rows(
    lab: Lab, methods: list[str], levels: tuple[int, int] | None, args: argparse.Namespace
) -> list[Any]:
    """Of exchanges; with `--peers`, of steps too, except hierarchical ones."""
    command = [sys.executable, "-m", "benchmarks.allreduce", "--worker"]
    command += [f"--methods={','.join(methods)}", f"--params={args.params}"]
    command += [f"--repeats={args.repeats}", *(["--peers"] if args.peers else [])]
    command += [f"--levels={json.dumps(levels)}", f"--devices={args.devices}"]
    timed = lab.rows(command, args.seconds, show_lines=not args.json)
    rows = [row for row in timed if "method" in row]
    steps = {row["name"].removeprefix(STEP): row["ms"] for row in timed if "method" not in row}
    for row in rows:
        row["native_ms"] = rows[0]["ms"]
        row["over_sum"] = row["ms"] / ((row["floor_ms"] or 0.0) + row["cpu_ms"] / CORES)
        if row["method"] in steps:
            row["step_ms"] = steps[row["method"]]
            row["step_less_compute_ms"] = row["step_ms"] - steps[COMPUTE]
    return [plain(row) for row in rows]


def peer_rows(lab: Lab, args: argparse.Namespace, native_ms: float) -> list[Any]:
    """Of PyTorch's steps."""
    shapes = ",".join(f"{a}x{b}" for a, b in shapes_of(round(args.params)).values())
    command = [args.peers, "-m", "benchmarks.netlab.peers", f"--shapes={shapes}"]
    compute, *rows = lab.rows([*command, f"--repeats={args.repeats}"], args.seconds)
    for row in rows:
        row |= {"step_ms": row["ms"], "ms": row["ms"] - compute["ms"], "native_ms": native_ms}
        row["over_floor"] = row["floor_ms"] and row["ms"] / row["floor_ms"]
        row["step_less_compute_ms"] = row["ms"]
    return [plain(row) for row in rows]


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what only other experiments need."""
    others = ("name", "all_ms", "steps")
    return {name: value for name, value in row.items() if name not in others}


def work(args: argparse.Namespace) -> None:
    """What one host does."""
    import jax

    import jaxcomm

    jax.config.update("jax_num_cpu_devices", args.devices)
    together = Jax()
    jax.set_mesh(jaxcomm.data_mesh())
    shapes = shapes_of(round(args.params))
    methods = args.methods.split(",")
    levels = args.levels and tuple(args.levels)
    cases: list[Any] = [Exchange(method, shapes, levels=levels) for method in methods]
    if args.peers:
        flat = [method for method in methods if method != BARE and axes_of(method) == "data"]
        cases.append(Step(f"{STEP}{COMPUTE}", shapes, with_sgd(COMPUTE)))
        for method in flat:
            step = Step(f"{STEP}{method}", shapes, with_sgd(method), warm=warm_of(method))
            cases.append(step)
    measure(cases, together, args.repeats)


def show(rows: list[Any], made: plan.Topology, args: argparse.Namespace) -> None:
    rates = sorted({"unlimited" if k.rate is None else f"{k.rate:g}" for k in made.links})
    of = f" of {args.devices} devices" if args.devices > 1 else ""
    print(
        f"{made.name}, {len(made.hosts)} hosts{of}, {' and '.join(rates)} Mbit/s, "
        f"{args.params:g} values, {CORES} cores, medians of {args.repeats}"
    )
    columns = f"{'ms':>9}{'over floor':>12}{'over sum':>10}{'of psum':>9}{'link MB':>9}"
    columns += f"{'CPU ms':>8}{'compile s':>11}{'step ms':>9}{'- compute':>11}"
    print(f"{'':22}{columns}")
    for row in rows:
        compile_s = f"{row['compile_s']:.1f}" if "compile_s" in row else "-"
        over = f"{row['over_floor']:.2f}" if row["over_floor"] else "-"
        both = f"{row['over_sum']:.2f}" if "over_sum" in row else "-"
        step = f"{row['step_ms']:.1f}" if "step_ms" in row else "-"
        less = f"{row['step_less_compute_ms']:.1f}" if "step_ms" in row else "-"
        print(
            f"{row['method']:22}{row['ms']:9.1f}{over:>12}{both:>10}"
            f"{row['ms'] / row['native_ms']:9.2f}"
            f"{row['bytes_busiest_link'] / 1e6:9.3f}{row['cpu_ms']:8.0f}{compile_s:>11}"
            f"{step:>9}{less:>11}"
        )


if __name__ == "__main__":
    sys.exit(main())
