"""Near links first: two algorithms on two mesh axes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm import _compat
from jaxcomm._compat import AxisName
from jaxcomm.collectives._algorithm import (
    Algorithm,
    add_block,
    cut,
    join,
    length,
    take_block,
)
from jaxcomm.collectives._reduction import Lifted, Reduction


@dataclasses.dataclass(frozen=True)
class Hierarchical(Algorithm):
    """Reduce-scatter over the near axis, all-reduce over the far one, all-gather over the near.

    The axis name is (far, near), as in a mesh of hosts times devices per host.

    Wire: near, that of its algorithm for the whole vector; far, that of its algorithm for the
    1/n-th of the vector that a device owns after the near reduce-scatter over n devices.

    Attributes:
      near: the algorithm between devices that differ in the last axis only.
      far: the algorithm between devices that differ in the first axis only.
    """

    near: Algorithm
    far: Algorithm
    name = "hierarchical"

    def all_reduce(
        self, lifted: Lifted, axis_name: AxisName, reduction: Reduction
    ) -> tuple[Any, Any]:
        """See `Algorithm.all_reduce`."""
        far, near = _far_and_near(axis_name)
        world = jax.lax.axis_size(axis_name)
        on_near, on_far = jax.lax.axis_size(near), jax.lax.axis_size(far)
        near_blocks, far_blocks = self.near.blocks(on_near), self.far.blocks(on_far)

        blocks = cut(lifted.vector, near_blocks)
        n, near_owned, far_owned = length(blocks), self.near.owned(near), self.far.owned(far)
        partial = reduction.start(blocks, world)
        mine, unsaid = self.near.reduce_scatter(partial, near, reduction, 1)
        mine = _cut_again(mine, far_blocks)
        mine, unsaid_far = self.far.reduce_scatter(mine, far, reduction, on_near)
        beside = take_block(cut(lifted.beside, near_blocks), near_owned)
        beside = take_block(_cut_again(beside, far_blocks), far_owned)

        value = reduction.finish(mine, beside, world)
        if reduction.keeps_errors:
            owed = jnp.where(self.far.is_owner(far), reduction.owed(mine, value, world), 0)
            block = join(add_block(unsaid_far, owed, far_owned), n)[None]
            unsaid = add_block(unsaid, jnp.where(self.near.is_owner(near), block, 0), near_owned)
        value = self.far.all_gather(value, far)
        value = jax.tree.map(lambda v: v[None], value)
        value = self.near.all_gather(value, near)
        value = jax.tree.map(lambda v: v.reshape(-1, *v.shape[2:]), value)

        small = reduction.read(value, -(-n // far_blocks))
        large = jax.tree.map(lambda b: b.reshape(near_blocks, -1)[:, :n], small)
        total = length(lifted.vector)
        return join(large, total), join(unsaid, total)


def _cut_again(block: Any, blocks: int) -> Any:
    """One block with its leading axis of 1, as further blocks."""
    return jax.tree.map(lambda b: cut(b[0], blocks), block)


def _far_and_near(axis_name: AxisName) -> tuple[str, str]:
    names = _compat.names_of(axis_name)
    if len(names) != 2 or names[0] == names[1]:
        raise ValueError(
            f"hierarchical needs two different mesh axes, (far, near), got {axis_name!r}; name "
            'them in the transformation, such as ("hosts", "devices").'
        )
    return names[0], names[1]


def hierarchical(near: Algorithm, far: Algorithm) -> Hierarchical:
    """Near links first, over the axes (far, near).

    Args:
      near: such as `jaxcomm.direct()`, for devices that differ in the last axis.
      far: such as `jaxcomm.circulant()`, for those that differ in the first.

    Raises:
      TypeError: if these are not algorithms with a reduce-scatter of their own.
    """
    for algorithm in (near, far):
        if not isinstance(algorithm, Algorithm) or algorithm.name in ("native", "hierarchical"):
            raise TypeError(
                f"hierarchical needs a direct, ring, halving_doubling or circulant algorithm for "
                f"each axis, got {algorithm!r}."
            )
    return Hierarchical(near, far)
