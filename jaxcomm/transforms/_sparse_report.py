"""What a step of a sparse mean selected and sent, in numbers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm import _axes
from jaxcomm._axes import AxisName
from jaxcomm.kernels import select


class SparseReport(NamedTuple):
    """What a step selected and sent, float32, summed over buckets; equal on all devices.

    Attributes:
      k: the number of values to select.
      selected: the number of values above a device's threshold, averaged over devices; where hosts
        have several devices, of a host.
      delivered: the number of selected values that fit into messages, likewise.
      applied: the number of values in the update.
      xi: with `measure_xi`, the distance between the update and the k largest values of the exact
        mean (of gradients plus residuals), over the norm of the mean gradient; else 0.
    """

    k: jax.Array
    selected: jax.Array
    delivered: jax.Array
    applied: jax.Array
    xi: jax.Array


def report_of(k: int, counts: jax.Array) -> jax.Array:
    """The numbers of a `SparseReport`, from the sums over a device's buckets of their counts."""
    counts = jax.lax.pmean(counts, tuple(sorted(_axes.manual_axes())))
    # Both are means over devices of sums of squares, so their ratio is that of the sums.
    xi = jnp.sqrt(counts[3] / jnp.where(counts[4] > 0, counts[4], 1.0))
    return jnp.stack([jnp.float32(k), *counts[:3], xi])


def distance(
    x: jax.Array, gradient: jax.Array, mean: jax.Array, k: int, axis_name: AxisName
) -> list[jax.Array]:
    """The squares of the distance to the true top-k and of the norm of the mean gradient."""
    exact = jax.lax.pmean(x, axis_name)
    best = jnp.where(jnp.abs(exact) >= select.threshold_for(exact, k), exact, 0.0)
    norm = jnp.sum(jnp.square(jax.lax.pmean(gradient, axis_name)))
    return [jnp.sum(jnp.square(best - mean)), norm]
