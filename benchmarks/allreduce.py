"""How long one exchange takes on a network, beside its floor, XLA's float32 mean and PyTorch.

    python -m benchmarks.allreduce --topology=star --hosts=4 --rate=50 --params=8e6
        [--methods=float32,bfloat16,vote/ring] [--repeats=5] [--json]

Hosts are real processes in namespaces of their own (`benchmarks.netlab`; needs root). Gradients are
matrices of 1024 x 1024. A repeat starts behind a barrier and takes as long as its slowest host;
repeats of all methods alternate; medians are shown. `link MB` is what the busiest direction of a
link carried in one exchange, headers and the flag included, and the floor is that over the rate
that one TCP stream reached on this network just before. Without a limit there is no floor.

`--out=FILE` keeps the rows as JSON, with the command, the date, versions and the machine; `--json`
prints them as the last line: method, codec, algorithm, ms, floor_ms, over_floor,
bytes_busiest_link, native_ms (a bare `jax.lax.psum` of the same gradients), compile_s, cpu_ms (of
all hosts together).
"""

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import IO, Any

from benchmarks.netlab.calibrate import calibrated
from benchmarks.netlab.flags import add_flags, chosen
from benchmarks.netlab.hosts import HostError, run_everywhere
from benchmarks.netlab.network import Network, NetworkError
from jaxcomm.plan import topology

SIDE = 1024
MARK = "@@"
BARE = "psum"
# The codec (or kind) and the algorithms of each family; the first is the default.
FAMILIES: dict[str, tuple[str, ...]] = {
    BARE: ("native",),
    "float32": ("native", "ring", "direct", "circulant"),
    "bfloat16": ("default", "direct", "ring", "circulant"),
    "int8": ("default", "direct", "ring", "circulant"),
    "cnat": ("default", "direct", "ring"),
    "int4": ("default", "direct"),
    "scaled_sign": ("default", "direct"),
    "vote": ("default", "direct", "ring", "halving_doubling", "circulant"),
    "oktopk": ("default",),
    "topk_allgather": ("default",),
}
USUAL = "float32,bfloat16,cnat,int8,int4,scaled_sign,vote,vote/direct,vote/ring,oktopk"


def main() -> int:
    args = parse()
    if args.worker:
        work(args)
        return 0
    try:
        made = chosen(args)
        methods = [BARE, *(m for m in args.methods.split(",") if m != BARE)]
        for method in methods:
            check_method(method)
        with Network(made) as network:
            rows = measured(network, methods, args)
    except (ValueError, NetworkError) as error:
        print(f"allreduce: {error}", file=sys.stderr)
        return 2
    except HostError as error:
        print(f"allreduce: {error}", file=sys.stderr)
        return 1
    show(rows, made, args)
    if args.out:
        Path(args.out).write_text(json.dumps({**circumstances(), "rows": rows}, indent=1) + "\n")
    if args.json:
        print(json.dumps(rows))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allreduce", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_flags(parser)
    parser.add_argument("--params", type=float, default=8e6, help="values of the gradients")
    parser.add_argument("--methods", default=USUAL, help="codec, or codec/algorithm; separate by ,")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1800, help="after which all is ended")
    parser.add_argument("--json", action="store_true", help="print the rows as the last line")
    parser.add_argument("--out", help="a file for the rows")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def circumstances() -> dict[str, Any]:
    """What a number means nothing without."""
    packages = ("jax", "jaxlib", "numpy", "pyroute2")
    return {
        "command": " ".join(["python -m benchmarks.allreduce", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in packages},
        },
    }


def check_method(method: str) -> tuple[str, str]:
    """The family and the algorithm of a method; ValueError for an unknown one."""
    family, _, algorithm = method.partition("/")
    if family not in FAMILIES:
        raise ValueError(f"unknown method {family!r}; there are {', '.join(FAMILIES)}.")
    if algorithm and algorithm not in FAMILIES[family]:
        raise ValueError(f"{family} has {', '.join(FAMILIES[family])}, not {algorithm!r}.")
    return family, algorithm or FAMILIES[family][0]


