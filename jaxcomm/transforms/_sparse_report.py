"""What a step of a sparse mean selected and sent, in numbers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm import _axes
from jaxcomm._axes import AxisName
from jaxcomm.kernels import select


class SparseReport(NamedTuple):
    """What a step selected and sent, float32, summed over buckets; equal on all devices.

    Inside `jaxcomm.in_backward`, each has a number for every layer.

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


def report_of(k: int, counts: jax.Array, squares: jax.Array, axis_name: AxisName) -> jax.Array:
    """The numbers of a `SparseReport`, from sums over buckets, which are equal along the axis.

    Wire: on a mesh of several axes, an all-reduce of 5 numbers over the others.
    """
    values = jnp.concatenate([counts, squares])
    if further := _axes.manual_axes().difference(_axes.names_of(axis_name)):
        values = jax.lax.pmean(values, tuple(sorted(further)))
    # Both squares are means over devices of sums, so their ratio is that of the sums.
    xi = jnp.sqrt(values[3] / jnp.where(values[4] > 0, values[4], 1.0))
    return jnp.stack([jnp.float32(k), *values[:3], xi])


def distance(
    x: jax.Array, gradient: jax.Array, mean: jax.Array, k: int, axis_name: AxisName
) -> jax.Array:
    """The squares of the distance to the true top-k and of the norm of the mean gradient."""
    exact = jax.lax.pmean(x, axis_name)
    best = jnp.where(jnp.abs(exact) >= select.threshold_for(exact, k), exact, 0.0)
    norm = jnp.sum(jnp.square(jax.lax.pmean(gradient, axis_name)))
    return jnp.stack([jnp.sum(jnp.square(best - mean)), norm])
