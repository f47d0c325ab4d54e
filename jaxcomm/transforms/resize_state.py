"""A state that was saved with another number of devices."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxcomm import _axes
from jaxcomm._numbers import are_keys
from jaxcomm.transforms._layout import Layout, are_other_names
from jaxcomm.transforms._wrappers import with_extra_args
from jaxcomm.transforms.per_device import PerDevice, is_own


def resize_state(tx: optax.GradientTransformation, state: Any, params: Any) -> Any:
    """The state of a run that continues on another number of devices.

    State that differs from device to device becomes, on every new device, its mean over the old
    ones. So the mean of the residuals over devices, which the updates still lack, stays as it was,
    and each device's own parameters under `jaxcomm.local_steps` start at the average of the old
    ones. Counters stay. Devices' shares of a bucket, such as the second-hop errors of
    `jaxcomm.one_bit_adam`, are joined and redistributed, so they are unchanged too.

    Args:
      tx: the transformation of the new run, made like that of the old one.
      state: the state of the old run, as numpy arrays, arrays that this process holds in full, or
        arrays that are split over the devices of the current mesh, along any of their axes: then no
        device needs room for the residuals of all old ones. Also as the lists and dictionaries that
        orbax restores.
      params: the parameters, placed on the current mesh. Every other axis of that mesh, such as one
        that splits parameters, must be as long as in the old run. Lists and dictionaries do not
        record its length: there, another length silently misplaces the vectors of buckets, such as
        the errors of `jaxcomm.one_bit_adam`.

    Returns:
      A state like that of `tx.init(params)`, with the numbers of the old one.

    Raises:
      ValueError: if the state is that of another transformation, or has arrays on other devices of
        which this process holds only a part; or, for a state with its own types, if other
        parameters are exempt, other axes split the parameters over another number of devices, or
        the errors of `jaxcomm.one_bit_adam` lie in other buckets.

    Wire: nothing; of arrays that are split, what XLA sends to average or to place them.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.mean("data", "int8", error_feedback=True)
      >>> w = jnp.zeros((2, 2))
      >>> with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
      ...     saved = jax.tree.map(jax.device_get, tx.init(w))
      >>> with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
      ...     jaxcomm.resize_state(tx, saved, w).residual.values[0].shape
      (2, 2, 2)
    """
    tx = with_extra_args(tx, "resize_state", "tx")
    new, treedef = jax.tree_util.tree_flatten_with_path(tx.init(params), is_leaf=is_own)
    old = {_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(state)}
    pairs = [(x, _taken(old, _name(path), is_own(x))) for path, x in new]
    if old or any(x is None for _, x in pairs):
        raise ValueError(
            "the state is not one of this transformation: they hold different arrays. Make tx as "
            "in the run that saved the state."
        )
    nodes = jax.tree.leaves(state, is_leaf=is_own)  # a state from a file has none of its own
    _check_shards([x for _, x in new if is_own(x)], list(filter(is_own, nodes)))
    static = treedef.unflatten([None] * len(new))
    _check_names(treedef.unflatten([x for _, x in new]), state)
    _check_buckets(static, state)
    return treedef.unflatten([_resized(*pair) for pair in pairs])


def _name(path: Any) -> str:
    """A path that is the same for named tuples and for the lists and dictionaries of a file."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _taken(old: dict[str, Any], name: str, own: bool) -> Any:
    """What an old state has at a path, removed from it: an array, or those of each device."""
    if not own:
        return old.pop(name, None)
    found = []
    while (path := f"{name}/values/{len(found)}".removeprefix("/")) in old:
        found.append(old.pop(path))
    return found


def _check_shards(new: list[PerDevice], old: list[PerDevice]) -> None:
    """Raises if other axes split the leaves of buckets in another way."""
    for here, there in zip(new, old, strict=False):
        if len(here.shards) == len(there.shards) and here.shards != there.shards:
            raise ValueError(
                f"other axes split the parameters over {there.shards} devices in the old "
                f"run, and over {here.shards} here; only the axis of the exchange may have another "
                "length."
            )


