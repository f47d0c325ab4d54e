"""Sparse all-reduces between hosts of several devices: what is selected is a host's sum."""

import jax
import jax.numpy as jnp

from jaxcomm import _axes, _hosts
from jaxcomm._axes import AxisName
from jaxcomm.collectives._sending import all_gather, all_to_all
from jaxcomm.collectives.algorithms._algorithm import cut, join
from jaxcomm.collectives.sparse._sparse import SparseAllReduce, SparseResult
from jaxcomm.kernels.reductions import sum_in_order


def exchange(
    algorithm: SparseAllReduce,
    x: jax.Array,
    threshold: jax.Array,
    step: jax.Array,
    axis_name: AxisName,
    *,
    with_taken: bool,
) -> tuple[SparseResult, jax.Array]:
    """`algorithm.exchange`; between hosts of several devices, in one vector of each host.

    The devices of a host add up first, in float32. Each then stands for its host in one part of the
    vector, and exchanges it with the devices of equal places on the other hosts. Its errors are
    those of the host's sum in this part, and zero elsewhere. Counts are those of a host, as if all
    its parts were like this one.

    Args:
      algorithm: the sparse all-reduce.
      x: as in `SparseAllReduce.exchange`, and so are the other arrays.
      threshold: of this device's part.
      step: the number of the step.
      axis_name: the mesh axis, or axes.
      with_taken: whether the places that were taken of the host's sum are needed; between hosts of
        several devices they are none otherwise.
    """
    between, within = _hosts.levels(axis_name)
    if within is None:
        return algorithm.exchange(x, threshold, step, between)
    n, size, place = x.size, within.size, _axes.place_on(within)
    part = sum_in_order(all_to_all(cut(x, size), within))
    found, threshold = algorithm.exchange(part, threshold, step, between)
    m = part.size
    mean = join(all_gather(found.mean / size, within), n)
    errors = jnp.zeros((size, m), jnp.float32)
    errors = jax.lax.dynamic_update_index_in_dim(errors, found.errors, place, 0)
    taken = jnp.zeros(0, jnp.int32)
    if with_taken:
        taken = found.taken
        taken = jnp.where(taken < m, taken + place * m, n)
        taken = all_gather(taken, within, tiled=True)
    result = SparseResult(
        mean,
        join(errors, n),
        taken,
        size * found.selected,
        size * found.delivered,
        size * found.applied,
        [part, *found.witnesses],
    )
    return result, threshold


def k_of(algorithm: SparseAllReduce, n: int, axis_name: AxisName) -> int:
    """How many of n values are to be selected: at least one of each part of a host's sum."""
    _, within = _hosts.levels(axis_name)
    parts = 1 if within is None else within.size
    return parts * algorithm.k(-(-n // parts))
