"""How fast votes are packed, unpacked and counted, beside a sum and a copy in the same run.

    python -m benchmarks.bitplanes [--mib=256] [--repeats=15]
    taskset -c 0 python -m benchmarks.bitplanes    # one core

`--mib` is the size of the vector of float32 that is packed; all else counts as many coordinates.
Before anything is timed, every result is compared with numpy's, on random data that is new in every
run, at an odd length and at the length that is timed.

GB/s are of the bytes that must move: everything read once and written once. `x sum` is the time
over that of summing the same bytes, `x copy` over that of copying them. Results are written into
the memory of the results before, so that no fresh pages are counted.
"""

import argparse
import importlib.metadata
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.arguments import count
from jaxcomm.kernels import bitplanes

LEARNING_RATE = 2.0**-7  # a power of two: numpy need not know whether XLA contracts to an fma
ODD = 1_000_003  # not a multiple of 32


class Case(NamedTuple):
    name: str
    f: Callable[..., Any]
    args: tuple[Any, ...]
    expected: Callable[[], Any]
    updates: bool = False  # whether f also reads, as its last argument, what it overwrites


def packed(bits: np.ndarray) -> np.ndarray:
    width = -(-len(bits) // 32)
    streams = np.pad(bits, (0, 32 * width - len(bits))).reshape(32, width)
    words = np.zeros(width, np.uint32)
    for b, stream in enumerate(streams):
        words |= stream.astype(np.uint32) << np.uint32(b)
    return words


def planes(counts: np.ndarray, P: int) -> tuple[np.ndarray, ...]:
    return tuple(packed(counts >> p & 1) for p in range(P))


def packing(n: int, rng: np.random.Generator) -> Iterator[Case]:
    """The sum and the copy come first: the rest is measured against them."""
    x = rng.standard_normal(n, np.float32)
    on_device, half = jnp.asarray(x), jnp.asarray(x, jnp.bfloat16)
    words = jnp.asarray(packed(x > 0))

    def signs() -> np.ndarray:
        return np.where(x > 0, np.float32(1), np.float32(-1))

    def update(words: jax.Array, p: jax.Array) -> jax.Array:
        return p - LEARNING_RATE * bitplanes.signs(words, n)

    yield Case("sum f32", jnp.sum, (on_device,), lambda: np.sum(x))
    # Of a plain copy XLA may make nothing; a changed sign has to be written.
    yield Case("copy f32", jnp.negative, (on_device,), lambda: -x)
    yield Case("pack f32", bitplanes.pack, (on_device,), lambda: packed(x > 0))
    yield Case("pack bf16", bitplanes.pack, (half,), lambda: packed(x > 0))
    yield Case("unpack", partial(bitplanes.unpack, n=n), (words,), lambda: x > 0)
    yield Case("signs", partial(bitplanes.signs, n=n), (words,), signs)
    yield Case("p -= lr * signs", update, (words,), lambda: -LEARNING_RATE * signs(), updates=True)


def counting(n: int, rng: np.random.Generator) -> Iterator[Case]:
    a, b = rng.integers(0, 8, (2, n), dtype=np.uint8)
    A, B = (tuple(map(jnp.asarray, planes(counts, 3))) for counts in (a, b))
    # The bits that no coordinate owns are counts of zero, and neither comparison holds for them.
    yield Case("add, 3 planes", partial(bitplanes.add, width=4), (A, B), lambda: planes(a + b, 4))
    yield Case(
        "exceeds, 3 planes", partial(bitplanes.exceeds, threshold=3), (A,), lambda: packed(a > 3)
    )
    yield Case("greater, 3 planes", bitplanes.greater, (A, B), lambda: packed(a > b))


class Timed:
    """A case, compiled and checked, whose result is written over its previous one."""

    def __init__(self, case: Case):
        f = case.f if case.updates else lambda *args: case.f(*args[:-1])
        expected = case.expected()
        self.case = case
        self.call = jax.jit(f, donate_argnums=len(case.args), keep_unused=True)
        self.result = jax.tree.map(jnp.zeros_like, expected)
        self.seconds: list[float] = []
        moved = (case.args, self.result, self.result if case.updates else ())
        self.bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(moved))
        self.run()
        for found, wanted in zip(*map(jax.tree.leaves, (self.result, expected)), strict=True):
            if wanted.ndim == 0:  # the sum, which rounds in another order
                np.testing.assert_allclose(found, wanted, atol=0.01 * case.args[0].size ** 0.5)
            else:
                np.testing.assert_array_equal(found, wanted, case.name)

    def run(self) -> float:
        start = time.perf_counter()
        self.result = jax.block_until_ready(self.call(*self.case.args, self.result))
        return time.perf_counter() - start


def checked(n: int, rng: np.random.Generator) -> list[Timed]:
    return [Timed(case) for family in (packing, counting) for case in family(n, rng)]


def table(timed: list[Timed]) -> str:
    speeds = [t.bytes / statistics.median(t.seconds) for t in timed]
    lines = [f"{'':20}{'MiB':>8}{'ms':>9}{'best ms':>9}{'GB/s':>8}{'x sum':>8}{'x copy':>8}"]
    for t, speed in zip(timed, speeds, strict=True):
        lines.append(
            f"{t.case.name:20}{t.bytes / 2**20:8.1f}{1e3 * t.bytes / speed:9.2f}"
            f"{1e3 * min(t.seconds):9.2f}{speed / 1e9:8.2f}"
            f"{speeds[0] / speed:8.2f}{speeds[1] / speed:8.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="time bit planes")
    parser.add_argument("--mib", type=count, default=256, help="size of the float32 vector")
    parser.add_argument("--repeats", type=count, default=15, help="rounds; medians are shown")
    args = parser.parse_args()
    rng = np.random.default_rng()
    checked(ODD, rng)
    timed = checked(args.mib * 2**18, rng)
    for _ in range(args.repeats):  # all cases in turn, so that other load meets all of them
        for t in timed:
            t.seconds.append(t.run())
    device = jax.devices()[0].device_kind
    print(
        f"jax {importlib.metadata.version('jax')}, {device}, {len(os.sched_getaffinity(0))} cores"
    )
    print(f"{args.mib * 2**18:,} coordinates, medians of {args.repeats} alternating rounds")
    print(table(timed))


if __name__ == "__main__":
    main()
