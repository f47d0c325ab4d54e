"""The mean of gradients in two thin matrices (PowerSGD), as an optax transformation."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm import codecs, collectives
from jaxcomm._axes import AxisName
from jaxcomm._notes import noted
from jaxcomm._numbers import check_seed, is_integer
from jaxcomm.codecs.random_k import RandomK
from jaxcomm.collectives.low_rank import (
    LowRankResult,
    projected_mean,
    sides,
    with_new_columns,
)
from jaxcomm.collectives.reductions import CodedMean
from jaxcomm.kernels import _implementations
from jaxcomm.kernels.random_bits import seeded_key
from jaxcomm.transforms import _roles
from jaxcomm.transforms._buckets import LAYER, buckets_of, bytes_of, keys_of, split_off_exempt
from jaxcomm.transforms._exchange import (
    Arrays,
    Own,
    exchange_buckets,
    kept_if,
    local_leaves,
    on_every_device,
    updates_of,
    within_range,
)
from jaxcomm.transforms._layout import PATHS, Layout, Leaf, layout_of, local_shape
from jaxcomm.transforms._options import Exempt, check_names
from jaxcomm.transforms._residuals import checked_dtype, rounded_leaves
from jaxcomm.transforms._states import require_state
from jaxcomm.transforms._wrappers import refuse_wrappers, warn_of_few_bits
from jaxcomm.transforms.per_device import PerDevice, zeros_per_device, zeros_per_group
from jaxcomm.transforms.stages import dense_first


class LowRankMeanState(NamedTuple):
    """The state of `low_rank_mean`.

    Attributes:
      layout: what `init` recorded about the parameters.
      step: int32, from which new columns are drawn.
      residual: the part of each device's gradients that is in no update yet, for each compressed
        leaf. In `residual_dtype`, with a leading device axis, sharded over the axis; inside
        `jax.shard_map`, this device's only.
      factors: for each compressed leaf the last Q of its matrices, joined into a vector:
        rank times the number of columns for each. float32, with a device axis too, although equal
        on all devices.
    """

    layout: Layout
    step: jax.Array
    residual: PerDevice
    factors: PerDevice
    roles = frozenset({_roles.MEANS})


def low_rank_mean(
    axis_name: AxisName,
    rank: int,
    codec: str | codecs.Codec = "float32",
    algorithm: str | collectives.algorithms.Algorithm | None = None,
    *,
    dense_steps: int = 0,
    exempt: Exempt = (),
    seed: int = 0,
    bucket_mib: float = 32.0,
    bucket_order: Sequence[str] | None = None,
    implementation: _implementations.Option = None,
    residual_dtype: jax.typing.DTypeLike = "float32",
) -> optax.GradientTransformationExtraArgs:
    """Replaces local gradients by their mean, projected to a few directions: PowerSGD.

    A leaf is a matrix M of m inputs and n outputs. Devices exchange the means of two thin matrices
    with `rank` columns each: P with n rows, which is made orthonormal, and Q = M P with m rows. The
    update is Q P^T. The next step starts from this Q, so that P converges to the directions in
    which the mean gradient is largest. The part of a device's gradient that is not in the update
    stays in its residual, which is added to the next gradient. Over all steps, the updates and the
    mean of the residuals add up to the mean of the gradients, whatever the codec. This suits SGD,
    with or without momentum after it. Before Adam it loses accuracy: `init` warns about an
    optimizer that keeps a variance, if both are in the same `optax.chain` or `optax.named_chain`.

    A leaf is compressed if (m + n) rank < m n. All others, and those of at most one dimension (as
    in `jaxcomm.mean`), are sent together in float32. The axes of a leaf are split into inputs and
    outputs where m + n is smallest: a convolution's kernel (height, width, in, out) before its last
    axis, a projection to attention heads (width, heads, head width) after its first. A leaf that is
    sharded over another axis is one matrix per shard. Layers that are stacked for `jax.lax.scan`
    are one matrix each if `jaxcomm.with_layer_axis` names them.

    If any gradient on any device is not finite, every update on every device is NaN, and residuals
    and factors stay as they were.

    Args:
      axis_name: the mesh axis, or axes, over which the batch is spread.
      rank: the number of columns of P and Q. Vogels et al. use 1 to 4 for convolutional networks
        and LSTMs; transformers need more.
      codec: the format of P and Q, as in `jaxcomm.mean`; not random_k, int2 or scaled_sign.
        Rounding P only changes the direction slightly, and the errors of Q join the residual.
      algorithm: who talks to whom, as in `jaxcomm.mean`.
      dense_steps: the number of steps with a float32 mean before the first compressed step. Then
        `update` also takes `dense=`, as that of `jaxcomm.dense_first`.
      exempt: which leaves are not compressed, as in `jaxcomm.mean`.
      seed: the seed for the first Q, and for codecs that round at random.
      bucket_mib: the maximum size of a bucket, in MiB of float32 gradients. A bucket is two
        messages, one after the other, so the default is larger than that of `jaxcomm.mean`.
      bucket_order: paths of leaves in the order in which their gradients appear, as
        `jaxcomm.backward_order` finds them; None means the reverse of the tree's order.
      implementation: which version of the codec's kernels runs, as in `jaxcomm.mean`.
      residual_dtype: "float32", or "bfloat16" for half of the memory, as in `jaxcomm.mean`.

    Returns:
      A transformation used like `jaxcomm.mean`. Every device keeps one copy of the compressed
      leaves, and Q.

    Raises:
      TypeError, ValueError: immediately, for bad arguments; by `init` if the rank compresses no
        leaf; otherwise as for `jaxcomm.mean`.

    Wire: for each bucket two means, each as by `jaxcomm.pmean`: one of rank n and one of rank m
    values, summed over its leaves. Once per step, one float32 all-reduce of all other leaves and,
    unless the codec is float32, of one flag; on a mesh of several axes, one int32 over the others.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.low_rank_mean("data", 1)
      >>> with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
      ...     state = tx.init(jnp.zeros((3, 4)))
      ...     grads = jnp.stack([jnp.zeros((3, 4)), 2 * jnp.ones((3, 4))])  # of 2 devices
      ...     updates, state = jax.jit(tx.update)(grads, state)
      >>> updates.round(3)  # the mean has rank 1
      Array([[1., 1., 1., 1.],
             [1., 1., 1., 1.],
             [1., 1., 1., 1.]], dtype=float32)

    References:
      T. Vogels, S. P. Karimireddy and M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression
      for Distributed Optimization", NeurIPS 2019, arXiv:1905.13727.
      L. Giraud, J. Langou and M. Rozloznik, "The Loss of Orthogonality in the Gram-Schmidt
      Orthogonalization Process", Computers and Mathematics with Applications 50, 2005.

    Differs from the paper: a device's residual is what the projection drops of its own gradient,
    not its gradient minus the mean; both have the same mean, but the former stays small where
    devices differ. Small matrices are not compressed. Columns of Q are scaled to the same size, and
    zero columns are drawn again, as they would stay zero. Gram-Schmidt does each projection twice.
    The published package (epfml/powersgd) sends P in one step and Q in the next.
    """
    check_names(axis_name, exempt, bucket_order)
    check_seed(seed)
    if not is_integer(rank) or rank < 1:
        raise ValueError(f"low_rank_mean needs a rank of at least 1, got {rank!r}.")
    codec = codecs.from_name(codec)
    if isinstance(codec, RandomK) or codec.needs_error_feedback:
        raise ValueError(
            f"{codec.name} is too coarse for a basis; choose float32, bfloat16, int8, int4 or "
            "another codec of all values; for fewer bytes, choose a lower rank."
        )
    is_float32 = codec == codecs.float32()
    bases, chosen = collectives.mean_of(codec, algorithm, implementation=implementation)
    factors, _ = collectives.mean_of(
        codec, algorithm, error_feedback=not is_float32, implementation=implementation
    )
    chosen.require_axes(axis_name)
    dtype, limit = checked_dtype(residual_dtype), bytes_of(bucket_mib)
    exchange = _Exchange(axis_name, rank, bases, factors, chosen, bucket_order, limit, seed, dtype)

    def init_fn(params: Any) -> Any:
        refuse_wrappers()
        chosen.warn_of_mesh(axis_name)
        warn_of_few_bits(params, "low_rank_mean")
        whole = layout_of(params, axis_name, exempt, bucket_order, exchange)
        layout = _low_rank_layout(whole, rank)
        _check_rank(whole, layout, rank)
        large, _ = split_off_exempt(layout)
        sizes = [rank * math.prod(_matrices(layout.leaves[i])[:2]) for i in large]
        starts = zeros_per_group(layout, params, [(i,) for i in large], sizes)
        residual = zeros_per_device(layout, params, large, dtype)
        return LowRankMeanState(layout, jnp.zeros((), jnp.int32), residual, starts)

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        kept = {"residual": True, "factors": True}
        rule = functools.partial(_low_rank_layout, rank=rank)
        require_state(state, LowRankMeanState, exempt, kept, rule, dtype=dtype)
        grads, treedef = local_leaves(updates, state.layout)
        means, (residual, factors) = on_every_device(
            functools.partial(exchange, layout=state.layout),
            grads,
            state.layout,
            (state.residual, state.factors),
            state.step,
        )
        new = LowRankMeanState(state.layout, state.step + 1, residual, factors)
        return treedef.unflatten(means), new

    return dense_first(optax.GradientTransformation(init_fn, update_fn), dense_steps)


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """The arguments of `low_rank_mean`, and what a device does with them."""

    axis_name: AxisName
    rank: int
    bases: CodedMean
    factors: CodedMean
    algorithm: collectives.algorithms.Algorithm
    bucket_order: Sequence[str] | None
    limit: int
    seed: int
    residual_dtype: str

    def __call__(
        self, grads: Arrays, own: Own, step: jax.Array, layout: Layout
    ) -> tuple[Arrays, Own]:
        """What one device does in a step: the updates, and its next state."""
        large, exempt_ = split_off_exempt(layout)
        buckets = buckets_of(layout, large, self.bucket_order, self.limit)
        residual, starts = (dict(zip(large, part, strict=True)) for part in own)
        residual = {i: x.astype(jnp.float32) for i, x in residual.items()}
        step_key = jax.random.fold_in(seeded_key(self.seed), step)
        for i, start in starts.items():
            if start.size != (due := self.rank * math.prod(_matrices(layout.leaves[i])[:2])):
                raise ValueError(
                    f"the state has {start.size} numbers of {layout.leaves[i].path}'s factor, "
                    f"expected {due} at rank {self.rank}: make tx with the rank of the run that "
                    "saved it."
                )

        bounded = [jnp.bool_(True)]  # a flag of each bucket
        bucket_keys = keys_of(step_key, layout, buckets)

        def on_bucket(number: int, parts: dict[int, jax.Array]) -> tuple[Any, Any]:
            keys = jax.random.split(bucket_keys[number], 3)
            sums = {i: g.astype(jnp.float32) + residual[i] for i, g in parts.items()}
            matrices = [sums[i].reshape(_matrices(layout.leaves[i])) for i in sums]
            with noted(f"rank {self.rank}, {self.bases.codec.name}"):
                done = self._on_bucket(matrices, [starts[i] for i in sums], keys)
            shapes = {i: grads[i].shape for i in parts}
            means, lacks = _in_shapes(done.means, shapes), _in_shapes(done.lacks, shapes)
            bounded.append(done.bounded)
            return means, (lacks, dict(zip(parts, done.factors, strict=True)))

        done = exchange_buckets(
            dict(enumerate(grads)),
            buckets,
            on_bucket,
            small={i: grads[i] for i in exempt_},
            look_at="parts" if self.factors.keeps_errors else "results",
            axis_name=self.axis_name,
            results_are_finite=True,  # as the flags say
        )
        means = functools.reduce(dict.__or__, done.buckets, dict(done.exact))
        lacks, factors = ({k: x for kept in done.kept for k, x in kept[j].items()} for j in (0, 1))
        means, lacks = within_range(means, lacks, grads)
        left = rounded_leaves([lacks[i] for i in large], own[0], step_key, layout, large)
        new = left, [factors[i].reshape(-1) for i in large]
        finite = done.finite & jnp.all(jnp.stack(bounded))
        updates, finite = updates_of(means, finite, grads, self.axis_name)
        return updates, tuple(kept_if(finite, *pair) for pair in zip(new, own, strict=True))

    def _on_bucket(self, matrices: Arrays, starts: Arrays, keys: jax.Array) -> LowRankResult:
        """The exchange of a bucket, of which this device holds matrices."""
        last = [
            q.reshape(x.shape[0], self.rank, x.shape[1])
            for q, x in zip(starts, matrices, strict=True)
        ]
        return projected_mean(
            matrices,
            with_new_columns(last, keys[0]),
            self.axis_name,
            dataclasses.replace(self.bases, key=keys[1]),
            dataclasses.replace(self.factors, key=keys[2]),
            self.algorithm,
        )


def _in_shapes(
    arrays: Sequence[jax.Array], shapes: dict[int, tuple[int, ...]]
) -> dict[int, jax.Array]:
    """The arrays by leaf, in these shapes."""
    return {i: x.reshape(shape) for x, (i, shape) in zip(arrays, shapes.items(), strict=True)}


def _matrices(leaf: Leaf) -> tuple[int, int, int]:
    """(b, m, n): a leaf on one device as b matrices of m inputs and n outputs.

    A stack of layers has one matrix for each layer.
    """
    shape = local_shape(leaf)
    b, shape = (shape[0], shape[1:]) if leaf.stacked else (1, shape)
    return b, *sides(shape)


def _low_rank_layout(layout: Layout, rank: int) -> Layout:
    """The layout in which leaves that the rank does not make smaller are exempt too."""
    leaves = tuple(dataclasses.replace(x, exempt=not _compressed(x, rank)) for x in layout.leaves)
    return dataclasses.replace(layout, leaves=leaves)


def _check_rank(whole: Layout, layout: Layout, rank: int) -> None:
    """Raises a ValueError if the rank compresses none of the leaves that could be compressed.

    Of what `in_backward` leaves to a usual exchange, it may compress none.
    """
    kept = [leaf for leaf in whole.leaves if not leaf.exempt and 0 not in leaf.shape]
    could = [leaf for leaf in kept if len(leaf.shape) - leaf.stacked >= 2]
    is_rest = PATHS.get() and LAYER.get() is None
    if not could or is_rest or not all(leaf.exempt for leaf in layout.leaves):
        return
    largest = max(could, key=lambda leaf: math.prod(leaf.shape))
    is_too_high = any(_compressed(leaf, 1) for leaf in could)
    instead = "Choose a lower rank" if is_too_high else "Use jaxcomm.mean"
    raise ValueError(
        f"rank {rank} compresses no parameter: the largest, {largest.path} of shape "
        f"{largest.shape}, would take (rows + columns) * rank values, which are no fewer than "
        f"it has. {instead}, or send them in float32: exempt={[leaf.path for leaf in could]}."
    )


def _compressed(leaf: Leaf, rank: int) -> bool:
    """Whether P and Q have fewer values than the matrix, on one device."""
    if leaf.exempt or len(leaf.shape) - leaf.stacked < 2 or 0 in leaf.shape:
        return False
    _, m, n = _matrices(leaf)
    return (m + n) * rank < m * n
