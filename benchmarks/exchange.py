"""How long one exchange takes between real processes, for every method beside XLA's f32 mean.

    python -m benchmarks.exchange [--processes=4] [--mib=32] [--repeats=5]

Starts the processes on this machine, joined over TCP. Every method averages, or votes on, the same
float32 vector of `--mib` MiB; results are compared with numpy before anything is timed. Repeats
alternate between the methods, start behind a barrier, and a repeat takes as long as its slowest
process. `sent` is what the compiled program sends per device, `Gb/s` that over the median time.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time

METHODS = [
    ("mean", "float32", "native"),
    ("mean", "float32", "ring"),
    ("mean", "float32", "halving_doubling"),
    ("mean", "bfloat16", "direct"),
    ("mean", "bfloat16", "ring"),
    ("mean", "bfloat16", "circulant"),
    ("mean", "float16", "direct"),
    ("vote", "1 bit", "direct"),
    ("vote", "planes", "ring"),
    ("vote", "planes", "circulant"),
]


def main() -> None:
    """Starts the processes, or is one of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--mib", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        measure(args)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "benchmarks.exchange", *sys.argv[1:]]
    command += [f"--coordinator={coordinator}"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen([*command, f"--rank={rank}"], env=env) for rank in range(args.processes)
    ]
    sys.exit(max(process.wait() for process in running))


def measure(args: argparse.Namespace) -> None:
    """What one process does: check, then time, then, on process 0, print."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    jax.distributed.initialize(args.coordinator, args.processes, args.rank)
    import jaxcomm

    jax.set_mesh(jaxcomm.data_mesh())
    n = args.mib * 2**18
    x = np.random.default_rng(args.rank).standard_normal(n, np.float32)
    batch = jaxcomm.global_batch(x[None], "data")
    everyone = np.asarray(multihost_utils.process_allgather(x))
    programs = {method: program(*method).lower(batch).compile() for method in METHODS}
    times: dict[tuple, list[float]] = {method: [] for method in METHODS}
    for repeat in range(args.repeats + 1):
        for method, run in programs.items():
            multihost_utils.sync_global_devices(str(repeat))
            started = time.perf_counter()
            result = jax.block_until_ready(run(batch))
            seconds = time.perf_counter() - started
            if repeat == 0:
                check(method, np.asarray(result.addressable_data(0)).ravel(), everyone)
                continue
            times[method].append(float(np.max(multihost_utils.process_allgather(seconds))))
    if args.rank == 0:
        show(args, {m: jaxcomm.wire_report(p).bytes_max for m, p in programs.items()}, times)


def program(kind: str, codec: str, algorithm: str):
    """A jitted exchange of one vector per device; all devices end with the result."""
    import jax
    from jax.sharding import PartitionSpec

    import jaxcomm

    def exchange(x):
        if kind == "mean":
            return jaxcomm.pmean(x[0], "data", codec, algorithm)
        tx = jaxcomm.majority_vote("data", algorithm)
        votes, _ = tx.update(x.reshape(2, -1), tx.init(x.reshape(2, -1)))
        return votes.reshape(-1)

    spec = PartitionSpec("data")
    return jax.jit(
        jax.shard_map(exchange, in_specs=spec, out_specs=PartitionSpec(), check_vma=False)
    )


def check(method: tuple, result, everyone) -> None:
    """Compares with numpy."""
    import numpy as np

    if method[0] == "mean":
        tolerance = {"float32": 1e-5, "bfloat16": 0.05, "float16": 0.01}[method[1]]
        np.testing.assert_allclose(result, everyone.mean(0), atol=tolerance)
    else:
        total = np.sign(everyone).sum(0)
        np.testing.assert_array_equal(result[total != 0], np.sign(total)[total != 0])


def show(args: argparse.Namespace, sent: dict, times: dict) -> None:
    """Prints the table."""
    import jax

    base = statistics.median(times[METHODS[0]])
    print(f"{args.mib} MiB of float32, {args.processes} processes, {jax.devices()[0].platform}")
    print(f"{'method':28s} {'ms':>8s} {'of f32 native':>14s} {'sent MiB':>9s} {'Gb/s':>6s}")
    for method in METHODS:
        median = statistics.median(times[method])
        rate = float(sent[method]) * 8e-9 / median
        print(
            f"{' '.join(method):28s} {median * 1e3:8.1f} {median / base:14.2f} "
            f"{float(sent[method]) / 2**20:9.2f} {rate:6.2f}"
        )


if __name__ == "__main__":
    main()
