"""The operations whose kernels must move no more than they have to, compiled for a target.

`python -m gpu_aot.operations TARGET N ...` prints, as one line of JSON, what each moves at each N.
"""

import functools
import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.aot.program import read_program
from benchmarks.aot.targets import mesh_of
from gpu_aot.traffic import kernels, moved
from jaxcomm import codecs
from jaxcomm.codecs import sign
from jaxcomm.kernels import bitplanes, select

WORLD = 8


class Operation(NamedTuple):
    """A function, what it takes, and how often it must read its first argument."""

    f: Callable[..., Any]
    args: tuple[tuple[tuple[int, ...], Any], ...]
    passes: int = 1


def planes(count: int, n: int) -> tuple[tuple[tuple[int, ...], Any], ...]:
    return (((bitplanes.words_for(n),), jnp.uint32),) * count


def update(words: jax.Array, params: jax.Array, rate: jax.Array) -> jax.Array:
    return params - rate * bitplanes.signs(words, params.size)


def add(*args: jax.Array) -> Any:
    return bitplanes.add(args[:3], args[3:], 4)


def majority(*args: jax.Array) -> jax.Array:
    return bitplanes.exceeds(bitplanes.add(args[:3], args[3:], 4), WORLD // 2)


def spread_over_tiles(x: jax.Array) -> jax.Array:
    """A control: packing in a layout that no kernel of XLA can follow in one pass."""
    tiles = bitplanes.votes(x[: x.size // 1024 * 1024]).reshape(-1, 32, 32).astype(jnp.uint32)
    return jnp.sum(tiles << jnp.arange(32, dtype=jnp.uint32)[:, None], axis=1, dtype=jnp.uint32)


def decode_and_sum(codec: codecs.Codec, n: int, payload: jax.Array) -> jax.Array:
    values = codec.decode(payload, n)
    return functools.reduce(jnp.add, [values[r] for r in range(WORLD)])


def operations(n: int) -> dict[str, Operation]:
    x, scalar = ((n,), jnp.float32), ((), jnp.float32)
    words = ((bitplanes.words_for(n),), jnp.uint32)
    blocks = n // sign.BLOCK
    whole, counts = ((blocks * sign.BLOCK,), jnp.float32), ((blocks,), jnp.int32)
    key = jax.random.key(0)
    table = {
        "pack": Operation(bitplanes.pack, (x,)),
        "pack bf16": Operation(bitplanes.pack, (((n,), jnp.bfloat16),)),
        "control": Operation(spread_over_tiles, (x,)),
        "unpack": Operation(functools.partial(bitplanes.unpack, n=n), (words,)),
        "signs with feedback": Operation(sign.encode_with_feedback, (whole, whole, counts), 2),
        "unpack and apply": Operation(update, (words, x, scalar)),
        "add 3 planes": Operation(add, planes(6, n)),
        "add and majority": Operation(majority, planes(6, n)),
        "count": Operation(select.count_at_least, (x, scalar)),
    }
    # A window of exponents, and a unit of the whole message, are known after a first pass.
    for name, codec, passes in (
        ("cnat", codecs.cnat(), 2),
        ("cnat fixed", codecs.cnat("fixed"), 1),
        ("cnat all", codecs.cnat("all"), 1),
        ("fp8", codecs.fp8_e4m3(), 1),
        ("int8", codecs.int8(), 1),
        ("int8 random", codecs.int8(rounding="random"), 1),
    ):
        payload = ((WORLD, codec.message_bytes(n)), jnp.uint8)
        encode = functools.partial(
            lambda codec, x: codec.encode(x, key if codec.is_random else None), codec
        )
        table |= {
            f"{name} encode": Operation(encode, (x,), passes),
            f"{name} decode and sum": Operation(
                functools.partial(decode_and_sum, codec, n), (payload,)
            ),
        }
    return table


def measured(operation: Operation, mesh: Any) -> dict[str, Any]:
    sharding = NamedSharding(mesh, PartitionSpec())
    args = [jax.ShapeDtypeStruct(s, d, sharding=sharding) for s, d in operation.args]
    results = jax.tree.leaves(jax.eval_shape(operation.f, *args))
    first = args[0].size * args[0].dtype.itemsize
    ideal = sum(a.size * a.dtype.itemsize for a in [*args, *results])
    ideal += (operation.passes - 1) * first
    lowered = jax.jit(operation.f).trace(*args).lower()
    compiled = lowered.compile({"xla_gpu_fail_ptx_compilation_on_register_spilling": True})
    program = read_program(compiled.as_text())
    return {"ideal": ideal, "moved": moved(program), "kernels": kernels(program)}


def main(target: str, *lengths: str) -> None:
    mesh = mesh_of(target, 1)
    report = {}
    for n in map(int, lengths):
        for name, operation in operations(n).items():
            report[f"{name}, {n}"] = measured(operation, mesh)
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
