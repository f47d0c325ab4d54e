"""The scaling efficiency of four hosts on slow Ethernet, rung by rung.

    python -m benchmarks.seed_ethernet [--rows=12288] [--repeats=12] [--parts=one,two] [--out=JSON]

The paper's float32 exchange takes 106/234 of the computing. Here a real training step of a small
perceptron is timed without exchange, then the links get the rate at which float32 takes just that.
Efficiency is the step without exchange over the step. Steps alternate, and a time is the median of
all. `bytes allow` is what a step would have whose exchange took only what the busiest link needs.

`two` has two links a host of the same rate as `one` has one. A TCP stream stays on one of them.
1-bit Adam is timed after its dense steps.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.arguments import count
from benchmarks.netlab.flags import add_run_flags
from benchmarks.netlab.measuring import RESULTS, Lab, guarded, keep
from benchmarks.netlab.methods import COMPUTE, Step, check_method, warm_of, with_sgd
from benchmarks.netlab.network import Network
from benchmarks.netlab.worker import Jax, measure
from jaxcomm import plan

NAME = "benchmarks.seed_ethernet"
HOSTS = 4
SHARE = 106 / 234  # of the time of computing, what the paper's float32 exchange takes
PARTS = {"one": 1, "two": 2}  # links a host
TWICE = " x2"  # two accumulated steps to an exchange
ADAM = "one_bit_adam"
METHODS = {
    "one": f"float32,bfloat16,bfloat16{TWICE},int8,cnat,vote,vote/ring,scaled_sign,{ADAM},oktopk,"
    "powersgd1",
    "two": f"float32,bfloat16,bfloat16{TWICE},bfloat16/direct{TWICE},cnat,vote",
}
PAPER = {  # per cent
    ("one", "float32"): 68.8,
    ("one", "bfloat16"): 81.5,
    ("one", f"bfloat16{TWICE}"): 89.8,
    ("two", f"bfloat16{TWICE}"): 94.5,
}


def main() -> int:
    args = parse()
    if args.worker:
        work(args)
        return 0
    return guarded("seed_ethernet", lambda: run(args))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {NAME}", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--methods", help="instead of all; separate by ,")
    parser.add_argument("--side", type=count, default=512, help="of the two square layers")
    parser.add_argument("--rows", type=count, default=12288, help="of a host's batch")
    add_run_flags(parser, repeats=12)
    return parser.parse_args()


def run(args: argparse.Namespace) -> None:
    for part in args.parts.split(","):
        if part not in PARTS:
            raise ValueError(f"unknown part {part!r}; there are {', '.join(PARTS)}.")
    for method in args.methods.split(",") if args.methods else ():
        if method != ADAM:
            check_method(method.removesuffix(TWICE))
    if "one" in args.parts.split(","):
        rate = rate_for(args)
    else:
        rate = rate_of("one", args.out or RESULTS / "seed_ethernet.json")
    for part in args.parts.split(","):
        made = plan.load("star", hosts=HOSTS, rate=rate, links_per_host=PARTS[part])
        with Network(made) as network:
            rows = Lab(network).rows(command(args, args.methods or METHODS[part]), args.seconds)
        finish(rows, part)
        show(rows, part, rate)
        keep(args.out, NAME, part, rows, rate=rate, params=2 * args.side**2)


def command(args: argparse.Namespace, methods: str, repeats: int | None = None) -> list[str]:
    """The worker's."""
    flags = [f"--{name}={getattr(args, name)}" for name in ("side", "rows")]
    flags += [f"--methods={methods}", f"--repeats={repeats or args.repeats}"]
    return [sys.executable, "-m", NAME, "--worker", *flags]


def rate_of(part: str, path: Path) -> float:
    """Mbit/s of a part that was measured."""
    parts = json.loads(path.read_text())["parts"] if path.exists() else {}
    if part not in parts:
        raise ValueError(f"{path} has no part {part!r}, whose rate is needed: add it to --parts.")
    return parts[part]["rate"]


def rate_for(args: argparse.Namespace) -> float:
    """Mbit/s at which float32's bytes take SHARE of the computing."""
    made = plan.load("star", hosts=HOSTS, rate=100)
    with Network(made) as network:
        lab = Lab(network)
        compute, float32 = lab.rows(command(args, "float32", repeats=6), args.seconds)
    assert lab.share is not None
    bits = 8 * float32["bytes_busiest_link"]
    return round(bits / (SHARE * compute["ms"] * 1e3) / lab.share, 2)


def finish(rows: list[Any], part: str) -> None:
    """Adds per cent: the efficiency, what bytes allow, the paper's."""
    compute = rows[0]["ms"]
    for row in rows:
        row["efficiency"] = 100 * compute / row["ms"]
        row["bytes_allow"] = 100 * compute / (compute + row["floor_ms"])
        row["paper"] = PAPER.get((part, row["name"]))


def show(rows: list[Any], part: str, rate: float) -> None:
    print(
        f"{part} link(s) of {rate:g} Mbit/s a host; a step's computing takes {rows[0]['ms']:.0f} ms"
    )
    print(f"{'':20}{'ms':>9}{'efficiency':>12}{'bytes allow':>13}{'paper':>7}{'link MB':>9}")
    for row in rows:
        paper = f"{row['paper']:.1f}" if row["paper"] else "-"
        print(
            f"{row['name']:20}{row['ms']:9.1f}{row['efficiency']:12.1f}{row['bytes_allow']:13.1f}"
            f"{paper:>7}{row['bytes_busiest_link'] / 1e6:9.3f}"
        )


def work(args: argparse.Namespace) -> None:
    """What one host does."""
    together = Jax()
    import jax

    import jaxcomm

    jax.set_mesh(jaxcomm.data_mesh())
    shapes = {name: (args.side, args.side) for name in ("layer0", "layer1")}
    cases = [Step(COMPUTE, shapes, optimizer(COMPUTE), args.rows)]
    for method in args.methods.split(","):
        steps = 2 if method.endswith(TWICE) else 1
        warm = 1 if method == ADAM else warm_of(method.removesuffix(TWICE))
        cases.append(Step(method, shapes, optimizer(method), args.rows, steps, warm))
    measure(cases, together, args.repeats)


def optimizer(method: str) -> Any:
    """The exchange and what follows it."""
    import jaxcomm

    if method == ADAM:
        return jaxcomm.one_bit_adam("data", 1e-4, dense_steps=1)
    if method.endswith(TWICE):
        return jaxcomm.multi_steps(with_sgd(method.removesuffix(TWICE)), 2)
    return with_sgd(method)


if __name__ == "__main__":
    sys.exit(main())
