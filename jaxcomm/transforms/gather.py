"""Whole parameters from shards, and in the backward pass shards of the exchanged gradient.

To autodiff `gather` is the identity; it also communicates. For one bucket of leaves on N devices:

    forward   shards -> one vector of the codec -> all-gather -> all N rows, decoded -> whole leaves
    backward  gradients of whole leaves + residuals -> N rows -> reduce-scatter -> shards of the
              mean, and what messages lost, which leaves as the "gradient" of the residuals

Row r holds what device r owns of every leaf of the bucket. Where `jax.checkpoint` runs a layer
again, the forward part runs again too, and the backward part does not.
"""

import dataclasses
import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from jaxcomm import _axes, _paths, codecs, collectives
from jaxcomm._axes import AxisName
from jaxcomm._cached_programs import refuse_cached_programs
from jaxcomm._notes import Message, noted
from jaxcomm._shards import ShardedParam, is_sharded
from jaxcomm.kernels.random_bits import own_key, seeded_key
from jaxcomm.kernels.reductions import all_finite
from jaxcomm.transforms._exchange import clipped, is_narrow
from jaxcomm.transforms._layout import is_exempt
from jaxcomm.transforms._residuals import rounded
from jaxcomm.transforms._scheme import Scheme
from jaxcomm.transforms.shard import split_dim_of

Arrays = list[jax.Array]
_THERE, _BACK, _KEPT = 0, 1, 2  # what a key is for: gathering shards, the gradient, residuals


@dataclasses.dataclass(frozen=True)
class _Bucket:
    """Leaves that travel together; static, as `jax.custom_vjp` requires.

    Attributes:
      scheme: how they travel.
      exempt: whether they travel in float32.
      weight: what residuals are multiplied by before they are added to gradients.
      paths: the paths of the leaves.
      dims: for each leaf the dimension that is split, counted from the end.
    """

    scheme: Scheme
    exempt: bool
    weight: int
    paths: tuple[str, ...]
    dims: tuple[int, ...]


def gather(params: Any, *, within: AxisName | None = None) -> Any:
    """Whole parameters from the shards of all devices; backward, shards of the mean gradient.

    Call it in the loss, where parameters are used: for each layer inside `jax.lax.scan` and
    `jax.checkpoint`, so that a device holds one whole layer at a time. `jax.checkpoint` gathers
    again in the backward pass; the gradient is still exchanged only once. Gather a parameter once
    and use the result as often as you need: if it is gathered twice, it is sent twice, and with
    error feedback the update is NaN, because its two residuals cannot be told apart.

    Args:
      params: the pytree that `jaxcomm.sharded_params` returned, or a part of it, or the slice that
        `jax.lax.scan` makes of a stack. Arrays are returned unchanged, so that a model with
        `gather` in it can also be evaluated under plain `jax.jit`, or trained on replicated
        parameters. Outside `jax.shard_map`, along Explicit axes, they are returned replicated.
      within: an automatic axis over which `jaxcomm.shard(params, within)` has split plain arrays,
        in addition to that of the exchange (HSDP). They become whole in each group of devices along
        that axis, and their gradients are sharded over it again. On a mesh without this axis,
        `within` has no effect.

    Returns:
      The pytree of whole arrays, in the dtypes of the parameters and equal on all devices.

    Raises:
      ValueError: for a slice of a stack that is split along its layers; for parameters that were
        cast before; if `within` is Explicit or runs device by device; or if the mesh has a further
        automatic axis of several devices, over which tensors may be split.

    Wire: forward, for each bucket of n values, N-1 messages of ceil(n/N) values in the format
    `gather=` of `jaxcomm.sharded`, each time it runs; backward, once, N-1 such messages in that of
    the exchange. Exempt leaves that are split are sent in float32 in both directions. Along
    `within`: XLA's all-gather and, backward, its reduce-scatter or all-reduce, in the dtype of the
    arrays.

    Example:
      Two devices hold one row of w each, and both compute with the whole of it:

      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.sharded(jaxcomm.mean("data"))
      >>> def loss_fn(params, x):
      ...     return jnp.mean(x @ jaxcomm.gather(params)["w"])
      >>> with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
      ...     params = jaxcomm.shard({"w": jnp.array([[1.0], [2.0]])}, "data")
      ...     at = jaxcomm.sharded_params(params, tx.init(params))
      ...     loss, _ = jax.jit(jaxcomm.value_and_grad(loss_fn, "data"))(at, jnp.eye(2))
      >>> loss.item()
      1.5
    """
    if within is not None:
        return _whole_within(params, within)
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_sharded)
    whole = [leaf.value if is_sharded(leaf) else leaf for leaf in leaves]
    if not _axes.manual_axes():
        explicit = _axes.explicit_axes()
        return treedef.unflatten(
            [jax.reshard(x, PartitionSpec()) if explicit else x for x in whole]
        )
    if any(map(is_sharded, leaves)):
        refuse_cached_programs("jaxcomm.gather exchanges in loops")
    for bucket, numbers in _buckets_of(leaves):
        with jax.named_scope("jaxcomm.gather"):
            shards = [leaves[i] for i in numbers]
            full: Any = _gathered(
                bucket,
                [s.value for s in shards],
                [s.residual for s in shards],
                [s.tick for s in shards],
            )
        for i, x in zip(numbers, full, strict=True):
            whole[i] = x
    return treedef.unflatten(whole)


