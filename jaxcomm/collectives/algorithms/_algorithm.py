"""What every all-reduce algorithm offers: a reduce-scatter and an all-gather of blocks.

How an all-reduce over N devices runs, with the functions of `Reduction`:

    prepare     float32[n] -> what travels: a vector of n bits, values or codes
    cut         the vector -> B blocks of ceil(n/B), padded with zeros; B = N for most algorithms
    reduce-     device r sends encoded partials of blocks and merges what arrives; at the end it
    scatter     owns the full partial of block `owned(r)`
    finish      the owner turns the full partial into the encoded result of its block
    all-gather  every device gets the encoded results of all blocks, and decodes the same bits
    restore     the joined blocks -> float32[n]
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxcomm import _axes
from jaxcomm._axes import Axis, AxisName
from jaxcomm.collectives.reductions import Prepared, Reduction


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Who talks to whom in an all-reduce; the reduction says what a message means.

    The factories in `jaxcomm.algorithms` make them. Each is a frozen dataclass: equal arguments
    make equal algorithms. Your own algorithm overrides `reduce_scatter` and `all_gather`, which
    `all_reduce` calls; CONTRIBUTING.md says how to add one.

    Attributes:
      name: the short form that factories accept as a string.
    """

    name: ClassVar[str]

    def blocks(self, world: int) -> int:
        """The number of blocks that a vector is cut into."""
        return world

    def chosen(self, axis_name: AxisName, reduction: Reduction, values: int) -> "Algorithm":
        """The algorithm that carries out a reduction of so many values: this one, or its choice."""
        del axis_name, reduction, values
        return self

    @property
    def for_means(self) -> "Algorithm":
        """The variant for means, whose sums are as wide as their terms, unlike those of votes."""
        return self

    def owned(self, axis_name: Axis) -> jax.Array:
        """The block that this device owns after the reduce-scatter."""
        return _axes.place_on(axis_name)

    def require_axes(self, axis_name: AxisName) -> None:
        """Raises a ValueError for mesh axes that this algorithm does not work over."""

    def warn_of_mesh(self, axis_name: AxisName) -> None:
        """Warns, where nothing is traced, of a mesh on which more is sent than needed."""

    def require_world(self, world: int) -> None:
        """Raises a ValueError for a number of devices that this algorithm does not work for."""

    def require_own_blocks(self, axis_name: Axis) -> None:
        """Raises a ValueError unless each device of the axis owns the block of its number."""

    def is_owner(self, axis_name: Axis) -> Any:
        """Whether this device owns a block; if not, what it holds is not a full partial."""
        del axis_name
        return True

    def reduce_scatter(
        self, partial: Any, axis_name: Axis, reduction: Reduction, devices_per_partial: int
    ) -> tuple[Any, Any]:
        """Merges the partials of all devices of the axis, block by block.

        Args:
          partial: all blocks, in order.
          axis_name: the mesh axis, or axes; a level of `hierarchical` may be part of them.
          reduction: what the messages mean.
          devices_per_partial: how many devices `partial` is already a partial of: 1, unless an
            exchange over another axis came before.

        Returns:
          The block that this device owns, with a leading axis of 1; and the first-hop errors of
          this device's messages, for all blocks, or None if the reduction keeps none.
        """
        raise NotImplementedError

    def all_gather(self, result: Any, axis_name: Axis) -> Any:
        """From every owner's encoded block, with a leading axis of 1, to all blocks in order."""
        raise NotImplementedError

    def all_reduce(
        self, prepared: Prepared, axis_name: AxisName, reduction: Reduction
    ) -> tuple[Any, Any]:
        """Reduces the prepared vectors of all devices, in the manual view.

        Args:
          prepared: what `reduction.prepare` made of this device's vector.
          axis_name: the mesh axis.
          reduction: what the messages mean.

        Returns:
          What `reduction.restore` takes, bitwise equal on all devices of the axis. And what
          `reduction.residual` takes: this device's first-hop errors, plus, in the block that it
          owns, its second-hop error; or None. Summed over devices, these are all that the result
          lacks.
        """
        world = _axes.world_of(axis_name)
        number = self.blocks(world)
        blocks = cut(prepared.vector, number)
        owned, n = self.owned(axis_name), length(prepared.vector)
        mine, errors = self.reduce_scatter(reduction.start(blocks, world), axis_name, reduction, 1)
        replicated = take_block(cut(prepared.replicated, number), owned)
        with jax.named_scope("encode"):
            result = reduction.finish(mine, replicated, world)
        if reduction.keeps_errors:
            error = reduction.second_hop_error(mine, result, world)
            # A device that owns no block holds a partial of some devices, whose error means
            # nothing.
            errors = add_block(errors, jnp.where(self.is_owner(axis_name), error, 0), owned)
        results = self.all_gather(result, axis_name)
        with jax.named_scope("decode"):
            decoded = reduction.decode_result(results, length(blocks))
        return join(decoded, n), join(errors, n)


def message_id(devices_per_partial: int, number: int) -> int:
    """A unique id for a message, folded into its rounding key.

    The message is of round `number` in an exchange whose partials already sum `devices_per_partial`
    devices: the two levels of an exchange use the same round numbers.
    """
    return (devices_per_partial << 16) + number


def cut(vector: Any, blocks: int) -> Any:
    """Every array of length n as `(blocks, ceil(n / blocks))`, padded with zeros."""

    def one(x: jax.Array) -> jax.Array:
        n = -(-x.size // blocks)
        return jnp.pad(x, (0, blocks * n - x.size)).reshape(blocks, n)

    return jax.tree.map(one, vector)


def join(blocks: Any, n: int) -> Any:
    """The first n elements of what `cut` was given."""
    return jax.tree.map(lambda b: b.reshape(-1)[:n], blocks)


def length(arrays: Any) -> int:
    """The length of the last axis, common to all arrays of a pytree."""
    return jax.tree.leaves(arrays)[0].shape[-1]


def take_block(blocks: Any, index: jax.Array) -> Any:
    """One block, with a leading axis of 1."""
    return jax.tree.map(lambda b: jax.lax.dynamic_slice_in_dim(b, index, 1), blocks)


def put_block(blocks: Any, block: Any, index: jax.Array) -> Any:
    """The blocks with one of them replaced by `block`, which has a leading axis of 1."""
    return jax.tree.map(
        lambda b, new: jax.lax.dynamic_update_slice_in_dim(b, new, index, axis=0), blocks, block
    )


def add_block(blocks: jax.Array, block: jax.Array, index: jax.Array) -> jax.Array:
    """The blocks with `block`, which has a leading axis of 1, added to one of them.

    This is an update in place, not a select for every element: XLA on CPU would fuse a select into
    the surrounding loops, which then take twice as long where blocks are padded.
    """
    return put_block(blocks, take_block(blocks, index) + block, index)
