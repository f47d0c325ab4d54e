"""Sparse all-reduces between hosts of several devices: what is selected is a host's sum."""

import jax
import jax.numpy as jnp

from jaxcomm import _axes, _hosts
from jaxcomm._axes import AxisName
from jaxcomm.collectives._sending import all_gather, all_to_all
from jaxcomm.collectives.sparse._sparse import SparseAllReduce, SparseResult
from jaxcomm.kernels.reductions import computed_once, sum_in_order

BLOCK = 512  # values in a row that one device stands for, in long vectors
LEAST_BLOCKS = 16  # of a part; shorter vectors have shorter blocks


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

    k is counted in each part. So that all parts have about as many large values, wherever these
    lie, blocks of the vector are dealt to them in turn.

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
    part = sum_in_order(all_to_all(computed_once(_dealt(x, size)), within))
    found, threshold = algorithm.exchange(part, threshold, step, between)
    mean = computed_once(_joined(all_gather(computed_once(found.mean / size), within), n))
    blocks = found.errors.reshape(-1, 1, block_of(n, size))
    errors = jnp.zeros((len(blocks), size, blocks.shape[2]), jnp.float32)
    errors = jax.lax.dynamic_update_slice_in_dim(errors, blocks, place, 1)
    taken = jnp.zeros(0, jnp.int32)
    if with_taken:
        block = block_of(n, size)
        places = (found.taken // block * size + place) * block + found.taken % block
        taken = jnp.where(found.taken < part.size, places, n)
        taken = all_gather(taken, within, tiled=True)
    result = SparseResult(
        mean,
        errors.reshape(-1)[:n],
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
    if within is None:
        return algorithm.k(n)
    block = block_of(n, within.size)
    return min(n, within.size * algorithm.k(block * -(-n // (block * within.size))))


def padded(algorithm: SparseAllReduce, n: int, axis_name: AxisName) -> int:
    """The length to which a vector of n values is padded with zeros, for `exchange`."""
    _, within = _hosts.levels(axis_name)
    return algorithm.padded(n) if within is None else n


def block_of(n: int, parts: int) -> int:
    """The number of values in a block."""
    return max(1, min(BLOCK, n // (LEAST_BLOCKS * parts)))


def _dealt(x: jax.Array, parts: int) -> jax.Array:
    """The parts of a vector, `(parts, m)`: block i belongs to part i modulo `parts`."""
    block = block_of(x.size, parts)
    blocks = jnp.pad(x, (0, -x.size % (parts * block))).reshape(-1, parts, block)
    return blocks.swapaxes(0, 1).reshape(parts, -1)


def _joined(parts: jax.Array, n: int) -> jax.Array:
    """The reverse, of a vector of n values; XLA on CPU copies faster than it transposes."""
    block = block_of(n, len(parts))
    return jnp.stack([part.reshape(-1, block) for part in parts], axis=1).reshape(-1)[:n]
