"""How long the exchange of each method takes to compile, beside the float32 mean's.

    python -m benchmarks.compile_time [--params=2e6,8e6,25e6] [--methods=float32,vote,...]
        [--out=JSON]

Four simulated devices, gradients in matrices of 1024 x 1024, and in the 192 leaves of the layers of
a transformer that does not scan them; the program of `tx.update` alone: seconds of tracing and
compiling. A training step adds its own. Nothing is cached.
"""

import argparse
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import jaxcomm
from benchmarks.arguments import new_file, several, values
from benchmarks.netlab.measuring import guarded, keep
from benchmarks.netlab.methods import FAMILIES, check_method, shapes_of, transformation

NAME = "benchmarks.compile_time"
DEVICES = 4
LAYERS, WIDTH = 12, 256  # of the transformer
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
    models = {f"{n / 1e6:g} million values": shapes_of(round(n)) for n in args.params}
    models[f"{len(transformer())} leaves"] = transformer()
    jaxcomm.simulate_devices(DEVICES)
    print(f"{'':16}" + "".join(f"{name:>20}" for name in models))
    rows = []
    for method in methods:
        seconds = {name: compile_seconds(method, shapes) for name, shapes in models.items()}
        rows.append({"method": method, "seconds": seconds})
        first = rows[0]["seconds"]
        cells = [f"{s:.1f} s ({s / first[name]:.0f}x)" for name, s in seconds.items()]
        print(f"{method:16}" + "".join(f"{cell:>20}" for cell in cells), flush=True)
    keep(args.out, NAME, "compile time", rows, devices=DEVICES)


def transformer() -> dict[str, tuple[int, ...]]:
    """The weights of its layers: of two norms, four projections and two products, with biases."""
    wide, heads = 4 * WIDTH, (4, WIDTH // 4)
    inputs = {"q": heads, "k": heads, "v": heads, "up": (wide,)}
    layer: dict[str, tuple[int, ...]] = {f"{name}_bias": out for name, out in inputs.items()}
    layer |= {f"{name}_kernel": (WIDTH, *out) for name, out in inputs.items()}
    layer |= {"o_kernel": (*heads, WIDTH), "down_kernel": (wide, WIDTH)}
    vectors = ("o_bias", "down_bias", "norm1_scale", "norm1_bias", "norm2_scale", "norm2_bias")
    layer |= dict.fromkeys(vectors, (WIDTH,))
    return {f"layer{i:02}_{name}": shape for i in range(LAYERS) for name, shape in layer.items()}


def compile_seconds(method: str, shapes: Mapping[str, tuple[int, ...]]) -> float:
    """Of tracing and compiling the update of a method."""
    mesh = jaxcomm.data_mesh()
    with jax.set_mesh(mesh):
        tx = transformation(method)
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
