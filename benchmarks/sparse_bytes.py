"""What sparse all-reduces send as the number of devices grows, read from compiled programs.

    python -m benchmarks.sparse_bytes [--millions=1] [--density=0.01] [--out=PNG]

For each algorithm with its defaults, and for XLA's dense all-reduce: the bytes that a device sends
in a step, over those of k entries of 8 bytes. Under each stands what the Ok-Topk paper
(arXiv:2201.07598, table 1) counts for it, in the same unit: without the room that static messages
need.
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp

import jaxcomm
from benchmarks.arguments import new_file, positive, share
from benchmarks.netlab.published import SPARSE_WORDS, sparse_volume
from jaxcomm.collectives import sparse
from jaxcomm.wire import WireReport

WORLDS = (2, 4, 8, 16)


def report_of(name: str, n: int, density: float, world: int) -> WireReport:
    """Of a mean of vectors of n values."""
    mesh = jaxcomm.data_mesh(devices=jax.devices()[:world])
    spec = jax.sharding.PartitionSpec("data")
    x = jax.ShapeDtypeStruct((world, n), jnp.float32)
    if name == "dense":
        one = lambda x, step: jaxcomm.pmean(x[0], "data")[None]  # noqa: E731
    else:
        algorithm = dataclasses.replace(sparse.from_name(name), density=density)
        carried = jnp.ones(())

        def one(x: jax.Array, step: jax.Array) -> jax.Array:
            outcome, new = algorithm.exchange(x[0], carried, step, "data")
            return (outcome.mean + new)[None]

    f = jax.shard_map(
        one,
        mesh=mesh,
        in_specs=(spec, jax.sharding.PartitionSpec()),
        out_specs=spec,
        check_vma=False,
    )
    return jaxcomm.wire_report(jax.jit(f).lower(x, jnp.int32(0)).compile())


def plot(rows: dict[str, list[float]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.8), layout="constrained")
    height = 0.0
    for name, values in sorted(rows.items(), key=lambda item: item[1][-1]):
        (line,) = axes.plot(WORLDS, values, marker="o", markersize=3, linewidth=1)
        height = max(values[-1], 1.28 * height)  # names at the ends, apart from each other
        axes.text(17, height, name, color=line.get_color(), va="center", fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(WORLDS, [str(N) for N in WORLDS])
    axes.set(xlabel="devices", ylabel="sent by a device, in k entries of 8 bytes")
    axes.set_xlim(1.8, 40)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="count the bytes of sparse all-reduces")
    parser.add_argument("--millions", type=positive, default=1.0, help="values of the vector")
    parser.add_argument("--density", type=share, default=0.01)
    parser.add_argument("--out", type=new_file, help="where to write a plot")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(WORLDS))
    n = round(args.millions * 1e6)
    k = max(1, round(args.density * n))
    print(f"{n:,} values, k = {k:,}; in units of k entries of 8 bytes ({8 * k:,} bytes)")
    print(f"{'':24}" + "".join(f"{f'N = {N}':>16}" for N in WORLDS))
    rows: dict[str, list[float]] = {}
    for name in SPARSE_WORDS:
        reports = [report_of(name, n, args.density, N) for N in WORLDS]
        rows[name] = [float(report.bytes_max) / (8 * k) for report in reports]
        print(f"{name:24}" + "".join(f"{v:16.2f}" for v in rows[name]))
        paper = [sparse_volume(name, n, k, N) for N in WORLDS]
        shown = [" to ".join(f"{volume:.2f}" for volume in volumes) for volumes in paper]
        print(f"{'  paper':24}" + "".join(f"{v:>16}" for v in shown))
    if args.out:
        plot(rows, args.out)


if __name__ == "__main__":
    main()
