"""How fast values are encoded and decoded, beside a copy and a sum in the same run.

    python -m benchmarks.codecs [--mib=64] [--repeats=15] [--only=cnat,int8]

`--mib` is the size of the vector of float32 that is encoded. GB/s are of these bytes, whatever the
size of the payload, and `x copy` is the time over that of copying them. "nearest" encodes without
random bits, for the codecs that can, "random" with them. Bytes are per value, with scales, and
the error is |decode(encode(x)) - x|^2 / |x|^2 of normally distributed values, at random if it can.

All cases run in turn, so that other load meets all of them. Results are written into the memory of
the results before, so that no fresh pages are counted.
"""

import argparse
import importlib.metadata
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.arguments import count, one_of, several
from jaxcomm import codecs
from jaxcomm.codecs import Codec
from jaxcomm.kernels.random_bits import random_bits


class Row(NamedTuple):
    """A codec that is timed, as one object for each of its roundings."""

    name: str
    nearest: Codec | None
    random: Codec | None


def rows() -> list[Row]:
    named = [
        ("cnat", lambda rounding: codecs.cnat("window", rounding)),
        ("cnat fixed", lambda rounding: codecs.cnat("fixed", rounding)),
        ("cnat all", lambda rounding: codecs.cnat("all", rounding)),
        ("int8", lambda rounding: codecs.int8(rounding=rounding)),
        ("int4", lambda rounding: codecs.int4(rounding=rounding)),
    ]
    table = [Row(name, make("nearest"), make("random")) for name, make in named]
    made = {name: make() for name, make in codecs.BY_NAME.items() if name not in dict(named)}
    for name, codec in made.items():
        table.append(Row(name, None, codec) if codec.is_random else Row(name, codec, None))
    return table


class Timed:
    """A function, compiled, whose result is written over its previous one."""

    def __init__(self, f: Callable[..., Any], *args: Any):
        self.args = args
        self.call = jax.jit(lambda *a: f(*a[:-1]), donate_argnums=len(args), keep_unused=True)
        shapes = jax.eval_shape(f, *args)
        self.result = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        self.seconds: list[float] = []
        self.run()
        self.seconds.clear()

    def run(self) -> None:
        start = time.perf_counter()
        self.result = jax.block_until_ready(self.call(*self.args, self.result))
        self.seconds.append(time.perf_counter() - start)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def cases(table: list[Row], x: jax.Array, key: jax.Array) -> dict[tuple[str, str], Timed]:
    n = x.size
    timed = {
        # Of a plain copy XLA may make nothing; a changed sign has to be written.
        ("copy f32", ""): Timed(jnp.negative, x),
        ("sum f32", ""): Timed(jnp.sum, x),
        ("random bits", ""): Timed(lambda key: random_bits(key, (n,)), key),
    }
    for row in table:
        if row.nearest is not None:
            timed[row.name, "nearest"] = Timed(row.nearest.encode, x)
        if row.random is not None:
            timed[row.name, "random"] = Timed(row.random.encode, x, key)
        codec = row.random or row.nearest
        assert codec is not None
        payload = jax.jit(codec.encode)(x, key)
        assert payload.size * payload.dtype.itemsize == codec.message_bytes(n), row.name
        timed[row.name, "decode"] = Timed(lambda p, codec=codec: codec.decode(p, n), payload)
    return timed


def error(codec: Codec, x: jax.Array, key: jax.Array) -> float:
    @jax.jit
    def relative(x: jax.Array, key: jax.Array) -> jax.Array:
        y = codec.decode(codec.encode(x, key), x.size)
        return jnp.sum(jnp.square(y - x)) / jnp.sum(jnp.square(x))

    return float(relative(x, key))


def report(table: list[Row], timed: dict[tuple[str, str], Timed], x: jax.Array) -> str:
    copy = timed["copy f32", ""].median
    lines = []
    for name, _ in list(timed)[:3]:
        seconds = timed[name, ""].median
        lines.append(f"{name:13}{1e3 * seconds:9.2f} ms{x.nbytes / seconds / 1e9:8.2f} GB/s")
    ways = ("nearest", "random", "decode")
    lines.append(
        "".join(
            [f"{'':13}", *(f"{way:>9} ms    GB/s  x copy" for way in ways), "   B/value   error"]
        )
    )
    for row in table:
        line = f"{row.name:13}"
        for way in ways:
            if (row.name, way) in timed:
                seconds = timed[row.name, way].median
                line += f"{1e3 * seconds:12.2f}{x.nbytes / seconds / 1e9:8.2f}{seconds / copy:8.2f}"
            else:
                line += f"{'-':>12}{'-':>8}{'-':>8}"
        codec = row.random or row.nearest
        assert codec is not None
        relative = error(codec, x, jax.random.key(1))
        lines.append(line + f"{codec.message_bytes(x.size) / x.size:10.4f}{relative:10.2e}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="time codecs")
    parser.add_argument("--mib", type=count, default=64, help="size of the float32 vector")
    parser.add_argument("--repeats", type=count, default=15, help="rounds; medians are shown")
    parser.add_argument(
        "--only",
        type=several(one_of(row.name for row in rows())),
        help="rows of the table, with commas between them",
    )
    args = parser.parse_args()
    table = [row for row in rows() if args.only is None or row.name in args.only]
    x = jax.random.normal(jax.random.key(0), (args.mib * 2**18,))
    timed = cases(table, x, jax.random.key(2))
    for _ in range(args.repeats):
        for t in timed.values():
            t.run()
    device = jax.devices()[0].device_kind
    print(
        f"jax {importlib.metadata.version('jax')}, {device}, {len(os.sched_getaffinity(0))} cores"
    )
    print(f"{x.size:,} values, medians of {args.repeats} alternating rounds")
    print(report(table, timed, x))


if __name__ == "__main__":
    main()
