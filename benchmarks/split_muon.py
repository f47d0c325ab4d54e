"""One step of Muon for matrices that are split over all hosts, by optax and by `orthogonalize`.

    python -m benchmarks.split_muon [--rate=200] [--layers=12] [--width=128] [--out=JSON]

The matrices are those of the layers of a scanned transformer: four of width x width and two of
width x 4 width in each. The step is the optimizer's alone, with a momentum, on means of gradients
that are split like the parameters. Hosts are real processes in namespaces of their own
(`benchmarks.netlab`; needs root). Each rate is a part of the JSON.
"""

import argparse
import sys
import time
from typing import Any

from benchmarks.arguments import count
from benchmarks.netlab.flags import add_flags, add_run_flags, chosen
from benchmarks.netlab.measuring import Lab, guarded, keep
from benchmarks.netlab.methods import compiled
from benchmarks.netlab.network import Network
from benchmarks.netlab.worker import Case, Jax, measure

NAME = "benchmarks.split_muon"


def main() -> int:
    args = parse()
    if args.worker:
        work(args)
        return 0
    return guarded("split_muon", lambda: run(args))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {NAME}", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_flags(parser)
    parser.set_defaults(hosts=4, rate="200")
    parser.add_argument("--layers", type=count, default=12)
    parser.add_argument("--width", type=count, default=128, help="of a layer")
    add_run_flags(parser, repeats=5)
    return parser.parse_args()


def run(args: argparse.Namespace) -> None:
    made, size = chosen(args), (f"--layers={args.layers}", f"--width={args.width}")
    if args.width % len(made.hosts):
        raise ValueError(f"--width={args.width} cannot be split over {len(made.hosts)} hosts.")
    command = [sys.executable, "-m", NAME, "--worker", *size, f"--repeats={args.repeats}"]
    with Network(made) as network:
        rows = Lab(network).rows(command, args.seconds)
    print(f"{'':24}{'ms':>9}{'over the floor':>16}{'bytes a weight':>16}{'compile s':>11}")
    for row in rows:
        over = f"{row['over_floor']:.2f}" if row["over_floor"] else ""
        sent = row["bytes_busiest_link"] / weights(args)
        print(f"{row['name']:24}{row['ms']:9.1f}{over:>16}{sent:16.2f}{row['compile_s']:11.1f}")
    keep(args.out, NAME, str(args.rate), rows, params=weights(args), topology=made.name)


def weights(args: argparse.Namespace) -> int:
    """The values of all matrices."""
    return args.layers * (4 + 2 * 4) * args.width**2


class Update(Case):
    """Steps of an optimizer of parameters that are split."""

    def __init__(self, name: str, tx: Any, params: Any):
        import jax
        import jax.numpy as jnp

        self.name = name
        self.grads = jax.tree.map(jnp.ones_like, params)
        self.state = tx.init(params)
        start = time.perf_counter()
        update = jax.jit(lambda grads, state: tx.update(grads, state), donate_argnums=1)
        self.program = compiled(update.lower(self.grads, self.state))
        self.row = {"name": name, "compile_s": time.perf_counter() - start}

    def run(self) -> None:
        """One step."""
        import jax

        updates, self.state = self.program(self.grads, self.state)
        jax.block_until_ready((updates, self.state))


def work(args: argparse.Namespace) -> None:
    """What one host does."""
    together = Jax()
    import jax
    import numpy as np
    import optax

    import jaxcomm

    jax.set_mesh(jaxcomm.data_mesh())
    d, rng = args.width, np.random.default_rng(0)
    shapes = dict.fromkeys(("query", "key", "value", "out"), (d, d))
    shapes |= {"expand": (d, 4 * d), "contract": (4 * d, d)}
    stacks = {k: rng.standard_normal((args.layers, *s), np.float32) for k, s in shapes.items()}
    params = jaxcomm.shard(stacks, "data", layers=list(stacks))
    matrices = dict.fromkeys(stacks, optax.contrib.MuonDimensionNumbers(1, 2))
    trace = optax.trace(0.95, nesterov=True)
    by_optax = optax.contrib.scale_by_muon(weight_dimension_numbers=matrices)
    steps = {
        "optax.contrib.muon": by_optax,
        "orthogonalize": optax.chain(trace, jaxcomm.orthogonalize(matrices)),
        "orthogonalize, bfloat16": optax.chain(
            trace, jaxcomm.orthogonalize(matrices, codec="bfloat16")
        ),
        "orthogonalize, int8": optax.chain(trace, jaxcomm.orthogonalize(matrices, codec="int8")),
    }
    cases = [Update(name, tx, params) for name, tx in steps.items()]
    measure(cases, together, args.repeats)


if __name__ == "__main__":
    sys.exit(main())
