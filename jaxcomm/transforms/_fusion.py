"""Several arrays in one exchange, and the flag that travels with the exact ones."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import _compat, collectives
from jaxcomm._compat import AxisName

Reduce = Callable[[jax.Array], jax.Array]
FLAG = "not finite"


def fused(parts: Mapping[Any, jax.Array], reduce: Reduce) -> dict[Any, jax.Array]:
    """Reduces arrays as one float32 vector.

    Args:
      parts: arrays by key.
      reduce: from a float32 vector to its reduction, of the same length.

    Returns:
      float32 results by key, in the shapes of the arrays.
    """
    flat = [part.reshape(-1).astype(jnp.float32) for part in parts.values()]
    ends = np.cumsum([x.size for x in flat])
    pieces = jnp.split(reduce(jnp.concatenate(flat)), ends[:-1])
    return {
        key: piece.reshape(part.shape)
        for (key, part), piece in zip(parts.items(), pieces, strict=True)
    }


def exact_means(
    parts: Mapping[Any, jax.Array], grads: list[jax.Array], axis_name: AxisName
) -> tuple[dict[Any, jax.Array], jax.Array]:
    """The means of some arrays, and whether all gradients on all devices of the mesh are finite.

    Wire: one float32 all-reduce of all parts and a flag; on a mesh of several axes also one int32
    over the others.
    """
    reduction, native = collectives.mean_of("float32", "native")
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in grads]))
    parts = {**parts, FLAG: 1 - finite.astype(jnp.float32)}
    means = fused(parts, lambda x: collectives.all_reduce(x, axis_name, reduction, native))
    finite = means.pop(FLAG) == 0
    further = tuple(sorted(_compat.manual_axes().difference(_compat.names_of(axis_name))))
    if further:
        finite = jax.lax.pmin(finite.astype(jnp.int32), further) == 1
    return means, finite


def bytes_of(bucket_mib: Any) -> int:
    """The size of a bucket in bytes, checked."""
    if isinstance(bucket_mib, jax.Array):
        raise TypeError(
            "bucket_mib decides shapes and must be a Python number; under "
            'optax.inject_hyperparams pass static_args=("bucket_mib",).'
        )
    if not (isinstance(bucket_mib, int | float) and 0 < bucket_mib < math.inf):
        raise ValueError(f"bucket_mib must be a positive number, got {bucket_mib!r}.")
    return max(int(bucket_mib * 2**20), 1)