def _check_names(new: Any, old: Any) -> None:
    """Raises if what is kept for a parameter would go to another one; a file has no names.

    Args:
      new: the state of `tx.init`.
      old: the state, whose arrays have the same names.
    """
    for here, there in zip(_states_in(new), _states_in(old), strict=False):
        if type(here) is not type(there):
            raise ValueError(
                f"the state is not one of this transformation: it has a {type(there).__name__} "
                f"where this one has a {type(here).__name__}."
            )
        has_residuals = bool(getattr(getattr(here, "residual", None), "values", ()))
        for leaf, other in zip(here.layout.leaves, there.layout.leaves, strict=False):
            if are_other_names(leaf.path, other.path):
                raise ValueError(
                    f"the state was made for a parameter {other.path!r} where tx.init now finds "
                    f"{leaf.path!r}; resize it with the parameters of the run that saved it."
                )
            if has_residuals and leaf.exempt != other.exempt:
                raise ValueError(
                    f"{leaf.path!r} is {'' if leaf.exempt else 'not '}exempt here and was "
                    f"{'' if other.exempt else 'not '}exempt in the old run, so residuals would go "
                    "to another parameter. Make tx with the exempt= of that run."
                )


def _states_in(tree: Any) -> list[Any]:
    """The states of exchanges, also those that others hold."""
    is_state = lambda x: isinstance(getattr(x, "layout", None), Layout)  # noqa: E731
    found = []
    for node in jax.tree.leaves(tree, is_leaf=is_state):
        if is_state(node):
            found += [node, *_states_in(tuple(node))]
    return found


def _check_buckets(new: Any, old: Any) -> None:
    """Raises if what lies in vectors of buckets would go to other leaves."""

    def buckets(state: Any) -> list[Any]:
        nodes = jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "buckets"))
        return [node.buckets for node in nodes if hasattr(node, "buckets")]

    if any(here != there for here, there in zip(buckets(new), buckets(old), strict=False)):
        raise ValueError(
            "the state belongs to other buckets. Make tx with the bucket_order and the "
            "bucket_mib of the run that saved the state."
        )


def _resized(new: Any, old: Any) -> Any:
    """The numbers of `old` in the shapes and places of `new`."""
    if not is_own(new):
        if _is_split(old, new):
            return _same_on_devices(new, old)
        return _on_numbers(_same, new, old)
    if len(old) != len(new.values):
        raise ValueError(
            f"the state is not one of this transformation: it keeps {len(old)} arrays for "
            f"each device where this one has {len(new.values)}, as with other error_feedback or "
            "exempt, or on one device, where jaxcomm.sharded splits nothing and has no residuals. "
            "Make tx as in the run that saved the state, on two devices or more."
        )
    resize = _dealt if new.are_shares else _spread
    values = []
    for x, o, spec in zip(new.values, old, new.specs, strict=True):
        if _is_split(o, x) and not new.are_shares:
            values.append(_spread_on_devices(x, o, spec))
            continue
        o = _resharded(o, NamedSharding(x.sharding.mesh, PartitionSpec())) if _is_split(o, x) else o
        values.append(_on_numbers(partial(resize, spec=spec), x, o))
    return dataclasses.replace(new, values=values)


def _is_split(old: Any, new: Any) -> bool:
    """Whether an old array is split over the devices that are to have the new one."""
    return (
        isinstance(old, jax.Array)
        and not old.is_fully_replicated
        and isinstance(new.sharding, NamedSharding)
        and old.sharding.device_set == new.sharding.device_set
    )


def _resharded(x: jax.Array, sharding: Sharding) -> jax.Array:
    return jax.jit(lambda x: x, out_shardings=sharding)(x)


def _same_on_devices(new: jax.Array, old: jax.Array) -> jax.Array:
    """The old numbers of an array that is split, where the new one is."""
    if old.shape != new.shape:
        raise _other(old.shape, new.shape)
    if not are_keys(new):
        old = old.astype(new.dtype)
    return _resharded(old, new.sharding)


def _on_numbers(f: Callable[[Any, np.ndarray], jax.Array], new: Any, old: Any) -> Any:
    """`f` of a new array and an old one; for random keys, of the numbers that they are made of."""
    if isinstance(old, jax.Array) and not (old.is_fully_addressable or old.is_fully_replicated):
        raise ValueError(
            f"the state has an array of shape {old.shape} of which this process holds only a part. "
            "Gather it: jax.experimental.multihost_utils.process_allgather(state, "
            "tiled=True), or let orbax restore whole arrays, on every device of the mesh."
        )
    old = np.asarray(jax.random.key_data(old) if are_keys(old) else old)
    if old.dtype.kind == "V" and jnp.result_type(new) == jnp.bfloat16:  # as numpy's files have it
        old = old.view(jnp.bfloat16)
    if not are_keys(new):
        return f(new, old)
    return jax.random.wrap_key_data(f(jax.random.key_data(new), old), impl=jax.random.key_impl(new))


