"""Means that stay encoded until it is known whether the step is taken."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm import _axes
from jaxcomm._axes import Axis, AxisName
from jaxcomm._notes import noted
from jaxcomm.codecs import float32
from jaxcomm.collectives.algorithms import Algorithm
from jaxcomm.collectives.algorithms._algorithm import cut
from jaxcomm.collectives.algorithms.direct import Direct
from jaxcomm.collectives.algorithms.hierarchical import Hierarchical
from jaxcomm.collectives.reductions import CodedMean
from jaxcomm.kernels.block_quantization.rows import Owed, Rows


class Undecoded(NamedTuple):
    """A mean with error feedback, on each device.

    Attributes:
      result: the mean, equal on all devices.
      owed: what this device's messages and results lack: its residual.
    """

    result: Rows
    owed: Owed


def stays_encoded(
    size: int, axis_name: AxisName, reduction: CodedMean, algorithm: Algorithm
) -> bool:
    """Whether `undecoded_mean` takes vectors of this size.

    It is for codecs in blocks with error feedback, over `direct`, in messages of whole blocks.
    Hosts may add up first, directly and in float32, if there are several.
    """
    world = jax.lax.axis_size(axis_name)
    if type(reduction) is not CodedMean or not reduction.keeps_errors or size % world or world == 1:
        return False
    chosen = algorithm.chosen(axis_name, reduction, size)
    if isinstance(chosen, Hierarchical):
        is_direct = chosen.near == chosen.far == Direct() and chosen.near_codec == float32()
        is_direct &= _axes.world_of(chosen.levels(axis_name)[0]) > 1
    else:
        is_direct = chosen == Direct()
    return is_direct and all(
        codec.in_rows(size // world) for codec in (reduction.codec, reduction.second_hop)
    )


def undecoded_mean(
    x: jax.Array, axis_name: AxisName, reduction: CodedMean, algorithm: Algorithm
) -> Undecoded:
    """`all_reduce_with_residual` without its last passes, where `stays_encoded`.

    Wire: the same.
    """
    chosen = algorithm.chosen(axis_name, reduction, x.size)
    own = reduction.for_this_device(axis_name)
    with noted((reduction, chosen)):
        if isinstance(chosen, Hierarchical):
            far, near = chosen.levels(axis_name)
            within = _axes.world_of(near)
            add_up, blocks = chosen.near_reduction(own), cut(x, within)
            summed, _ = chosen.near.reduce_scatter(blocks, near, add_up, 1)
            results, owed = _exchanged(summed[0], far, own, within)
            results = chosen.near.all_gather(results[None], near)
            results = results.reshape(-1, results.shape[-1])
            first = _axes.place_on(near) * len(owed.sent.units)
            owed = owed._replace(first=first)
        else:
            results, owed = _exchanged(x, axis_name, own, 1)
    return Undecoded(own.second_hop.rows(results, x.size // len(results)), owed)


def _exchanged(x: jax.Array, axis: Axis, own: CodedMean, devices: int) -> tuple[jax.Array, Owed]:
    """The encoded results, `(N, m)`, of partials of so many devices, by `direct`; what is owed."""
    world, direct = _axes.world_of(axis), Direct()
    blocks = cut(x, world)
    mine, message = direct.merged_with_own(blocks, axis, own, devices)
    with jax.named_scope("encode"):
        result = own.finish(mine, None, world * devices)
    error = own.second_hop_error(mine, result, world * devices)
    results = direct.all_gather(result, axis)
    sent = own.codec.rows(message, blocks.shape[1])
    return results, Owed(x, sent, error.reshape(-1), _axes.place_on(axis), jnp.int32(0))
