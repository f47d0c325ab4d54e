"""What every all-reduce algorithm offers: a reduce-scatter and an all-gather of blocks."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxcomm._compat import AxisName
from jaxcomm.collectives._reduction import Lifted, Reduction


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Who talks to whom in an all-reduce; what a message means is the reduction's.

    Attributes:
      name: the short form that factories accept as a string.
    """

    name: ClassVar[str]

    def blocks(self, world: int) -> int:
        """The number of blocks that a vector is cut into."""
        return world

    def owned(self, axis_name: AxisName) -> jax.Array:
        """The block that this device owns after the reduce-scatter."""
        return jax.lax.axis_index(axis_name)

    def reduce_scatter(
        self, partial: Any, axis_name: AxisName, reduction: Reduction, each: int
    ) -> Any:
        """Merges the partials of all devices of the axis, block by block.

        Args:
          partial: all blocks, in order; those of a device are partials of `each` devices.
          axis_name: the mesh axis.
          reduction: what the messages mean.
          each: 1, unless an exchange over another axis came before.

        Returns:
          The block that this device owns, with a leading axis of 1.
        """
        raise NotImplementedError

    def all_gather(self, value: Any, axis_name: AxisName) -> Any:
        """From every owner's encoded block, with a leading axis of 1, to all blocks in order."""
        raise NotImplementedError

    def all_reduce(self, lifted: Lifted, axis_name: AxisName, reduction: Reduction) -> Any:
        """Reduces the lifted vectors of all devices, in the manual view.

        Args:
          lifted: what `reduction.lift` made of this device's vector.
          axis_name: the mesh axis.
          reduction: what the messages mean.

        Returns:
          What `reduction.lower` takes, bitwise equal on all devices of the axis.
        """
        world = jax.lax.axis_size(axis_name)
        number = self.blocks(world)
        blocks = cut(lifted.vector, number)
        mine = self.reduce_scatter(reduction.start(blocks, world), axis_name, reduction, 1)
        beside = take_block(cut(lifted.beside, number), self.owned(axis_name))
        values = self.all_gather(reduction.finish(mine, beside, world), axis_name)
        return join(reduction.read(values, length(blocks)), length(lifted.vector))


def cut(vector: Any, blocks: int) -> Any:
    """Every array of length n as `(blocks, ceil(n / blocks))`, padded with zeros."""

    def one(x: jax.Array) -> jax.Array:
        n = -(-x.size // blocks)
        return jnp.pad(x, (0, blocks * n - x.size)).reshape(blocks, n)

    return jax.tree.map(one, vector)


def join(blocks: Any, n: int) -> Any:
    """The first n elements of what was cut."""
    return jax.tree.map(lambda b: b.reshape(-1)[:n], blocks)


def length(arrays: Any) -> int:
    """The length of the last axis, common to all arrays of a pytree."""
    return jax.tree.leaves(arrays)[0].shape[-1]


def take_block(blocks: Any, index: jax.Array) -> Any:
    """One block, with a leading axis of 1."""
    return jax.tree.map(lambda b: jax.lax.dynamic_slice_in_dim(b, index, 1), blocks)