def measured(network: Network, methods: list[str], args: argparse.Namespace) -> list[Any]:
    """Runs the workers, and counts bytes where they stop for it."""
    rates = calibrated(network)
    # The slowest link of the path was full: what it carried, of what it is shaped to.
    limits = [rate_between(network.topology, *step) for step in rates]
    slowest = min(limits, default=math.inf)
    share = None if slowest == math.inf else min(rates.values()) / slowest
    counted: list[dict[tuple[str, str, int], int]] = []

    def on_line(line: str, stdin: IO[str]) -> None:
        if line.startswith(MARK):
            counted.append(network.bytes_sent())
            stdin.write("\n")
            stdin.flush()
        elif not args.json:
            print(line, file=sys.stderr, flush=True)

    command = [sys.executable, "-m", "benchmarks.allreduce", "--worker"]
    command += [f"--methods={','.join(methods)}", f"--params={args.params}"]
    command += [f"--repeats={args.repeats}"]
    printed = run_everywhere(network, command, args.seconds, WORKER_VARIABLES, on_line)
    rows = json.loads(printed[0].splitlines()[-1])
    native = next(row["ms"] for row in rows if row["method"] == BARE)
    for row, before, after in zip(rows, counted[::2], counted[1::2], strict=True):
        sent = {key: after[key] - before[key] for key in after}
        row["bytes_busiest_link"] = max(sent.values())
        row["floor_ms"] = floor_ms(network.topology, sent, share)
        row["over_floor"] = row["floor_ms"] and row["ms"] / row["floor_ms"]
        row["native_ms"] = native
    return rows


# What `train.launch` sets too: without it, the kernel maps a step's memory afresh in every step.
WORKER_VARIABLES = {
    "XLA_FLAGS": "",  # a device for each host, and programs as users have them
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**28),
}


def rate_between(made: topology.Topology, a: str, b: str) -> float:
    """Mbit/s of all links between two neighbours together; infinite without a limit."""
    rates = [link.rate for link in made.links if set(link.ends) == {a, b}]
    return math.inf if None in rates else sum(rate for rate in rates if rate)


def floor_ms(
    made: topology.Topology, sent: dict[tuple[str, str, int], int], share: float | None
) -> float | None:
    """How long the slowest link needs for what it carried, at the rate that a stream reaches."""
    times = [
        8 * count / (made.links[i].rate * 1e3 * share)
        for (_, _, i), count in sent.items()
        if made.links[i].rate is not None and share
    ]
    return max(times, default=None)


def work(args: argparse.Namespace) -> None:
    """What one host does: compile, count, then time all methods in turn; host 0 prints the rows."""
    import jax

    jax.distributed.initialize()
    from jax.experimental import multihost_utils

    cases = [Case(method, round(args.params)) for method in args.methods.split(",")]
    for case in cases:
        case.run()
    for case in cases:
        for moment in ("before", "after"):
            multihost_utils.sync_global_devices(f"{case.method} {moment}")
            if jax.process_index() == 0:
                print(MARK, case.method, moment, flush=True)
                sys.stdin.readline()
            multihost_utils.sync_global_devices(f"{case.method} {moment} counted")
            if moment == "before":
                case.run()
    for repeat in range(args.repeats):
        for case in cases:
            multihost_utils.sync_global_devices(f"{case.method} {repeat}")
            cpu, start = cpu_seconds(), time.perf_counter()
            case.run()
            case.seconds.append(time.perf_counter() - start)
            case.cpu.append(cpu_seconds() - cpu)
    rows = []
    for case in cases:
        times, cpu = multihost_utils.process_allgather(
            (case.array(case.seconds), case.array(case.cpu))
        )
        slowest, together = times.max(axis=0).tolist(), cpu.sum(axis=0).tolist()
        rows.append(case.row(statistics.median(slowest), statistics.median(together)))
    if jax.process_index() == 0:
        print(json.dumps(rows), flush=True)


