"""The front door of the collectives: one reduction, carried out by one algorithm."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm import _compat, codecs
from jaxcomm._compat import AxisName
from jaxcomm.collectives._algorithm import Algorithm
from jaxcomm.collectives._reduction import Reduction
from jaxcomm.collectives.circulant import circulant
from jaxcomm.collectives.direct import direct
from jaxcomm.collectives.halving_doubling import halving_doubling
from jaxcomm.collectives.mean import Mean
from jaxcomm.collectives.native import native
from jaxcomm.collectives.ring import ring

BY_NAME = {
    "native": native,
    "direct": direct,
    "ring": ring,
    "halving_doubling": halving_doubling,
    "circulant": circulant,
}


def from_name(algorithm: str | Algorithm) -> Algorithm:
    """The algorithm that a string is short for, with its defaults.

    Raises:
      ValueError: for an unknown name.
      TypeError: for anything that is neither a name nor an algorithm.
    """
    if isinstance(algorithm, Algorithm):
        return algorithm
    if not isinstance(algorithm, str):
        raise TypeError(
            f"algorithm must be a name ({', '.join(BY_NAME)}) or an algorithm, got {algorithm!r}; "
            "a factory must be called: jaxcomm.ring()."
        )
    if algorithm not in BY_NAME:
        raise ValueError(f"unknown algorithm {algorithm!r}; choose one of {', '.join(BY_NAME)}.")
    return BY_NAME[algorithm]()


def mean_of(codec: str | codecs.Codec, algorithm: str | Algorithm | None) -> tuple[Mean, Algorithm]:
    """The reduction and the algorithm behind `jaxcomm.mean` and `jaxcomm.pmean`.

    Without an algorithm, float32 travels by XLA's own all-reduce and every other format directly,
    which rounds least.
    """
    codec = codecs.from_name(codec)
    if algorithm is None:
        algorithm = "native" if codec == codecs.float32() else "direct"
    return Mean(codec), from_name(algorithm)


def all_reduce(
    x: jax.Array, axis_name: AxisName, reduction: Reduction, algorithm: Algorithm
) -> jax.Array:
    """Reduces one array over a mesh axis, in the manual view.

    Every device ends with the same bits, and the result is typed as equal on all of them, also
    under `jax.shard_map`'s checks.

    Args:
      x: float array of any shape and size, another on every device.
      axis_name: the mesh axis; every axis of the mesh must be manual here.
      reduction: what the messages mean.
      algorithm: who talks to whom.

    Returns:
      The reduced values in the shape and dtype of `x`, equal on all devices of the axis.

    Wire: that of the algorithm, in the format of the reduction.
    """

    def exchange(x: jax.Array) -> jax.Array:
        lifted = reduction.lift(x.reshape(-1).astype(jnp.float32), axis_name)
        reduced = algorithm.all_reduce(lifted, axis_name, reduction)
        return reduction.lower(reduced, lifted.agreed, x.size).reshape(x.shape).astype(x.dtype)

    if x.size == 0:
        return jnp.zeros(x.shape, x.dtype)
    if not _compat.checks_on(axis_name):
        return exchange(x)
    elsewhere = _compat.varying_axes(x).difference(_compat.names_of(axis_name))
    return _compat.as_varying(_compat.unchecked(exchange)(x), elsewhere)


def pmean(
    x: Any,
    axis_name: AxisName,
    codec: str | codecs.Codec = "float32",
    algorithm: str | Algorithm | None = None,
) -> Any:
    """The mean over a mesh axis, as `jax.lax.pmean`, with a chosen format on the wire.

    Each array is exchanged by itself; `jaxcomm.mean` exchanges gradients in buckets.

    Args:
      x: a pytree of float arrays, in a region of `jax.shard_map` that is manual over every axis.
      axis_name: the mesh axis, or axes.
      codec: "float32", "bfloat16", "float16" or a codec.
      algorithm: "native", "direct", "ring", "halving_doubling", "circulant" or an algorithm;
        None is "native" for float32 and "direct" for everything else.

    Returns:
      The means, in the shapes and dtypes of `x`, bitwise equal on all devices of the axis.

    Raises:
      TypeError: for arrays that are not float.
      NameError: where the axis is not manual.
      ValueError: for an unknown codec or algorithm.

    Wire: 2(N-1)/N * ceil(n/N) * N elements of the codec's dtype, for each array of n elements and
    every algorithm but halving_doubling at other than powers of two; float16 adds an int32 `pmax`.

    Example:
      >>> import functools, jax, jax.numpy as jnp, jaxcomm
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jaxcomm.data_mesh(devices=jax.devices()[:4])
      >>> mean = functools.partial(jaxcomm.pmean, axis_name="data", codec="bfloat16")
      >>> mean = jax.shard_map(mean, mesh=mesh, in_specs=P("data"), out_specs=P())
      >>> jax.jit(mean)(jnp.arange(8.0))
      Array([3., 4.], dtype=float32)
    """
    reduction, chosen = mean_of(codec, algorithm)
    require_axis(axis_name)
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            where = _compat.path_name(path) or "x"
            raise TypeError(
                f"pmean needs float arrays, got {leaf.dtype} at {where}; "
                "convert it first, or average it with jax.lax.pmean."
            )
    return jax.tree.map(lambda leaf: all_reduce(leaf, axis_name, reduction, chosen), x)


def require_axis(axis_name: AxisName) -> None:
    """Raises a NameError where the axis is not manual."""
    if not _compat.is_manual(axis_name):
        raise NameError(
            f"axis {axis_name!r} is not manual here (manual axes: "
            f"{sorted(_compat.manual_axes()) or 'none'}); call this inside jax.shard_map over it."
        )
