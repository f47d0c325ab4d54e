"""Which leaves travel together, in which order, and as which vector."""

import contextvars
import dataclasses
import functools
import itertools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import _axes
from jaxcomm._numbers import is_real
from jaxcomm._pieces import cut, starts_of
from jaxcomm.kernels import _device
from jaxcomm.transforms._layout import Layout, filled_leaves, split_over

Bucket = tuple[int, ...]

SHORT = 2**14  # values of a leaf: to start an operation on it takes as long as to do it
LARGE = 2**17  # values of a leaf that is worth loops of its own: they take 0.1 s to compile
_CONVOLUTION = 4  # axes of a kernel, two of them in space
_MOST = 2**32  # bytes of leaves that are joined: int32 counts their values, with room to spare
_EVEN = 64  # XLA on CPU concatenates sums well if this divides their lengths


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Buckets:
    """Which leaves travel together, where a state keeps something for each bucket."""

    of: tuple[Bucket, ...]

    def require_same(self, buckets: tuple[Bucket, ...]) -> None:
        """Raises a ValueError for the buckets of other leaves."""
        if buckets != self.of:
            raise ValueError(
                "the state belongs to other buckets. Make tx with the bucket_order and the "
                "bucket_mib of the run that saved the state, or start over with tx.init(params)."
            )


# Set where a layer is exchanged separately, inside the backward pass: the layer's number, from
# which keys are derived; 0 in `init`.
LAYER: contextvars.ContextVar[jax.Array | int | None]
LAYER = contextvars.ContextVar("layer", default=None)


def split_off_exempt(layout: Layout) -> tuple[Bucket, Bucket]:
    """The leaves to compress and those that are exempt; empty ones always are."""
    large = [i for i in filled_leaves(layout) if not layout.leaves[i].exempt]
    return tuple(large), _all_but(large, layout)


def split_off_empty(layout: Layout) -> tuple[Bucket, Bucket]:
    """The leaves that have values and those that have none."""
    full = filled_leaves(layout)
    return tuple(full), _all_but(full, layout)


def _all_but(chosen: list[int], layout: Layout) -> Bucket:
    return tuple(sorted(set(range(len(layout.leaves))).difference(chosen)))


def by_appearance(layout: Layout, chosen: Bucket, order: Sequence[str] | None) -> Bucket:
    """The leaves in the order in which their gradients appear.

    Args:
      layout: the leaves.
      chosen: the leaves to sort, as indices.
      order: paths of leaves, first gradient first; leaves that it does not name come last. None is
        the tree's order reversed.
    """
    rank = {path: i for i, path in enumerate(order or ())}
    return tuple(sorted(reversed(chosen), key=lambda i: rank.get(layout.leaves[i].path, len(rank))))


def buckets_of(
    layout: Layout, chosen: Bucket, order: Sequence[str] | None, limit: int
) -> tuple[Bucket, ...]:
    """Groups leaves in the order in which their gradients appear.

    A bucket is closed before it would exceed the limit, so a larger leaf is sent alone. Every
    bucket is its own concatenation of whole leaves: slices of one concatenation of all leaves would
    make the first bucket wait for the last gradient.

    Inside the backward pass of a loop, the buckets of a layer are filled starting from its last
    gradient, and the last holds two thirds of the limit: few products are left to hide it.

    Leaves that are sharded over another axis never share a bucket with others: what is equal
    along that axis must be rounded alike along it.

    Args:
      layout: the leaves.
      chosen: the leaves to group, as indices.
      order: as in `by_appearance`.
      limit: float32 bytes that a bucket holds.

    Returns:
      The buckets, each a tuple of indices.
    """
    queue = by_appearance(layout, chosen, order)
    buckets: list[list[int]] = []
    current: dict[frozenset[str], list[int]] = {}
    room: dict[frozenset[str], int] = {}
    last_first = LAYER.get() is not None
    for i in reversed(queue) if last_first else queue:
        leaf = layout.leaves[i]
        size, axes = 4 * math.prod(leaf.shape), split_over(leaf)
        if size > room.get(axes, 0):
            current[axes], room[axes] = [], 2 * limit // 3 if last_first and not buckets else limit
            buckets.append(current[axes])
        current[axes].append(i)
        room[axes] -= size
    if last_first:
        buckets = [bucket[::-1] for bucket in buckets[::-1]]
    return tuple(map(tuple, buckets))


def keys_of(key: jax.Array, layout: Layout, buckets: Sequence[Bucket]) -> list[jax.Array]:
    """A separate key for each bucket: no two of them round alike.

    It is derived from the paths of the leaves, so it also differs between the transformations of an
    `optax.partition`; from the layer, inside the backward pass; and from the shard, where the
    leaves are sharded over another axis. It is equal on all devices of the exchange's axis.

    All are drawn at once: XLA on a GPU would spend a kernel, and time to compile, on each.
    """
    paths = ["\n".join(layout.leaves[i].path for i in bucket) for bucket in buckets]
    hashes = np.array([zlib.crc32(path.encode()) for path in paths], np.uint32)
    layer = LAYER.get()

    def folded(number: jax.Array) -> jax.Array:
        own = jax.random.fold_in(key, number)
        return own if layer is None else jax.random.fold_in(own, layer)

    keys = []
    drawn = jax.vmap(folded)(jnp.asarray(hashes)) if paths else ()
    for bucket, own in zip(buckets, drawn, strict=True):
        for axis in sorted(split_over(layout.leaves[bucket[0]])):
            own = jax.random.fold_in(own, jax.lax.axis_index(axis))
        keys.append(own)
    return keys


