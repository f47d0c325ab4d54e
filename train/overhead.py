"""What the training loop adds to the compiled step.

    python -m train.overhead [--steps=1000] [--config=configs/digits_resnet.py]

One process with one device trains a tiny network, so that what the loop adds shows: making batches,
metrics, files, the progress bar. Tests, checkpoints, looks and comparisons of replicas are left
out, because they run only every so many steps. The bare step is the same program, called again and
again on one batch, its loss read one step late. Times are milliseconds per step, on the wall clock
and of the CPU; where other programs run, only user CPU time is meaningful.
"""

import argparse
import resource
import runpy
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from train import loop
from train.run import assemble

WARM = 100  # Steps before the clocks are read.
CLOCKS = {
    "wall": time.perf_counter,
    "user CPU, process": lambda: resource.getrusage(resource.RUSAGE_SELF).ru_utime,
    "CPU, main thread": time.thread_time,
}


class Stopwatch:
    """Stands in for the loop's profile, which is told of every step before it starts."""

    steps = 0
    read: dict[int, dict[str, float]] = {}

    def __init__(self, *_: Any):
        self.read.clear()

    def before(self, number: int, state: Any) -> None:
        if number in (WARM, self.steps):
            jax.block_until_ready(state)
            self.read[number] = {name: clock() for name, clock in CLOCKS.items()}

    def close(self, state: Any) -> None:
        del state


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m train.overhead", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--config", default="configs/digits_resnet.py")
    args = parser.parse_args()
    if args.steps <= WARM:
        parser.error(f"--steps must be above {WARM}, the steps that warm up, got {args.steps}")
    config = runpy.run_path(args.config)["get_config"]()
    shrink(config, args.steps)
    with tempfile.TemporaryDirectory() as workdir:
        in_loop = of_loop(config, Path(workdir))
    alone = of_step(config)
    print(f"{'ms in a step':20}{'loop':>10}{'bare step':>12}{'difference':>12}")
    for name in CLOCKS:
        a, b = in_loop[name], alone[name]
        print(f"{name:20}{a:10.3f}{b:12.3f}{a - b:12.3f}")


def shrink(config: Any, steps: int) -> None:
    """Makes a network of a millisecond a step, without what runs only every so many steps."""
    config.steps = steps
    config.batch_size = 8
    if config.model.name == "resnet":
        config.model.stages, config.model.width = (1,), 8
    config.eval_every = config.checkpoint.every = config.guard.replicas_every = steps
    config.inspect.every = 0
    config.measure_steps = 1


def of_loop(config: Any, workdir: Path) -> dict[str, float]:
    """Milliseconds per step of the whole loop, by clock."""
    Stopwatch.steps = config.steps
    loop.profiling.Profile = Stopwatch
    loop.train(config, workdir, time.perf_counter())
    first, last = Stopwatch.read[WARM], Stopwatch.read[config.steps]
    return {name: 1e3 * (last[name] - first[name]) / (config.steps - WARM) for name in CLOCKS}


def of_step(config: Any) -> dict[str, float]:
    """The same for the compiled step alone."""
    run = assemble(config, Path())
    batch, now = run.batch(stop=False), run.begin()
    program = run.compile(now)
    late, first = None, {}
    for number in range(1, config.steps + 1):
        if number == WARM:
            jax.block_until_ready(now)
            first = {name: clock() for name, clock in CLOCKS.items()}
        now, metrics = program(now, batch)
        if late is not None:
            float(late["loss"])
        late = metrics
    jax.block_until_ready(now)
    steps = config.steps - WARM + 1
    return {name: 1e3 * (clock() - first[name]) / steps for name, clock in CLOCKS.items()}


if __name__ == "__main__":
    main()
