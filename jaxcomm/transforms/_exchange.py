"""The protocol of an exchange: what every method does around its own collective.

A step of a method, for L leaves of gradients on N devices:

1. `local_leaves` checks the gradients (one for each parameter, local, not yet averaged) and
   removes the mark that no arithmetic accepts.
2. `on_every_device` runs the rest device by device, in one region for both views: the global view
   (plain `jax.jit`; gradients and per-device state have a leading device axis) and the manual view
   (inside the user's `jax.shard_map`). A method's exchange need not know which view it is in.
3. `exchange_buckets` exchanges the large leaves bucket by bucket, each by the method's own
   collective, in the order in which their gradients appear. Buckets take turns: bucket b + 1 waits
   for bucket b, so that XLA neither joins them nor starts all of them after the last gradient. (On
   CPU, XLA drops such waits before it orders collectives, and mixes the rounds of buckets.) Inside
   the backward pass of a loop, the result of a hop of a sparse mean waits for a gradient that is
   computed in the meantime: the first hop for the first leaf of the next bucket, the second hop for
   the leaf after that. The first hop of the last bucket waits for the last exempt leaf.
4. At the end, one float32 all-reduce takes the mean of everything small (exempt leaves, scales),
   with a flag: how many devices hold a gradient, or a next residual, that is not finite. A mean
   that carries these values needs no flag: where its results are finite, its residuals are too.
5. The results are equal on all devices, so each device checks them locally: sums of finite
   gradients can overflow too. The flag of a sparse mean covers them: few of its values are new.
6. `updates_of` makes the update NaN on every device if anything was not finite, also in the dtype
   of the gradients, and `kept_if` leaves residuals as they were before the step. So either every
   device takes the step, or none does.
"""

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec

from jaxcomm import _axes, collectives
from jaxcomm._attached import attached_in
from jaxcomm._axes import AxisName
from jaxcomm._context import holding
from jaxcomm._marks import OWN_GRADIENT, kind_of, mark_local, unmark_local
from jaxcomm._notes import Message, noted
from jaxcomm._shards import is_sharded
from jaxcomm._users_line import users_line
from jaxcomm.kernels.reductions import all_finite, all_parts
from jaxcomm.transforms._buckets import LAYER, SHORT, Bucket, in_row_major, joined, split
from jaxcomm.transforms._layout import Layout, check_gradients, check_paths
from jaxcomm.transforms._specs import names_in, restrict
from jaxcomm.transforms._wrappers import refuse_wrappers
from jaxcomm.transforms.per_device import PerDevice, require_own

Arrays = list[jax.Array]
Own = tuple[Arrays, ...]
# What one device does: from its gradients, its own state, and what all devices hold alike, to
# results that are equal on all devices of the axis, and its next state.
OnDevice = Callable[[Arrays, Own, Any], tuple[Arrays, Own]]
# Where joining all leaves would only cost time: a vector of some, if any, and the others by leaf.
Partly = tuple[jax.Array | None, dict[int, jax.Array]]
# A bucket as one float32 vector, as its leaves, or in part.
Result = jax.Array | dict[int, jax.Array] | Partly
# How a method exchanges a bucket: from its number and its parts, by leaf, to the result, equal on
# all devices, and anything that the method keeps of it. The result is a `Result`, planes of votes,
# or units of blocks, where what is still encoded is kept.
OnBucket = Callable[[int, dict[int, jax.Array]], tuple[Any, Any]]

# Which part of a bucket shows that something is not finite; see `exchange_buckets`.
LookAt = Literal["results", "own", "parts"]

_TAGS = 8
FLAG, TAG, COUNTS = "not finite", "tag of the key", "counts"


class Exchanged(NamedTuple):
    """The result of an exchange, on each device.

    Attributes:
      buckets: the result of each bucket, equal on all devices.
      kept: what the method keeps of each bucket.
      exact: the float32 means of the small arrays, by their keys, equal on all devices.
      finite: whether gradients, results and what is kept are finite, on all devices along the axis.
    """

    buckets: list[Any]
    kept: list[Any]
    exact: dict[Any, jax.Array]
    finite: jax.Array


