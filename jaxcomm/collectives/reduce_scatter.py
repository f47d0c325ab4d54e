"""The two halves of an all-reduce, for arrays split over the axis: reduce-scatter, all-gather.

Device r of N holds row r of a matrix, and the reduced row r is for device r:

    reduce_scatter   from N rows on every device to the one row of this device, reduced over all
    all_gather       from the row of this device to all N rows, in a codec, the same on every device
"""

import dataclasses
import functools

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxcomm import _axes, codecs
from jaxcomm._axes import AxisName
from jaxcomm.collectives import _sending
from jaxcomm.collectives.algorithms import Algorithm
from jaxcomm.collectives.algorithms.hierarchical import Hierarchical
from jaxcomm.collectives.reductions import CodedMean, Reduction

# The name, for policies of `jax.checkpoint`, of the rows that came over the far axis.
FAR_ROWS = "jaxcomm.far"


def reduce_scatter_with_residual(
    rows: jax.Array, axis_name: AxisName, reduction: Reduction, algorithm: Algorithm
) -> tuple[jax.Array, jax.Array | None]:
    """Reduces row r of all devices for device r, and returns what the result lacks.

    Args:
      rows: float32[N, n], different on every device, where the checks of `jax.shard_map` are off
        and every axis of the mesh is manual.
      axis_name: the mesh axis.
      reduction: what the messages mean. Nothing travels back, so its second hop is not used.
      algorithm: who talks to whom.

    Returns:
      The reduced row of this device, float32[n]. And its residual, float32[N, n], or None if
      `reduction` keeps no errors: summed over devices, the rows are N times the results plus the
      residuals.

    Raises:
      ValueError: if the algorithm does not leave every device one block.

    Wire: (N-1) messages of n values for direct, ring and circulant: half of `jaxcomm.pmean`.
    """
    if rows.size == 0:
        return rows[0], (rows if reduction.keeps_errors else None)
    world = jax.lax.axis_size(axis_name)
    if isinstance(reduction, CodedMean):
        reduction = dataclasses.replace(reduction, second_hop=codecs.float32())
    reduction = reduction.for_this_device(axis_name)
    algorithm.require_own_blocks(axis_name)
    prepared = reduction.prepare(rows, axis_name)
    blocks = reduction.start(prepared.vector, world)
    mine, errors = algorithm.reduce_scatter(blocks, axis_name, reduction, 1)
    me = jax.lax.axis_index(axis_name)
    replicated = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, me, 1), prepared.replicated)
    result = reduction.decode_result(reduction.finish(mine, replicated, world), rows.shape[1])
    result = jax.tree.map(lambda x: x[0], result)
    result = reduction.restore(result, prepared.shared_scale, rows.shape[1])
    if not reduction.keeps_errors:
        return result, None
    return result, reduction.residual(rows, errors, prepared.shared_scale)


def all_gather(
    row: jax.Array,
    axis_name: AxisName,
    codec: codecs.Codec,
    algorithm: Algorithm,
    key: jax.Array | None,
) -> jax.Array:
    """The rows of all devices, decoded: the same bits on every device, its own row included.

    Args:
      row: float32[n], different on every device, where the checks of `jax.shard_map` are off.
      axis_name: the mesh axis.
      codec: the format on the wire.
      algorithm: if it is hierarchical, rows travel over the far axis first, and the near devices
        pass them on unchanged, so each row goes to every host once.
      key: for codecs that round at random: different on every device.

    Returns:
      float32[N, n].

    Wire: (N-1) messages of n values. Hierarchical, on F hosts of D devices: far (F-1) messages,
    near F(D-1).
    """
    payload = codec.encode(row, key)
    if isinstance(algorithm, Hierarchical):
        far, near = algorithm.levels(axis_name)
        payload = checkpoint_name(_sending.all_gather(payload, far), FAR_ROWS)
        of_near = functools.partial(
            jax.lax.all_gather, axis=1, axis_index_groups=_axes.groups_on(near)
        )
        payloads = of_near(payload, _axes.whole_of(near)).reshape(-1, *payload.shape[1:])
    else:
        payloads = _sending.all_gather(payload, axis_name)
    return codec.decode(payloads, row.shape[0])
