"""Near links first: two algorithms on two mesh axes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm import _axes
from jaxcomm._axes import AxisName
from jaxcomm.collectives.algorithms._algorithm import (
    Algorithm,
    add_block,
    cut,
    join,
    length,
    take_block,
)
from jaxcomm.collectives.reductions import Prepared, Reduction


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
        self, prepared: Prepared, axis_name: AxisName, reduction: Reduction
    ) -> tuple[Any, Any]:
        """See `Algorithm.all_reduce`.

        The near reduce-scatter leaves each device a near block; that is cut again into far blocks,
        which the far reduce-scatter merges over the hosts. The way back is the same in reverse.
        """
        far, near = _far_and_near(axis_name)
        world = jax.lax.axis_size(axis_name)
        on_near, on_far = jax.lax.axis_size(near), jax.lax.axis_size(far)
        near_blocks, far_blocks = self.near.blocks(on_near), self.far.blocks(on_far)

        blocks = cut(prepared.vector, near_blocks)
        n, near_owned, far_owned = length(blocks), self.near.owned(near), self.far.owned(far)
        partial = reduction.start(blocks, world)
        mine, errors = self.near.reduce_scatter(partial, near, reduction, 1)
        mine = _cut_again(mine, far_blocks)
        mine, far_errors = self.far.reduce_scatter(mine, far, reduction, on_near)
        replicated = take_block(cut(prepared.replicated, near_blocks), near_owned)
        replicated = take_block(_cut_again(replicated, far_blocks), far_owned)

        result = reduction.finish(mine, replicated, world)
        if reduction.keeps_errors:
            # Far errors are of parts of the near block that this device owns: they belong there.
            error = reduction.second_hop_error(mine, result, world)
            error = jnp.where(self.far.is_owner(far), error, 0)
            block = join(add_block(far_errors, error, far_owned), n)[None]
            errors = add_block(errors, jnp.where(self.near.is_owner(near), block, 0), near_owned)
        result = self.far.all_gather(result, far)
        result = jax.tree.map(lambda v: v[None], result)
        result = self.near.all_gather(result, near)
        result = jax.tree.map(lambda v: v.reshape(-1, *v.shape[2:]), result)

        small = reduction.decode_result(result, -(-n // far_blocks))
        large = jax.tree.map(lambda b: b.reshape(near_blocks, -1)[:, :n], small)
        total = length(prepared.vector)
        return join(large, total), join(errors, total)


def _cut_again(block: Any, blocks: int) -> Any:
    """One block with its leading axis of 1, as further blocks."""
    return jax.tree.map(lambda b: cut(b[0], blocks), block)


def _far_and_near(axis_name: AxisName) -> tuple[str, str]:
    names = _axes.names_of(axis_name)
    if len(names) != 2 or names[0] == names[1]:
        raise ValueError(
            f"hierarchical needs two different mesh axes, (far, near), got {axis_name!r}; name "
            'them in the transformation, such as ("hosts", "devices").'
        )
    return names[0], names[1]


def hierarchical(near: Algorithm, far: Algorithm) -> Hierarchical:
    """Near links first, over the axes (far, near).

    Args:
      near: such as `jaxcomm.algorithms.direct()`, for devices that differ in the last axis.
      far: such as `jaxcomm.algorithms.circulant()`, for those that differ in the first.

    Raises:
      TypeError: if these are not algorithms with a reduce-scatter of their own.
    """
    for algorithm in (near, far):
        if isinstance(algorithm, str):
            raise TypeError(
                f"hierarchical takes algorithms, got the name {algorithm!r}; "
                f"write jaxcomm.algorithms.{algorithm}()."
            )
        if not isinstance(algorithm, Algorithm) or algorithm.name in ("native", "hierarchical"):
            raise TypeError(
                f"hierarchical needs a direct, ring, halving_doubling or circulant algorithm for "
                f"each axis, got {algorithm!r}."
            )
    return Hierarchical(near, far)
