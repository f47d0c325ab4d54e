"""The mean of the largest gradients over devices, as an optax transformation."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _hosts, collectives
from jaxcomm._axes import AxisName
from jaxcomm._notes import noted
from jaxcomm._numbers import is_real
from jaxcomm.collectives import sparse
from jaxcomm.collectives.sparse import _by_hosts
from jaxcomm.kernels import _implementations, select
from jaxcomm.kernels.random_bits import seeded_key
from jaxcomm.kernels.reductions import finite_parts
from jaxcomm.transforms import _roles
from jaxcomm.transforms._buckets import (
    Bucket,
    Buckets,
    buckets_of,
    by_appearance,
    bytes_of,
    in_row_major,
    joined,
    joined_sums,
    split_off_empty,
    split_off_exempt,
)
from jaxcomm.transforms._exchange import (
    Arrays,
    Own,
    by_leaf,
    clipped,
    exchange_buckets,
    kept_if,
    local_leaves,
    on_every_device,
    updates_of,
    within_range,
)
from jaxcomm.transforms._layout import Layout, layout_of
from jaxcomm.transforms._options import Exempt, check_names
from jaxcomm.transforms._residuals import checked_dtype, rounded_leaves
from jaxcomm.transforms._sparse_report import SparseReport, distance, report_of
from jaxcomm.transforms._states import require_state
from jaxcomm.transforms._wrappers import refuse_wrappers, warn_of_few_bits
from jaxcomm.transforms.per_device import (
    NOTHING,
    PerDevice,
    values_of,
    zeros_per_device,
    zeros_per_group,
)
from jaxcomm.transforms.stages import dense_first


class SparseMeanState(NamedTuple):
    """The state of `sparse_mean`.

    Attributes:
      layout: what `init` recorded about the parameters.
      step: int32, the number of sparse steps.
      residual: the part of each device's gradients that is in no update yet, for each compressed
        leaf. In `residual_dtype`, with a leading device axis, sharded over the axis; inside
        `jax.shard_map`, this device's only.
      velocity: with momentum correction, each device's momentum, of exempt leaves too; likewise.
      thresholds: for each bucket, float32[devices, 1], sharded over the axis; each device's
        threshold for the next step.
      report: the report of the last step.
    """

    layout: Layout
    step: jax.Array
    residual: PerDevice
    velocity: PerDevice
    thresholds: PerDevice
    report: SparseReport

    @property
    def roles(self) -> frozenset[str]:
        """Means, of momenta with momentum correction."""
        return frozenset({_roles.MEANS, *([_roles.MOMENTA] if self.velocity.values else [])})


def sparse_mean(
    axis_name: AxisName,
    density: float = 0.01,
    algorithm: str | sparse.SparseAllReduce = "oktopk",
    *,
    error_feedback: bool = True,
    momentum_correction: float | None = None,
    dense_steps: int = 0,
    measure_xi: bool = False,
    exempt: Exempt = (),
    bucket_mib: float = 32.0,
    bucket_order: Sequence[str] | None = None,
    implementation: _implementations.Option = None,
    residual_dtype: jax.typing.DTypeLike = "float32",
) -> optax.GradientTransformationExtraArgs:
    """Replaces local gradients by the mean of their largest values over a mesh axis.

    A value that is not in the update stays in its device's residual, which is added to the next
    gradients. Without momentum correction, the updates and the mean of the residuals add up, over
    all steps, to the mean of the gradients. Leaves of at most one dimension (as in `jaxcomm.mean`)
    are averaged exactly.

    With momentum correction, each device accumulates its momentum instead of its gradients and
    selects from that sum, so that values that wait keep their momentum. Once a value is sent, its
    sum and its momentum restart from zero. Exempt leaves and dense steps use the same momentum, but
    never clear it. Use an optimizer without momentum then:
    `optax.chain(jaxcomm.sparse_mean("data", 0.01, momentum_correction=0.9), optax.sgd(lr))`.

    Where hosts have several devices, as far as jax knows, the devices of a host add up first, in
    float32, and the largest values of the host's sum are selected: each of D devices stands for its
    host in one part of a bucket, selects k/D values of it, and its residual is zero elsewhere.

    If any gradient on any device is not finite, every update on every device is NaN, and residuals,
    momenta and thresholds stay as they were.

    Args:
      axis_name: the mesh axis, or axes, over which the batch is spread.
      density: the share k/n of the values of a bucket that are selected, in (0, 1].
      algorithm: "oktopk", "topk_allgather", "topk_dsa", "gtopk", "gaussiank" or one with options,
        such as `jaxcomm.sparse.oktopk(values="bfloat16", recompute_every=128)`.
      error_feedback: whether residuals are kept; without them, values that are not sent are lost.
      momentum_correction: the decay, in [0, 1), of each device's momentum, or None.
      dense_steps: the number of steps before the first sparse step, which take the float32 mean of
        the gradients; with momentum correction, of the momenta. Then `update` also takes `dense=`,
        as that of `jaxcomm.dense_first`.
      measure_xi: whether the report has the distance to the true top-k. It is meant for studies, as
        it costs float32 means of everything.
      exempt: which leaves are not compressed, as in `jaxcomm.mean`.
      bucket_mib: the maximum size of a bucket, in MiB of float32 gradients; k is counted per
        bucket. The default is larger than that of `jaxcomm.mean`, because messages are small and
        every bucket takes seconds to compile.
      bucket_order: paths of leaves in the order in which their gradients appear, as
        `jaxcomm.backward_order` finds them; None means the reverse of the tree's order.
      implementation: which version of a kernel runs where there are several, as in `jaxcomm.mean`.
      residual_dtype: "float32", or "bfloat16" for half of the memory, as in `jaxcomm.mean`.

    Returns:
      A transformation used like `jaxcomm.mean`.

    Raises:
      TypeError, ValueError: immediately for bad arguments; otherwise as for `jaxcomm.mean`.

    Wire: for each bucket that of the algorithm; where hosts have D devices, that between hosts for
    1/D of the bucket, and within hosts an all-to-all and an all-gather of the bucket in float32.
    One float32 all-reduce of all exempt elements and one flag; one of 5 numbers for the report; on
    a mesh of several axes, one int32 over the others. With `measure_xi`, two more float32
    all-reduces of each bucket.

    Example:
      >>> import jaxcomm, optax
      >>> halves = jaxcomm.sparse.oktopk(values="bfloat16")  # entries of 4 bytes
      >>> tx = optax.chain(jaxcomm.sparse_mean("data", 0.01, halves), optax.sgd(0.1, momentum=0.9))

    References:
      Y. Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for
      Distributed Training", ICLR 2018, arXiv:1712.01887 (momentum correction, factor masking).
      S. Li and T. Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP
      2022, arXiv:2201.07598.

    Differs from the paper: in bytes and owners, as `jaxcomm.sparse.oktopk` says. Momentum
    correction and factor masking are those of Lin et al.; their clipping and their rising density
    are left out.
    """
    check_names(axis_name, exempt, bucket_order)
    chosen = sparse.from_name(algorithm)
    option = _implementations.check(implementation, chosen.operations, chosen.name)
    chosen = dataclasses.replace(chosen, density=density, implementation=option)
    _check(error_feedback, measure_xi, momentum_correction)
    m = momentum_correction
    dtype = checked_dtype(residual_dtype, error_feedback)
    exchange = _Exchange(
        axis_name, chosen, error_feedback, m, measure_xi, bucket_order, bytes_of(bucket_mib), dtype
    )

    def init_fn(params: Any) -> Any:
        refuse_wrappers()
        if error_feedback:
            warn_of_few_bits(params, f"a mean by {chosen.name}")
        layout = layout_of(params, axis_name, exempt, bucket_order, exchange)
        _hosts.warn_of_order(axis_name, instead="")
        large, _ = split_off_exempt(layout)
        residual = zeros_per_device(layout, params, large, dtype) if error_feedback else NOTHING
        full, _ = split_off_empty(layout)
        velocity = NOTHING if m is None else zeros_per_device(layout, params, full)
        buckets = exchange.buckets(layout)
        for bucket in buckets:  # one that is as long as this has one leaf
            if (values := values_of(layout, bucket)) > select.MOST:
                path = layout.leaves[bucket[0]].path
                raise ValueError(
                    f"a sparse mean takes at most 2^31 - 256 values, and {path} has {values} on a "
                    f'device; shard it over another axis, or leave it out: exempt=["{path}"].'
                )
        thresholds = zeros_per_group(layout, params, buckets, [1] * len(buckets))
        report = SparseReport(*[jnp.zeros((), jnp.float32) for _ in SparseReport._fields])
        kept = jnp.zeros((), jnp.int32), residual, velocity, thresholds
        return SparseMeanState(dataclasses.replace(layout, buckets=buckets), *kept, report)

    def update_fn(
        updates: Any, state: Any, params: Any = None, *, exchange: _Exchange = exchange
    ) -> tuple[Any, Any]:
        del params
        kept, of_all = {"residual": error_feedback}, {"velocity": m is not None}
        require_state(state, SparseMeanState, exempt, kept, kept_of_all=of_all, dtype=dtype)
        Buckets(state.layout.buckets).require_same(exchange.buckets(state.layout))
        grads, treedef = local_leaves(updates, state.layout)
        (*means, report), (residual, velocity, thresholds) = on_every_device(
            functools.partial(exchange, layout=state.layout),
            grads,
            state.layout,
            (state.residual, state.velocity, state.thresholds),
            state.step,
            further_results=1,
        )
        step = state.step if exchange.is_dense else state.step + 1
        kept = state.layout, step, residual, velocity, thresholds
        return treedef.unflatten(means), SparseMeanState(*kept, SparseReport(*report))

    tx, dense = optax.GradientTransformation(init_fn, update_fn), None
    if m is not None:  # A plain mean would have no momentum.
        full = dataclasses.replace(exchange, is_dense=True)
        dense = optax.GradientTransformation(init_fn, functools.partial(update_fn, exchange=full))
    return dense_first(tx, dense_steps, dense)


class _Bucket(NamedTuple):
    """What one device keeps of the exchange of a bucket.

    Attributes:
      residual: float32 vector, the next residual; None without error feedback.
      velocity: float32 vector, the next momentum; None without momentum correction.
      threshold: float32[1], the next one.
      counts: float32[5]: the counts of `SparseResult`, and the two numbers of `distance`.
      finite: bool array, true everywhere if x, the mean and what this device keeps are finite.
    """

    residual: jax.Array | None
    velocity: jax.Array | None
    threshold: jax.Array
    counts: jax.Array
    finite: jax.Array


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """The arguments of `sparse_mean`, and what a device does with them."""

    axis_name: AxisName
    algorithm: sparse.SparseAllReduce
    error_feedback: bool
    momentum: float | None
    measure_xi: bool
    bucket_order: Sequence[str] | None
    limit: int
    residual_dtype: str
    is_dense: bool = False

    def buckets(self, layout: Layout) -> tuple[Bucket, ...]:
        """The leaves that travel together."""
        large, _ = split_off_exempt(layout)
        return buckets_of(layout, large, self.bucket_order, self.limit)

    def k(self, n: int) -> int:
        """How many values of a bucket of n are to be selected."""
        return _by_hosts.k_of(self.algorithm, n, self.axis_name)

    def __call__(
        self, grads: Arrays, own: Own, step: jax.Array, layout: Layout
    ) -> tuple[Arrays, Own]:
        """What one device does in a step: the updates and a report, and its next state."""
        large, exempt_ = split_off_exempt(layout)
        exempt_ = by_appearance(layout, exempt_, self.bucket_order)
        buckets = self.buckets(layout)
        full, _ = split_off_empty(layout)
        residual = dict(zip(large, own[0], strict=False))
        old = dict(zip(full, own[1], strict=False))

        def moved(parts: dict[int, jax.Array]) -> dict[int, jax.Array]:
            if self.momentum is None:
                return parts
            sums = {
                i: part.astype(jnp.float32) + (self.momentum * old[i] if i in old else 0.0)
                for i, part in parts.items()
            }
            # Without this, XLA on GPUs adds those of convolutions again for the next momenta.
            return {i: in_row_major(x) for i, x in sums.items()}

        small = moved({i: grads[i] for i in exempt_})

        def on_bucket(number: int, parts: dict[int, jax.Array]) -> tuple[jax.Array, _Bucket]:
            moving = moved(parts)
            x = joined_sums(moving, residual) if self.error_feedback else joined(moving)
            return self._on_bucket(x, joined(moving), own[2][number], step)

        done = exchange_buckets(
            dict(enumerate(grads)),
            buckets,
            on_bucket,
            small=small,
            look_at="own",
            axis_name=self.axis_name,
        )
        means = done.exact | by_leaf(done.buckets, buckets, grads)
        residual, velocity = {}, {}
        if self.error_feedback:
            left = [kept.residual for kept in done.kept]
            residual = by_leaf(left, buckets, grads)
            means, residual = within_range(means, residual, grads)
        if self.momentum is not None:
            # A float32 momentum can outgrow float16: the update is cut, or none would be finite.
            means |= {i: clipped(means[i], grads[i].dtype) for i in small}
            momenta = [kept.velocity for kept in done.kept]
            velocity = small | by_leaf(momenta, buckets, grads)
        key, kept = jax.random.fold_in(seeded_key(0), step), large if residual else ()
        new = (
            rounded_leaves([residual[i] for i in kept], own[0], key, layout, kept),
            [velocity[i] for i in full if velocity],
            [kept.threshold for kept in done.kept],
        )
        updates, finite = updates_of(means, done.finite, grads, self.axis_name)
        new = tuple(kept_if(finite, *pair) for pair in zip(new, own, strict=True))
        sizes = [vector.size for vector in done.buckets]
        k = sum(sizes if self.is_dense else map(self.k, sizes))
        report = report_of(k, sum((kept.counts for kept in done.kept), jnp.zeros(5, jnp.float32)))
        return [*updates, report], new

    def _on_bucket(
        self, x: jax.Array, velocity: jax.Array, threshold: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, _Bucket]:
        """The mean of a bucket, of which this device holds x, and what is kept of it."""
        if self.is_dense:
            with noted("float32, native"):
                mean = collectives.float32_mean(x, self.axis_name)
            residual = jnp.zeros_like(x) if self.error_feedback else None
            counts = jnp.array([x.size, x.size, x.size, 0, 0], jnp.float32)
            # The mean carries what is not finite.
            return mean, _Bucket(residual, velocity, threshold, counts, finite_parts(mean))
        # Not of the errors, which are written over x: they would be read once more.
        finite = finite_parts(x)
        x, finite = jax.lax.optimization_barrier((x, finite))
        by_hosts = _hosts.note_of(self.axis_name)
        with noted(f"{self.algorithm.name}, density {self.algorithm.density:g}{by_hosts}"):
            result, after = _by_hosts.exchange(
                self.algorithm,
                x,
                threshold[0],
                step,
                self.axis_name,
                with_taken=self.momentum is not None,
            )
        squares = [jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)]
        if self.measure_xi:
            squares = distance(x, velocity, result.mean, self.k(x.size), self.axis_name)
        counts = (result.selected, result.delivered, result.applied)
        counts = jnp.stack([*(c.astype(jnp.float32) for c in counts), *squares])
        residual = result.errors if self.error_feedback else None
        # Factor masking: where a value was sent, its momentum restarts from zero.
        masked = None
        if self.momentum is not None:
            masked = velocity.at[result.taken].set(0.0, mode="drop")
        finite = jnp.concatenate([finite, *map(finite_parts, result.witnesses)])
        return result.mean, _Bucket(residual, masked, after[None], counts, finite)


def _check(error_feedback: Any, measure_xi: Any, m: Any) -> None:
    """Raises a ValueError for bad options of a sparse mean."""
    if not isinstance(error_feedback, bool):
        raise ValueError(f"error_feedback must be True or False, got {error_feedback!r}.")
    if not isinstance(measure_xi, bool):
        raise ValueError(f"measure_xi must be True or False, got {measure_xi!r}.")
    if m is not None and not (is_real(m) and 0 <= m < 1):
        raise ValueError(f"momentum_correction must be None or a number in [0, 1), got {m!r}.")
    if m is not None and not error_feedback:
        raise ValueError(
            "momentum_correction is for values that wait, and with error_feedback=False no value "
            "waits: put jaxcomm.local(axis, optax.trace(0.9)) before jaxcomm.sparse_mean, or give "
            "the optimizer a momentum."
        )
