"""The Mosaic kernels, compiled for a target inside of a checked `jax.shard_map`.

`python -m gpu_aot.pallas TARGET NAME N` prints, as JSON, what the program moves, or that this jax
has no Mosaic for the target. MOSAIC_GPU_DUMP_TO says where the compiler leaves its reports.
"""

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks.aot.program import read_program
from benchmarks.aot.targets import mesh_of
from gpu_aot.traffic import kernels, moved
from jaxcomm.kernels import bitplanes, select
from jaxcomm.kernels.block_quantization import integers
from jaxcomm.kernels.powers_of_two import nine_bits

SPLIT, EVERYWHERE = P("data"), P()


def kernel(name: str, n: int) -> tuple[Callable[..., Any], list[Any], tuple[P, ...]]:
    """A function, what it takes on eight devices, and which of this is split over them."""
    x, scalar = jax.ShapeDtypeStruct((8 * n,), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)

    def encoded(levels: int, size: int, seed: int | None) -> Callable[..., Any]:
        key = None if seed is None else jax.random.key(seed)
        return functools.partial(integers.encode, levels=levels, size=size, key=key)

    def messages(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, **which: f(x.reshape(8, -1), **which)

    def summed(n: int, payloads: jax.Array, **which: Any) -> jax.Array:
        return nine_bits.decode_and_sum(payloads.reshape(8, -1), n, **which)

    def added(*planes: jax.Array, **which: Any) -> Any:
        return bitplanes.add(planes[:3], planes[3:], 4, **which)

    def counted(*args: jax.Array, **which: Any) -> jax.Array:
        return select.count_at_least(*args, **which)[None]

    words = jax.ShapeDtypeStruct((8 * bitplanes.words_for(n),), jnp.uint32)

    def integers_summed(payloads: jax.Array, **which: Any) -> jax.Array:
        return integers.decode_and_sum(payloads.reshape(8, -1), n, 127, 256, **which)

    integer_bytes = integers.message_bytes(n, 127, 256)
    integer_payloads = jax.ShapeDtypeStruct((64 * integer_bytes,), jnp.uint8)
    payloads = jax.ShapeDtypeStruct((64 * nine_bits.message_bytes(n),), jnp.uint8)
    random_cnat = functools.partial(nine_bits.encode, key=jax.random.key(0))
    return {
        "add": (added, [words] * 6, (SPLIT,) * 6),
        "count": (counted, [x, scalar], (SPLIT, EVERYWHERE)),
        "int8": (encoded(127, 256, None), [x], (SPLIT,)),
        "int8 random": (encoded(127, 256, 0), [x], (SPLIT,)),
        "int4 random": (encoded(7, 64, 0), [x], (SPLIT,)),
        "int8 messages": (messages(encoded(127, 256, None)), [x], (SPLIT,)),
        "int8 sum": (integers_summed, [integer_payloads], (SPLIT,)),
        "cnat all": (nine_bits.encode, [x], (SPLIT,)),
        "cnat all messages": (messages(nine_bits.encode), [x], (SPLIT,)),
        "cnat all random": (random_cnat, [x], (SPLIT,)),
        "cnat all sum": (functools.partial(summed, n), [payloads], (SPLIT,)),
    }[name]


def main(target: str, name: str, n: str) -> None:
    mesh = mesh_of(target)
    f, args, specs = kernel(name, int(n))
    mosaic = functools.partial(f, implementation="mosaic")
    split = jax.shard_map(mosaic, mesh=mesh, in_specs=specs, out_specs=SPLIT)
    with jax.default_device(mesh.devices.flat[0]):
        try:
            lowered = jax.jit(split).trace(*args).lower()
        except NotImplementedError as error:
            print(json.dumps({"refused": str(error)}))
            return
    program = read_program(lowered.compile().as_text())
    inputs = [local(x, spec) for x, spec in zip(args, specs, strict=True)]
    leaves = [*inputs, *jax.tree.leaves(jax.eval_shape(f, *inputs))]
    ideal = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    print(json.dumps({"moved": moved(program), "ideal": ideal, "kernels": kernels(program)}))


def local(x: jax.ShapeDtypeStruct, spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((x.size // 8,), x.dtype) if spec == SPLIT else x


if __name__ == "__main__":
    main(*sys.argv[1:])