def _whole_within(params: Any, axis_name: AxisName) -> Any:
    """The parameters gathered over an automatic axis, where the mesh has it."""
    names = jax.sharding.get_abstract_mesh().axis_names  # none without a mesh
    if not set(names).issuperset(_axes.names_of(axis_name)):
        return gather(params)
    if _axes.manual_axes().intersection(_axes.names_of(axis_name)):
        raise ValueError(
            f"gather(within={axis_name!r}) leaves the gathering to XLA, but that axis is "
            "manual here. Name the axis over which parameters are split, and take "
            "gradients over another one."
        )
    if _axes.explicit_axes().intersection(_axes.names_of(axis_name)):
        raise ValueError(
            f"gather(within={axis_name!r}) leaves the gathering to XLA, which decides nothing "
            "along Explicit axes; make the mesh with axis_types=(jax.sharding.AxisType.Auto,) * "
            f"{len(names)}."
        )
    # Where no axis is manual, as in an evaluation, that of the exchange is automatic too.
    further = _further_axes(axis_name) if _axes.manual_axes() else []
    if further:
        raise ValueError(
            f"gather(within={axis_name!r}) makes parameters whole over all automatic axes, and "
            f"{further[0]!r} may split them too. Specify the sharding of each parameter: "
            "jax.lax.with_sharding_constraint(x, its spec without the axis)."
        )
    pairs, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_sharded)
    if split := [leaf.place for _, leaf in pairs if is_sharded(leaf)]:
        raise ValueError(
            f"parameter {split[0].path} is split over {split[0].axis_name!r} and comes from "
            "jaxcomm.sharded_params; gather it without `within`."
        )
    world = _axes.axis_size(axis_name)
    found = []
    for path, x in pairs:
        name = _paths.path_name(path)
        dim = None if is_exempt(name, x.shape, False, ()) else split_dim_of(x.shape, world)
        found.append(x if dim is None else _in_group(PartitionSpec(*[None] * dim, axis_name), x))
    return treedef.unflatten(found)


