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
program says. With --lowered, the programs are read from a folder; lowering them takes as long as
compiling them, and the machine with the GPU need not do it.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

import jaxcomm
from benchmarks.aot import lowered
from benchmarks.aot.gpu_models import METHODS, MODELS, SCALES, Model, optimizer, step_of
from benchmarks.arguments import count, existing_folder, new_file, one_of, several
from benchmarks.device_time import keep, launch_alone, machine, recorded, refused

WARM, STEPS = 25, 5  # steps before all rounds, in which residuals grow, and in a round
PROFILED = 2  # steps


class Step:
    """The step of a method, and the state that it goes on from; compiled by `compile`."""

    def __init__(self, model: Model, method: str):
        self.method, self.milliseconds = method, list[float]()
        tx = optimizer(model, method)
        jitted = jax.jit(
            step_of(model, tx, exchanges=method != "none"),
            donate_argnums=(0, 1),
            compiler_options=jaxcomm.compiler_options(),
        )
        self.batch = jaxcomm.global_batch(model.batch, "data")
        self.params = jaxcomm.replicate(model.params)
        self.state = jaxcomm.replicate(tx.init(self.params))
        self.lowered = jitted.lower(self.params, self.state, self.batch)

    @classmethod
    def of_file(cls, path: Path) -> "Step":
        """A step that `benchmarks.aot.lowered` has lowered; what it goes on from is drawn."""
        self = cls.__new__(cls)
        found = lowered.read(path)
        self.method, self.milliseconds = found.method, []
        self.lowered = found.lowered
        self.params, self.state, self.batch = found.arguments
        return self

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


def measured(steps: list[Step], repeats: int) -> list[dict[str, Any]]:
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
    parser.add_argument("--methods", type=several(one_of(METHODS)), default=list(METHODS))
    parser.add_argument("--scale", default="full", choices=("tiny", "full"))
    parser.add_argument("--repeats", type=count, default=5)
    parser.add_argument("--memory", action="store_true", help="of one method")
    parser.add_argument(
        "--lowered", type=existing_folder, help="of `python -m benchmarks.aot.lowered`"
    )
    parser.add_argument("--scopes", action="store_true", help="tell the kernels' scopes")
    parser.add_argument("--out", type=new_file)
    args = parser.parse_args()
    if args.memory and len(args.methods) > 1:
        parser.error("--memory: the allocator keeps one peak; name one method, --methods=int8")
    warnings.filterwarnings("ignore", message=".*before an optimizer that keeps a variance")
    if args.scopes:
        launch_alone()
    jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:1]))
    make = lambda: MODELS[args.model](**SCALES[args.model][args.scale])  # noqa: E731
    if args.memory:
        print(json.dumps(memory(make(), args.methods[0])))
        return
    save = functools.partial(keep, args.out, machine(), args.model, key=("method",))
    refused(parser, save)
    methods = ["none", *args.methods]
    if args.lowered:
        paths = [lowered.path_of(args.lowered, args.model, method) for method in methods]
        if missing := [path for path in paths if not path.exists()]:
            parser.error(f"--lowered: there is no {missing[0]}; name --methods that were lowered")
        steps = list(map(Step.of_file, paths))
    else:
        model = make()
        steps = [Step(model, method) for method in methods]
    save(measured(steps, args.repeats))


if __name__ == "__main__":
    main()
