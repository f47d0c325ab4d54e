"""The entry point of the collectives: one reduction, carried out by one algorithm."""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm import _axes, _paths, codecs
from jaxcomm._axes import AxisName
from jaxcomm._notes import noted
from jaxcomm._users_line import users_line
from jaxcomm.codecs.random_k import RandomK
from jaxcomm.collectives import algorithms
from jaxcomm.collectives.algorithms import Algorithm
from jaxcomm.collectives.algorithms._default import Default, sent_as
from jaxcomm.collectives.algorithms.hierarchical import Hierarchical
from jaxcomm.collectives.reductions import CodedMean, Majority, RandomKMean, Reduction
from jaxcomm.kernels import _implementations
from jaxcomm.kernels.bitplanes import Planes


def mean_of(
    codec: str | codecs.Codec,
    algorithm: str | Algorithm | None,
    second_hop: str | codecs.Codec | None = None,
    error_feedback: bool | str = False,
    implementation: _implementations.Option = None,
) -> tuple[CodedMean, Algorithm]:
    """The reduction and the algorithm of `jaxcomm.mean` and `jaxcomm.pmean`.

    Without an algorithm, float32 travels by XLA's own all-reduce, and `Default` chooses for all
    other formats.

    Raises:
      TypeError, ValueError: for invalid arguments, or ones that do not go together.
    """
    codec = codecs.from_name(codec)
    if not isinstance(error_feedback, bool) and error_feedback != "first_hop":
        raise ValueError(
            f'error_feedback must be True, False or "first_hop", got {error_feedback!r}.'
        )
    sent = codec.values if isinstance(codec, RandomK) else codec
    back = sent if second_hop is None else codecs.from_name(second_hop)
    if isinstance(back, RandomK):
        raise ValueError(
            "second_hop cannot be random_k, which draws once for both hops; name the format of the "
            'mean, such as second_hop="bfloat16".'
        )
    if algorithm is None:
        algorithm = Default(sent_as({sent.name, back.name}))
        if sent == back == codecs.float32():
            algorithm = algorithms.native()
    chosen = algorithms.from_name(algorithm).for_means
    if chosen.name == "native":
        _check_native(sent, back, error_feedback)
    if (sent.needs_error_feedback and not error_feedback) or (
        back.needs_error_feedback and error_feedback is not True
    ):
        raise ValueError(
            f"a mean of {(sent if sent.needs_error_feedback else back).name} without error "
            "feedback is biased; use jaxcomm.mean(..., error_feedback=True), or "
            "jaxcomm.majority_vote for signs alone."
        )
    near = chosen.near_codec if isinstance(chosen, Hierarchical) else None
    on_the_wire = [sent, back] if near is None else [near, sent, back]
    _check_ranges(on_the_wire)
    for used in on_the_wire:
        if error_feedback and used.variance >= 1:
            warnings.warn(
                f"the error of {used.name} can exceed the value itself (its variance is up to "
                f"{used.variance:.1f} times the square), so residuals may grow without bound; "
                "use more levels, smaller blocks, clipping or error_feedback=False.",
                stacklevel=users_line(),
            )
    operations = tuple(dict.fromkeys((*sent.operations, *back.operations)))
    option = _implementations.check(implementation, operations, f"a mean in {codec.name}")
    sent, back = (dataclasses.replace(used, implementation=option) for used in (sent, back))
    if isinstance(codec, RandomK):
        return RandomKMean(sent, back, error_feedback, selection=codec), chosen
    return CodedMean(sent, back, error_feedback), chosen


def _check_ranges(used: Sequence[codecs.Codec]) -> None:
    """Raises a ValueError for a codec of a fixed range beside one that values are scaled for."""
    fixed = [codec for codec in used if codec.has_fixed_range]
    scaled = [codec for codec in used if codec.largest is not None]
    if fixed and scaled:
        raise ValueError(
            f"{fixed[0]} is for values of a fixed range, and a mean in {scaled[0].name} scales "
            "them to the range of that format; use another codec for one of the hops."
        )


def _check_native(
    codec: codecs.Codec, second_hop: codecs.Codec, error_feedback: bool | str
) -> None:
    """Raises a ValueError where XLA's own all-reduce cannot do what is asked."""
    if second_hop != codec:
        raise ValueError(
            f"native is one all-reduce in one format, got {codec.name} and second_hop="
            f'{second_hop.name}; choose another algorithm, such as "direct".'
        )
    if error_feedback and codec != codecs.float32():
        raise ValueError(
            f"error feedback cannot keep what XLA rounds off in {codec.name}; choose an "
            'algorithm other than native, such as "direct".'
        )
    jax.eval_shape(codec.native, jax.ShapeDtypeStruct((1,), jnp.float32))


