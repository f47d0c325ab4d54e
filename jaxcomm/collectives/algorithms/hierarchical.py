"""Near links first: two algorithms, within machines and between them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm import _axes, codecs
from jaxcomm._axes import Axis, AxisName, Part
from jaxcomm._numbers import is_integer
from jaxcomm.codecs.random_k import RandomK
from jaxcomm.collectives.algorithms._algorithm import (
    Algorithm,
    add_block,
    cut,
    join,
    length,
    put_block,
    take_block,
)
from jaxcomm.collectives.reductions import CodedMean, Prepared, Reduction

ON_A_LEVEL = ("direct", "ring", "two_way_ring", "halving_doubling", "circulant")


@dataclasses.dataclass(frozen=True)
class Hierarchical(Algorithm):
    """Reduce-scatter over the near links, all-reduce over the far ones, all-gather over the near.

    The axis name is (far, near), as in a mesh of hosts times devices per host; or, with
    `devices_per_host`, any axis along which the devices of a host follow each other.

    Wire: over the near links, that of `near` for the whole vector; over the far links, that of
    `far` for the 1/n-th of the vector that a device owns after the near reduce-scatter over n
    devices.

    Attributes:
      near: the algorithm between the devices of a host.
      far: the algorithm between devices of equal places on their hosts.
      near_codec: the format of the near reduce-scatter; None means that of the reduction. The near
        all-gather passes on what came over the far links unchanged.
      devices_per_host: how many devices in a row are near each other; None means two axes.
    """

    near: Algorithm
    far: Algorithm
    near_codec: codecs.Codec | None = None
    devices_per_host: int | None = None
    name = "hierarchical"

    @property
    def for_means(self) -> Algorithm:
        """See `Algorithm.for_means`."""
        return dataclasses.replace(self, near=self.near.for_means, far=self.far.for_means)

    def require_axes(self, axis_name: AxisName) -> None:
        """See `Algorithm.require_axes`: two of them, unless hosts are parts of one."""
        if self.devices_per_host is None:
            _far_and_near(axis_name)

    def require_world(self, world: int) -> None:
        """See `Algorithm.require_world`: whole hosts."""
        if self.devices_per_host is not None and world % self.devices_per_host:
            raise ValueError(
                f"hierarchical(devices_per_host={self.devices_per_host}) needs a multiple of "
                f"{self.devices_per_host} devices, and the axis has {world}."
            )

    def levels(self, axis_name: Axis) -> tuple[Axis, Axis]:
        """What the far algorithm goes over, and what the near one."""
        assert not isinstance(axis_name, Part), "a level of hierarchical has no levels"
        if self.devices_per_host is None:
            return _far_and_near(axis_name)
        self.require_world(_axes.axis_size(axis_name))
        return _axes.levels_of(axis_name, self.devices_per_host)

    def require_own_blocks(self, axis_name: Axis) -> None:
        """See `Algorithm.require_own_blocks`: on both levels."""
        far, near = self.levels(axis_name)
        self.near.require_own_blocks(near)
        self.far.require_own_blocks(far)

    def near_reduction(self, reduction: Reduction) -> Reduction:
        """That of the near reduce-scatter; float32 leaves no errors to keep."""
        if self.near_codec is None:
            return reduction
        if not isinstance(reduction, CodedMean):
            raise ValueError(
                "near_codec is the format of a mean, and votes have none; leave it out."
            )
        if self.near_codec == codecs.float32():
            reduction = dataclasses.replace(reduction, error_feedback=False)
        return dataclasses.replace(reduction, codec=self.near_codec)

    def all_reduce(
        self, prepared: Prepared, axis_name: AxisName, reduction: Reduction
    ) -> tuple[Any, Any]:
        """See `Algorithm.all_reduce`.

        The near reduce-scatter leaves each device a near block. This is cut again into far blocks,
        which the far reduce-scatter merges over the hosts. The all-gathers do the same in reverse.
        """
        far, near = self.levels(axis_name)
        world = jax.lax.axis_size(axis_name)
        on_near, on_far = _axes.world_of(near), _axes.world_of(far)
        near_blocks, far_blocks = self.near.blocks(on_near), self.far.blocks(on_far)

        blocks = cut(prepared.vector, near_blocks)
        n, near_owned, far_owned = length(blocks), self.near.owned(near), self.far.owned(far)
        partial = reduction.start(blocks, world)
        mine, errors = self.near.reduce_scatter(partial, near, self.near_reduction(reduction), 1)
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
            block = jnp.where(self.near.is_owner(near), block, 0)
            errors = _with_block(errors, block, near_owned, near_blocks)
        result = self.far.all_gather(result, far)
        result = jax.tree.map(lambda v: v[None], result)
        result = self.near.all_gather(result, near)
        result = jax.tree.map(lambda v: v.reshape(-1, *v.shape[2:]), result)

        small = reduction.decode_result(result, -(-n // far_blocks))
        large = jax.tree.map(lambda b: b.reshape(near_blocks, -1)[:, :n], small)
        total = length(prepared.vector)
        return join(large, total), join(errors, total)

    def reduce_scatter(
        self, partial: Any, axis_name: Axis, reduction: Reduction, devices_per_partial: int
    ) -> tuple[Any, Any]:
        """See `Algorithm.reduce_scatter`: block i is that of device i, counted along (far, near).

        A near block holds what the devices with this near index will own, on all hosts.
        """
        far, near = self.levels(axis_name)
        on_near, on_far = _axes.world_of(near), _axes.world_of(far)

        self.require_own_blocks(axis_name)

        def by_near(x: jax.Array) -> jax.Array:  # (far * near, n) -> (near, far * n)
            return x.reshape(on_far, on_near, -1).swapaxes(0, 1).reshape(on_near, -1)

        blocks = jax.tree.map(by_near, partial)
        reduced = self.near_reduction(reduction)
        mine, errors = self.near.reduce_scatter(blocks, near, reduced, devices_per_partial)
        mine = jax.tree.map(lambda b: b.reshape(on_far, -1), mine)
        per_far_partial = devices_per_partial * on_near
        mine, far_errors = self.far.reduce_scatter(mine, far, reduction, per_far_partial)
        if reduction.keeps_errors:
            # Far errors belong to the partial sums of the near block that this device owns.
            block = far_errors.reshape(1, -1)
            errors = _with_block(errors, block, self.near.owned(near), on_near)
            errors = errors.reshape(on_near, on_far, -1).swapaxes(0, 1)
            errors = errors.reshape(on_far * on_near, -1)
        return mine, errors


def _cut_again(block: Any, blocks: int) -> Any:
    """One block with its leading axis of 1, as further blocks."""
    return jax.tree.map(lambda b: cut(b[0], blocks), block)


def _with_block(errors: Any, block: jax.Array, index: jax.Array, blocks: int) -> jax.Array:
    """The errors with those of one block added; None is a near exchange that made none."""
    if errors is not None:
        return add_block(errors, block, index)
    return put_block(jnp.zeros((blocks, block.shape[-1]), jnp.float32), block, index)


def _far_and_near(axis_name: AxisName) -> tuple[str, str]:
    names = _axes.names_of(axis_name)
    if len(names) != 2:
        raise ValueError(
            f"hierarchical needs two mesh axes, (far, near), got {axis_name!r}; name them in the "
            'transformation, such as ("hosts", "devices"), or give devices_per_host.'
        )
    return names[0], names[1]


def hierarchical(
    *,
    near: Algorithm,
    far: Algorithm,
    near_codec: str | codecs.Codec | None = None,
    devices_per_host: int | None = None,
) -> Hierarchical:
    """Near links first: what travels between hosts is one vector of each, not of each device.

    `algorithm=None` does this by itself, with `near` and `far` direct and `near_codec="float32"`,
    where jax knows which devices are of one host.

    Args:
      near: such as `jaxcomm.algorithms.direct()`, between the devices of a host.
      far: such as `jaxcomm.algorithms.circulant()`, between devices of equal places on their hosts.
      near_codec: the format of the near reduce-scatter of a mean, such as "bfloat16"; the codec of
        the mean then applies to the far links alone. None means the codec of the mean. The near
        all-gather forwards what came over the far links unchanged.
      devices_per_host: the number of devices of a host, which follow each other along the axis;
        None means that the axis is two, (far, near), as in a mesh of hosts times devices.

    Returns:
      The algorithm, for `algorithm=`.

    Raises:
      TypeError: if `near` or `far` is not `direct()`, `ring()`, `two_way_ring()`,
        `halving_doubling()` or `circulant()`.
      ValueError: for a codec that needs a scale common to all devices, or error feedback; for a
        number of devices that is not positive.

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
    if devices_per_host is not None and not (is_integer(devices_per_host) and devices_per_host > 0):
        raise ValueError(
            f"devices_per_host is a positive number of devices, got {devices_per_host!r}."
        )
    return Hierarchical(near, far, near_codec, devices_per_host)
