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
from jaxcomm.kernels.block_quantization import integers
from jaxcomm.kernels.powers_of_two import nine_bits


def kernel(name: str, n: int) -> tuple[Callable[..., Any], jax.ShapeDtypeStruct]:
    """A function, and what it takes, split over eight devices."""
    x = jax.ShapeDtypeStruct((8 * n,), jnp.float32)

    def encoded(levels: int, size: int, seed: int | None) -> Callable[..., Any]:
        key = None if seed is None else jax.random.key(seed)
        return functools.partial(integers.encode, levels=levels, size=size, key=key)

    def messages(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, **which: f(x.reshape(8, -1), **which)

    def summed(n: int, payloads: jax.Array, **which: Any) -> jax.Array:
        return nine_bits.decode_and_sum(payloads.reshape(8, -1), n, **which)

    payloads = jax.ShapeDtypeStruct((64 * nine_bits.message_bytes(n),), jnp.uint8)
    random_cnat = functools.partial(nine_bits.encode, key=jax.random.key(0))
    return {
        "int8": (encoded(127, 256, None), x),
        "int8 random": (encoded(127, 256, 0), x),
        "int4 random": (encoded(7, 64, 0), x),
        "int8 messages": (messages(encoded(127, 256, None)), x),
        "cnat all": (nine_bits.encode, x),
        "cnat all messages": (messages(nine_bits.encode), x),
        "cnat all random": (random_cnat, x),
        "cnat all sum": (functools.partial(summed, n), payloads),
    }[name]


def main(target: str, name: str, n: str) -> None:
    mesh = mesh_of(target)
    f, x = kernel(name, int(n))
    mosaic = functools.partial(f, implementation="mosaic")
    split = jax.shard_map(mosaic, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    with jax.default_device(mesh.devices.flat[0]):
        try:
            lowered = jax.jit(split).trace(x).lower()
        except NotImplementedError as error:
            print(json.dumps({"refused": str(error)}))
            return
    program = read_program(lowered.compile().as_text())
    own = jax.ShapeDtypeStruct((x.size // 8,), x.dtype)
    ideal = sum(array.size * array.dtype.itemsize for array in (own, jax.eval_shape(f, own)))
    print(json.dumps({"moved": moved(program), "ideal": ideal, "kernels": kernels(program)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
