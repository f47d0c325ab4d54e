"""Which all-reduces a method makes in a step, and how many bytes their messages have."""

import dataclasses
import math
from collections.abc import Iterator
from typing import cast

from jaxcomm import codecs
from jaxcomm.codecs.entries import Entries
from jaxcomm.collectives import algorithms, sparse
from jaxcomm.collectives.algorithms import Algorithm
from jaxcomm.collectives.low_rank import sides
from jaxcomm.collectives.sparse._by_threshold import ByThreshold
from jaxcomm.collectives.sparse.topk_chunks import TopkChunks
from jaxcomm.plan.families import Method, density_of
from jaxcomm.plan.loads import Workload
from jaxcomm.plan.messages import BetweenHosts, Coded, Lists, PerBlock, Reduction, Votes

_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Sent:
    """An all-reduce that a method makes.

    Attributes:
      algorithm: who talks to whom.
      reduction: how many bytes messages have.
      values: the length of the vector.
      times: how often it runs in a step.
    """

    algorithm: Algorithm
    reduction: Reduction
    values: int
    times: int


def buckets_of(method: Method, load: Workload, between_cpus: bool) -> tuple[int, ...]:
    """The values of each bucket, in the order of the gradients: whole leaves, as many as fit.

    A larger leaf, such as a stack of layers, is sent alone. Between CPUs XLA joins all of its own
    all-reduces into one.
    """
    is_joined = (method.family, method.algorithm) == ("float32", "native")
    leaves = load.shapes if is_joined else load.large
    if is_joined and between_cpus:
        return (load.values,)
    limit, sizes, room = int(method.about.bucket_mib * _MIB) // 4, [], 0
    for size in map(math.prod, reversed(leaves)):
        if size > room:
            sizes.append(0)
            room = limit
        sizes[-1] += size
        room -= size
    return tuple(sizes)


def values_of_bucket(method: Method, load: Workload, between_cpus: bool) -> int:
    """How many values travel together, on average."""
    sizes = buckets_of(method, load, between_cpus)
    return -(-sum(sizes) // len(sizes)) if sizes else 0


def sent(
    method: Method, load: Workload, world: int, between_cpus: bool, per_host: int = 1
) -> Iterator[Sent]:
    """The all-reduces of a method in a step; equal ones are listed once, with `times`.

    The last one is that of all exempt leaves, in float32; with XLA's own float32 mean they travel
    with the others. All buckets are assumed to have the mean size.
    """
    buckets = len(buckets_of(method, load, between_cpus))
    if method.family.startswith("powersgd"):
        yield from _of_low_rank(method, load, buckets)
        return
    is_joined = (method.family, method.algorithm) == ("float32", "native")
    exempt = 0 if is_joined else load.exempt_values
    values = values_of_bucket(method, load, between_cpus)
    if values and method.algorithm == "own":
        yield Sent(*_of_sparse(method.family, values, world, per_host), values, buckets)
    elif values:
        yield Sent(
            method.made(world, between_cpus, values), _reduction(method.family), values, buckets
        )
    if exempt:
        yield Sent(algorithms.native(), Coded(codecs.float32()), exempt, 1)


def _reduction(family: str) -> Reduction:
    return Votes() if family == "vote" else Coded(codecs.from_name(family))


def _of_sparse(name: str, n: int, world: int, per_host: int) -> tuple[Algorithm, Reduction]:
    """The messages of each sparse all-reduce, as its docstring describes them."""
    if 1 < per_host < world:
        far, of_part = _of_sparse(name, -(-n // per_host), world // per_host, 1)
        by_hosts = algorithms.hierarchical(
            near=algorithms.direct(), far=far, devices_per_host=per_host
        )
        return by_hosts, BetweenHosts(of_part, per_host)
    chosen = dataclasses.replace(sparse.from_name(name), density=density_of(name))
    if isinstance(chosen, TopkChunks):
        return algorithms.ring(), PerBlock(world, 0, 4 * chosen.entries(n).words)
    return _of_lists(cast(ByThreshold, chosen), n, world)


def _of_lists(chosen: ByThreshold, n: int, world: int) -> tuple[Algorithm, Reduction]:
    """The messages of those that send lists of values and places."""
    width = -(-n // world)
    small, whole = Entries(chosen.values, width), Entries(chosen.values, n)
    if chosen.name in ("topk_allgather", "gaussiank"):
        return algorithms.ring(), PerBlock(world, 0, whole.bytes_of(chosen.room(n)))
    if chosen.name == "gtopk":
        # Every round sends whole lists, to the same devices as in halving-doubling.
        k = chosen.k(n)
        return algorithms.halving_doubling(), Lists(whole.bytes_of(k), 4 * -(-k // 32))
    there = small.bytes_of(chosen.room(n, world))
    if chosen.name == "oktopk":
        back = small.bytes_of(-(-chosen.k(n) // world))
    else:
        back = min(small.bytes_of(min(world * chosen.room(n, world), width)), 4 * width)
    return algorithms.direct(), PerBlock(world, there, back)


def _of_low_rank(method: Method, load: Workload, buckets: int) -> Iterator[Sent]:
    """Two means of thin matrices for each bucket, and one of what is not compressed."""
    rank, thin = int(method.family.removeprefix("powersgd")), [0, 0]
    whole = load.exempt_values
    for shape in load.large:
        m, n = sides(shape) if len(shape) > 1 else (math.prod(shape), 1)
        if len(shape) < 2 or (m + n) * rank >= m * n:
            whole += m * n
        else:
            thin = [thin[0] + rank * n, thin[1] + rank * m]
    for values, times in ((thin[0], buckets), (thin[1], buckets), (whole, 1)):
        if values:
            each = -(-values // times)
            yield Sent(algorithms.native(), Coded(codecs.float32()), each, times)
