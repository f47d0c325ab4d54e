"""Votes of 16 hosts: the ring against the 1-bit all-to-all, and what is faster than both.

    python -m benchmarks.seed_majority [--topologies=chain,clusters] [--hosts=16] [--rate=10]
        [--params=1e6] [--repeats=3] [--out=JSON]

The ring counts votes on their way, ceil(log2(k+1)) bits for k devices. The 1-bit exchange sends
every sign to its owner and every result to everyone, both by an all-to-all. The paper keeps a bit
in a byte; rows named `byte` do the same, here and nowhere in the library: each of our bit planes
is an array of bytes that are 0 or 1. Rows named `vote` send true bits. `float32/ring` is XLA's
all-reduce, which gloo carries out as a ring.

Before anything is timed, the results of all votes are compared: they are equal.
"""

import argparse
import dataclasses
import sys
from typing import Any

from benchmarks.arguments import count, values
from benchmarks.netlab.flags import add_run_flags
from benchmarks.netlab.measuring import Lab, guarded, keep
from benchmarks.netlab.methods import Collective
from benchmarks.netlab.network import Network
from benchmarks.netlab.worker import Jax, measure
from jaxcomm import plan

NAME = "benchmarks.seed_majority"
PAPER = "1.8 to 2.4"  # how many times faster than the 1-bit exchange the paper's ring is
PARAMS = 1e6
METHODS = (
    "float32/ring",
    "bfloat16/ring",
    "byte/1-bit",
    "byte/ring",
    "vote/1-bit",
    "vote/direct",
    "vote/ring",
    "vote/two_way_ring",
    "vote/halving_doubling",
    "vote/circulant",
    "vote/hierarchical",
    "vote/two_clusters",
)


def main() -> int:
    args = parse()
    if args.worker:
        work(args)
        return 0
    return guarded("seed_majority", lambda: run(args))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {NAME}", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--topologies", default="chain,clusters")
    parser.add_argument("--hosts", type=count, default=16)
    parser.add_argument("--rate", default="10", help="Mbit/s of every link")
    parser.add_argument("--params", type=values, default=PARAMS)
    parser.add_argument("--methods", default=",".join(METHODS))
    add_run_flags(parser, repeats=3)
    return parser.parse_args()


def run(args: argparse.Namespace) -> None:
    for method in args.methods.split(","):
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r}; there are {', '.join(METHODS)}.")
    command = [sys.executable, "-m", NAME, "--worker", f"--methods={args.methods}"]
    command += [f"--params={args.params}", f"--repeats={args.repeats}"]
    for name in args.topologies.split(","):
        made = plan.load(name, hosts=args.hosts, rate=args.rate)
        with Network(made) as network:
            rows = Lab(network).rows(command, args.seconds)
        part = f"{made.name} of {args.hosts} hosts"
        if args.params != PARAMS:
            part += f", {args.params / 1e6:g} M values"
        show(part, args, rows)
        keep(args.out, NAME, part, rows, rate=args.rate, params=args.params, paper=PAPER)


def show(part: str, args: argparse.Namespace, rows: list[Any]) -> None:
    print(f"{part}, {args.rate} Mbit/s, {args.params:g} values, medians of {args.repeats}")
    print(f"{'':24}{'ms':>9}{'over floor':>12}{'link MB':>9}{'CPU ms':>8}")
    for row in rows:
        over = f"{row['over_floor']:.2f}" if row["over_floor"] else "-"
        print(
            f"{row['name']:24}{row['ms']:9.1f}{over:>12}"
            f"{row['bytes_busiest_link'] / 1e6:9.3f}{row['cpu_ms']:8.0f}"
        )
    ms = {row["name"]: row["ms"] for row in rows}
    for kind in ("byte", "vote"):
        if {f"{kind}/ring", f"{kind}/1-bit"} <= ms.keys():
            ratio = ms[f"{kind}/1-bit"] / ms[f"{kind}/ring"]
            print(f"ring over 1-bit, {kind}: {ratio:.2f} times faster; the paper: {PAPER}")
    votes = {name: t for name, t in ms.items() if name.startswith("vote/")}
    if "vote/ring" in votes:
        best = min(votes, key=votes.__getitem__)
        print(f"best vote: {best}, {votes['vote/ring'] / votes[best]:.2f} times our ring's speed")


