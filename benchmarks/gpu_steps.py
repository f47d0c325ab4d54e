"""Whole training steps on one GPU: what encoding, decoding and state cost beside no exchange.

    python -m benchmarks.gpu_steps [--model=resnet50] [--methods=bfloat16,int8] [--out=JSON]

The mesh has one device, so that nothing is sent, and everything else of the exchange is done: its
buckets are gathered, encoded, decoded and put back. `none` is the step of plain jax and optax. The
models are ResNet-50 (64 images of 224 x 224, momentum) and a scanned transformer (12 layers of
width 768, 8 rows of 1024 tokens, Adam), in bfloat16 products.

All steps are compiled first. Then rounds of each are timed in turn, and medians are shown: the time
of a step and its share above `none`'s. Beside it stands the time of all kernels of a step, as jax's
profiler records them. --out adds to a file. With --scopes kernels are launched alone, so that the
profiler knows what they belong to, and the JSON has the largest outside of the gradient. With
--memory, two steps of one method run, and the allocator's peak stands beside what the compiled
program says.
"""

import argparse
import functools
import json
import os
import re
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

import jaxcomm
from benchmarks.aot import resnet, transformer
from benchmarks.arguments import count, new_file, one_of, several
from benchmarks.device_time import keep, launch_alone, machine, recorded, refused
from train.step import make_forward, make_loss

WARM, STEPS = 25, 5  # steps before all rounds, in which residuals grow, and in a round
PROFILED = 2  # steps
SCALES: dict[str, dict[str, dict[str, Any]]] = {
    "resnet50": {
        "tiny": {"rows": 2, "image": 32, "stages": (1, 1)},
        "full": {"rows": 64, "image": 224, "stages": (3, 4, 6, 3)},
    },
    "transformer": {
        "tiny": {"rows": 1, "layers": 2, "width": 64, "context": 32},
        "full": {"rows": 8, "layers": 12, "width": 768, "context": 1024},
    },
}

Make = Callable[[], optax.GradientTransformation]
EXCHANGES: dict[str, Make] = {
    "float32": lambda: jaxcomm.mean("data"),
    "bfloat16": lambda: jaxcomm.mean("data", "bfloat16"),
    "cnat": lambda: jaxcomm.mean("data", "cnat"),
    "cnat_all": lambda: jaxcomm.mean("data", jaxcomm.codecs.cnat("all")),
    "int8": lambda: jaxcomm.mean("data", "int8"),
    "int4": lambda: jaxcomm.mean("data", "int4", error_feedback=True),
    "scaled_sign": lambda: jaxcomm.mean("data", "scaled_sign", error_feedback=True),
    "vote": lambda: jaxcomm.majority_vote("data"),
    "vote_direct": lambda: jaxcomm.majority_vote("data", "direct"),
    "oktopk": lambda: jaxcomm.sparse_mean("data", 0.01),
    "topk_allgather": lambda: jaxcomm.sparse_mean("data", 0.01, "topk_allgather"),
    "gaussiank": lambda: jaxcomm.sparse_mean("data", 0.01, "gaussiank"),
    "int8_plain": lambda: jaxcomm.mean("data", "int8", implementation="xla"),
    "cnat_all_plain": lambda: jaxcomm.mean(
        "data", jaxcomm.codecs.cnat("all"), implementation="xla"
    ),
    "oktopk_plain": lambda: jaxcomm.sparse_mean("data", 0.01, implementation="xla"),
    "low_rank": lambda: jaxcomm.low_rank_mean("data", 4),
}


class Model(NamedTuple):
    """A loss, its parameters, a batch and an optimizer."""

    loss: Callable[..., Any]
    params: Any
    batch: Any
    optimizer: optax.GradientTransformation


def resnet50(rows: int, image: int, stages: tuple[int, ...]) -> Model:
    graph, params = nnx.split(resnet.resnet50(image, stages))
    loss = make_loss(make_forward(graph, 127.0, 64.0), 0.1)
    rng = np.random.default_rng(0)
    batch = {
        "image": rng.integers(0, 256, (rows, image, image, 3), np.uint8),
        "label": rng.integers(0, 1000, rows, np.int32),
    }
    params = jax.device_get(nnx.to_pure_dict(params))  # else they would count as memory
    return Model(loss, params, batch, optax.sgd(0.01, momentum=0.9))