def all_reduce(
    x: jax.Array, axis_name: AxisName, reduction: Reduction, algorithm: Algorithm
) -> jax.Array:
    """Reduces one array over a mesh axis, in the manual view.

    Every device ends with the same bits, and the result is typed as equal on all devices, also
    under `jax.shard_map`'s checks.

    Args:
      x: float array of any shape and size, different on every device.
      axis_name: the mesh axis; every axis of the mesh must be manual here.
      reduction: what the messages mean.
      algorithm: who talks to whom.

    Returns:
      The reduced values in the shape and dtype of `x`, equal on all devices of the axis.

    Wire: that of the algorithm, in the format of the reduction.
    """

    def reduced(x: jax.Array) -> jax.Array:
        flat = x.reshape(-1).astype(jnp.float32)
        result, _ = all_reduce_with_residual(flat, axis_name, reduction, algorithm)
        return result.reshape(x.shape).astype(x.dtype)

    if not _axes.checks_on(axis_name):
        return reduced(x)
    elsewhere = _axes.varying_axes(x).difference(_axes.names_of(axis_name))
    return _axes.as_varying(_axes.unchecked(reduced)(x), elsewhere)


def float32_mean(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """`all_reduce` of the mean in float32, as XLA does it."""
    return all_reduce(x, axis_name, *mean_of("float32", "native"))


def majority_of(
    vectors: Sequence[jax.Array], axis_name: AxisName, reduction: Majority, algorithm: Algorithm
) -> Planes:
    """The outcome of one vote on several vectors, still packed.

    Args:
      vectors: as `Majority.ballot` takes them, where the checks of `jax.shard_map` are off.
      axis_name: the mesh axis.
      reduction: the rules.
      algorithm: who talks to whom.

    Returns:
      One plane of signs or, where the outcome can be zero, also the plane of what is not zero:
      uint32 words of all vectors in turn, equal on all devices of the axis.

    Wire: that of the algorithm.
    """
    with noted((reduction, algorithm)):
        return algorithm.all_reduce(reduction.ballot(vectors, axis_name), axis_name, reduction)[0]


def all_reduce_with_residual(
    x: jax.Array, axis_name: AxisName, reduction: Reduction, algorithm: Algorithm
) -> tuple[jax.Array, jax.Array | None]:
    """Reduces a vector as `all_reduce` does, and also returns the residual.

    Args:
      x: float32[n], different on every device, where the checks of `jax.shard_map` are off.
      axis_name: the mesh axis.
      reduction: what the messages mean.
      algorithm: who talks to whom.

    Returns:
      The reduced values, equal on all devices of the axis. And this device's residual, float32[n],
      or None if `reduction` keeps no errors: summed over all devices, the vectors are N times the
      result plus the residuals.
    """
    if x.size == 0:  # x itself would still be typed as an input
        nothing = jnp.zeros_like(x)
        return nothing, (nothing if reduction.keeps_errors else None)
    reduction, n = reduction.for_this_device(axis_name), x.size
    blocks = algorithm.blocks(jax.lax.axis_size(axis_name))
    x = jnp.pad(x, (0, reduction.padded(n, blocks) - n))
    x = reduction.filled(x, n, blocks)
    with noted((reduction, algorithm)):
        prepared = reduction.prepare(x, axis_name)
        result, errors = algorithm.all_reduce(prepared, axis_name, reduction)
    result = reduction.restore(result, prepared.shared_scale, x.size)[:n]
    if not reduction.keeps_errors:
        return result, None
    return result, reduction.residual(x, errors, prepared.shared_scale)[:n]


def pmean(
    x: Any,
    axis_name: AxisName,
    codec: str | codecs.Codec = "float32",
    algorithm: str | Algorithm | None = None,
    *,
    second_hop: str | codecs.Codec | None = None,
    key: jax.Array | None = None,
    implementation: _implementations.Option = None,
) -> Any:
    """The mean over a mesh axis, like `jax.lax.pmean`, with a chosen format on the wire.

    Each array is exchanged separately; `jaxcomm.mean` exchanges gradients in buckets. The
    derivative is that of `jax.lax.pmean`, in float32: rounding is not differentiated.

    Args:
      x: a pytree of float arrays of at most 32 bits, in a region of `jax.shard_map` that is manual
        over every axis.
      axis_name: the mesh axis, or axes.
      codec: a name in `jaxcomm.codecs.BY_NAME`, or a codec.
      algorithm: "native", "direct", "ring", "two_way_ring", "halving_doubling", "circulant" or an
        algorithm; None means "native" for float32. Between CPU processes it is "ring" for 16 bits
        and int8 (short vectors take fewer rounds), "two_way_ring" for cnat on 3 to 8 devices, and
        "circulant" on more than 32. For everything else it is "direct". Where hosts have several
        devices, these are added up in float32 first, and the above is between hosts.
      second_hop: the format in which the mean is sent back; None means that of `codec`.
      key: for codecs that round or draw at random: equal on all devices, different in each call.
      implementation: which version of the codec's kernels runs, as in `jaxcomm.mean`.

    Returns:
      The means, in the shapes and dtypes of `x`, bitwise equal on all devices of the axis.

    Raises:
      TypeError: for arrays of another dtype.
      NameError: where the axis is not manual.
      ValueError: for an unknown codec or algorithm, for codecs that need error feedback, for
        "native" with a second hop or a codec other than float32 and 16 bits, and without a key
        where the codec needs one.

    Wire: for each array of n elements, (N-1) messages of ceil(n/N) values in each of two formats,
    `codec.message_bytes` each. Exceptions are halving_doubling where N is not a power of two, and
    direct with one aggregator, and "native" on CPUs, which sends 16 bits as float32. float16 adds
    an int32 `pmax`. Long vectors in 8-bit formats and in formats with scales are padded to whole
    blocks, which adds at most a 64th. Where hosts have several devices, algorithm=None sends what
    `jaxcomm.algorithms.hierarchical` does.

    Example:
      >>> import functools, jax, jax.numpy as jnp, jaxcomm
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jaxcomm.data_mesh(devices=jax.devices()[:4])
      >>> mean = functools.partial(jaxcomm.pmean, axis_name="data", codec="bfloat16")
      >>> mean = jax.shard_map(mean, mesh=mesh, in_specs=P("data"), out_specs=P())
      >>> jax.jit(mean)(jnp.arange(8.0))
      Array([3., 4.], dtype=float32)
    """
    reduction, chosen = mean_of(codec, algorithm, second_hop, implementation=implementation)
    _require_axis(axis_name)
    if reduction.is_random and key is None:
        both = codecs.from_name(codec), reduction.second_hop
        name = next((c.name for c in both if c.is_random), both[0].name)
        raise ValueError(
            f"{name} rounds at random and needs a key that is equal on all devices "
            "and another in each call: key=jax.random.fold_in(jax.random.key(0), step)."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating) or dtype == jnp.float64:
            where = _paths.path_name(path) or "x"
            raise TypeError(
                f"pmean needs float arrays of at most 32 bits, got {dtype} at {where}; "
                "convert it first, or average it with jax.lax.pmean."
            )

    def mean(number: int, leaf: jax.Array) -> jax.Array:
        # The key is an argument: in a loop it belongs to the loop, and a function may not close
        # over it.
        def coded_mean(x: jax.Array, *keys: jax.Array) -> jax.Array:
            own = dataclasses.replace(reduction, key=keys[0]) if keys else reduction
            return all_reduce(x, axis_name, own, chosen)

        coded = jax.custom_jvp(coded_mean)
        coded.defjvp(lambda x, dx: (coded(*x), jax.lax.pmean(dx[0], axis_name)))
        return coded(leaf, *([] if key is None else [jax.random.fold_in(key, number)]))

    leaves, treedef = jax.tree.flatten(x)
    means = [mean(number, jnp.asarray(leaf)) for number, leaf in enumerate(leaves)]
    return treedef.unflatten(means)


def _require_axis(axis_name: AxisName) -> None:
    """Raises a NameError where the axis is not manual, or only some axes of the mesh are."""
    manual = _axes.manual_axes()
    if not _axes.is_manual(axis_name):
        raise NameError(
            f"axis {axis_name!r} is not manual here (manual axes: {sorted(manual) or 'none'}); "
            "call this inside jax.shard_map over it."
        )
    mesh = _axes.current_mesh()
    if others := [a for a in mesh.axis_names if a not in manual and mesh.shape[a] > 1]:
        raise NameError(
            f"axis {others[0]!r} is not manual here, so what is sharded over it would be gathered; "
            "leave axis_names out of jax.shard_map, or name all axes in it."
        )
