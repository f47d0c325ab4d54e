"""Each method's exchange of one matrix over eight GPUs or TPUs: what the compiled program sends.

`python -m gpu_aot.exchanges TARGET N` prints, as JSON, bytes by kind of collective, and the dtypes.
"""

import json
import sys
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import jaxcomm
from benchmarks.aot.targets import mesh_of, traced_for
from jaxcomm import _hosts

ON_A_HOST = 4  # devices, of methods by hosts
DENSITY = 0.01
METHODS: dict[str, Any] = {
    "mean": lambda: jaxcomm.mean("data"),
    "bfloat16": lambda: jaxcomm.mean("data", "bfloat16"),
    "bfloat16 native": lambda: jaxcomm.mean("data", "bfloat16", "native"),
    "bfloat16 ring": lambda: jaxcomm.mean("data", "bfloat16", "ring"),
    "bfloat16 halving_doubling": lambda: jaxcomm.mean("data", "bfloat16", "halving_doubling"),
    "bfloat16 circulant": lambda: jaxcomm.mean("data", "bfloat16", "circulant"),
    "cnat": lambda: jaxcomm.mean("data", "cnat"),
    "int8": lambda: jaxcomm.mean("data", "int8"),
    "int8 by hosts": lambda: jaxcomm.mean("data", "int8"),
    "vote by hosts": lambda: jaxcomm.majority_vote("data"),
    "scaled_sign": lambda: jaxcomm.mean("data", "scaled_sign", error_feedback=True),
    "vote direct": lambda: jaxcomm.majority_vote("data", "direct"),
    "vote": lambda: jaxcomm.majority_vote("data"),
    "vote circulant": lambda: jaxcomm.majority_vote("data", "circulant"),
    "vote halving_doubling": lambda: jaxcomm.majority_vote("data", "halving_doubling"),
    "vote ring": lambda: jaxcomm.majority_vote("data", "ring"),
    "one_bit_adam": lambda: jaxcomm.one_bit_adam("data", 1e-3, dense_steps=10),
    "topk_allgather": lambda: jaxcomm.sparse_mean("data", DENSITY, "topk_allgather"),
    "topk_chunks": lambda: jaxcomm.sparse_mean("data", DENSITY, "topk_chunks"),
    "one_bit_adam by hosts": lambda: jaxcomm.one_bit_adam("data", 1e-3, dense_steps=10),
    "topk_allgather by hosts": lambda: jaxcomm.sparse_mean("data", DENSITY, "topk_allgather"),
    "gtopk": lambda: jaxcomm.sparse_mean("data", DENSITY, "gtopk"),
}


def sent(mesh: Any, method: str, n: int) -> dict[str, Any]:
    tx = METHODS[method]()
    params = {"w": jax.ShapeDtypeStruct((n // 64, 64), jnp.float32, sharding=everywhere(mesh))}
    specs = jaxcomm.state_spec(tx, params, mesh)
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s)),
        jax.eval_shape(tx.init, params),
        specs,
    )
    split = NamedSharding(mesh, PartitionSpec("data"))
    grads = {"w": jax.ShapeDtypeStruct((mesh.size, n // 64, 64), jnp.float32, sharding=split)}
    text = jax.jit(tx.update).trace(grads, state, params).lower().compile().as_text()
    report = jaxcomm.wire_report(text)
    kinds = sorted({c.op for c in report.collectives})
    return {
        "bytes": {kind: float(report.only(kind).bytes_max) for kind in kinds},
        "dtypes": sorted({dtype for c in report.collectives for dtype in c.dtypes}),
    }


def everywhere(mesh: Any) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def main(target: str, n: str) -> None:
    mesh = mesh_of(target)
    with traced_for(mesh):
        found = {}
        for method in METHODS:
            # Devices that are not there belong to no host.
            devices = ON_A_HOST if method.endswith("by hosts") else 1
            with mock.patch.object(_hosts, "devices_per_host", lambda _, devices=devices: devices):
                found[method] = sent(mesh, method, int(n))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
