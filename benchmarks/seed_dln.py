"""Orders of halving-doubling on a distributed loop network, over TCP, beside the simulation.

    python -m benchmarks.seed_dln [--topology=dln] [--rate=50] [--params=1e6] [--repeats=3]
        [--out=JSON]

8 switches with 2 hosts each; every host is a real jax process. A float32 mean by a ring and by
halving-doubling in its orders, each compared with numpy's before anything is timed. `predicted` is
what `jaxcomm.plan` says of the pairs, at the rate that one TCP stream reached on this network just
before; `half duplex` is that if both directions between the same two hosts share the rate of one,
as gloo's do.
"""

import argparse
import sys
from typing import Any

from benchmarks.arguments import values
from benchmarks.netlab.flags import add_run_flags
from benchmarks.netlab.measuring import Lab, guarded, keep
from benchmarks.netlab.methods import Collective
from benchmarks.netlab.network import Network
from benchmarks.netlab.worker import Jax, measure
from jaxcomm import plan

NAME = "benchmarks.seed_dln"
PER_SWITCH = 2
LATENCY = 2e-4  # seconds for a message between processes of this machine
ORDERS: dict[str, tuple[Any, ...]] = {
    "near_first": (),
    "far_first": ("far_first",),
    "shifted": ("shifted", PER_SWITCH),
    "spread": ("spread", PER_SWITCH),
}


def algorithms() -> dict[str, Any]:
    import jaxcomm

    made = jaxcomm.algorithms
    return {"ring": made.ring()} | {
        name: made.halving_doubling(*order) for name, order in ORDERS.items()
    }


def main() -> int:
    args = parse()
    if args.worker:
        work(args)
        return 0
    return guarded("seed_dln", lambda: run(args))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {NAME}", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--topology", default="dln")
    parser.add_argument("--rate", default="50", help="Mbit/s of every link")
    parser.add_argument("--params", type=values, default=1e6)
    add_run_flags(parser, repeats=3)
    return parser.parse_args()


def run(args: argparse.Namespace) -> None:
    made = plan.load(args.topology, rate=args.rate)
    command = [sys.executable, "-m", NAME, "--worker"]
    command += [f"--params={args.params}", f"--repeats={args.repeats}"]
    with Network(made) as network:
        lab = Lab(network)
        rows = lab.rows(command, args.seconds)
    for row in rows:
        row |= predicted(made, row["name"], 4 * args.params, lab.share or 1.0)
    show(made, rows, args)
    keep(args.out, NAME, f"{made.name}, {args.rate}", rows, rate=args.rate, params=args.params)


def predicted(made: plan.Topology, name: str, size: float, share: float) -> dict[str, float]:
    """Milliseconds, with both directions at once and with half of that."""
    algorithm = algorithms()[name]
    return {
        key: 1e3
        * plan.Simulation(made, plan.Model(LATENCY, half_duplex=half)).seconds(
            algorithm, size / share
        )
        for key, half in (("predicted_ms", False), ("predicted_half_duplex_ms", True))
    }


def show(made: plan.Topology, rows: list[Any], args: argparse.Namespace) -> None:
    print(f"{made.name}, {len(made.hosts)} hosts, {args.rate} Mbit/s, {args.params:g} values")
    columns = (
        f"{'ms':>9}{'predicted':>11}{'half duplex':>13}{'over floor':>12}{'of near first':>15}"
    )
    print(f"{'':14}{columns}")
    plain = next(row["ms"] for row in rows if row["name"] == "near_first")
    for row in rows:
        over = f"{row['over_floor']:.2f}" if row["over_floor"] else "-"
        print(
            f"{row['name']:14}{row['ms']:9.1f}{row['predicted_ms']:11.1f}"
            f"{row['predicted_half_duplex_ms']:13.1f}{over:>12}{row['ms'] / plain:15.3f}"
        )


def work(args: argparse.Namespace) -> None:
    """What one host does."""
    together = Jax()
    import numpy as np

    import jaxcomm

    n = round(args.params)
    every = [
        np.random.default_rng(rank).integers(-8, 9, n).astype(np.float32) / 16
        for rank in range(len(together.gather([0.0])))
    ]
    mesh = jaxcomm.data_mesh()
    cases = []
    for name, algorithm in algorithms().items():

        def mean(x: Any, algorithm: Any = algorithm) -> Any:
            return jaxcomm.pmean(x, "data", "float32", algorithm)

        case = Collective(name, mesh, mean, every[together.rank][None])
        np.testing.assert_array_equal(case.result(), np.mean(every, axis=0))
        cases.append(case)
    measure(cases, together, args.repeats)


if __name__ == "__main__":
    sys.exit(main())
