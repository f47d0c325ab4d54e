"""What travels behind the backward pass of a scanned transformer on eight GPUs, as it is compiled.

    python -m benchmarks.overlap --target=h100 --model=scanned --json    # or a10

compiles a training step with Adam for each method, ahead of time (the `gpu-aot` extra; no GPU is
needed), and reads the scheduled program: nothing is timed. The transformer has 12 layers of width
768 in a `jax.lax.scan` (85 M parameters), 8 rows of 1024 tokens a device, and bfloat16 products.
With --model=exchanged_after the same layers are exchanged behind the backward pass. With --fsdp=4
the devices are two groups of four (HSDP): parameters and Adam's moments are split within a group,
each layer is computed twice, and the exchange is between the groups.

A row has the megabytes that a device sends in a step; the share of them that is of collectives
between whose start and done a kernel of the backward pass is started, and the share behind a matrix
product of it (with --fsdp between the groups, and as `within_` inside of them); the peak memory of
a device, and that in units of plain `jax.lax.pmean`'s.
"""

import argparse
import json
import os
import warnings
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jaxcomm
from benchmarks.aot import transformer
from benchmarks.aot.overlap import Overlap, overlap
from benchmarks.aot.targets import TARGETS, mesh_of

ROWS = 8
SHAPES = transformer.shapes(layers=12, width=768, heads=12, vocabulary=256, context=1024)
MODELS = ("scanned", "exchanged_after")
LAYERS = ["blocks/*"]

P = PartitionSpec
METHODS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "float32": lambda **kw: jaxcomm.mean("data", **kw),
    "bfloat16": lambda **kw: jaxcomm.mean("data", "bfloat16", **kw),
    "cnat": lambda **kw: jaxcomm.mean("data", "cnat", **kw),
    "int8": lambda **kw: jaxcomm.mean("data", "int8", **kw),
    "scaled_sign": lambda **kw: jaxcomm.mean("data", "scaled_sign", error_feedback=True, **kw),
    "vote": lambda **kw: jaxcomm.majority_vote("data", **kw),
    "oktopk": lambda **kw: jaxcomm.sparse_mean("data", 0.01, **kw),
}


def placed(mesh: Any, tree: Any, specs: Any) -> Any:
    """Shapes on a mesh, each sharded as its spec says."""

    def of(x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(of, tree, jax.tree.broadcast(specs, tree))


def compiled(mesh: Any, tx: optax.GradientTransformation, gradient: Callable[..., Any]) -> Any:
    """A step of `gradient(params, state, tokens)` and `tx`, for the GPUs of a mesh."""
    params, tokens = inputs(mesh)
    tx = jaxcomm.with_param_specs(tx, params)
    shapes = jax.eval_shape(tx.init, params)
    state = placed(mesh, shapes, jaxcomm.state_spec(tx, params, mesh))

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        loss, grads = gradient(params, state, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    options = jaxcomm.compiler_options()
    jitted = jax.jit(step, donate_argnums=(0, 1), compiler_options=options)
    return jitted.trace(params, state, tokens).lower().compile()


def inputs(mesh: Any) -> tuple[Any, Any]:
    """The shapes of the parameters and of a batch."""
    rows, context = ROWS * mesh.size, SHAPES["embed"]["positions"].shape[0]
    tokens = jax.ShapeDtypeStruct((rows, context + 1), jnp.int32)
    params = placed(mesh, SHAPES, P())
    if "fsdp" in mesh.axis_names:
        params = jaxcomm.shard(SHAPES, "fsdp", layers=LAYERS)
    return params, placed(mesh, tokens, P(mesh.axis_names))


def bucket_mib(method: str) -> float:
    """A layer has three buckets, or two where many kernels lie between the hops."""
    return 20.0 if method in ("scaled_sign", "oktopk") else 16.0


def with_method(mesh: Any, method: str, model: str) -> Any:
    """The step of a method."""
    gradient = jaxcomm.value_and_grad(transformer.loss_fn, "data")
    order = jaxcomm.backward_order(gradient, *inputs(mesh))
    exchange = METHODS[method](bucket_order=order, bucket_mib=bucket_mib(method))
    if model == "exchanged_after":
        tx = optax.chain(exchange, optax.adam(1e-3))
        return compiled(mesh, tx, lambda params, _, tokens: gradient(params, tokens))
    inside = jaxcomm.in_backward(exchange, ["blocks"])
    tx = optax.chain(inside, optax.adam(1e-3))
    return compiled(mesh, tx, lambda p, state, tokens: gradient(inside.attach(p, state), tokens))


def with_psum(mesh: Any) -> Any:
    """The step of a user of plain jax."""

    def local(params: Any, tokens: jax.Array) -> Any:
        return jax.lax.pmean(jax.value_and_grad(transformer.loss_fn)(params, tokens), "data")

    means = jax.shard_map(
        local,
        in_specs=(P(), P("data")),
        out_specs=P(),
        axis_names={"data"},
        check_vma=False,
    )
    return compiled(mesh, optax.adam(1e-3), lambda params, _, tokens: means(params, tokens))


def row(mesh: Any, program: Any) -> dict[str, float]:
    """What the compiled program says."""
    memory, text = program.memory_analysis(), program.as_text()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes + results
    parts = jaxcomm.wire_report(text).by_axes(mesh)
    found = traffic(overlap(text, parts["data",]))
    if "fsdp" in mesh.axis_names:
        within = traffic(overlap(text, parts["fsdp",]))
        found |= {f"within_{name}": value for name, value in within.items()}
    return {**found, "peak_mib": round(peak / 2**20)}


def traffic(found: Overlap) -> dict[str, float]:
    """Megabytes, and the shares that travel behind something."""
    return {
        "sent_mb": round(found.sent / 1e6, 3),
        "hidden": round(found.hidden / found.sent, 3),
        "behind_products": round(found.behind_products / found.sent, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--target", default="h100", choices=sorted(TARGETS))
    parser.add_argument("--model", default="scanned", choices=MODELS)
    parser.add_argument("--fsdp", type=int, default=1, choices=(1, 2, 4))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--json", action="store_true", help="all rows as JSON in the last line")
    args = parser.parse_args()
    methods = args.methods.split(",")
    if wrong := [method for method in methods if method not in METHODS]:
        parser.error(f"unknown method {wrong[0]!r}; choose among {', '.join(METHODS)}.")
    warnings.filterwarnings("ignore", message=".*in front of an optimizer that keeps a variance")
    mesh, rows = mesh_of(args.target, within=args.fsdp), {}
    with jax.set_mesh(mesh):
        for method in ("psum", *methods):
            is_psum = method == "psum"
            found = row(mesh, with_psum(mesh) if is_psum else with_method(mesh, method, args.model))
            of_psum = found["peak_mib"] / rows.get("psum", found)["peak_mib"]
            rows[method] = found | {"of_psum": round(of_psum, 3)}
            print(method, rows[method], flush=True)
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
