"""What rounding leaves behind, compiled for a target.

`python -m gpu_aot.residuals TARGET` prints, as one line of JSON, for each way of rounding whether
the program of x - rounded(x) still rounds.
"""

import json
import re
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.aot.targets import mesh_of
from jaxcomm import codecs
from jaxcomm.codecs.entries import Entries

N = 2**16
SUBTRACTION = re.compile(r"subtract\((%\S+), (%\S+)\)")

Rounding = Callable[[jax.Array], jax.Array]


def through(codec: codecs.Codec) -> Rounding:
    return lambda x: codec.decode(codec.encode(x), x.size)


def roundings() -> dict[str, Rounding]:
    return {
        "control": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
        **{name: through(codecs.from_name(name)) for name in ("bfloat16", "float16", "fp8_e4m3")},
        "entries": Entries("bfloat16", N).rounded,
    }


def main(target: str) -> None:
    mesh = mesh_of(target, 1)
    x = jax.ShapeDtypeStruct((N,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    report = {}
    for name, rounded in roundings().items():
        program = jax.jit(lambda x, f=rounded: x - f(x)).trace(x).lower().compile().as_text()
        pairs = SUBTRACTION.findall(program)
        report[name] = bool(pairs) and all(a != b for a, b in pairs)
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
