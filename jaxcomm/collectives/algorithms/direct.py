"""Everyone sends everyone its block: two exchanges, one rounding of the sum."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm import _axes
from jaxcomm._axes import Axis
from jaxcomm._numbers import is_integer
from jaxcomm.collectives._sending import all_gather, all_to_all
from jaxcomm.collectives.algorithms._algorithm import (
    Algorithm,
    message_id,
    put_block,
    take_block,
)
from jaxcomm.collectives.algorithms._scheduled import Order, Scheduled
from jaxcomm.collectives.algorithms.schedule import Round, Schedule, rotations, shift
from jaxcomm.collectives.reductions import Reduction


@dataclasses.dataclass(frozen=True)
class Direct(Algorithm):
    """An all-to-all of blocks, a local reduction by each block's owner, an all-gather.

    Every value is encoded once on its way to the owner, and the sum once on its way back, for any
    number of devices. The owner adds the decoded values in float32, in the order of the devices.
    Its own value is encoded and decoded like the others, unless errors are kept; then it is added
    exactly.

    This is the in-network aggregation of Horvath et al., in which workers send codes and an
    aggregator adds, rounds and returns them. Here each device is the aggregator of its own block;
    `direct(aggregator=0)` has a single aggregator.

    Wire: 2(N-1)/N of the vector in 2 collective operations.

    References:
      H. Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's
      Convergence Speed", ICML 2021, arXiv:2102.02888, section 5 (the same exchange).
      S. Horvath et al., "Natural Compression for Distributed Deep Learning", MSML 2022,
      arXiv:1905.10988.
    """

    name = "direct"

    def schedule(self, world: int) -> Schedule:
        """What the two operations move, as a schedule: in round k, r sends to r + k.

        XLA decides the order of these sends in its all-to-all and all-gather.
        """
        rounds = tuple(Round(shift(world, k), (k, k + 1), 0) for k in range(1, world))
        return Schedule(world, world, rotations(world), rounds)

    def reduce_scatter(
        self, partial: Any, axis_name: Axis, reduction: Reduction, devices_per_partial: int
    ) -> tuple[Any, Any]:
        """See `Algorithm.reduce_scatter`."""
        world, me = _axes.world_of(axis_name), _axes.place_on(axis_name)
        counts = (devices_per_partial,) * world
        if world == 1:  # no message, such as on the near level with one device a host
            errors = jax.tree.map(jnp.zeros_like, partial) if reduction.keeps_errors else None
            return reduction.merge_all(partial), errors
        if reduction.keeps_errors:
            merged, message = self.merged_with_own(
                partial, axis_name, reduction, devices_per_partial
            )
            errors = reduction.first_hop_error(partial, message)
            return merged, put_block(errors, jnp.zeros_like(errors[:1]), me)
        with jax.named_scope("encode"):
            message = reduction.encode(partial, counts, message_id(devices_per_partial, 0))
        arrived = all_to_all(message, axis_name)
        with jax.named_scope("decode"):
            return reduction.decode_and_merge(arrived, counts, partial), None

    def merged_with_own(
        self, partial: Any, axis_name: Axis, reduction: Reduction, devices_per_partial: int
    ) -> tuple[Any, Any]:
        """`reduce_scatter` where errors are kept: the block that this device owns; its messages.

        The device's own block needs no message, so it is merged whole and leaves no error.
        """
        world, me = _axes.world_of(axis_name), _axes.place_on(axis_name)
        counts = (devices_per_partial,) * world
        with jax.named_scope("encode"):
            message = reduction.encode(partial, counts, message_id(devices_per_partial, 0))
        arrived = all_to_all(message, axis_name)
        with jax.named_scope("decode"):
            return reduction.merge_with_own(arrived, take_block(partial, me), me), message

    def all_gather(self, result: Any, axis_name: Axis) -> Any:
        """See `Algorithm.all_gather`."""
        return all_gather(result, axis_name, tiled=True)


@dataclasses.dataclass(frozen=True)
class Aggregator(Scheduled):
    """Everyone sends everything to one device, which answers everyone: a parameter server.

    Wire: 1 vector from each other device and N-1 from the aggregator, in 2(N-1) rounds. The
    aggregator's link is the bottleneck; this is a baseline for measurements.

    Attributes:
      device: the aggregator's place along the axis.

    References:
      J. Bernstein et al., "signSGD with Majority Vote is Communication Efficient and Fault
      Tolerant", ICLR 2019, arXiv:1810.05291.
    """

    device: int
    name = "direct"

    def blocks(self, world: int) -> int:
        """See `Algorithm.blocks`: the aggregator reduces the whole vector."""
        del world
        return 1

    def require_world(self, world: int) -> None:
        """See `Algorithm.require_world`: the aggregator is one of the devices."""
        if self.device >= world:
            raise ValueError(
                f"the aggregator {self.device} is not on the axis, which has {world} devices; "
                f"choose one of 0 to {world - 1}."
            )

    def positions(self, world: int) -> Order:
        """See `Scheduled.positions`."""
        return ((0,),) * world

    def rounds(self, world: int) -> tuple[Round, ...]:
        """One block, one sender a round."""
        self.require_world(world)
        others = (r for r in range(world) if r != self.device)
        return tuple(Round(((r, self.device),), (0, 1), 0) for r in others)


def direct(aggregator: int | str = "sharded") -> Direct | Aggregator:
    """All-to-all, then all-gather: 2 operations, two roundings at any N.

    Args:
      aggregator: "sharded" makes every device the aggregator of its shard; a number makes one
        device the aggregator of everything.

    Returns:
      The algorithm, for `algorithm=`.

    Raises:
      ValueError: for any other aggregator.

    Wire: 2(N-1)/N of the vector. A single aggregator sends N-1 vectors, and every other device one.

    References:
      S. Horvath et al., "Natural Compression for Distributed Deep Learning", MSML 2022,
      arXiv:1905.10988.
      J. Bernstein et al., "signSGD with Majority Vote is Communication Efficient and Fault
      Tolerant", ICLR 2019, arXiv:1810.05291 (one aggregator).
    """
    if aggregator == "sharded":
        return Direct()
    if not is_integer(aggregator) or aggregator < 0:
        raise ValueError(f'aggregator must be "sharded" or a device number, got {aggregator!r}.')
    return Aggregator(aggregator)
