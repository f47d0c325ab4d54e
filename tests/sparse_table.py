"""Every sparse all-reduce as a row of a table: what is true of it for any number of devices."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import sparse_oracles
from jaxcomm import sparse
from jaxcomm.collectives.sparse import SparseAllReduce, SparseResult

N, DENSITY = 4096, 0.02
K = round(N * DENSITY)

Sent = dict[str, list[float]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A sparse all-reduce, and what must be true of it.

    Attributes:
      roomy: with room for all that is selected, and thresholds that are exact in every step.
      oracle: of (N, n) and the k of each device to the sum, and to what leaves each residual.
      sent: of the algorithm, n and the number of devices to the bytes of each operation.
      is_exact: whether k values are selected, not about k.
      sorts: whether the program may sort.
    """

    roomy: SparseAllReduce
    oracle: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
    sent: Callable[[Any, int, int], Sent]
    is_exact: bool = True
    sorts: bool = False


def ceil(share: float) -> int:
    return int(np.ceil(share))


def list_bytes(algorithm: SparseAllReduce, entries: int, places: int) -> int:
    """Entries of a value and 2 bytes; and 4 for every 2^16 places, if there are more than those."""
    entry = {"float32": 4, "bfloat16": 2}[algorithm.values] + 2
    return entries * entry + (4 * ceil(places / 2**16) if places > 2**16 else 0)


def sent_by_all_gather(algorithm: SparseAllReduce, n: int, world: int) -> Sent:
    room = min(n, ceil(algorithm.slack * algorithm.k(n)))
    return {"all-gather": [(world - 1) * list_bytes(algorithm, room, n)]}


def sent_by_dsa(algorithm: SparseAllReduce, n: int, world: int) -> Sent:
    room = min(n, ceil(algorithm.slack * algorithm.k(n) / world))
    width = ceil(n / world)
    sent = list_bytes(algorithm, room, width)
    whole = {"float32": 4, "bfloat16": 2}[algorithm.values] * width
    back = min(list_bytes(algorithm, min(world * room, width), width), whole)
    return {"all-to-all": [(world - 1) * sent], "all-gather": [(world - 1) * back]}


def sent_by_gtopk(algorithm: SparseAllReduce, n: int, world: int) -> Sent:
    """By a device that folds, once more, and who answers says which places survived."""
    q, k = world.bit_length() - 1, algorithm.k(n)
    size = list_bytes(algorithm, k, n)
    answer = 4 * ceil(k / 32)  # a bit for each
    return {"collective-permute": [size] * q + [size, size, answer] * (world > 2**q)}


def sent_by_oktopk(algorithm: Any, n: int, world: int) -> Sent:
    k, others, width = algorithm.k(n), world - 1, ceil(n / world)
    room = min(n, ceil(algorithm.slack * k / world))
    back = min(width, ceil(k / world))
    return {
        "all-to-all": [others * list_bytes(algorithm, room, width)],
        "all-gather": [others * list_bytes(algorithm, back, width)],
    }


def sent_by_chunks(algorithm: Any, n: int, world: int) -> Sent:
    """Planes of bits of all entries; and for each chunk whole words of unary, and one more."""
    width = min(n, algorithm.chunk)
    k, chunks = max(1, round(algorithm.density * width)), ceil(n / width)
    width = 32 * ceil(width / 32)
    low = int(np.log2(width // k))
    planes = (low + 2) * ceil(chunks * k / 32)
    of_each = ceil((k + width // 2**low) / 32) + 1
    return {"all-gather": [4 * (world - 1) * (planes + chunks * of_each)]}


CASES: dict[str, Case] = {
    "oktopk": Case(
        sparse.oktopk(slack=20.0, recompute_every=1),
        sparse_oracles.oktopk,
        sent_by_oktopk,
    ),
    "topk_allgather": Case(sparse.topk_allgather(), sparse_oracles.topk, sent_by_all_gather),
    "topk_chunks": Case(sparse.topk_chunks(), sparse_oracles.topk_chunks, sent_by_chunks),
    "topk_dsa": Case(sparse.topk_dsa(slack=20.0), sparse_oracles.topk, sent_by_dsa),
    "gtopk": Case(sparse.gtopk(), sparse_oracles.gtopk, sent_by_gtopk, sorts=True),
    "gaussiank": Case(
        sparse.gaussiank(slack=20.0), sparse_oracles.topk, sent_by_all_gather, is_exact=False
    ),
}
# Those whose messages have room for what reaches a threshold, in a format that is chosen.
BY_THRESHOLD = [name for name in CASES if name != "topk_chunks"]


@functools.cache  # inputs are many, programs few
def compiled(mesh: Mesh, algorithm: SparseAllReduce, n: int = N) -> jax.stages.Compiled:
    """From (N, n), N thresholds and a step to what every device has."""
    algorithm = dataclasses.replace(algorithm, density=DENSITY)

    def one(x: jax.Array, thresholds: jax.Array, step: jax.Array) -> Any:
        found = algorithm.exchange(x[0], thresholds[0], step, "data")
        return jax.tree.map(lambda y: y[None], found)

    spec = PartitionSpec("data")
    f = jax.shard_map(
        one, mesh=mesh, in_specs=(spec, spec, PartitionSpec()), out_specs=spec, check_vma=False
    )
    world = mesh.size
    return jax.jit(f).lower(jnp.zeros((world, n)), jnp.zeros(world), jnp.int32(0)).compile()


def exchanged(
    x: np.ndarray,
    mesh: Mesh,
    algorithm: SparseAllReduce,
    step: int = 0,
    thresholds: np.ndarray | None = None,
) -> tuple[SparseResult, np.ndarray]:
    """One step: the outcome, with a leading device axis and a mask of what is taken, and the next
    thresholds.

    The law holds: what is in the mean and what is kept is all there was, and everyone has the same
    mean.
    """
    world = len(x)
    if thresholds is None:
        thresholds = np.zeros(world, np.float32)
    outcome, thresholds = jax.tree.map(
        np.asarray, compiled(mesh, algorithm, x.shape[1])(x, thresholds, jnp.int32(step))
    )
    assert (outcome.mean == outcome.mean[:1]).all()
    total = outcome.errors.astype(np.float64).sum(0) + world * outcome.mean[0].astype(np.float64)
    scale = np.abs(x).max(initial=1e-30)
    np.testing.assert_allclose(total, x.astype(np.float64).sum(0), atol=2e-6 * world * scale)
    taken = np.zeros((world, x.shape[1] + 1), bool)
    np.put_along_axis(taken, outcome.taken, True, axis=1)
    return outcome._replace(taken=taken[:, :-1]), thresholds


def normal(world: int, n: int = N, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((world, n)).astype(np.float32)