def local_leaves(updates: Any, layout: Layout) -> tuple[Arrays, Any]:
    """The leaves of local gradients, checked and in the order of states, and their tree.

    Raises:
      ValueError: for gradients that are not those of the layout's parameters, or not local; and
        inside an optax wrapper that would break the exchange.
    """
    refuse_wrappers()
    if any(map(is_sharded, jax.tree.leaves(updates, is_leaf=is_sharded))):
        raise ValueError(
            "these gradients are of jaxcomm.sharded_params and were exchanged in the backward pass "
            "already; put the exchange inside jaxcomm.sharded(...)."
        )
    if attached := attached_in(updates):
        raise ValueError(
            f"the gradient of {attached[0].path} was exchanged in the backward pass. Exchange once "
            "in a chain: the jaxcomm.in_backward that attached it comes first. Transformations of "
            "local gradients go inside it, as in "
            "jaxcomm.in_backward(optax.chain(jaxcomm.local(...), exchange), layers); "
            "jaxcomm.accumulate adds up microbatches."
        )
    grads, treedef = jax.tree.flatten(updates)
    if OWN_GRADIENT in {kind_of(g) for g in grads}:
        raise ValueError(
            "these gradients were taken at each device's own parameters, and an exchange would mix "
            "them up; give them to the jaxcomm.local_steps that has these parameters. Clipping "
            "and other transformations before the exchange belong in its inner optimizer."
        )
    check_gradients(grads, layout)
    check_paths(updates, layout)
    if not isinstance(jnp.zeros((), bool), Tracer):  # which it is inside of a trace
        warnings.warn(
            "tx.update runs outside jax.jit: operations are compiled one by one, in every step. "
            "Call it in a jitted step, such as jax.jit(tx.update).",
            UserWarning,
            stacklevel=users_line(),
        )
    own = 0 if _axes.is_manual(layout.axis_name) else 1  # the device axis, else none
    bare = unmark_local(mark_local(grads))  # also of others no derivative would be right
    pairs = zip(bare, layout.leaves, strict=True)
    return [g if names_in(leaf.spec) else in_row_major(g, own) for g, leaf in pairs], treedef


def on_every_device(
    on_device: OnDevice,
    grads: Arrays,
    layout: Layout,
    own: tuple[PerDevice, ...] = (),
    shared: Any = (),
    further_results: int = 0,
) -> tuple[Arrays, tuple[PerDevice, ...]]:
    """Runs `on_device` on every device, in a region that is manual over all axes of the mesh.

    The region has to be manual over all axes: under an axis that is automatic, flattening a leaf
    would gather it. The checks of `jax.shard_map` are off in it: `on_device` vouches that its
    results are equal on all devices of the axis.

    Args:
      on_device: what one device does; it sees no device axis.
      grads: the gradients, as they are in the current view.
      layout: what `init` recorded about the parameters.
      own: state of each device.
      shared: a pytree of arrays that are equal on all devices.
      further_results: how many arrays `on_device` returns after those of the leaves, equal on all
        devices of the mesh.

    Returns:
      The results, in the shapes of the parameters in both views, and the next `own`.
    """
    for part in own:
        require_own(part, layout)
    specs, own_specs = [leaf.spec for leaf in layout.leaves], [list(part.specs) for part in own]
    is_manual = _axes.is_manual(layout.axis_name)
    if is_manual:
        further = frozenset(_axes.current_mesh().axis_names) - _axes.manual_axes()
        specs = grad_specs = [restrict(spec, further) for spec in specs]
        own_specs = [[_behind_device_axis(s, further) for s in part] for part in own_specs]
    else:
        grad_specs = [PartitionSpec(layout.axis_name, *spec) for spec in specs]

    def run(grads: Arrays, own: list[Arrays], shared: Any, layer: Any) -> Any:
        local = grads if is_manual else [g[0] for g in grads]
        with holding(LAYER, layer):
            results, kept = on_device(local, tuple([x[0] for x in part] for part in own), shared)
        return results, [[x[None] for x in part] for part in kept]

    equal = PartitionSpec()
    in_specs = (grad_specs, own_specs, equal, equal)
    out_specs = (specs + [equal] * further_results, own_specs)
    with noted(layout):
        results, kept = _axes.region(run, in_specs, out_specs)(
            grads, [list(part.values) for part in own], shared, LAYER.get()
        )
    if is_manual:
        # Without checks, the region's results are typed as equal everywhere: restore what varies.
        names = _axes.names_of(layout.axis_name)
        leaves = [
            _axes.as_varying(x, _axes.varying_axes(g).difference(names))
            for x, g in zip(results[: len(grads)], grads, strict=True)
        ]
        results = leaves + results[len(grads) :]
        kept = [
            [_axes.as_varying(x, _axes.varying_axes(o)) for x, o in zip(*pair, strict=True)]
            for pair in zip(kept, [part.values for part in own], strict=True)
        ]
    return results, tuple(
        dataclasses.replace(part, values=k) for part, k in zip(own, kept, strict=True)
    )


