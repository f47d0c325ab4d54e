"""How near the kernels come to the memory's own speed: every implementation beside a copy.

    python -m benchmarks.kernels [--mib=1,16] [--repeats=20] [--only=bitplanes.pack] [--out=JSON]

`--mib` lists sizes of the float32 vector that each operation is about. GB/s are of the bytes that
must move: everything read once and written once. `of copy` is this over what copying a vector of
the same size reaches in the same run.

On a GPU, the time is that of the kernels alone, as jax's profiler records it, and each call is
given other buffers than the calls before it, more in all than the cache holds. What the plain
version gives on the CPU is compared first, bit by bit, and the share of bytes that differ is
printed; above 16 MiB, kernels are compared with the plain version of the GPU. On a CPU, the numbers
say how fast XLA's code for CPU is, and nothing about a GPU; the table says so.
"""

import argparse
import functools
import json
import os
import re
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.arguments import count, hundredth, new_file, one_of, several
from benchmarks.device_time import (
    Kernel,
    keep,
    launch_alone,
    machine,
    per_call,
    recorded,
    refused,
)
from jaxcomm import codecs
from jaxcomm.kernels import bitplanes, select
from jaxcomm.kernels.block_quantization import fp8, integers
from jaxcomm.kernels.powers_of_two import nine_bits, window
from jaxcomm.kernels.random_bits import random_bits

CACHE = 2**28  # bytes; more than the last cache of any GPU of today holds
ON_CPU = 16  # MiB; larger results are compared on the GPU alone
DIFFERING = 1e-4  # of the bytes, at most: GPUs divide and multiply to within a last bit
MESSAGES = 8
KEY = 7


class Case(NamedTuple):
    """An operation.

    Attributes:
      name: of it; that of `_implementations.OPERATIONS` where it has several.
      f: called with the arguments, and with `implementation=` where it has several.
      arguments: of a normally distributed vector.
      kernel: the implementation beside "xla", if there is one; "default" if what None picks is
        timed instead of both.
    """

    name: str
    f: Callable[..., Any]
    arguments: Callable[[jax.Array], tuple[jax.Array, ...]]
    kernel: str | None = None

    @property
    def implementations(self) -> tuple[str, ...]:
        if self.kernel == "default":
            return (self.kernel,)
        return ("xla",) if self.kernel is None else ("xla", self.kernel)

    def made(self, implementation: str) -> Callable[..., Any]:
        if self.kernel in (None, "default"):
            return self.f
        return functools.partial(self.f, implementation=implementation)


def itself(x: jax.Array) -> tuple[jax.Array]:
    return (x,)


def only_length(x: jax.Array) -> tuple[jax.Array]:
    """An array of no bytes with as many rows as the vector has values."""
    return (jnp.zeros((x.size, 0)),)


def votes(x: jax.Array) -> tuple[jax.Array, ...]:
    """Six planes of random bits."""
    words = bitplanes.words_for(x.size)
    return tuple(jax.random.bits(jax.random.key(i), (words,)) for i in range(6))


def added(*planes: jax.Array) -> Any:
    return bitplanes.add(planes[:3], planes[3:], 4)


def keyed(encode: Callable[..., Any]) -> Callable[..., Any]:
    """An encoding that rounds at random, each value with its own bits."""
    return lambda x, **options: encode(x, key=jax.random.key(KEY), **options)


def payloads(encode: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array]]:
    """Messages, as many values together as the vector has."""
    return lambda x: (encode(x.reshape(MESSAGES, -1)),)


def int8_encoded(x: jax.Array, **options: Any) -> jax.Array:
    return integers.encode(x, levels=127, size=256, **options)


def e4m3_encoded(x: jax.Array, **options: Any) -> jax.Array:
    return fp8.encode(x, jnp.float8_e4m3fn, 256, **options)


