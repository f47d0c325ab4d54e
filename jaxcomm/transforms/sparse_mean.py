"""The mean of the largest gradients over devices, as an optax transformation."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _hosts
from jaxcomm._axes import AxisName
from jaxcomm._numbers import is_real
from jaxcomm.collectives import sparse
from jaxcomm.kernels import _implementations, select
from jaxcomm.transforms import _roles
from jaxcomm.transforms._buckets import (
    Bucket,
    Buckets,
    bytes_of,
    split_off_empty,
    split_off_exempt,
)
from jaxcomm.transforms._exchange import (
    local_leaves,
    on_every_device,
)
from jaxcomm.transforms._layout import Layout, layout_of
from jaxcomm.transforms._options import Exempt, check_names
from jaxcomm.transforms._residuals import checked_dtype
from jaxcomm.transforms._sparse_exchange import SparseExchange
from jaxcomm.transforms._sparse_report import SparseReport
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
    residual_decay: float = 1.0,
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
    gradients. Without momentum correction and decay, the updates and the mean of the residuals add
    up, over all steps, to the mean of the gradients. Leaves of at most one dimension (as in
    `jaxcomm.mean`) are averaged exactly.

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
      algorithm: "oktopk", "topk_chunks", "topk_allgather", "topk_dsa", "gtopk", "gaussiank" or one
        with options, such as `jaxcomm.sparse.oktopk(values="bfloat16", recompute_every=128)`.
      error_feedback: whether residuals are kept; without them, values that are not sent are lost.
      residual_decay: what a residual is multiplied by in each step, in (0, 1]. Below 1 the
        residual is a momentum, and what is sent is subtracted from it: with the sign of the result,
        as in DeMo; in `jaxcomm.local_steps` with the outer optimizer `optax.sgd(1.0)`, as in
        SparseLoCo.
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
    One float32 all-reduce of all exempt elements, a flag and 3 numbers for the report; on a mesh of
    several axes, one int32 and 5 numbers over the others. With `measure_xi`, two more float32
    all-reduces of each bucket.

    Example:
      >>> import jaxcomm, optax
      >>> halves = jaxcomm.sparse.oktopk(values="bfloat16")  # entries of 4 bytes
      >>> tx = optax.chain(jaxcomm.sparse_mean("data", 0.01, halves), optax.sgd(0.1, momentum=0.9))
      >>> chunks = jaxcomm.sparse_mean("data", 1 / 32, "topk_chunks")  # entries of 9 bits
      >>> few = optax.chain(chunks, optax.sgd(0.1, momentum=0.9, nesterov=True))
      >>> own = jaxcomm.sparse_mean("data", 1 / 32, "topk_chunks", residual_decay=0.99)
      >>> demo = optax.chain(own, optax.scale_by_sign(), optax.scale_by_learning_rate(1e-3))

    References:
      Y. Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for
      Distributed Training", ICLR 2018, arXiv:1712.01887 (momentum correction, factor masking).
      S. Li and T. Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP
      2022, arXiv:2201.07598.
      B. Peng et al., "DeMo: Decoupled Momentum Optimization", ICLR 2026, arXiv:2411.19870.
      A. Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025,
      arXiv:2508.15706.

    Differs from the paper: in bytes and owners, as `jaxcomm.sparse.oktopk` says. Momentum
    correction and factor masking are those of Lin et al.; their clipping and their rising density
    are left out. DeMo selects among cosine coefficients of each chunk; here it is values.
    """
    check_names(axis_name, exempt, bucket_order)
    chosen = sparse.from_name(algorithm)
    option = _implementations.check(implementation, chosen.operations, chosen.name)
    chosen = dataclasses.replace(chosen, density=density, implementation=option)
    _check(error_feedback, measure_xi, momentum_correction, residual_decay)
    m = momentum_correction
    dtype = checked_dtype(residual_dtype, error_feedback)
    exchange = SparseExchange(
        axis_name,
        chosen,
        error_feedback,
        float(residual_decay),
        m,
        measure_xi,
        bucket_order,
        bytes_of(bucket_mib),
        dtype,
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
        _refuse_long(layout, buckets, exchange)
        thresholds = zeros_per_group(layout, params, buckets, [1] * len(buckets))
        report = SparseReport(*[jnp.zeros((), jnp.float32) for _ in SparseReport._fields])
        kept = jnp.zeros((), jnp.int32), residual, velocity, thresholds
        return SparseMeanState(dataclasses.replace(layout, buckets=buckets), *kept, report)

    def update_fn(
        updates: Any, state: Any, params: Any = None, *, exchange: SparseExchange = exchange
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


def _refuse_long(layout: Layout, buckets: Sequence[Bucket], exchange: SparseExchange) -> None:
    """Raises a ValueError for a bucket that is too long to select from: it has one leaf."""
    for bucket in buckets:
        if exchange.padded(values := values_of(layout, bucket)) > select.MOST:
            path = layout.leaves[bucket[0]].path
            raise ValueError(
                f"a sparse mean takes at most 2^31 - 256 values, and {path} has {values} on a "
                f'device; shard it over another axis, or leave it out: exempt=["{path}"].'
            )


def _check(error_feedback: Any, measure_xi: Any, m: Any, decay: Any) -> None:
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
    if not (is_real(decay) and 0 < decay <= 1):
        raise ValueError(f"residual_decay must be a number in (0, 1], got {decay!r}.")
    if decay != 1 and (m is not None or not error_feedback):
        raise ValueError(
            f"residual_decay={decay} makes a momentum of the residual: leave out "
            f"{'error_feedback=False' if m is None else 'momentum_correction'}."
        )