def _same(new: Any, old: np.ndarray) -> jax.Array:
    """The old numbers, which are the same on all devices."""
    if old.shape != jnp.shape(new):
        raise _other(old.shape, jnp.shape(new))
    return _placed(old, new)


def _other(old: tuple[int, ...], new: tuple[int, ...], each: str = "") -> ValueError:
    return ValueError(
        f"the state is not one of this transformation: it holds {old}{each} where this one has "
        f"{new}."
    )


def _device_axis(spec: PartitionSpec) -> int:
    """Which axis counts devices: the first, or in stacks of layers the second."""
    return next(i for i, entry in enumerate(spec) if entry is not None)


def _spread(new: jax.Array, old: np.ndarray, spec: PartitionSpec) -> jax.Array:
    """The mean over the old devices, on every new one."""
    axis = _device_axis(spec)
    _check_shapes(new, old, axis)
    is_float = jnp.issubdtype(old.dtype, jnp.floating)
    mean = old.mean(axis, np.float64, keepdims=True) if is_float else old.take([0], axis)
    return _placed(np.broadcast_to(mean, new.shape), new)


def _spread_on_devices(new: jax.Array, old: jax.Array, spec: PartitionSpec) -> jax.Array:
    """The same of an array that is split over the new devices, none of which has all of it."""
    axis = _device_axis(spec)
    _check_shapes(new, old, axis)
    return _spread_program(new, axis, are_keys(old))(old)


def _spread_program(new: Any, axis: int, keys: bool) -> Any:
    """From the arrays of all old devices to their mean, on every new one; of keys, the first."""

    def spread(old: jax.Array) -> jax.Array:
        is_float = not keys and jnp.issubdtype(old.dtype, jnp.floating)
        first = jax.lax.slice_in_dim(old, 0, 1, axis=axis)
        mean = jnp.mean(old, axis, jnp.float32, keepdims=True) if is_float else first
        return jnp.broadcast_to(mean.astype(new.dtype), new.shape)

    return jax.jit(spread, out_shardings=new.sharding)


def _check_shapes(new: jax.Array, old: Any, axis: int) -> None:
    """Raises unless the arrays differ only in their numbers of devices."""
    if np.delete(old.shape, axis).tolist() != np.delete(new.shape, axis).tolist():
        raise _other(old.shape[axis + 1 :], new.shape[axis + 1 :], " for each device")


def _dealt(new: jax.Array, old: np.ndarray, spec: PartitionSpec) -> jax.Array:
    """Parts of a bucket, joined and dealt out again: device i owns part i.

    Where other axes split the bucket's leaves, each shard has its own bucket.
    """
    axis = _device_axis(spec)
    split = spec[axis + 1] if len(spec) > axis + 1 else None
    shards = 1 if split is None else _axes.axis_size(split)
    if old.ndim != axis + 2 or old.shape[:axis] != new.shape[:axis] or old.shape[-1] % shards:
        raise _other(old.shape[axis + 1 :], new.shape[axis + 1 :], " for each device")
    stacks, devices, length = new.shape[:axis], new.shape[axis], new.shape[-1] // shards
    parts = np.swapaxes(old.reshape(*stacks, old.shape[axis], shards, -1), axis, axis + 1)
    parts = parts.reshape(*stacks, shards, -1)
    # What lies beyond the bucket's end is zero.
    joined = np.zeros((*stacks, shards, devices * length), old.dtype)
    size = min(parts.shape[-1], joined.shape[-1])
    joined[..., :size] = parts[..., :size]
    dealt = np.swapaxes(joined.reshape(*stacks, shards, devices, length), axis, axis + 1)
    return _placed(dealt.reshape(new.shape), new)


def _placed(values: np.ndarray, like: jax.Array) -> jax.Array:
    values = values.astype(like.dtype)  # a copy: XLA on CPU would use the array that was passed
    if not isinstance(like.sharding, NamedSharding):
        return jnp.asarray(values)
    make = jax.make_array_from_callback
    return make(values.shape, like.sharding, values.__getitem__, dtype=values.dtype)