def scanned(rows: int, layers: int, width: int, context: int) -> Model:
    shapes = transformer.shapes(layers, width, heads=width // 64, vocabulary=256, context=context)
    rng = np.random.default_rng(0)

    def drawn(path: Any, shape: Any) -> np.ndarray:
        if path[-1].key == "scale":
            return np.ones(shape.shape, np.float32)
        return 0.02 * rng.standard_normal(shape.shape, np.float32)

    params = jax.tree_util.tree_map_with_path(drawn, shapes)
    tokens = rng.integers(0, 256, (rows, context + 1), np.int32)
    loss = lambda params, tokens: (transformer.loss_fn(params, tokens), {})  # noqa: E731
    return Model(loss, params, tokens, optax.adam(1e-4))


MODELS = {"resnet50": resnet50, "transformer": scanned}


def optimizer(model: Model, method: str) -> optax.GradientTransformation:
    if method == "none":
        return model.optimizer
    if method == "one_bit_adam":
        return jaxcomm.one_bit_adam("data", 1e-4, dense_steps=1)
    return optax.chain(EXCHANGES[method](), model.optimizer)


class Step:
    """The compiled step of a method and the state that it goes on from."""

    def __init__(self, model: Model, method: str):
        self.method = method
        self.tx = optimizer(model, method)
        gradient = (
            jax.value_and_grad(model.loss, has_aux=True)
            if method == "none"
            else jaxcomm.value_and_grad(model.loss, "data", has_aux=True)
        )

        def step(params: Any, state: Any, batch: Any) -> Any:
            (loss, _), grads = gradient(params, batch)
            updates, state = self.tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        self.jitted = jax.jit(
            step, donate_argnums=(0, 1), compiler_options=jaxcomm.compiler_options()
        )
        self.milliseconds: list[float] = []
        self.batch = jaxcomm.global_batch(model.batch, "data")
        self.params = jaxcomm.replicate(model.params)
        self.state = jaxcomm.replicate(self.tx.init(self.params))
        self.lowered = self.jitted.lower(self.params, self.state, self.batch)

    def compile(self) -> None:
        self.compiled = self.lowered.compile()
        text = self.compiled.as_text()
        self.scopes = dict(
            re.findall(r'%?([\w.\-]+) = [^\n]*?metadata=\{[^\n}]*?op_name="([^"]*)"', text)
        )

    def run(self, steps: int) -> None:
        loss = None
        for _ in range(steps):
            self.params, self.state, loss = self.compiled(self.params, self.state, self.batch)
        jax.block_until_ready((self.params, self.state, loss))

    def time(self) -> None:
        start = time.perf_counter()
        self.run(STEPS)
        self.milliseconds.append(1e3 * (time.perf_counter() - start) / STEPS)

    def profile(self) -> dict[str, Any]:
        """Milliseconds of kernels in a step: all, those outside of the gradient, the largest."""
        with recorded() as kernels:
            self.run(PROFILED)
        total = outside = unknown = 0.0
        by_kernel: Counter[str] = Counter()
        for kernel in kernels:
            ms = 1e3 * kernel.seconds / PROFILED
            total += ms
            scope = self.scopes.get(kernel.op)
            if scope is None:
                unknown += ms
            elif not ("transpose(" in scope or "jvp(" in scope):
                outside += ms
                short = re.sub(r"note\[\d+\]/|jit\(\w+\)/", "", scope)
                by_kernel[f"{kernel.op} {kernel.name[:40]} [{short[-90:]}]"] += ms
        largest = {name: round(ms, 3) for name, ms in by_kernel.most_common(12)}
        return {
            "kernels_ms": round(total, 3),
            "outside_gradient_ms": round(outside, 3),
            "unknown_ms": round(unknown, 3),
            "largest": largest,
            "kernels": len(kernels) // PROFILED,
        }


def said(compiled: Any) -> int:
    """The peak memory that a compiled program says it needs, in bytes."""
    memory = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + results


def measured(model: Model, methods: list[str], repeats: int) -> list[dict[str, Any]]:
    steps = [Step(model, method) for method in methods]
    start = time.perf_counter()
    steps[0].compile()  # alone: the others find what the compiler has tried out for it
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(Step.compile, steps[1:]))
        print(f"{len(steps)} programs compiled in {time.perf_counter() - start:.0f} s", flush=True)
    for step in steps:
        step.run(WARM)
    for _ in range(repeats):  # in turn, so that other load meets all of them
        for step in steps:
            step.time()
    rows = []
    for step in steps:
        ms = statistics.median(step.milliseconds)
        row = {"method": step.method, "ms": round(ms, 3), "said_mib": said(step.compiled) >> 20}
        row["over_none"] = round(ms / (rows[0]["ms"] if rows else ms) - 1, 4)
        row |= step.profile()
        if rows:
            more = row["kernels_ms"] - rows[0]["kernels_ms"]
            row["exchange_share"] = round(more / rows[0]["ms"], 4)
        rows.append(row)
        print(shown(row), flush=True)
    return rows


def shown(row: dict[str, Any]) -> str:
    return (
        f"{row['method']:16}{row['ms']:9.2f} ms{100 * row['over_none']:8.1f} %"
        f"   kernels {row['kernels_ms']:8.2f} ms, outside the gradient "
        f"{row['outside_gradient_ms']:7.2f} ms, "
        f"unknown {row['unknown_ms']:.2f}, {row['kernels']} kernels"
    )


def memory(model: Model, method: str) -> dict[str, Any]:
    """The peak memory of two steps as the allocator saw it, beside what the program says."""
    step = Step(model, method)
    step.compile()
    step.run(2)
    stats = jax.local_devices()[0].memory_stats() or {}
    peak, wanted = stats.get("peak_bytes_in_use", 0), said(step.compiled)
    return {"method": method, "peak": peak, "said": wanted, "ratio": round(peak / wanted, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_steps", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="resnet50", choices=sorted(MODELS))
    methods = (*EXCHANGES, "one_bit_adam")
    parser.add_argument("--methods", type=several(one_of(methods)), default=list(methods))
    parser.add_argument("--scale", default="full", choices=("tiny", "full"))
    parser.add_argument("--repeats", type=count, default=5)
    parser.add_argument("--memory", action="store_true", help="of one method")
    parser.add_argument("--scopes", action="store_true", help="tell the kernels' scopes")
    parser.add_argument("--out", type=new_file)
    args = parser.parse_args()
    if args.memory and len(args.methods) > 1:
        parser.error("--memory: the allocator keeps one peak; name one method, --methods=int8")
    warnings.filterwarnings("ignore", message=".*before an optimizer that keeps a variance")
    if args.scopes:
        launch_alone()
    jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:1]))
    model = MODELS[args.model](**SCALES[args.model][args.scale])
    if args.memory:
        print(json.dumps(memory(model, args.methods[0])))
        return
    save = functools.partial(keep, args.out, machine(), args.model, key=("method",))
    refused(parser, save)
    save(measured(model, ["none", *args.methods], args.repeats))


if __name__ == "__main__":
    main()
