"""How long one exchange takes between real processes, for every method beside XLA's f32 mean.

    python -m benchmarks.exchange [--processes=4 | --simulated=8] [--methods=sparse] [--mib=32]

Starts the processes on this machine, joined over TCP, or simulates devices in one. Every method
averages, or votes on, the same float32 vector of `--mib` MiB; results are compared with numpy
before anything is timed. Repeats alternate between the methods, start after a barrier, and a
repeat takes as long as its slowest process. `sent` is what the compiled program sends per device,
`Gb/s` that over the median time.

The sparse methods select 1 %, update their residuals, and re-use thresholds; `exact` is the step
that finds them anew. What they send is that of their most expensive step.
"""

import argparse
import dataclasses
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.arguments import count

Method = tuple[str, str, str]

DENSE = [
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
SPARSE = [
    ("mean", "float32", "native"),
    ("sparse", "re-used", "oktopk"),
    ("sparse", "exact", "oktopk"),
    ("sparse", "re-used", "topk_allgather"),
    ("sparse", "exact", "topk_allgather"),
    ("sparse", "re-used", "topk_dsa"),
    ("sparse", "re-used", "gtopk"),
    ("sparse", "exact", "gaussiank"),
]
DENSITY = 0.01


def main() -> None:
    """Starts the processes, or is one of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=count, default=4)
    parser.add_argument("--simulated", type=count, help="devices in one process, instead")
    parser.add_argument("--methods", choices=["dense", "sparse"], default="dense")
    parser.add_argument("--mib", type=count, default=32)
    parser.add_argument("--repeats", type=count, default=5)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None or args.simulated:
        measure(args)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "benchmarks.exchange", *sys.argv[1:]]
    command += [f"--coordinator={coordinator}"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    running = [
        subprocess.Popen([*command, f"--rank={rank}"], env=env) for rank in range(args.processes)
    ]
    try:
        sys.exit(max(process.wait() for process in running))
    finally:
        for process in running:
            process.kill()


def measure(args: argparse.Namespace) -> None:
    """What one process does: check, then time, then, on process 0, print."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    import jaxcomm

    if args.simulated:
        jaxcomm.simulate_devices(args.simulated)
    else:
        jax.distributed.initialize(args.coordinator, args.processes, args.rank)

    jax.set_mesh(jaxcomm.data_mesh())
    x = vectors(args.mib * 2**18)
    batch = jaxcomm.global_batch(x, "data")
    everyone = np.asarray(multihost_utils.process_allgather(x, tiled=True))
    methods = DENSE if args.methods == "dense" else SPARSE
    programs = {method: prepared(method, batch) for method in methods}
    times: dict[Method, list[float]] = {method: [] for method in methods}
    for repeat in range(args.repeats + 1):
        for method, (compiled, inputs) in programs.items():
            multihost_utils.sync_global_devices(str(repeat))
            started = time.perf_counter()
            result = jax.block_until_ready(compiled(*inputs))
            seconds = time.perf_counter() - started
            if repeat == 0:
                check(method, result, everyone)
                continue
            times[method].append(float(np.max(multihost_utils.process_allgather(seconds))))
    if jax.process_index() == 0:
        show(args, {m: jaxcomm.wire_report(p).bytes_max for m, (p, _) in programs.items()}, times)


def vectors(n: int) -> Any:
    """The vectors of this process's devices, normal, `(devices, n)`."""
    import jax
    import numpy as np

    seeds = [device.id for device in jax.local_devices()]
    return np.stack([np.random.default_rng(i).standard_normal(n, np.float32) for i in seeds])


def prepared(method: Method, batch: Any) -> tuple[Any, tuple[Any, ...]]:
    """A compiled exchange of one vector per device, and what to call it with."""
    kind, form, algorithm = method
    if kind == "sparse":
        return sparse(form, algorithm, batch)
    return dense(kind, form, algorithm).lower(batch).compile(), (batch,)


def dense(kind: str, codec: str, algorithm: str) -> Any:
    """A jitted mean or vote; all devices end with the result."""
    import jax
    from jax.sharding import PartitionSpec

    import jaxcomm

    def exchange(x):
        if kind == "mean":
            return jaxcomm.pmean(x[0], "data", codec, algorithm)
        tx = jaxcomm.majority_vote("data", algorithm)
        grads = x.reshape(2, -1)
        votes, _ = tx.update(jaxcomm.mark_local(grads), tx.init(grads))
        return votes.reshape(-1)

    spec = PartitionSpec("data")
    return jax.jit(
        jax.shard_map(exchange, in_specs=spec, out_specs=PartitionSpec(), check_vma=False)
    )


def sparse(form: str, name: str, batch: Any) -> tuple[Any, tuple[Any, ...]]:
    """A compiled step of `sparse_mean`: its first, or its second with the first one's state."""
    import jax
    import jax.numpy as jnp

    import jaxcomm
    from jaxcomm.collectives import sparse

    algorithm = sparse.from_name(name)
    if name != "gaussiank":
        algorithm = dataclasses.replace(algorithm, recompute_every=32)
    n = batch.shape[1]
    tx = jaxcomm.sparse_mean("data", DENSITY, algorithm, bucket_mib=n / 2**18)
    state = tx.init(jaxcomm.replicate(jnp.zeros((2, n // 2))))
    gradients = batch.reshape(-1, 2, n // 2)
    compiled = jax.jit(tx.update).lower(gradients, state).compile()
    if form == "re-used":
        state = compiled(gradients, state)[1]._replace(residual=state.residual)
    return compiled, (gradients, state)


def check(method: Method, result: Any, everyone: Any) -> None:
    """Compares with numpy."""
    import jax
    import numpy as np

    if method[0] == "mean":
        tolerance = {"float32": 1e-5, "bfloat16": 0.05, "float16": 0.01}[method[1]]
        mean = np.asarray(result.addressable_data(0)).ravel()
        np.testing.assert_allclose(mean, everyone.mean(0), atol=tolerance)
    elif method[0] == "vote":
        total, votes = np.sign(everyone).sum(0), np.asarray(result.addressable_data(0)).ravel()
        np.testing.assert_array_equal(votes[total != 0], np.sign(total)[total != 0])
    else:  # What is not in the update is in the residuals.
        update, state = result
        owed = jax.jit(lambda r: r.mean(0), out_shardings=update.sharding)(state.residual.values[0])
        total = np.asarray(update) + np.asarray(owed)
        np.testing.assert_allclose(total.ravel(), everyone.mean(0), atol=1e-5)
        assert 0 < np.mean(np.asarray(update) != 0) < len(everyone) * 2 * DENSITY


def show(
    args: argparse.Namespace, sent: dict[Method, Any], times: dict[Method, list[float]]
) -> None:
    """Prints the table."""
    import jax

    base = statistics.median(times["mean", "float32", "native"])
    world = (
        f"{args.simulated} simulated devices" if args.simulated else f"{args.processes} processes"
    )
    print(f"{args.mib} MiB of float32, {world}, {jax.devices()[0].platform}")
    print(f"{'method':28s} {'ms':>8s} {'of f32 native':>14s} {'sent MiB':>9s} {'Gb/s':>6s}")
    for method in times:
        median = statistics.median(times[method])
        rate = float(sent[method]) * 8e-9 / median
        print(
            f"{' '.join(method):28s} {median * 1e3:8.1f} {median / base:14.2f} "
            f"{float(sent[method]) / 2**20:9.2f} {rate:6.2f}"
        )


if __name__ == "__main__":
    main()