def cpu_seconds() -> float:
    """Of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Case:
    """A method, compiled, with gradients and state."""

    def __init__(self, method: str, params: int):
        import jax
        import jax.numpy as jnp
        import numpy as np

        import jaxcomm

        self.method = method
        self.family, self.algorithm = check_method(method)
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        mesh = jaxcomm.data_mesh()
        jax.set_mesh(mesh)
        shapes = {f"layer{i}": (SIDE, SIDE) for i in range(params // SIDE**2)}
        rest = params % SIDE**2 // SIDE
        shapes |= {"rest": (rest, SIDE)} if rest else {}
        rng = np.random.default_rng(jax.process_index())
        local = {
            name: rng.standard_normal((1, *shape), dtype=np.float32)
            for name, shape in shapes.items()
        }
        sharding = jax.NamedSharding(mesh, jax.P("data"))
        self.grads = jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(sharding, x), local
        )
        start = time.perf_counter()
        if self.family == BARE:
            self.state: Any = ()
            f = jax.shard_map(
                lambda grads, state: (jax.lax.psum(grads, "data"), state),
                in_specs=(jax.P("data"), jax.P()),
                out_specs=(jax.P(), jax.P()),
            )
        else:
            tx = self.transformation()
            params_ = {name: jnp.zeros(shape) for name, shape in shapes.items()}
            self.state = tx.init(jaxcomm.replicate(params_))
            f = tx.update
        self.step = jax.jit(f).lower(self.grads, self.state).compile()
        self.compile_s = time.perf_counter() - start

    def transformation(self) -> Any:
        import jaxcomm

        chosen = None if self.algorithm == "default" else self.algorithm
        options = {} if chosen is None else {"algorithm": chosen}
        if self.family == "vote":
            return jaxcomm.majority_vote("data", **options)
        if self.family in ("oktopk", "topk_allgather"):
            return jaxcomm.sparse_mean("data", 0.01, self.family)
        if self.family in ("int4", "scaled_sign"):
            options["error_feedback"] = True
        return jaxcomm.mean("data", self.family, **options)

    def run(self) -> None:
        import jax

        updates, self.state = self.step(self.grads, self.state)
        jax.block_until_ready((updates, self.state))

    def array(self, numbers: list[float]) -> Any:
        import numpy as np

        return np.asarray(numbers, np.float32)

    def row(self, seconds: float, cpu: float) -> dict[str, Any]:
        return {
            "method": self.method,
            "codec": self.family,
            "algorithm": self.algorithm,
            "ms": 1e3 * seconds,
            "cpu_ms": 1e3 * cpu,
            "compile_s": self.compile_s,
        }


def show(rows: list[Any], made: topology.Topology, args: argparse.Namespace) -> None:
    rates = sorted({"unlimited" if k.rate is None else f"{k.rate:g}" for k in made.links})
    print(
        f"{made.name}, {len(made.hosts)} hosts, {' and '.join(rates)} Mbit/s, "
        f"{args.params:g} values, {os.cpu_count()} cores, medians of {args.repeats}"
    )
    columns = (
        f"{'ms':>9}{'over floor':>12}{'of psum':>9}{'link MB':>9}{'CPU ms':>8}{'compile s':>11}"
    )
    print(f"{'':22}{columns}")
    for row in rows:
        over = f"{row['over_floor']:.2f}" if row["over_floor"] else "-"
        print(
            f"{row['method']:22}{row['ms']:9.1f}{over:>12}{row['ms'] / row['native_ms']:9.2f}"
            f"{row['bytes_busiest_link'] / 1e6:9.3f}{row['cpu_ms']:8.0f}{row['compile_s']:11.1f}"
        )


if __name__ == "__main__":
    sys.exit(main())
