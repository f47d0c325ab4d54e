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
from jaxcomm.kernels.block_quantization import fp8, integers
from jaxcomm.kernels.powers_of_two import nine_bits, window

# The largest magnitude of a message is known after a first pass, which XLA makes.
PASSES = {"cnat": 2, "cnat messages": 2, "cnat random": 2}


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
    random_window = functools.partial(window.encode, key=jax.random.key(0))
    e4m3, e5m2 = (
        functools.partial(fp8.encode, dtype=dtype, size=256)
        for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2)
    )
    return {
        "int8": (encoded(127, 256, None), x),
        "int8 random": (encoded(127, 256, 0), x),
        "int4 random": (encoded(7, 64, 0), x),
        "int8 messages": (messages(encoded(127, 256, None)), x),
        "fp8 e4m3": (e4m3, x),
        "fp8 e5m2": (e5m2, x),
        "fp8 messages": (messages(e4m3), x),
        "cnat": (window.encode, x),
        "cnat messages": (messages(window.encode), x),
        "cnat random": (random_window, x),
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
    passes = PASSES.get(name, 1)
    read = [own] * passes
    ideal = sum(array.size * array.dtype.itemsize for array in (*read, jax.eval_shape(f, own)))
    found = {"moved": moved(program), "ideal": ideal, "passes": passes}
    print(json.dumps(found | {"kernels": kernels(program)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