def alone_or_joined(
    parts: Mapping[int, jax.Array], fits: Callable[[int], bool]
) -> tuple[list[dict[int, jax.Array]], int]:
    """The leaves of a bucket in groups: each large one whose size fits alone, then all others.

    To join a large leaf with others and to cut it out again takes as long as to encode it, on CPU.
    Elsewhere all are joined: XLA does that where they are encoded, in fewer kernels.

    Returns:
      The groups, none of them empty, and how many are one leaf that is alone.
    """
    on_cpu = _device.current().platform == "cpu"
    alone, rest = [], {}
    for i, x in parts.items():
        if on_cpu and x.size >= LARGE and fits(x.size):
            alone.append({i: x})
        else:
            rest[i] = x
    return alone + ([rest] if rest else []), len(alone)


def joined(parts: Mapping[Any, jax.Array], size: int | None = None) -> jax.Array:
    """The arrays as one float32 vector, padded with zeros to `size` if it is given."""
    return _concatenated([_flat(part) for part in parts.values()], size)


def joined_sums(
    a: Mapping[Any, jax.Array], b: Mapping[Any, jax.Array], size: int | None = None
) -> jax.Array:
    """The sums of arrays with the same keys, as `joined` makes one vector of them."""
    sums = [_flat(part) + _flat(b[key]) for key, part in a.items()]
    write = functools.partial(_written, size=size or sum(part.size for part in sums))
    once = functools.partial(_concatenated_once, size=size)
    return jax.lax.platform_dependent(sums, cpu=write, default=once)


def _flat(part: jax.Array) -> jax.Array:
    return part.reshape(-1).astype(jnp.float32)


def _concatenated(vectors: list[jax.Array], size: int | None) -> jax.Array:
    whole = jnp.concatenate(vectors)
    return whole if size is None else jnp.pad(whole, (0, size - whole.size))


def _concatenated_once(vectors: list[jax.Array], size: int | None) -> jax.Array:
    """`_concatenated` for GPUs, followed by a barrier.

    Without it, each kernel of the codec would compute all sums again. The kernel for a leaf's next
    residual would read other leaves too, and could not write in place.
    """
    return jax.lax.optimization_barrier(_concatenated(vectors, size))


def _written(vectors: list[jax.Array], size: int) -> jax.Array:
    """The same for CPU, where XLA is slow to concatenate or pad sums of odd lengths."""
    even = list(itertools.takewhile(lambda part: part.size % _EVEN == 0, vectors))
    behind = size - sum(part.size for part in even)
    if behind % _EVEN:
        even, behind = [], size
    if not behind:
        return jnp.concatenate(even)
    # Without the barrier XLA makes the first write a `pad`.
    vector = jax.lax.optimization_barrier(jnp.zeros(behind, jnp.float32))
    odd = vectors[len(even) :]
    for part, start in zip(odd, starts_of([part.size for part in odd]), strict=True):
        vector = jax.lax.dynamic_update_slice_in_dim(vector, part, start, axis=0)
    return jnp.concatenate([*even, vector])


def split(vector: jax.Array, parts: Mapping[Any, Any]) -> dict[Any, jax.Array]:
    """The reverse of `joined`, in the shapes of `parts`."""
    pieces = cut(vector, [math.prod(part.shape) for part in parts.values()])
    pairs = zip(pieces, parts.items(), strict=True)
    return {key: piece.reshape(part.shape) for piece, (key, part) in pairs}


def bytes_of(bucket_mib: Any) -> int:
    """The size of a bucket in bytes, from MiB; 4 GiB at most.

    Raises:
      TypeError, ValueError: for anything but a positive Python number.
    """
    if isinstance(bucket_mib, jax.Array):
        raise TypeError(
            "bucket_mib decides shapes and must be a Python number; under "
            'optax.inject_hyperparams pass static_args=("bucket_mib",).'
        )
    if not (is_real(bucket_mib) and 0 < bucket_mib < math.inf):
        raise ValueError(f"bucket_mib must be a positive number, got {bucket_mib!r}.")
    return min(max(int(bucket_mib * 2**20), 1), _MOST)


def in_row_major(x: jax.Array, whole: int = 0) -> jax.Array:
    """The same array, in the memory layout of states, where gradients may have another one.

    On NVIDIA GPUs, gradients of convolutions do. XLA would convert each state that is added to such
    a gradient to that layout and back, and copy states that it could not write in place. Arrays of
    fewer than four axes stay as they are: the barrier would keep the products that make them from
    hiding some of what is sent.

    Args:
      x: an array of which only the first `whole` axes may be sharded over an axis that is not
        manual; others would be gathered.
      whole: the number of leading axes to keep.
    """

    def flat_and_back(x: jax.Array) -> jax.Array:
        flat = jax.lax.optimization_barrier(x.reshape(*x.shape[:whole], -1))
        return _axes.as_varying(flat.reshape(x.shape), _axes.varying_axes(x))

    if x.ndim < whole + _CONVOLUTION or not x.size:
        return x
    return jax.lax.platform_dependent(x, cuda=flat_and_back, default=lambda x: x)
