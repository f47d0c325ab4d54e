"""How long the exchange of each method takes to compile, beside the float32 mean's.

    python -m benchmarks.compile_time [--params=2e6,8e6,25e6] [--methods=float32,vote,...]
        [--out=JSON]

Four simulated devices, gradients in matrices of 1024 x 1024, the program of `tx.update` alone:
seconds of tracing and compiling. A training step adds its own. Nothing is cached.
"""

import argparse
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

import jaxcomm
from benchmarks.arguments import new_file, several, values
from benchmarks.netlab.measuring import guarded, keep
from benchmarks.netlab.methods import FAMILIES, check_method, shapes_of, transformation

NAME = "benchmarks.compile_time"
DEVICES = 4
USUAL = tuple(name for name in FAMILIES if name not in ("psum", "powersgd1", "powersgd2"))


def main() -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {NAME}", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--params", type=several(values), default="2e6,8e6,25e6", help="values of the gradients"
    )
    parser.add_argument("--methods", default=",".join(USUAL))
    parser.add_argument("--out", type=new_file, help="a JSON file that the rows are kept in")
    args = parser.parse_args()
    return guarded("compile_time", lambda: run(args))


def run(args: argparse.Namespace) -> None:
    methods = args.methods.split(",")
    for method in methods:
        check_method(method)
    sizes = [round(size) for size in args.params]
    jaxcomm.simulate_devices(DEVICES)
    print(f"{'':16}" + "".join(f"{f'{size:g} values':>18}" for size in sizes))
    rows = []
    for method in methods:
        seconds = [compile_seconds(method, size) for size in sizes]
        rows.append({"method": method, "seconds": dict(zip(map(str, sizes), seconds, strict=True))})
        first = rows[0]["seconds"].values()
        cells = [f"{s:.1f} s ({s / f:.0f}x)" for s, f in zip(seconds, first, strict=True)]
        print(f"{method:16}" + "".join(f"{cell:>18}" for cell in cells), flush=True)
    keep(args.out, NAME, "compile time", rows, devices=DEVICES)


def compile_seconds(method: str, params: int) -> float:
    """Of tracing and compiling the update of a method."""
    mesh = jaxcomm.data_mesh()
    with jax.set_mesh(mesh):
        tx = transformation(method)
        shapes = shapes_of(params)
        sharding = jax.NamedSharding(mesh, jax.P("data"))
        grads: Any = {
            name: jax.ShapeDtypeStruct((DEVICES, *shape), jnp.float32, sharding=sharding)
            for name, shape in shapes.items()
        }
        state = tx.init(jaxcomm.replicate({name: jnp.zeros(s) for name, s in shapes.items()}))
        start = time.perf_counter()
        jax.jit(tx.update).lower(grads, state).compile()
        return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