def exchange_buckets(
    parts: Mapping[int, jax.Array],
    buckets: Sequence[Bucket],
    on_bucket: OnBucket,
    small: Mapping[Any, jax.Array],
    look_at: LookAt,
    axis_name: AxisName,
    equal_key: jax.Array | None = None,
    results_are_finite: bool = False,
) -> Exchanged:
    """Exchanges buckets in turn, then everything small and the flag.

    Args:
      parts: what travels in buckets, by leaf.
      buckets: which leaves travel together, in order.
      on_bucket: how the method exchanges a bucket.
      small: what is averaged exactly, in float32; leaves in the order of their gradients.
      look_at: where to look for non-finite values of buckets: "results", which every device sees;
        "parts", also what travels; "own", only at `finite` of what `on_bucket` keeps, the parts
        of everything. The last two send a flag; "own" averages the sums of `counts` with it.
      axis_name: the mesh axis.
      equal_key: a key that must be equal on all devices; if it is not, `finite` is False.
      results_are_finite: whether the results of buckets are always finite, as signs are.

    Wire: that of `on_bucket` for each bucket; one float32 all-reduce of all small arrays, the flag
    if there is one and, with a key, a tag of it.
    """
    results, kept = [], []
    exempt = tuple(key for key in small if isinstance(key, int))
    behind = collectives.Behind({**parts, **small}, list(itertools.chain(*buckets)))
    for number, bucket in enumerate(buckets):
        ready, results = in_turn({i: behind.arrays[i] for i in bucket}, results)
        behind.turns = [i for i in behind.turns if i not in bucket]
        if number == len(buckets) - 1:
            behind.turns = list(exempt[-1:])
        in_a_loop = LAYER.get() is not None
        with noted(Message("bucket", bucket)), jax.named_scope(f"bucket{number}"):
            with collectives.travelling(behind if in_a_loop else None):
                result, rest = on_bucket(number, ready)
        results.append(result)
        kept.append(rest)
    small = {key: behind.arrays[key] for key in small}
    if look_at == "own":
        local = [part for k in kept for part in k.finite] or [jnp.ones(1, bool)]
        small[FLAG] = 1 - all_parts(local).astype(jnp.float32)
        small[COUNTS] = sum((k.counts for k in kept), jnp.zeros(3, jnp.float32))
    elif look_at == "parts":
        local = [parts[i] for i in itertools.chain(*buckets)] + jax.tree.leaves(kept)
        small[FLAG] = 1 - all_finite(as_vectors(local)).astype(jnp.float32)
    if equal_key is not None:
        # Integers and their squares: the variance is zero only if all are equal. They have 10 bits,
        # or fewer on many devices, so that all sums of squares are exact. If one of very many
        # devices has another tag, the variance is small, so several tags are compared.
        bits = min(10, 1 + (24 - (jax.lax.axis_size(axis_name) - 1).bit_length()) // 2)
        drawn = jax.random.bits(equal_key, (_TAGS,), jnp.uint32) >> (32 - bits)
        tags = drawn.astype(jnp.float32) - 2 ** (bits - 1)
        small[TAG] = jnp.stack([tags, jnp.square(tags)])
    # The flag needs the last gradient, so it comes last: a bucket after it would wait for it too.
    exact, finite, computed = {}, jnp.bool_(True), []
    if small:
        small, results = in_turn(small, results)
        with noted(Message("exempt", exempt)), jax.named_scope("small"):
            computed = [collectives.float32_mean(joined(small), axis_name)]
        exact = split(computed[0], small)
    finite &= exact.pop(FLAG, 0) == 0
    if equal_key is not None:
        means, means_of_squares = exact.pop(TAG)
        variances = means_of_squares - jnp.square(means)
        finite &= jnp.all(variances < 0.25)  # the same on every device
    if look_at != "own" and not results_are_finite:
        computed += jax.tree.leaves(results)
    finite &= all_finite(as_vectors(computed))
    return Exchanged(results, kept, exact, finite)


def as_vectors(arrays: Sequence[jax.Array]) -> Arrays:
    """Vectors, which XLA on CPU reduces several times as fast as matrices.

    Short ones of a dtype are joined: on CPU, to start an operation takes as long as to reduce one.
    In a region that is manual over all axes this moves nothing; elsewhere it would gather leaves
    that are sharded over an automatic axis.
    """
    vectors = [x.reshape(-1) for x in arrays if x.size]  # empty ones say nothing
    short: dict[Any, Arrays] = {}
    for x in vectors:
        if x.size < SHORT:
            short.setdefault(x.dtype, []).append(x)
    return [*map(jnp.concatenate, short.values()), *(x for x in vectors if x.size >= SHORT)]


def vectors_in_view(arrays: Arrays, layout: Layout) -> Arrays:
    """`as_vectors` of arrays in the shapes of the parameters, in the current view.

    Those that are sharded over another axis stay as they are.
    """
    is_whole = [not names_in(leaf.spec) for leaf in layout.leaves]
    typed = list(zip(_axes.varying_alike(arrays), is_whole, strict=True))
    return [
        *as_vectors([x for x, whole in typed if whole]),
        *(x for x, whole in typed if not whole),
    ]


def on_further_axes(finite: jax.Array, axis_name: AxisName) -> jax.Array:
    """A flag that is equal along the axis, made equal along the other axes of the mesh too."""
    return _axes.on_all(finite, _axes.manual_axes().difference(_axes.names_of(axis_name)))


def in_turn(
    parts: dict[Any, jax.Array], results: list[Any]
) -> tuple[dict[Any, jax.Array], list[Any]]:
    """The parts of the next exchange and the results of the earlier ones, unchanged, in this order.

    The parts cannot be used before the last result is available. XLA joins collectives that do not
    wait for each other, up to a size that it chooses, and on GPUs it starts all of them after the
    last gradient. XLA drops unused outputs of a barrier, so use what this returns for both.
    """
    if not results:
        return parts, results
    last, *values = jax.lax.optimization_barrier((results[-1], *parts.values()))
    return dict(zip(parts, values, strict=True)), [*results[:-1], last]


def by_leaf(
    results: Sequence[Result], buckets: Sequence[Bucket], grads: Arrays
) -> dict[int, jax.Array]:
    """Buckets as arrays by leaf, in the shapes of the gradients; or the next state of leaves."""
    pieces = {}
    for result, bucket in zip(results, buckets, strict=True):
        if isinstance(result, dict):
            result = None, result
        vector, alone = result if isinstance(result, tuple) else (result, {})
        parts = {i: grads[i] for i in bucket if i not in alone}
        pieces |= alone | ({} if vector is None else split(vector, parts))
    return pieces


def updates_of(
    results: Mapping[int, jax.Array], finite: jax.Array, grads: Arrays, axis_name: AxisName
) -> tuple[Arrays, jax.Array]:
    """The updates, in the dtypes of the gradients; NaN on every device if any was not finite.

    Args:
      results: by the place of their gradient.
      finite: whether they are finite, equal along the axis.
      grads: the gradients.
      axis_name: the mesh axis.

    Returns:
      The updates, and whether they are finite: what float32 holds may overflow in 16 bits. The flag
      is equal on all devices.

    Wire: on a mesh of several axes, one int32 over the other axes.
    """
    updates = [results[i].astype(g.dtype) for i, g in enumerate(grads)]
    if narrow := [u for u in updates if u.dtype.itemsize < 4]:
        finite &= all_finite(as_vectors(narrow))
    finite = on_further_axes(finite, axis_name)
    return [jnp.where(finite, u, jnp.nan) for u in updates], finite


def within_range(
    results: Mapping[int, jax.Array], left: Mapping[int, jax.Array], grads: Arrays
) -> tuple[dict[int, jax.Array], dict[int, jax.Array]]:
    """Results within the range of float16, for float16 gradients, and the residuals that follow.

    What waits in a float32 residual can outgrow float16. It would overflow in every step from then
    on, so the excess is added to the residuals of all devices, and thus to their mean.
    """
    results, left = dict(results), dict(left)
    for i in left:
        if is_narrow(grads[i].dtype):
            near = clipped(results[i], grads[i].dtype)
            results[i], left[i] = near, left[i] + (results[i] - near)
    return results, left


def is_narrow(dtype: Any) -> bool:
    """Whether the range of this float dtype is smaller than float32's."""
    return bool(jnp.finfo(dtype).max < np.finfo(np.float32).max / 2)


def clipped(x: jax.Array, dtype: Any) -> jax.Array:
    """float32 values within the range of a dtype."""
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -most, most) if is_narrow(dtype) else x


def kept_if(finite: jax.Array, new: Sequence[jax.Array], old: Sequence[jax.Array]) -> Arrays:
    """The next per-device state: unchanged if the step is not taken.

    It is chosen in the shape in which it is kept, with its device axis. Otherwise XLA on CPU would
    not write it over the old one, but elsewhere, and copy it.
    """
    return [jnp.where(finite, a[None], b[None])[0] for a, b in zip(new, old, strict=True)]


def _behind_device_axis(spec: PartitionSpec, axes: frozenset[str]) -> PartitionSpec:
    """A spec for per-device state in the manual view, where its leading axis is local."""
    return PartitionSpec(None, *restrict(PartitionSpec(*spec[1:]), axes))
