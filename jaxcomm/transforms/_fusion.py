"""Several arrays in one exchange, and the flag that travels with the exact ones."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import _compat, collectives
from jaxcomm._compat import AxisName

Reduce = Callable[[jax.Array], jax.Array]
FLAG, TAG = "not finite", "tag of the key"


def fused(parts: Mapping[Any, jax.Array], reduce: Reduce) -> dict[Any, jax.Array]:
    """Reduces arrays as one float32 vector.

    Args:
      parts: arrays by key.
      reduce: from a float32 vector to its reduction, of the same length.

    Returns:
      float32 results by key, in the shapes of the arrays.
    """
    return split(reduce(joined(parts)), parts)


def joined(parts: Mapping[Any, jax.Array]) -> jax.Array:
    """The arrays as one float32 vector."""
    return jnp.concatenate([part.reshape(-1).astype(jnp.float32) for part in parts.values()])


def split(vector: jax.Array, parts: Mapping[Any, jax.Array]) -> dict[Any, jax.Array]:
    """The reverse, in the shapes of `parts`."""
    ends = np.cumsum([part.size for part in parts.values()])
    pieces = jnp.split(vector, ends[:-1])
    return {
        key: piece.reshape(part.shape)
        for (key, part), piece in zip(parts.items(), pieces, strict=True)
    }


def in_turn(
    parts: dict[Any, jax.Array], results: list[jax.Array]
) -> tuple[dict[Any, jax.Array], list[jax.Array]]:
    """The parts of the next exchange and the results of those before, as they are, in this order.

    Nothing can be done with the parts before the last result is there. XLA joins collectives that
    do not wait for each other, up to a size of its own, and on GPU it starts all of them behind the
    last gradient; those that take turns start when their gradients appear. As it drops whatever
    is not used of a barrier, use what this returns in place of both.
    """
    if not results:
        return parts, results
    last, *values = jax.lax.optimization_barrier((results[-1], *parts.values()))
    return dict(zip(parts, values, strict=True)), [*results[:-1], last]


def exact_means(
    parts: Mapping[Any, jax.Array],
    grads: list[jax.Array],
    axis_name: AxisName,
    shared_key: jax.Array | None = None,
    results: Sequence[jax.Array] = (),
) -> tuple[dict[Any, jax.Array], jax.Array, list[jax.Array]]:
    """The means of some arrays, and whether all gradients on all devices of the mesh are finite.

    With a `shared_key`, also whether all devices have the same: as good as not finite otherwise.
    The results of the other exchanges come first and are returned last: the flag needs the last
    gradient, so behind it they could not travel while gradients are computed.

    Wire: one float32 all-reduce of all parts, a flag and, with a key, a tag; on a mesh of several
    axes also one int32 over the others.
    """
    reduction, native = collectives.mean_of("float32", "native")
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in grads]))
    parts = {**parts, FLAG: 1 - finite.astype(jnp.float32)}
    if shared_key is not None:
        # Integers whose sums float32 holds exactly. Their mean is everyone's only if all are equal.
        parts[TAG] = (jax.random.bits(shared_key) >> 18).astype(jnp.float32)
    parts, results = in_turn(parts, list(results))
    means = fused(parts, lambda x: collectives.all_reduce(x, axis_name, reduction, native))
    finite = means.pop(FLAG) == 0
    if shared_key is not None:
        finite &= jnp.abs(means.pop(TAG) - parts[TAG]) < 0.01
    further = tuple(sorted(_compat.manual_axes().difference(_compat.names_of(axis_name))))
    if further:
        finite = jax.lax.pmin(finite.astype(jnp.int32), further) == 1
    return means, finite, results


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