def _further_axes(axis_name: AxisName) -> list[str]:
    """The other automatic axes with several devices."""
    mesh, own = jax.sharding.get_abstract_mesh(), _axes.names_of(axis_name)
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    automatic = [name for name, kind in kinds if kind == AxisType.Auto]
    return [name for name in automatic if name not in own and mesh.shape[name] > 1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_group(spec: PartitionSpec, x: jax.Array) -> jax.Array:
    """The array, whole on every device of a group; its gradient, in shards."""
    del spec
    return jax.lax.with_sharding_constraint(x, PartitionSpec())


_in_group.defvjp(
    lambda spec, x: (_in_group(spec, x), None),
    lambda spec, _, gradient: (jax.lax.with_sharding_constraint(gradient, spec),),
)


def _buckets_of(leaves: list[Any]) -> list[tuple[_Bucket, list[int]]]:
    """The split leaves that travel together, in the order of the tree."""
    groups: dict[tuple[Scheme, bool, int], list[list[int]]] = {}
    room: dict[tuple[Scheme, bool, int], int] = {}
    dims: dict[int, int] = {}
    for i, leaf in enumerate(leaves):
        if not is_sharded(leaf):
            continue
        place = leaf.place
        if place.dim is None or leaf.value.size == 0:
            continue
        if leaf.value.ndim < -place.dim:
            raise ValueError(
                f"parameter {place.path} is split along the axis that was sliced away; split "
                "another dimension of stacked layers: jaxcomm.shard(params, axis, layers=[...])."
            )
        if [x.dtype for x in jax.tree.leaves((leaf.residual, leaf.tick))] != _dtypes_of(leaf):
            raise ValueError(
                f"the state of parameter {place.path} was changed together with it; cast and scale "
                "parameters after jaxcomm.gather, not before it."
            )
        kind, dims[i] = (place.scheme, place.exempt, place.weight), place.dim
        size = 4 * leaf.value.size * jax.lax.axis_size(place.axis_name)
        if size > room.get(kind, 0):
            groups.setdefault(kind, []).append([])
            room[kind] = place.scheme.bucket_bytes
        groups[kind][-1].append(i)
        room[kind] -= size
    return [
        (_Bucket(*kind, tuple(leaves[i].place.path for i in own), tuple(dims[i] for i in own)), own)
        for kind, buckets in groups.items()
        for own in buckets
    ]


def _dtypes_of(leaf: ShardedParam) -> list[Any]:
    """The dtypes that the state of a parameter had, residual and tick, where it has them."""
    dtypes = {"residual": leaf.place.scheme.residual_dtype, "tick": "float32"}
    return [jnp.dtype(d) for name, d in dtypes.items() if getattr(leaf, name) is not None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(bucket: _Bucket, values: Arrays, residuals: list[Any], ticks: Arrays) -> Arrays:
    """The whole leaves of a bucket."""
    del residuals
    return _unchecked(bucket, _all_rows, (values, ticks))


def _gathered_forward(
    bucket: _Bucket, values: Arrays, residuals: list[Any], ticks: Arrays
) -> tuple[Arrays, Any]:
    # `_all_rows` itself: a policy of `jax.checkpoint` sees no names inside a nested `custom_vjp`.
    return _unchecked(bucket, _all_rows, (values, ticks)), (residuals, ticks)


def _gathered_backward(bucket: _Bucket, saved: Any, gradients: Arrays) -> Any:
    residuals, ticks = saved
    with jax.named_scope("jaxcomm.exchange"):
        shards, left = _unchecked(bucket, _exchanged, (gradients, residuals, ticks))
    return shards, left, [jnp.ones_like(tick) for tick in ticks]


_gathered.defvjp(_gathered_forward, _gathered_backward)


def _unchecked(bucket: _Bucket, f: Any, args: tuple[Any, ...]) -> Any:
    """`f(bucket, *args)` with the checks of `jax.shard_map` off, typed as varying."""
    if not _axes.checks_on(bucket.scheme.axis_name):
        return f(bucket, *args)
    results = _axes.unchecked(lambda args: f(bucket, *args))(args)
    axes = frozenset(_axes.names_of(bucket.scheme.axis_name))
    return jax.tree.map(lambda x: _axes.as_varying(x, axes), results)


def _all_rows(bucket: _Bucket, values: Arrays, ticks: Arrays) -> Arrays:
    """The forward part on one device."""
    scheme = bucket.scheme
    codec, algorithm = scheme.gather, scheme.algorithm
    if bucket.exempt:
        codec = codecs.float32()
    key = None
    if codec.is_random:
        key = _key_of(bucket, ticks, _THERE)
        key = own_key(key, jax.lax.axis_index(scheme.axis_name))
    row = jnp.concatenate([x.reshape(-1).astype(jnp.float32) for x in values])
    with noted(Message("gathered", bucket.paths)), noted((codec, algorithm)):
        rows = collectives.all_gather(row, scheme.axis_name, codec, algorithm, key)
    found, start = [], 0
    for x, dim in zip(values, bucket.dims, strict=True):
        part = rows[:, start : start + x.size]
        start += x.size
        found.append(_joined(part, x.shape, dim).astype(x.dtype))
    return found


def _exchanged(
    bucket: _Bucket, gradients: Arrays, residuals: list[Any], ticks: Arrays
) -> tuple[Arrays, list[Any]]:
    """The backward part on one device."""
    scheme, axis = bucket.scheme, bucket.scheme.axis_name
    world, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    shapes = [_shard_shape(g.shape, d, world) for g, d in zip(gradients, bucket.dims, strict=True)]
    if scheme.frozen:
        zeros = [jnp.zeros(s, g.dtype) for s, g in zip(shapes, gradients, strict=True)]
        return zeros, residuals
    owed = [
        g.astype(jnp.float32) if r is None else g.astype(jnp.float32) + _times(r, bucket.weight)
        for g, r in zip(gradients, residuals, strict=True)
    ]
    parts = [_split(x, dim, world) for x, dim in zip(owed, bucket.dims, strict=True)]
    rows = jnp.concatenate(parts, axis=1)
    if scheme.reduction is None:
        mine, errors = rows[me], None
    else:
        reduction, algorithm = scheme.reduction, scheme.algorithm
        if bucket.exempt:
            reduction, algorithm = collectives.mean_of("float32", "native")
        reduction = dataclasses.replace(reduction, key=_key_of(bucket, ticks, _BACK))
        with noted(Message("gradient", bucket.paths)), noted((reduction, algorithm)):
            mine, errors = collectives.reduce_scatter_with_residual(
                rows, axis, reduction, algorithm
            )
    if scheme.signs:
        # Votes are always finite; a device that sees other values marks its own shard with NaN.
        finite = all_finite([rows.reshape(-1)])
        mine = jnp.where(finite, jnp.sign(mine) if bucket.exempt else mine, jnp.nan)
    shards, left, start = [], [], 0
    for g, r, dim, shape in zip(gradients, residuals, bucket.dims, shapes, strict=True):
        stop = start + g.size // world
        shard = mine[start:stop]
        if errors is not None and is_narrow(g.dtype):
            # What waits in float32 can outgrow float16, and would then overflow in every step. The
            # owner keeps the excess: for a mean over N devices, N times as much.
            shard = clipped(shard, g.dtype)
            errors = errors.at[me, start:stop].add(world * (mine[start:stop] - shard))
        shards.append(shard.reshape(shape).astype(g.dtype))
        left.append(r if errors is None else _joined(errors[:, start:stop], shape, dim))
        start = stop
    if errors is not None:
        left = [_times(x, 1 / bucket.weight) for x in left]
        left = rounded(left, residuals, own_key(_key_of(bucket, ticks, _KEPT), me))
    return shards, left


def _times(x: jax.Array, weight: float) -> jax.Array:
    """In float32; as it is where the weight is 1."""
    x = x.astype(jnp.float32)
    return x if weight == 1 else weight * x


def _split(x: jax.Array, dim: int, world: int) -> jax.Array:
    """A whole leaf as (N, n/N): row r is what device r owns."""
    at = x.ndim + dim
    parts = x.reshape(*x.shape[:at], world, x.shape[at] // world, *x.shape[at + 1 :])
    return jnp.moveaxis(parts, at, 0).reshape(world, -1)


def _joined(rows: jax.Array, shard: tuple[int, ...], dim: int) -> jax.Array:
    """The reverse of `_split`, from the shape of a shard."""
    at, world = len(shard) + dim, rows.shape[0]
    parts = jnp.moveaxis(rows.reshape(world, *shard), 0, at)
    return parts.reshape(*shard[:at], world * shard[at], *shard[at + 1 :])


def _shard_shape(shape: tuple[int, ...], dim: int, world: int) -> tuple[int, ...]:
    at = len(shape) + dim
    return (*shape[:at], shape[at] // world, *shape[at + 1 :])


def _key_of(bucket: _Bucket, ticks: Arrays, purpose: int) -> jax.Array:
    """A key of the bucket, its step, layer and microbatch; equal on all devices."""
    paths = "\n".join(bucket.paths)
    key = jax.random.fold_in(seeded_key(bucket.scheme.seed), zlib.crc32(paths.encode()))
    key = jax.random.fold_in(key, purpose)
    numbers = ticks[0].reshape(-1, 3)[0].astype(jnp.int32)
    return functools.reduce(jax.random.fold_in, list(numbers), key)