def work(args: argparse.Namespace) -> None:
    """What one host does."""
    together = Jax()
    import jax
    import numpy as np

    rng = np.random.default_rng(jax.process_index())
    x = rng.standard_normal((1, round(args.params)), dtype=np.float32)
    cases = [case_of(method, x) for method in args.methods.split(",")]
    results = {c.name: c.result() for c in cases if not c.name.endswith(("16/ring", "32/ring"))}
    for name, result in results.items():
        first = next(iter(results.values()))
        if not np.array_equal(result, first) or not set(np.unique(result)) <= {-1, 1}:
            raise AssertionError(f"{name} counts other votes than the first method")
        if len({sums[0] for sums in together.gather([result.sum()])}) > 1:
            raise AssertionError(f"{name} ends with other results on other hosts")
    measure(cases, together, args.repeats)


def case_of(method: str, x: Any) -> Collective:
    """An exchange of one vector, with ties that go to -1, as the paper's do."""
    import jax

    import jaxcomm
    from jaxcomm.collectives.all_reduce import all_reduce
    from jaxcomm.collectives.reductions import Majority

    kind, _, algorithm = method.partition("/")
    axes: Any = "data"
    mesh = jaxcomm.data_mesh()
    if algorithm == "hierarchical":
        near = mesh.size // 2
        axes = ("far", "near")
        mesh = jax.sharding.Mesh(mesh.devices.reshape(2, near), axes)
    if kind == "float32":
        return Collective(method, mesh, lambda x: jax.lax.psum(x, axes), x)
    if kind == "bfloat16":
        return Collective(method, mesh, lambda x: jaxcomm.pmean(x, axes, kind, "ring"), x)
    direct = jaxcomm.algorithms.direct()
    algorithms = {
        "1-bit": both_hops_all_to_all(),
        "hierarchical": jaxcomm.algorithms.hierarchical(near=direct, far=direct),
        "two_clusters": jaxcomm.algorithms.two_clusters(),
    }
    chosen = algorithms.get(algorithm) or jaxcomm.algorithms.BY_NAME[algorithm]()
    votes = Majority("negative", "random", jax.random.key(0))
    if kind == "byte":
        votes = in_bytes(votes)
    return Collective(method, mesh, lambda x: all_reduce(x, axes, votes, chosen), x)


def both_hops_all_to_all() -> Any:
    """The direct algorithm, whose owners send their result to each other device by itself."""
    import jax
    import jax.numpy as jnp

    from jaxcomm.collectives._sending import all_to_all
    from jaxcomm.collectives.algorithms.direct import Direct

    @dataclasses.dataclass(frozen=True)
    class OneBit(Direct):
        def all_gather(self, result: Any, axis_name: Any) -> Any:
            world = jax.lax.axis_size(axis_name)
            copies = jax.tree.map(lambda v: jnp.concatenate([v] * world), result)
            return jax.tree.map(lambda v: all_to_all(v, axis_name), copies)

    return OneBit()


def in_bytes(votes: Any) -> Any:
    """The same vote in the paper's storage: a bit of a plane is a byte that is 0 or 1.

    Four such bytes are one of our words, so that planes are added as ever; 7 of 8 bits stay 0.
    """
    import jax
    import jax.numpy as jnp

    from jaxcomm.collectives.reductions import Majority, Prepared

    @dataclasses.dataclass(frozen=True)
    class InBytes(Majority):
        def prepare(self, x: jax.Array, axis_name: Any) -> Any:
            del axis_name
            bits = jnp.pad((x > 0).astype(jnp.uint8), (0, -x.size % 4))
            return Prepared((jax.lax.bitcast_convert_type(bits.reshape(-1, 4), jnp.uint32),))

        def restore(self, vector: Any, shared_scale: Any, n: int) -> jax.Array:
            del shared_scale
            bits = jax.lax.bitcast_convert_type(vector[0], jnp.uint8).reshape(-1)[:n]
            return jnp.where(bits == 1, 1.0, -1.0)

    return InBytes(**{f.name: getattr(votes, f.name) for f in dataclasses.fields(votes)})


if __name__ == "__main__":
    sys.exit(main())
