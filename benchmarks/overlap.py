"""What travels behind the backward pass on eight GPUs, as training steps are compiled for them.

    python -m benchmarks.overlap --target=h100 [--model=resnet50] [--methods=a,b] [--out=JSON]

compiles a training step with each method, ahead of time (the `gpu-aot` extra; no GPU is needed),
and reads the scheduled program: nothing is timed. `resnet50` is ResNet-50 with momentum and 64
images of 224 x 224 a device, as the training program compiles it. `scanned` is a transformer of 12
layers of width 768 in a `jax.lax.scan` (85 M parameters) with Adam and 8 rows of 1024 tokens a
device, whose layers are exchanged inside of the loop; `exchanged_after` is the same, exchanged
behind the backward pass. All have bfloat16 products. With --fsdp=4 the transformer's devices are
two groups of four (HSDP): parameters and Adam's moments are split within a group, each layer is
computed twice, and the exchange is between the groups.

A row has the megabytes that a device sends in a step; the share of them that is of collectives
between whose start and done a kernel of the backward pass is started, and the share behind a matrix
product of it (with --fsdp between the groups, and as `within_` inside of them); the megabytes in
conditionals, which are in neither; the peak memory of a device, and that in units of the first row:
plain `jax.lax.pmean`'s, of ResNet-50 the float32 mean's; and the seconds of compiling. --out adds
to a file, in place of the same rows.
"""

import argparse
import functools
import json
import os
import time
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

import jaxcomm
from benchmarks.aot import steps
from benchmarks.aot.overlap import Overlap, overlap
from benchmarks.aot.targets import TARGETS, mesh_of, traced_for
from benchmarks.arguments import new_file
from benchmarks.device_time import keep, refused

MODELS: dict[str, Callable[..., Any]] = {
    "resnet50": steps.resnet50,
    "scanned": functools.partial(steps.scanned, in_backward=True),
    "exchanged_after": functools.partial(steps.scanned, in_backward=False),
}
KEY = ("model", "target", "fsdp", "method")


def row(mesh: Any, program: Any) -> dict[str, Any]:
    """What the compiled program says."""
    memory, text = program.memory_analysis(), program.as_text()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes + results
    parts = jaxcomm.wire_report(text).by_axes(mesh)
    collectives = overlap(text, parts["data",])
    found = traffic(collectives)
    if "fsdp" in mesh.axis_names:
        within = traffic(overlap(text, parts["fsdp",]))
        found |= {f"within_{name}": value for name, value in within.items()}
    return {
        **found,
        "conditional_mb": round(collectives.in_conditionals / 1e6, 3),
        "collectives": len(parts["data",].collectives),
        "blocking": len(collectives.blocking),
        "peak_mib": round(peak / 2**20),
    }


def traffic(found: Overlap) -> dict[str, float]:
    """Megabytes, and the shares that travel behind something."""
    return {
        "sent_mb": round(found.sent / 1e6, 3),
        "hidden": round(found.hidden / found.sent, 3),
        "behind_products": round(found.behind_products / found.sent, 3),
    }


def versions() -> dict[str, str]:
    """What the programs of a file are compiled with."""
    return {name: metadata.version(name) for name in ("jax", "jaxlib", "jax-cuda13-plugin")}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--target", default="h100", choices=sorted(TARGETS))
    parser.add_argument("--model", default="scanned", choices=sorted(MODELS))
    parser.add_argument("--fsdp", type=int, default=1, choices=(1, 2, 4))
    parser.add_argument("--methods", help="all that the model has, unless given")
    parser.add_argument("--out", type=new_file)
    parser.add_argument("--json", action="store_true", help="all rows as JSON in the last line")
    args = parser.parse_args()
    known = steps.known(args.model)
    methods = args.methods.split(",") if args.methods else known
    if wrong := [method for method in methods if method not in known]:
        parser.error(f"unknown method {wrong[0]!r}; choose among {', '.join(known)}.")
    if args.model == "resnet50" and args.fsdp > 1:
        parser.error("--fsdp: the parameters of resnet50 are not split; choose --model=scanned.")
    save = functools.partial(keep, args.out, versions(), "rows", key=KEY)
    refused(parser, save)
    warnings.filterwarnings("ignore", message=".*before an optimizer that keeps a variance")
    first = "float32" if args.model == "resnet50" else "psum"
    mesh, rows = mesh_of(args.target, within=args.fsdp), {}
    with traced_for(mesh):
        for method in dict.fromkeys((first, *methods)):
            begin = time.perf_counter()
            program = MODELS[args.model](mesh, method)
            seconds = round(time.perf_counter() - begin, 1)
            found = row(mesh, program) | {"seconds": seconds}
            of_first = found["peak_mib"] / rows.get(first, found)["peak_mib"]
            rows[method] = found | {"of_first": round(of_first, 3)}
            print(method, rows[method], flush=True)
            where = {"model": args.model, "target": args.target, "fsdp": args.fsdp}
            save(rows=[{**where, "method": method, **rows[method]}])
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
