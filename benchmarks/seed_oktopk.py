"""Sparse all-reduces on the wire as the number of hosts grows: bytes and time.

    python -m benchmarks.seed_oktopk [--worlds=2,4,8,16] [--params=2e6] [--density=0.01]
        [--rate=50] [--out=JSON]

Every host has a gradient of the same size, whatever their number (weak scaling). `volume` is what
the busiest host sent, over the bytes of k entries of 8 bytes, headers and all; under each stands
what the Ok-Topk paper (arXiv:2201.07598, table 1) counts for it, without headers and without the
room that static messages need. Every method is timed in a step in which thresholds are re-used.
"""

import argparse
import sys
from typing import Any

from benchmarks.arguments import count, several, share, values
from benchmarks.netlab.flags import add_run_flags
from benchmarks.netlab.measuring import Lab, guarded, keep
from benchmarks.netlab.methods import SPARSE, Exchange, shapes_of
from benchmarks.netlab.network import Network
from benchmarks.netlab.published import sparse_volume
from benchmarks.netlab.worker import Jax, measure
from jaxcomm import plan

NAME = "benchmarks.seed_oktopk"
DENSE = "float32"
METHODS = ",".join((DENSE, *SPARSE))


def main() -> int:
    args = parse()
    if args.worker:
        work(args)
        return 0
    return guarded("seed_oktopk", lambda: run(args))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {NAME}", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--worlds", type=several(count), default="2,4,8,16", help="of hosts")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--params", type=values, default=2e6)
    parser.add_argument("--density", type=share, default=0.01)
    parser.add_argument("--rate", default="50")
    add_run_flags(parser, repeats=5)
    return parser.parse_args()


def run(args: argparse.Namespace) -> None:
    for method in args.methods.split(","):
        if method not in METHODS.split(","):
            raise ValueError(f"unknown method {method!r}; there are {METHODS}.")
    n = sum(a * b for a, b in shapes_of(round(args.params)).values())
    k = max(1, round(args.density * n))
    flags = [f"--{name}={getattr(args, name)}" for name in ("params", "density", "methods")]
    command = [sys.executable, "-m", NAME, "--worker", *flags, f"--repeats={args.repeats}"]
    for world in args.worlds:
        with Network(plan.load("star", hosts=world, rate=args.rate)) as network:
            rows = Lab(network).rows(command, args.seconds)
        for row in rows:
            row["volume"] = row["bytes_busiest_link"] / (8 * k)
            name = "dense" if row["name"] == DENSE else row["name"]
            row["paper"] = sparse_volume(name, n, k, world)
        show(rows, world, args.rate, n)
        keep(args.out, NAME, f"{world:02} hosts", rows, rate=args.rate, params=n, k=k)


def show(rows: list[Any], world: int, rate: str, n: int) -> None:
    print(f"{world} hosts, {rate} Mbit/s, {n} values; volume in k entries of 8 bytes")
    print(f"{'':18}{'ms':>9}{'over floor':>12}{'volume':>9}{'paper':>16}{'CPU ms':>8}")
    for row in rows:
        paper = " to ".join(f"{v:.2f}" for v in row["paper"])
        over = f"{row['over_floor']:.2f}" if row["over_floor"] else "-"
        print(
            f"{row['name']:18}{row['ms']:9.1f}{over:>12}{row['volume']:9.2f}{paper:>16}"
            f"{row['cpu_ms']:8.0f}"
        )


def work(args: argparse.Namespace) -> None:
    """What one host does."""
    together = Jax()
    import jax

    import jaxcomm

    jax.set_mesh(jaxcomm.data_mesh())
    shapes = shapes_of(round(args.params))
    cases = [Exchange(method, shapes, args.density) for method in args.methods.split(",")]
    measure(cases, together, args.repeats)


if __name__ == "__main__":
    sys.exit(main())
