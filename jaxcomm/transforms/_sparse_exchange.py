"""What one device does in a step of a sparse mean."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm import _hosts, collectives
from jaxcomm._axes import AxisName
from jaxcomm._notes import noted
from jaxcomm.collectives import sparse
from jaxcomm.collectives.sparse import _by_hosts
from jaxcomm.kernels.random_bits import seeded_key
from jaxcomm.kernels.reductions import finite_parts
from jaxcomm.transforms._buckets import (
    Bucket,
    buckets_of,
    by_appearance,
    in_row_major,
    joined,
    joined_sums,
    split_off_empty,
    split_off_exempt,
)
from jaxcomm.transforms._exchange import (
    COUNTS,
    Arrays,
    Own,
    by_leaf,
    clipped,
    exchange_buckets,
    kept_if,
    updates_of,
    within_range,
)
from jaxcomm.transforms._layout import Layout
from jaxcomm.transforms._residuals import rounded_leaves
from jaxcomm.transforms._sparse_report import distance, report_of

_AS_ASKED = 0.05  # by how much a density may differ from the one that was asked for, unsaid


class _Bucket(NamedTuple):
    """What one device keeps of the exchange of a bucket.

    Attributes:
      residual: float32 vector, the next residual; None without error feedback.
      velocity: float32 vector, the next momentum; None without momentum correction.
      threshold: float32[1], the next one.
      counts: float32[3]: those of `SparseResult`.
      squares: float32[2]: the two numbers of `distance`, equal along the axis, or zeros.
      finite: results of `finite_parts`, true if x, the mean and what this device keeps are finite.
    """

    residual: jax.Array | None
    velocity: jax.Array | None
    threshold: jax.Array
    counts: jax.Array
    squares: jax.Array
    finite: Sequence[jax.Array]


@dataclasses.dataclass(frozen=True)
class SparseExchange:
    """The arguments of `sparse_mean`, and what a device does with them."""

    axis_name: AxisName
    algorithm: sparse.SparseAllReduce
    error_feedback: bool
    residual_decay: float
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

    def padded(self, n: int) -> int:
        """The length to which a bucket of n values is padded with zeros."""
        return _by_hosts.padded(self.algorithm, n, self.axis_name)

    def _form(self, n: int) -> str:
        """What is said of a bucket of n values; of the density, what it is if not as asked."""
        density, asked = self.k(n) / n, self.algorithm.density
        share = f"{asked:g}" if abs(density / asked - 1) < _AS_ASKED else f"{density:.2g}"
        decay = f", decay {self.residual_decay:g}" if self.residual_decay != 1 else ""
        by_hosts = _hosts.note_of(self.axis_name)
        return f"{self.algorithm.name}, density {share}{decay}{by_hosts}"

    def __call__(
        self, grads: Arrays, own: Own, step: jax.Array, layout: Layout
    ) -> tuple[Arrays, Own]:
        """What one device does in a step: the updates and a report, and its next state."""
        large, exempt_ = split_off_exempt(layout)
        exempt_ = by_appearance(layout, exempt_, self.bucket_order)
        buckets = self.buckets(layout)
        full, _ = split_off_empty(layout)
        residual = dict(zip(large, own[0], strict=False))
        if self.residual_decay != 1:
            residual = {i: self.residual_decay * x.astype(jnp.float32) for i, x in residual.items()}
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
            moving, n = moved(parts), sum(part.size for part in parts.values())
            size = n if self.is_dense else self.padded(n)
            x = joined_sums(moving, residual, size) if self.error_feedback else joined(moving, size)
            return self._on_bucket(x, joined(moving), own[2][number], step)

        done = exchange_buckets(
            dict(enumerate(grads)),
            buckets,
            on_bucket,
            small=small,
            look_at="own",
            axis_name=self.axis_name,
        )
        counts = done.exact.pop(COUNTS)
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
        sizes = [sum(grads[i].size for i in bucket) for bucket in buckets]
        k = sum(sizes if self.is_dense else map(self.k, sizes))
        squares = sum((kept.squares for kept in done.kept), jnp.zeros(2, jnp.float32))
        report = report_of(k, counts, squares, self.axis_name)
        return [*updates, report], new

    def _on_bucket(
        self, x: jax.Array, velocity: jax.Array, threshold: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, _Bucket]:
        """The mean of a bucket, of which this device holds x, and what is kept of it."""
        if self.is_dense:
            with noted("float32, native"):
                mean = collectives.float32_mean(x, self.axis_name)
            residual = jnp.zeros_like(x) if self.error_feedback else None
            counts, squares = jnp.full(3, x.size, jnp.float32), jnp.zeros(2, jnp.float32)
            # The mean carries what is not finite.
            kept = residual, velocity, threshold, counts, squares, [finite_parts(mean)]
            return mean, _Bucket(*kept)
        # Not of the errors, which are written over x: they would be read once more.
        finite = finite_parts(x)
        x, finite = jax.lax.optimization_barrier((x, finite))
        with noted(self._form(velocity.size)):
            result, after = _by_hosts.exchange(
                self.algorithm,
                x,
                threshold[0],
                step,
                self.axis_name,
                with_taken=self.momentum is not None,
            )
        squares = jnp.zeros(2, jnp.float32)
        if self.measure_xi:
            squares = distance(x, velocity, result.mean, self.k(velocity.size), self.axis_name)
        counts = jnp.stack([result.selected, result.delivered, result.applied]).astype(jnp.float32)
        residual = result.errors if self.error_feedback else None
        # Factor masking: where a value was sent, its momentum restarts from zero.
        masked = None
        if self.momentum is not None:
            masked = velocity.at[result.taken].set(0.0, mode="drop")
        finite = [finite, *map(finite_parts, result.witnesses)]
        return result.mean, _Bucket(residual, masked, after[None], counts, squares, finite)
