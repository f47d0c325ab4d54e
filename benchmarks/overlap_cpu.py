"""Whether an exchange between CPU processes overlaps with computing, and how.

    python -m benchmarks.overlap_cpu [--topology=star] [--hosts=2] [--rate=200] [--params=2.5e6]
        [--products=10] [--repeats=5] [--out=JSON]

Matrix products and a float32 all-reduce of so many values, neither of which needs the other: each
alone, both in one program, in one program that computes what it sends and keeps it, as two programs
that one thread starts, and as two programs of two threads. Hosts are real processes on a network of
their own (`benchmarks.netlab`; needs root); with as many hosts as cores, the products have a core
each.
"""

import argparse
import concurrent.futures
import sys
from typing import Any

from benchmarks.arguments import count, values
from benchmarks.netlab.flags import add_flags, add_run_flags, chosen
from benchmarks.netlab.measuring import Lab, guarded, keep
from benchmarks.netlab.methods import SIDE, compiled
from benchmarks.netlab.network import Network
from benchmarks.netlab.worker import Case, Jax, measure

NAME = "benchmarks.overlap_cpu"


def main() -> int:
    args = parse()
    if args.worker:
        work(args)
        return 0
    return guarded("overlap_cpu", lambda: run(args))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {NAME}", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_flags(parser)
    parser.set_defaults(hosts=2, rate="200")
    parser.add_argument("--params", type=values, default=2.5e6, help="values of the all-reduce")
    parser.add_argument("--products", type=count, default=10, help="of matrices of 1024 x 1024")
    add_run_flags(parser, repeats=5, seconds=300)
    return parser.parse_args()


def run(args: argparse.Namespace) -> None:
    made = chosen(args)
    command = [sys.executable, "-m", NAME, "--worker", f"--params={args.params}"]
    command += [f"--products={args.products}", f"--repeats={args.repeats}"]
    with Network(made) as network:
        rows = Lab(network).rows(command, args.seconds)
    for row in rows:
        print(f"{row['name']:32}{row['ms']:9.1f} ms")
    part = f"{made.name} of {len(made.hosts)} hosts"
    keep(args.out, NAME, part, rows, rate=args.rate, params=args.params, products=args.products)


class Programs(Case):
    """Compiled programs that are run at once, by one thread or by several."""

    def __init__(self, name: str, programs: list[Any], threads: int = 1):
        self.name, self.programs = name, programs
        self.row: dict[str, Any] = {"name": name}
        self.pool = concurrent.futures.ThreadPoolExecutor(threads) if threads > 1 else None

    def run(self) -> None:
        """Starts all of them, and waits for their results."""
        import jax

        if self.pool is None:
            jax.block_until_ready([program() for program in self.programs])
        else:
            list(self.pool.map(lambda program: jax.block_until_ready(program()), self.programs))


def work(args: argparse.Namespace) -> None:
    """What one host does."""
    together = Jax()
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jaxcomm

    jax.set_mesh(jaxcomm.data_mesh())
    x = np.ones(round(args.params), np.float32)
    matrix = np.full((SIDE, SIDE), 1e-3, np.float32)
    x, matrix = jaxcomm.global_batch((x[None], matrix[None]), "data")

    def products(matrix: Any) -> Any:
        y = matrix
        for _ in range(args.products):
            y = y @ matrix[0]
        return y

    def program(*parts: str) -> Any:
        def body(x: Any, matrix: Any) -> Any:
            found = (jnp.zeros((1, 1)), jnp.zeros((1, 1)))
            sent = 2 * x if "kept" in parts else x
            if "exchange" in parts:
                mean = jax.lax.psum(sent, "data")
                found = ((mean, sent) if "kept" in parts else mean[:, :1], found[1])
            return (found[0], products(matrix)) if "products" in parts else found

        specs = (jax.P("data"), jax.P("data"))
        mapped = jax.shard_map(body, in_specs=specs, out_specs=specs, check_vma=False)
        run = compiled(jax.jit(mapped).lower(x, matrix))
        return lambda: run(x, matrix)

    exchange, multiply = program("exchange"), program("products")
    cases = [
        Programs("products", [multiply]),
        Programs("exchange", [exchange]),
        Programs("one program", [program("exchange", "products")]),
        Programs("one program, sent values kept", [program("exchange", "products", "kept")]),
        Programs("two programs, one thread", [exchange, multiply]),
        Programs("two programs, two threads", [exchange, multiply], threads=2),
    ]
    measure(cases, together, args.repeats)


if __name__ == "__main__":
    sys.exit(main())