def int8_sum(payloads: jax.Array) -> jax.Array:
    return codecs.int8().decode_and_sum(payloads, payloads.shape[1] * 64 // 65)


def nine_bits_sum(payloads: jax.Array, **options: Any) -> jax.Array:
    return nine_bits.decode_and_sum(payloads, payloads.shape[1] * 8 // 9, **options)


SHARE = 100  # one of so many is selected


def selectable(x: jax.Array) -> tuple[jax.Array, ...]:
    """With the threshold that about one of SHARE normal values reaches."""
    return x, jnp.float32(statistics.NormalDist().inv_cdf(1 - 1 / SHARE / 2))


def compacted(x: jax.Array, threshold: jax.Array, implementation: str) -> Any:
    capacity = int(1.1 * x.size / SHARE)
    return select.compact(x, threshold, capacity, implementation=implementation)


OPERATIONS = (
    # Of a plain copy XLA may make nothing; a changed sign has to be written.
    Case("copy", lambda x: -x, itself),
    Case("bitplanes.add", added, votes),
    Case("integers.encode", int8_encoded, itself, "mosaic"),
    Case("integers.encode (random)", keyed(int8_encoded), itself, "mosaic"),
    Case("integers.decode_and_sum", int8_sum, payloads(int8_encoded)),
    Case("fp8.encode", e4m3_encoded, itself, "mosaic"),
    Case("cnat.encode", keyed(window.encode), itself, "mosaic"),  # random, as cnat is by default
    Case("nine_bits.encode", nine_bits.encode, itself, "mosaic"),
    Case("nine_bits.encode (random)", keyed(nine_bits.encode), itself, "mosaic"),
    Case("nine_bits.decode_and_sum", nine_bits_sum, payloads(nine_bits.encode), "mosaic"),
    Case("select.count_at_least", select.count_at_least, selectable),
    Case("select.compact", compacted, selectable, "triton"),
    Case("select.threshold_for", lambda x: select.threshold_for(x, x.size // SHARE), itself),
    Case("random_bits", lambda x: random_bits(jax.random.key(KEY), x.shape[:1]), only_length),
    Case("bitplanes.pack", bitplanes.pack, itself),
    Case("bitplanes.pack_both", bitplanes.pack_both, itself),
    Case(
        "bitplanes.signs",
        lambda words: bitplanes.signs(words, 32 * words.size),
        lambda x: (bitplanes.pack(x),),
    ),
)


def of_codec(name: str) -> tuple[Case, Case]:
    """Encoding a vector, and adding the values of some messages."""
    codec = codecs.BY_NAME[name]()

    def encode(x: jax.Array) -> jax.Array:
        return codec.encode(x, jax.random.key(KEY) if codec.is_random else None)

    def messages(x: jax.Array) -> tuple[jax.Array, ...]:
        return encode(x.reshape(MESSAGES, -1)), *only_length(x)

    def summed(payloads: jax.Array, length: jax.Array) -> jax.Array:
        return codec.decode_and_sum(payloads, length.shape[0] // MESSAGES)

    return (
        Case(f"{name} encode", encode, itself, "default"),
        Case(f"{name} sum", summed, messages, "default"),
    )


CODECS = ("bfloat16", "float16", "fp8_e4m3", "int4", "cnat", "scaled_sign")
ABOVE = ("fp8_e4m3 encode", "cnat encode")  # are operations with a kernel each
OF_CODECS = tuple(case for name in CODECS for case in of_codec(name) if case.name not in ABOVE)
CASES = (*OPERATIONS, *OF_CODECS)


class Timed:
    """One implementation at one size, compiled."""

    def __init__(self, case: Case, implementation: str, n: int):
        self.case, self.implementation = case, implementation
        shapes = jax.eval_shape(case.arguments, jax.ShapeDtypeStruct((n,), jnp.float32))
        f = case.made(implementation)
        self.name = re.sub(r"\W+", "_", f"{case.name}_{implementation}")
        named = _named(lambda *args: f(*args), self.name)
        self.program = jax.jit(named).lower(*shapes).compile()
        self.sets: list[Any] = []
        self.differing = self.bytes = self.seconds = 0.0

    def check(self, args: Any, wanted: Any) -> Any:
        """Runs once, and compares; returns the results."""
        found = jax.block_until_ready(self.program(*args))
        self.bytes = sum(a.nbytes for a in jax.tree.leaves([args, found]))
        if wanted is not None:
            self.differing = differing(found, wanted)
            assert self.differing <= DIFFERING, f"{self.differing:.2e} of the bytes differ"
        return found

    def run(self, repeats: int) -> None:
        """Runs, and takes the time of the host, which counts on a CPU."""
        start = time.perf_counter()
        for i in range(repeats):
            jax.block_until_ready(self.program(*self.sets[i % len(self.sets)]))
        self.seconds = (time.perf_counter() - start) / repeats

    def take(self, kernels: list[Kernel], repeats: int) -> None:
        """The time of its own kernels among all."""
        own = [kernel for kernel in kernels if kernel.module == f"jit_{self.name}"]
        try:
            self.seconds = statistics.median(per_call(own, repeats))
        except ValueError:  # not every call runs the same branches
            self.seconds = sum(kernel.seconds for kernel in own) / repeats

    def row(self, mib: float, copy: float) -> dict[str, Any]:
        return {
            "operation": self.case.name,
            "implementation": self.implementation,
            "mib": mib,
            "bytes": int(self.bytes),
            "us": round(1e6 * self.seconds, 2),
            "gb_per_s": round(self.bytes / self.seconds / 1e9, 1),
            "of_copy": round(self.bytes / self.seconds / copy, 3),
            "differing": self.differing,
        }


def _named(f: Callable[..., Any], name: str) -> Callable[..., Any]:
    f.__name__ = f.__qualname__ = name
    return f


def differing(found: Any, wanted: Any) -> float:
    """The share of bytes that differ, over all arrays; on the device where both are."""
    off = size = 0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), (a.shape, b.shape)
        if isinstance(b, np.ndarray):
            off += int(np.count_nonzero(_bytes(np.asarray(a)) != _bytes(b)))
        else:
            off += int(_unequal(a, b)) * a.dtype.itemsize
        size += a.nbytes
    return off / size


def _bytes(x: np.ndarray) -> np.ndarray:
    return np.frombuffer(x.tobytes(), np.uint8)


@jax.jit
def _unequal(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.sum(a != b)


def on_cpu(case: Case, args: Any) -> Any:
    """What the plain version gives on the CPU, as numpy arrays."""
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        results = jax.jit(case.made("xla"))(*jax.device_put(args, cpu))
    return jax.tree.map(np.asarray, results)


def sets_of(case: Case, vectors: list[jax.Array]) -> list[Any]:
    """Arguments in as many buffers as the cache does not hold together."""
    if case.arguments is itself:
        return [(x,) for x in vectors]
    make = jax.jit(case.arguments)
    first = make(vectors[0])
    size = sum(a.nbytes for a in first)
    wanted = max(2, -(-CACHE // size)) if size and len(vectors) > 1 else 1
    return [first, *(make(vectors[i % len(vectors)]) for i in range(1, wanted))]


def compiled(n: int, cases: list[Case], failed: list[str]) -> dict[str, list[Timed]]:
    """The programs for vectors of n values; compiling is most of the work, and takes all cores.

    What does not compile is added to `failed`.
    """

    def attempt(case: Case, name: str) -> Timed | None:
        try:
            return Timed(case, name, n)
        except NotImplementedError as error:
            print(f"{case.name}: {error}")
        except Exception as error:  # the others are worth their time all the same
            failed.append(f"{case.name}, {name}, {n} values: FAILED, {str(error)[:1000]}")
        return None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = {
            case.name: [pool.submit(attempt, case, name) for name in case.implementations]
            for case in cases
        }
    return {name: [t for f in own if (t := f.result())] for name, own in made.items()}


def measured(
    mib: float, repeats: int, cases: list[Case], failed: list[str]
) -> list[dict[str, Any]]:
    """All that run at one size, beside the copy, which comes first; others are in `failed`."""
    n = int(mib * 2**18)
    programs = compiled(n, cases, failed)
    number = max(2, -(-CACHE // (4 * n))) if jax.default_backend() != "cpu" else 1
    normal = jax.jit(lambda i: jax.random.normal(jax.random.key(i), (n,)))
    vectors = [normal(i) for i in range(number)]
    timed: list[Timed] = []
    for case in cases:
        sets = sets_of(case, vectors)
        wanted = on_cpu(case, sets[0]) if mib <= ON_CPU else None
        for t in programs[case.name]:
            try:
                found = t.check(sets[0], wanted)
            except Exception as error:  # likewise
                text = str(error)[:1000]
                failed.append(f"{case.name}, {t.implementation}, {mib} MiB: FAILED, {text}")
                continue
            wanted = found if wanted is None else wanted
            t.sets = sets
            timed.append(t)
    if not timed or timed[0].case.name != "copy":
        raise SystemExit("\n".join([*failed, "the copy failed: nothing to compare with"]))
    with recorded() as kernels:
        for t in timed:
            t.run(repeats)
    if jax.default_backend() != "cpu":
        for t in timed:
            t.take(kernels, repeats)
    rows = [t.row(mib, timed[0].bytes / timed[0].seconds) for t in timed]
    print("\n".join(map(shown, rows)), flush=True)
    return rows


def shown(row: dict[str, Any]) -> str:
    name = f"{row['operation']:26}{row['implementation']:8}{row['mib']:7g}"
    speed = f"{row['us']:11.1f}{row['gb_per_s']:9.1f}{row['of_copy']:8.2f}"
    return f"{name}{speed}{row['differing']:11.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description="time kernels beside a copy")
    parser.add_argument(
        "--mib", type=several(hundredth), default="1,16,256", help="sizes of the float32 vector"
    )
    parser.add_argument("--repeats", type=count, default=20, help="calls; medians are shown")
    parser.add_argument(
        "--only",
        type=several(one_of(case.name for case in CASES)),
        default=[case.name for case in CASES],
        help="operations, with commas between them; the copy comes too",
    )
    parser.add_argument("--out", type=new_file, help="a JSON file that the rows are added to")
    args = parser.parse_args()
    cases = [case for case in CASES if case.name in ("copy", *args.only)]
    launch_alone()
    facts = machine()
    save = functools.partial(
        keep, args.out, facts, "rows", key=("operation", "implementation", "mib")
    )
    refused(parser, save)
    print(json.dumps(facts))
    if jax.default_backend() == "cpu":
        print(f"CPU, {len(os.sched_getaffinity(0))} cores: NOT a measurement of GPU kernels")
    print(f"{'':34}{'MiB':>7}{'us':>11}{'GB/s':>9}{'of copy':>8}{'differing':>11}")
    failed: list[str] = []
    for mib in args.mib:
        save(measured(mib, args.repeats, cases, failed))
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
