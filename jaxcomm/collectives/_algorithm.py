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

    def is_owner(self, axis_name: AxisName) -> Any:
        """Whether this device owns a block at all; if not, its block is a partial of some."""
        del axis_name
        return True

    def reduce_scatter(
        self, partial: Any, axis_name: AxisName, reduction: Reduction, each: int
    ) -> tuple[Any, Any]:
        """Merges the partials of all devices of the axis, block by block.

        Args:
          partial: all blocks, in order; those of a device are partials of `each` devices.
          axis_name: the mesh axis.
          reduction: what the messages mean.
          each: 1, unless an exchange over another axis came before.

        Returns:
          The block that this device owns, with a leading axis of 1, and what its messages have
          not said of all blocks, or None where the reduction does not want to know.
        """
        raise NotImplementedError

    def all_gather(self, value: Any, axis_name: AxisName) -> Any:
        """From every owner's encoded block, with a leading axis of 1, to all blocks in order."""
        raise NotImplementedError

    def all_reduce(
        self, lifted: Lifted, axis_name: AxisName, reduction: Reduction
    ) -> tuple[Any, Any]:
        """Reduces the lifted vectors of all devices, in the manual view.

        Args:
          lifted: what `reduction.lift` made of this device's vector.
          axis_name: the mesh axis.
          reduction: what the messages mean.

        Returns:
          What `reduction.lower` takes, bitwise equal on all devices of the axis; and what this
          device's messages have not said, the value that it sent as an owner included, for
          `reduction.errors`. Summed over devices, that is all that is missing in the result.
        """
        world = jax.lax.axis_size(axis_name)
        number = self.blocks(world)
        blocks = cut(lifted.vector, number)
        owned, n = self.owned(axis_name), length(lifted.vector)
        mine, unsaid = self.reduce_scatter(reduction.start(blocks, world), axis_name, reduction, 1)
        value = reduction.finish(mine, take_block(cut(lifted.beside, number), owned), world)
        if reduction.keeps_errors:
            owed = reduction.owed(mine, value, world)
            unsaid = add_block(unsaid, jnp.where(self.is_owner(axis_name), owed, 0), owned)
        values = self.all_gather(value, axis_name)
        return join(reduction.read(values, length(blocks)), n), join(unsaid, n)


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


def hop_number(each: int, number: int) -> int:
    """The number of a message: the one of that number among partials of `each` devices."""
    return (each << 16) + number


def put_block(blocks: Any, block: Any, index: jax.Array) -> Any:
    """The blocks with another one, that has a leading axis of 1, in the place of one of them."""
    return jax.tree.map(
        lambda b, new: jax.lax.dynamic_update_slice_in_dim(b, new, index, axis=0), blocks, block
    )


def add_block(blocks: jax.Array, block: jax.Array, index: jax.Array) -> jax.Array:
    """The blocks with one block, that has a leading axis of 1, added to one of them."""
    return put_block(blocks, take_block(blocks, index) + block, index)
