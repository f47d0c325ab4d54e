"""Means that stay encoded until it is known whether the step is taken."""

from typing import NamedTuple

import jax

from jaxcomm import _axes
from jaxcomm._axes import AxisName
from jaxcomm._notes import noted
from jaxcomm.collectives._sending import all_gather, all_to_all
from jaxcomm.collectives.algorithms import Algorithm
from jaxcomm.collectives.algorithms._algorithm import cut, message_id, take_block
from jaxcomm.collectives.algorithms.direct import Direct
from jaxcomm.collectives.reductions import CodedMean
from jaxcomm.kernels import _device
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

    It is for codecs in blocks with error feedback, over `direct`, in messages of whole blocks; and
    for CPUs, as others fuse the passes that it saves.
    """
    world = jax.lax.axis_size(axis_name)
    if _device.current().platform != "cpu":
        return False
    if type(reduction) is not CodedMean or not reduction.keeps_errors or size % world or world == 1:
        return False
    is_direct = type(algorithm.chosen(axis_name, reduction, size)) is Direct
    return is_direct and all(
        codec.in_rows(size // world) for codec in (reduction.codec, reduction.second_hop)
    )


def undecoded_mean(
    x: jax.Array, axis_name: AxisName, reduction: CodedMean, algorithm: Algorithm
) -> Undecoded:
    """`all_reduce_with_residual` by `direct` without its last passes, where `stays_encoded`.

    Wire: the same.
    """
    world, me = _axes.world_of(axis_name), _axes.place_on(axis_name)
    chosen, n = algorithm.chosen(axis_name, reduction, x.size), x.size // world
    own = reduction.for_this_device(axis_name)
    with noted((reduction, algorithm)), noted((reduction, chosen)):
        blocks = own.start(cut(x, world), world)
        with jax.named_scope("encode"):
            message = own.encode(blocks, (1,) * world, message_id(1, 0))
        arrived = all_to_all(message, axis_name)
        with jax.named_scope("decode"):
            mine = own.merge_with_own(arrived, take_block(blocks, me), me)
        with jax.named_scope("encode"):
            result = own.finish(mine, None, world)
        error = own.second_hop_error(mine, result, world)
        results = all_gather(result, axis_name, tiled=True)
    sent = own.codec.rows(message, n)
    return Undecoded(own.second_hop.rows(results, n), Owed(x, sent, error.reshape(-1), me))
