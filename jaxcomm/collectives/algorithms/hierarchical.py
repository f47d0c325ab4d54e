"""Near links first: two algorithms on two mesh axes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm import _axes, codecs
from jaxcomm._axes import AxisName
from jaxcomm.codecs.random_k import RandomK
from jaxcomm.collectives.algorithms._algorithm import (
    Algorithm,
    add_block,
    cut,
    join,
    length,
    take_block,
)
from jaxcomm.collectives.reductions import CodedMean, Prepared, Reduction

ON_A_LEVEL = ("direct", "ring", "two_way_ring", "halving_doubling", "circulant")


@dataclasses.dataclass(frozen=True)
class Hierarchical(Algorithm):
    """Reduce-scatter over the near axis, all-reduce over the far one, all-gather over the near.

    The axis name is (far, near), as in a mesh of hosts times devices per host.

    Wire: over the near axis, that of `near` for the whole vector; over the far axis, that of `far`
    for the 1/n-th of the vector that a device owns after the near reduce-scatter over n devices.

    Attributes:
      near: the algorithm between devices that differ in the last axis only.
      far: the algorithm between devices that differ in the first axis only.
      near_codec: the format of the near reduce-scatter; None means that of the reduction. The near
        all-gather passes on what came over the far axis unchanged.
    """

    near: Algorithm
    far: Algorithm
    near_codec: codecs.Codec | None = None
    name = "hierarchical"

    @property
    def for_means(self) -> Algorithm:
        """See `Algorithm.for_means`."""
        return dataclasses.replace(self, near=self.near.for_means, far=self.far.for_means)

    def require_axes(self, axis_name: AxisName) -> None:
        """See `Algorithm.require_axes`: two of them."""
        _far_and_near(axis_name)

    def require_own_blocks(self, axis_name: AxisName) -> None:
        """See `Algorithm.require_own_blocks`: on both levels."""
        far, near = _far_and_near(axis_name)
        self.near.require_own_blocks(near)
        self.far.require_own_blocks(far)

    def _near_reduction(self, reduction: Reduction) -> Reduction:
        if self.near_codec is None:
            return reduction
        if not isinstance(reduction, CodedMean):
            raise ValueError("near_codec is the format of a mean, and votes have none; leave it.")
        return dataclasses.replace(reduction, codec=self.near_codec)

    def all_reduce(
        self, prepared: Prepared, axis_name: AxisName, reduction: Reduction
    ) -> tuple[Any, Any]:
        """See `Algorithm.all_reduce`.

        The near reduce-scatter leaves each device a near block. This is cut again into far blocks,
        which the far reduce-scatter merges over the hosts. The all-gathers do the same in reverse.
        """
        far, near = _far_and_near(axis_name)
        world = jax.lax.axis_size(axis_name)
        on_near, on_far = jax.lax.axis_size(near), jax.lax.axis_size(far)
        near_blocks, far_blocks = self.near.blocks(on_near), self.far.blocks(on_far)

        blocks = cut(prepared.vector, near_blocks)
        n, near_owned, far_owned = length(blocks), self.near.owned(near), self.far.owned(far)
        partial = reduction.start(blocks, world)
        mine, errors = self.near.reduce_scatter(partial, near, self._near_reduction(reduction), 1)
        mine = _cut_again(mine, far_blocks)
        mine, far_errors = self.far.reduce_scatter(mine, far, reduction, on_near)
        replicated = take_block(cut(prepared.replicated, near_blocks), near_owned)
        replicated = take_block(_cut_again(replicated, far_blocks), far_owned)

        result = reduction.finish(mine, replicated, world)
        if reduction.keeps_errors:
            # Far errors belong to parts of the near block that this device owns.
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

    def reduce_scatter(
        self, partial: Any, axis_name: AxisName, reduction: Reduction, devices_per_partial: int
    ) -> tuple[Any, Any]:
        """See `Algorithm.reduce_scatter`: block i is that of device i, counted along (far, near).

        A near block holds what the devices with this near index will own, on all hosts.
        """
        far, near = _far_and_near(axis_name)
        on_near, on_far = jax.lax.axis_size(near), jax.lax.axis_size(far)

        self.require_own_blocks(axis_name)

        def by_near(x: jax.Array) -> jax.Array:  # (far * near, n) -> (near, far * n)
            return x.reshape(on_far, on_near, -1).swapaxes(0, 1).reshape(on_near, -1)

        blocks = jax.tree.map(by_near, partial)
        reduced = self._near_reduction(reduction)
        mine, errors = self.near.reduce_scatter(blocks, near, reduced, devices_per_partial)
        mine = jax.tree.map(lambda b: b.reshape(on_far, -1), mine)
        per_far_partial = devices_per_partial * on_near
        mine, far_errors = self.far.reduce_scatter(mine, far, reduction, per_far_partial)
        if errors is not None:
            # Far errors belong to the partial sums of the near block that this device owns.
            errors = add_block(errors, far_errors.reshape(1, -1), self.near.owned(near))
            errors = errors.reshape(on_near, on_far, -1).swapaxes(0, 1)
            errors = errors.reshape(on_far * on_near, -1)
        return mine, errors


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


def hierarchical(
    *, near: Algorithm, far: Algorithm, near_codec: str | codecs.Codec | None = None
) -> Hierarchical:
    """Near links first, over the axes (far, near).

    Args:
      near: such as `jaxcomm.algorithms.direct()`, for devices that differ in the last axis.
      far: such as `jaxcomm.algorithms.circulant()`, for those that differ in the first.
      near_codec: the format of the near reduce-scatter of a mean, such as "bfloat16"; the codec of
        the mean then applies to the far links alone. None means the codec of the mean. The near
        all-gather forwards what came over the far links unchanged.

    Returns:
      The algorithm, for `algorithm=`.

    Raises:
      TypeError: if `near` or `far` is not `direct()`, `ring()`, `two_way_ring()`,
        `halving_doubling()` or `circulant()`.
      ValueError: for a codec that needs a scale common to all devices, or error feedback.

    Wire: over the near links, that of `near` for the vector; over the far links, that of `far` for
    the 1/n-th that each of n near devices owns.
    """
    near_codec = None if near_codec is None else codecs.from_name(near_codec)
    if near_codec is not None and (
        near_codec.largest or near_codec.needs_error_feedback or isinstance(near_codec, RandomK)
    ):
        raise ValueError(
            f"near_codec is for fast links and cannot be {near_codec.name}; take float32, bfloat16 "
            "or int8."
        )
    for algorithm in (near, far):
        if algorithm in ON_A_LEVEL:
            raise TypeError(
                f"hierarchical takes algorithms, got the name {algorithm!r}; "
                f"write jaxcomm.algorithms.{algorithm}()."
            )
        if not isinstance(algorithm, Algorithm) or algorithm.name not in ON_A_LEVEL:
            raise TypeError(
                f"hierarchical needs an algorithm for each axis, one of {', '.join(ON_A_LEVEL)}, "
                f"such as jaxcomm.algorithms.ring(), got {algorithm!r}."
            )
    return Hierarchical(near, far, near_codec)
