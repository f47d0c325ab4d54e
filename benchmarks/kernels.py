"""How near the kernels come to the memory's own speed: every implementation beside a copy.

    python -m benchmarks.kernels [--mib=1,16,256] [--repeats=20] [--implementations=...]

`--mib` lists sizes of the float32 vector that each operation is about; the implementations are xla,
mosaic and triton. Before anything is timed, every one is compared with numpy, on random data that
is new in every run. GB/s are of the bytes that must move: everything read once and written once.
`of copy` is this over what copying a vector of the same size reaches in the same run.

On a GPU, each call is given other buffers than the calls before it, more in all than the cache
holds. A program makes several calls, one behind the other, so that what Python takes to start it
counts little. On CPU the numbers say how fast XLA's code for CPU is, and nothing about a GPU; the
table says so.
"""

import argparse
import functools
import importlib.metadata
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.arguments import count, positive, several
from jaxcomm.kernels import bitplanes, select
from jaxcomm.kernels.block_quantization import integers
from jaxcomm.kernels.powers_of_two import nine_bits

CACHE = 2**28  # bytes; more than the last cache of any GPU of today holds
CALLS = 8  # in one program
MEMORY = 2**33  # bytes that the arguments and results of a program take, unless one call takes more


class Case(NamedTuple):
    """An operation: its name, who can do it, its arguments from numpy's random numbers, a check."""

    name: str
    implementations: dict[str, Callable[..., Any]]
    arguments: Callable[[np.random.Generator, int], tuple[np.ndarray, ...]]
    expected: Callable[..., tuple[np.ndarray, ...]]
    agree: Callable[[Any, np.ndarray, str], None] = np.testing.assert_array_equal


def nearly(found: Any, wanted: np.ndarray, name: str) -> None:
    """Few codes may be one level off: GPUs divide by a unit to within a last bit."""
    off = np.abs(np.asarray(found).view(np.int8).astype(int) - wanted.view(np.int8))
    assert off.max() <= 1 and np.mean(off > 0) < 1e-4, name


