"""The mean of the largest gradients over devices, as an optax transformation."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _compat, collectives
from jaxcomm._compat import AxisName
from jaxcomm.kernels import select
from jaxcomm.transforms._buckets import Bucket, buckets_of, split_off_exempt
from jaxcomm.transforms._fusion import bytes_of, exact_means, in_turn, joined, split
from jaxcomm.transforms._layout import Exempt, Layout, check_gradients, layout_of
from jaxcomm.transforms._views import Arrays, on_every_device
from jaxcomm.transforms._wrappers import refuse_wrappers
from jaxcomm.transforms.per_device import (
    NOTHING,
    PerDevice,
    zeros_per_bucket,
    zeros_per_device,
)
from jaxcomm.transforms.stages import warmup


class SparseReport(NamedTuple):
    """What a step selected and sent, float32, summed over buckets; equal on all devices.

    Attributes:
      k: the number of values to select.
      selected: how many a device wanted to send, the mean over devices.
      delivered: how many of these found room in a message.
      wanted: the places that the update would have values at if it had room.
      applied: those at which it has.
      xi: with `measure_xi`, how far the update is from the k largest values of the mean of what the
        devices hold, over the norm of the mean gradient; else 0.
    """

    k: jax.Array
    selected: jax.Array
    delivered: jax.Array
    wanted: jax.Array
    applied: jax.Array
    xi: jax.Array


class SparseMeanState(NamedTuple):
    """The state of `sparse_mean`.

    Attributes:
      layout: what `init` saw of the parameters.
      step: int32.
      residual: what of each device's gradients is in no update yet.
      velocity: with momentum correction, each device's momentum.
      carried: for each bucket, the thresholds and boundaries that are re-used.
      report: of the last step.
    """

    layout: Layout
    step: jax.Array
    residual: PerDevice
    velocity: PerDevice
    carried: PerDevice
    report: SparseReport


def sparse_mean(
    axis_name: AxisName,
    density: float = 0.01,
    algorithm: str | collectives.Sparse = "oktopk",
    *,
    error_feedback: bool = True,
    momentum_correction: float | None = None,
    warmup_steps: int = 0,
    measure_xi: bool = False,
    exempt: Exempt = (),
    bucket_mib: float = 16.0,
    bucket_order: Sequence[str] | None = None,
) -> optax.GradientTransformation:
    """Replaces local gradients by the mean of their largest values over a mesh axis.

    What of a device's gradients is not in an update stays in its residual and is added to its next
    gradients: over all steps, updates and residuals add up to the mean of the gradients. Leaves of
    at most one dimension are averaged exactly.

    With momentum correction, a device's momentum is what is added up and selected, so that what
    waits keeps its momentum; both are cleared where they were sent. The optimizer then needs no
    momentum of its own: `optax.chain(jaxcomm.sparse_mean("data", 0.01, momentum_correction=0.9),
    optax.sgd(lr))`.

    If any gradient on any device is not finite, every update on every device is NaN and the state
    stays as it is.

    Args:
      axis_name: the mesh axis, or axes, over which the batch is spread.
      density: the share k/n of the values of a bucket that are selected, in (0, 1].
      algorithm: "oktopk", "topk_allgather", "topk_dsa", "gtopk", "gaussiank" or one with options,
        such as `jaxcomm.oktopk(values="bfloat16", recompute_every=128)`.
      error_feedback: whether what is not sent is kept; without it, it is lost.
      momentum_correction: the decay of each device's momentum in [0, 1), or None.
      warmup_steps: steps of the float32 mean before the first sparse one.
      measure_xi: whether the report has the distance to the true top-k: for studies, as it takes
        float32 means of everything.
      exempt: what else is not compressed, as in `jaxcomm.mean`.
      bucket_mib: MiB of float32 gradients that a bucket holds at most; k is of a bucket. More than
        for dense means: a bucket's messages are small, and each costs time to compile.
      bucket_order: paths of leaves in the order in which their gradients appear, as
        `jaxcomm.backward_order` finds them; None is the reverse of the tree's order.

    Returns:
      A transformation used as `jaxcomm.mean` is.

    Raises:
      TypeError, ValueError: at once for bad arguments; else as `jaxcomm.mean`.

    Wire: for each bucket that of the algorithm; one float32 all-reduce of all exempt elements and
    one flag; one of 6 numbers for the report; on a mesh of several axes, one int32 over the others.
    With `measure_xi` two float32 all-reduces of each bucket more.

    References:
      Y. Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for
      Distributed Training", ICLR 2018, arXiv:1712.01887 (momentum correction, factor masking).
      S. Li and T. Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP
      2022, arXiv:2201.07598.
    """
    _compat.names_of(axis_name)
    chosen = dataclasses.replace(collectives.sparse_from_name(algorithm), density=density)
    if not isinstance(error_feedback, bool):
        raise ValueError(f"error_feedback must be True or False, got {error_feedback!r}.")
    m = momentum_correction
    if m is not None and not (isinstance(m, int | float) and 0 <= m < 1):
        raise ValueError(f"momentum_correction must be None or a number in [0, 1), got {m!r}.")
    exchange = _Exchange(
        axis_name, chosen, error_feedback, m, measure_xi, bucket_order, bytes_of(bucket_mib)
    )

    def init_fn(params: Any) -> Any:
        refuse_wrappers()
        layout = layout_of(params, axis_name, exempt)
        large, _ = split_off_exempt(layout)
        residual = zeros_per_device(layout, params, large)
        velocity = NOTHING if m is None else zeros_per_device(layout, params, large)
        carried = zeros_per_bucket(
            layout, params, exchange.buckets(layout, large), lambda n: layout.world + 3
        )
        report = SparseReport(*[jnp.zeros(()) for _ in SparseReport._fields])
        step = jnp.zeros((), jnp.int32)
        return SparseMeanState(layout, step, residual, velocity, carried, report)

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        refuse_wrappers()
        grads, treedef = jax.tree.flatten(updates)
        check_gradients(grads, state.layout)
        parts = (state.residual, state.velocity, state.carried)
        own = PerDevice(
            [v for part in parts for v in part.values], sum((part.specs for part in parts), ())
        )
        (*means, report), own = on_every_device(
            lambda g, own, step: exchange(g, own, step, state.layout),
            grads,
            state.layout,
            own,
            state.step,
            further_results=1,
        )
        values = iter(own.values)
        residual, velocity, carried = (
            PerDevice([next(values) for _ in part.values], part.specs) for part in parts
        )
        new = SparseMeanState(
            state.layout, state.step + 1, residual, velocity, carried, SparseReport(*report)
        )
        return treedef.unflatten(means), new

    tx = optax.GradientTransformation(init_fn, update_fn)
    return warmup(tx, warmup_steps)


class _Own(NamedTuple):
    """What a device has of its own of each compressed leaf."""

    residual: dict[int, jax.Array]
    velocity: dict[int, jax.Array]

    @classmethod
    def of(cls, own: Arrays, large: Bucket, moving: bool) -> "_Own":
        """Sorts the arrays of a device's state."""
        residual = dict(zip(large, own, strict=False))
        velocity = dict(zip(large, own[len(large) :], strict=False)) if moving else {}
        return cls(residual, velocity)


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """The arguments of `sparse_mean`, and what a device does with them."""

    axis_name: AxisName
    algorithm: collectives.Sparse
    error_feedback: bool
    momentum: float | None
    measure_xi: bool
    bucket_order: Sequence[str] | None
    limit: int

    def buckets(self, layout: Layout, large: Bucket) -> tuple[Bucket, ...]:
        """The leaves that travel together."""
        return buckets_of(layout, large, self.bucket_order, self.limit)

    def of_bucket(
        self, grads: dict[int, jax.Array], old: _Own, carried: jax.Array, step: jax.Array
    ) -> tuple[collectives.SparseMean, jax.Array, jax.Array, jax.Array, Arrays]:
        """The outcome for one bucket; its next residual, velocity and what is carried; and xi's."""
        velocity = joined({i: g.astype(jnp.float32) for i, g in grads.items()})
        if self.momentum is not None:
            velocity += self.momentum * joined({i: old.velocity[i] for i in grads})
        x = joined({i: old.residual[i] for i in grads}) + velocity
        outcome, new = self.algorithm.exchange(
            x, collectives.Carried.unpacked(carried, x.size), step, self.axis_name
        )
        residual = outcome.errors if self.error_feedback else jnp.zeros_like(x)
        distance = [jnp.zeros(()), jnp.zeros(())]
        if self.measure_xi:
            distance = _distance(
                x, velocity, outcome.mean, self.algorithm.k(x.size), self.axis_name
            )
        # Factor masking: where a value was sent, its momentum starts anew.
        velocity = jnp.where(outcome.errors == x, velocity, 0.0)
        return outcome, residual, velocity, new.packed(), distance

    def __call__(
        self, grads: Arrays, own: Arrays, step: jax.Array, layout: Layout
    ) -> tuple[Arrays, Arrays]:
        """What one device does in a step: the updates and a report, and its next state."""
        large, exempt_ = split_off_exempt(layout)
        buckets = self.buckets(layout, large)
        old = _Own.of(own, large, self.momentum is not None)
        carried = own[len(own) - len(buckets) :]
        residual, velocity, carried_on, results = {}, {}, [], []
        k, counts = 0, jnp.zeros(6)
        for bucket, carry in zip(buckets, carried, strict=True):
            parts, results = in_turn({i: grads[i] for i in bucket}, results)
            outcome, left, moving, carry, distance = self.of_bucket(parts, old, carry, step)
            results.append(outcome.mean)
            residual |= split(left, parts)
            velocity |= split(moving, parts)
            carried_on.append(carry)
            counts += jnp.stack([*(c.astype(jnp.float32) for c in outcome[2:]), *distance])
            k += self.algorithm.k(left.size)
        means, finite, results = exact_means(
            {i: grads[i] for i in exempt_}, grads, self.axis_name, results=results
        )
        for bucket, mean in zip(buckets, results, strict=True):
            means |= split(mean, {i: grads[i] for i in bucket})
        new = [residual[i] for i in large]
        new += [velocity[i] for i in large if self.momentum is not None]
        kept = [jnp.where(finite, n, o) for n, o in zip(new + carried_on, own, strict=True)]
        updates = [
            jnp.where(finite, means[i], jnp.nan).astype(g.dtype) for i, g in enumerate(grads)
        ]
        counts = jax.lax.pmean(counts, tuple(sorted(_compat.manual_axes())))
        # A ratio of sums over buckets and shards of the squares, as these are means of both.
        xi = jnp.sqrt(counts[4] / jnp.where(counts[5] > 0, counts[5], 1.0))
        report = jnp.stack([jnp.float32(k), *counts[:4], xi])
        return [*updates, report], kept


def _distance(
    x: jax.Array, gradient: jax.Array, mean: jax.Array, k: int, axis_name: AxisName
) -> Arrays:
    """The squares of the distance to the true top-k and of the norm of the mean gradient."""
    exact = jax.lax.pmean(x, axis_name)
    best = jnp.where(jnp.abs(exact) >= select.threshold_for(exact, k), exact, 0.0)
    norm = jnp.sum(jnp.square(jax.lax.pmean(gradient, axis_name)))
    return [jnp.sum(jnp.square(best - mean)), norm]