def packed(bits: np.ndarray) -> np.ndarray:
    width = -(-len(bits) // 32)
    streams = np.pad(bits, (0, 32 * width - len(bits))).reshape(32, width)
    words = np.zeros(width, np.uint32)
    for b, stream in enumerate(streams):
        words |= stream.astype(np.uint32) << np.uint32(b)
    return words


def normal(rng: np.random.Generator, n: int) -> tuple[np.ndarray, ...]:
    return (rng.standard_normal(n, np.float32),)


def votes(rng: np.random.Generator, n: int) -> tuple[np.ndarray, ...]:
    return tuple(rng.integers(0, 2**32, (6, bitplanes.words_for(n)), np.uint32))


def added(*planes: jax.Array, implementation: str) -> tuple[jax.Array, ...]:
    return bitplanes.add(planes[:3], planes[3:], 4, implementation=implementation)


def sums_of(*planes: np.ndarray) -> tuple[np.ndarray, ...]:
    bits = np.stack([np.unpackbits(p.view(np.uint8)).astype(np.int8) for p in planes])
    sums = (bits * np.int8([1, 2, 4, 1, 2, 4])[:, None]).sum(0)
    return tuple(np.packbits(sums >> p & 1).view(np.uint32) for p in range(4))


def int8_payload(x: np.ndarray) -> tuple[np.ndarray]:
    blocks = x.reshape(-1, 256)
    scale = np.abs(blocks).max(axis=1) * np.float32(1 / 127)
    unit = ((scale.view(np.uint32) + 253) >> 8 << 8).view(np.float32)
    numbers = np.minimum(np.abs(blocks * (1 / unit)[:, None]), 127).astype(np.float64)
    levels = np.copysign(np.floor(numbers + 0.5), blocks).astype(np.int8)
    return (np.concatenate([levels.reshape(-1).view(np.uint8), unit.view(np.uint8)]),)


def cnat_payload(x: np.ndarray) -> tuple[np.ndarray]:
    pattern = np.abs(x).view(np.uint32)
    exponent = (pattern + 2**22) >> 23
    signs = packed((x < 0) & (exponent > 0))
    return (np.concatenate([exponent.astype(np.uint8), signs.view(np.uint8)]),)


MESSAGES = 8


def payloads(encode: Callable[..., tuple[np.ndarray]]) -> Callable[..., tuple[np.ndarray]]:
    """Messages of small integers, as many values together as the vector has."""

    def arguments(rng: np.random.Generator, n: int) -> tuple[np.ndarray]:
        x = rng.integers(-8, 9, (MESSAGES, n // MESSAGES)).astype(np.float32)
        x[:, ::256] = 127
        return (np.stack([encode(row)[0] for row in x]),)

    return arguments


def int8_total(payloads: np.ndarray) -> tuple[np.ndarray]:
    n = payloads.shape[1] * 64 // 65
    units = np.ascontiguousarray(payloads[:, n:]).view(np.float32)
    values = payloads[:, :n].view(np.int8) * np.repeat(units, 256, axis=1)
    return (np.sum(values, axis=0, dtype=np.float32),)


def int8_sum(payloads: jax.Array, implementation: str) -> jax.Array:
    n = payloads.shape[1] * 64 // 65
    sums = functools.partial(integers.decode_and_sum, implementation=implementation)
    return sums(payloads, n, 127, 256)


def cnat_total(payloads: np.ndarray) -> tuple[np.ndarray]:
    n = payloads.shape[1] * 8 // 9
    exponents, words = payloads[:, :n], np.ascontiguousarray(payloads[:, n:]).view(np.uint32)
    signs = np.concatenate([words >> b & 1 for b in range(32)], axis=1)
    values = np.where(exponents > 0, 2.0 ** (exponents.astype(np.int32) - 127), 0)
    return (np.sum(np.where(signs, -values, values), axis=0).astype(np.float32),)


def cnat_sum(payloads: jax.Array, implementation: str) -> jax.Array:
    n = payloads.shape[1] * 8 // 9
    return nine_bits.decode_and_sum(payloads, n, implementation=implementation)


def counted(rng: np.random.Generator, n: int) -> tuple[np.ndarray, ...]:
    return *normal(rng, n), np.float32(2)


def count_of(x: np.ndarray, threshold: np.float32) -> tuple[np.ndarray]:
    return (np.count_nonzero(np.abs(x) >= threshold),)


SHARE = 100  # one of so many is selected, as near as it goes


def compacted(x: jax.Array, threshold: jax.Array, implementation: str) -> tuple[jax.Array, ...]:
    capacity = x.size // SHARE
    return tuple(select.compact(x, threshold, capacity, implementation=implementation))


def selectable(rng: np.random.Generator, n: int) -> tuple[np.ndarray, ...]:
    x = rng.standard_normal(n, np.float32)
    return x, np.partition(np.abs(x), n - n // SHARE)[n - n // SHARE]


def compaction_of(x: np.ndarray, threshold: np.float32) -> tuple[np.ndarray, ...]:
    i = np.flatnonzero(np.abs(x) >= threshold)
    i = i[np.lexsort((i, i % 8, i // select.CHUNK))][: len(x) // SHARE].astype(np.int32)
    return x[i], i, np.int32(np.count_nonzero(np.abs(x) >= threshold))


def on_both(f: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """An operation with one result, by the names of its implementations."""

    def called(name: str) -> Callable[..., Any]:
        return lambda *args: (f(*args, implementation=name),)

    return {name: called(name) for name in ("xla", "mosaic")}


CASES = (
    # Of a plain copy XLA may make nothing; a changed sign has to be written.
    Case("copy", {"xla": lambda x: (-x,)}, normal, lambda x: (-x,)),
    Case("pack", {"xla": lambda x: (bitplanes.pack(x),)}, normal, lambda x: (packed(x > 0),)),
    Case(
        "int8 encode",
        on_both(functools.partial(integers.encode, levels=127, size=256)),
        normal,
        int8_payload,
        nearly,
    ),
    Case("int8 sum", on_both(int8_sum), payloads(int8_payload), int8_total),
    Case("cnat all encode", on_both(nine_bits.encode), normal, cnat_payload),
    Case("cnat all sum", on_both(cnat_sum), payloads(cnat_payload), cnat_total),
    Case(
        "add 3 planes",
        {name: functools.partial(added, implementation=name) for name in ("xla", "mosaic")},
        votes,
        sums_of,
    ),
    Case("count", on_both(select.count_at_least), counted, count_of),
    Case(
        "compact 1 %",
        {name: functools.partial(compacted, implementation=name) for name in ("xla", "triton")},
        selectable,
        compaction_of,
    ),
)


class Timed:
    """One implementation at one size, checked and then timed."""

    def __init__(self, case: Case, f: Callable[..., Any], args: Any, sets: list[Any]):
        results = jax.jit(f)(*sets[0])  # raises where it cannot run
        for found, wanted in zip(results, case.expected(*args), strict=True):
            case.agree(found, wanted, case.name)
        self.bytes = sum(a.nbytes for a in [*args, *results])
        self.sets, self.turn, self.seconds = sets, 0, []
        self.calls = max(1, min(CALLS, len(sets), MEMORY // self.bytes))
        self.program = jax.jit(functools.partial(in_line, f))
        jax.block_until_ready(self.program(self.sets[: self.calls]))  # compiled

    def run(self) -> None:
        first = self.turn % (len(self.sets) - self.calls + 1)
        self.turn += self.calls
        start = time.perf_counter()
        jax.block_until_ready(self.program(self.sets[first : first + self.calls]))
        self.seconds.append((time.perf_counter() - start) / self.calls)

    @property
    def speed(self) -> float:
        return self.bytes / statistics.median(self.seconds)


def in_line(f: Callable[..., Any], sets: list[Any]) -> list[Any]:
    """Calls in one program, each behind the one before."""
    results: list[Any] = []
    for args in sets:
        if results:
            args, results[-1] = jax.lax.optimization_barrier((args, results[-1]))
        results.append(f(*args))
    return results


def measured(
    mib: float, repeats: int, chosen: list[str], rng: np.random.Generator
) -> dict[tuple[str, str], Timed | None]:
    """All that run at one size; None stands for an implementation that this device lacks."""
    timed: dict[tuple[str, str], Timed | None] = {}
    for case in CASES:
        args = case.arguments(rng, int(mib * 2**18))
        size = sum(a.nbytes for a in args)
        turns = max(CALLS, -(-CACHE // size)) if jax.default_backend() != "cpu" else 1
        sets = [tuple(jnp.array(a) for a in args) for _ in range(turns)]
        own: list[Timed] = []
        for name, f in case.implementations.items():
            if name in chosen:
                try:
                    own.append(Timed(case, f, args, sets))
                    timed[case.name, name] = own[-1]
                except NotImplementedError:
                    timed[case.name, name] = None
        for _ in range(repeats):  # all in turn, so that other load meets all of them
            for t in own:
                t.run()
        for t in own:  # of the next operation there may be no room beside them
            t.sets = []
    return timed


def main() -> None:
    parser = argparse.ArgumentParser(description="time kernels beside a copy")
    parser.add_argument(
        "--mib", type=several(positive), default="1,16,256", help="sizes of the float32 vector"
    )
    parser.add_argument("--repeats", type=count, default=20, help="rounds; medians are shown")
    parser.add_argument("--implementations", default="xla,mosaic,triton")
    args = parser.parse_args()
    device, rng = jax.devices()[0], np.random.default_rng()
    print(f"jax {importlib.metadata.version('jax')}, {device.device_kind}, {args.repeats} rounds")
    if device.platform == "cpu":
        print(f"CPU, {len(os.sched_getaffinity(0))} cores: NOT a measurement of GPU kernels")
    print(f"{'':20}{'':8}{'MiB':>8}{'us':>12}{'GB/s':>9}{'of copy':>9}")
    for mib in args.mib:
        timed = measured(mib, args.repeats, ["xla", *args.implementations.split(",")], rng)
        copy = timed["copy", "xla"]
        for (name, implementation), t in timed.items():
            label = f"{name:20}{implementation:8}{mib:8.0f}"
            if t is None or copy is None:
                print(f"{label}  not on this device")
            else:
                seconds = t.bytes / t.speed
                print(
                    f"{label}{1e6 * seconds:12.1f}{t.speed / 1e9:9.2f}{t.speed / copy.speed:9.2f}"
                )


if __name__ == "__main__":
    main()
