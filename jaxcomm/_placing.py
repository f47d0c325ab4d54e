"""Places values that every process has on a mesh of several processes.

`jax.device_put` compares them by gathering the arrays of all processes on every device, which would
have to hold one model per process. Here their checksums are compared.
"""

import contextvars
import functools
import os
import re
import threading
import weakref
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcomm import _axes, _compat
from jaxcomm._context import holding
from jaxcomm._numbers import are_keys

# Letters that an error shows before what differs, and in all.
_BEFORE, _SHOWN = 80, 240


def place(
    names: Sequence[str], leaves: Sequence[Any], shardings: Sequence[NamedSharding]
) -> list[jax.Array]:
    """The leaves on the mesh, in new buffers.

    Args:
      names: the names of the leaves, for messages.
      leaves: arrays that each process has as a whole, equal in all of them, or global arrays.
      shardings: the shardings of the leaves, over one mesh.

    Returns:
      The arrays.

    Raises:
      ValueError: for leaves that differ between processes, if all have devices in the mesh.
    """
    leaves = [_strong(x) for x in leaves]
    keys = {i: jax.random.key_impl(x) for i, x in enumerate(leaves) if are_keys(x)}
    if keys:  # jax places keys on the devices of one process alone
        leaves = [jax.random.key_data(x) if i in keys else x for i, x in enumerate(leaves)]
        placed = place(names, leaves, shardings)
        for i, impl in keys.items():
            placed[i] = jax.random.wrap_key_data(placed[i], impl=impl)
        return placed
    several = [i for i, s in enumerate(shardings) if not s.is_fully_addressable]
    values = {i: _as_numpy(leaves[i]) for i in several if _is_whole(leaves[i])}
    # What `jnp` makes where a mesh is set is typed as equal everywhere, but nothing checked it.
    here = {i: _here(leaves[i]) for i in several if _is_typed(leaves[i])}
    compared = dict(sorted((values | here).items()))
    if compared and _all_take_part(shardings[several[0]]):
        _require_equal([names[i] for i in compared], list(compared.values()))
    rest = [i for i in range(len(leaves)) if i not in values]
    own = [_without_buffers_of(leaves[i], shardings[i]) for i in rest]
    moved = jax.device_put(own, [shardings[i] for i in rest], may_alias=False)
    placed = dict(zip(rest, moved, strict=True))
    for i, x in values.items():
        make = jax.make_array_from_callback
        placed[i] = make(x.shape, shardings[i], x.__getitem__, dtype=x.dtype)
    remember([placed[i] for i in compared])
    return [placed[i] for i in range(len(leaves))]


def require_equal_everywhere(names: Sequence[str], leaves: Sequence[Any]) -> None:
    """Raises a ValueError if processes differ in arrays that each has as a whole, or in settings.

    Arrays that were compared before, here or by `place`, are not compared again; nothing is, where
    some process has no device in the current mesh, or under a transformation.
    """
    if not _is_for_all():
        return
    pairs = zip(names, leaves, strict=True)
    own = [(n, x) for n, x in pairs if (_is_typed(x) or _is_whole(x)) and not _was_compared(x)]
    if own or _SETTINGS:  # otherwise one process may do this alone
        _require_same_settings()
    if own:
        _require_equal([name for name, _ in own], [_here(x) for _, x in own])
    remember([x for _, x in own])


def require_equal_shapes(rows: Sequence[np.ndarray], local: int, sharding: NamedSharding) -> None:
    """Raises a ValueError if devices have rows of other shapes or dtypes, or other leaves.

    `local` is the number of this process's devices.

    Or if they have made exchanges with other settings, see `note_settings`.

    Nothing is compared in a thread, whose messages could mix with those of the main one.
    """
    if _is_main_thread() and _all_take_part(sharding):
        kinds = "; ".join(f"{(len(x) // local, *x.shape[1:])} {x.dtype}" for x in rows)
        cure = "give every process as many rows for each of its devices, of the same kind"
        _require_same_text(kinds, "shapes of rows", cure)
        _require_same_settings()


# Of the exchanges that were made outside of a trace, as text: those that were not compared yet, and
# the checksums of the others. And what chooses among algorithms now.
_SETTINGS: list[str] = []
_AGREED: set[int] = set()
_CHOICE: list[str] = []


def note_settings(settings: Any) -> None:
    """Notes settings that must be equal in all processes, to be compared with the next arrays.

    A process may trace what others do not, such as for a report, or try an exchange on a mesh of
    its own; nothing is noted then.
    """
    text = _as_text(settings) if _is_for_all() else ""
    if text and text not in _SETTINGS and _sum_of(text) not in _AGREED:
        _SETTINGS.append(text)


_ALONE: contextvars.ContextVar[bool] = contextvars.ContextVar("alone", default=False)


def alone() -> AbstractContextManager[None]:
    """Here processes make exchanges that others do not, or in another order; none is compared."""
    return holding(_ALONE, True)


def note_choice(cluster: Any) -> None:
    """Notes what now chooses in this process, in place of what did before; None is the default."""
    _CHOICE[:] = [] if cluster is None else [f"plan.use: {_as_text(cluster)}"]


def constrained(x: Any, spec: PartitionSpec) -> jax.Array:
    """An array that is sharded so while jax traces: by its type, unless along Auto axes."""
    explicit = _axes.explicit_axes()
    over = {name for entry in spec for name in _axes.names_in_entry(entry)}
    move = jax.reshard if explicit and explicit >= over else jax.lax.with_sharding_constraint
    return move(_strong(x), spec)


def _as_text(settings: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(settings))


def _is_for_all() -> bool:
    """Whether other processes do the same: all have devices in the mesh, and nothing is traced.

    Threads may do it in another order in each process.
    """
    if jax.process_count() == 1 or _ALONE.get() or not _is_main_thread():
        return False
    if isinstance(jnp.zeros((), bool), Tracer):
        return False
    mesh = jax.sharding.get_mesh()
    return not mesh.empty and _all_take_part(NamedSharding(mesh, PartitionSpec()))


def _require_same_settings() -> None:
    lines = [_compat.versions(), *_SETTINGS, *_CHOICE]
    cure = "run the same program with the same arguments and versions everywhere"
    new = [_sum_of(text) for text in _SETTINGS]
    _SETTINGS.clear()  # also if they are refused: another exchange may follow
    _require_same_text("; ".join(lines), "settings of exchanges", cure)
    _AGREED.update(new)


def _sum_of(text: str) -> int:
    return zlib.crc32(text.encode(errors="backslashreplace"))


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _here(leaf: Any) -> np.ndarray:
    """The values that this process has of an array."""
    return np.asarray(leaf.addressable_data(0) if isinstance(leaf, jax.Array) else leaf)


# Arrays that were found to be equal in all processes, by their ids.
_COMPARED: dict[int, weakref.ref] = {}


def remember(leaves: Sequence[Any]) -> None:
    """Notes that these arrays are equal in all processes."""
    for x in leaves:
        if isinstance(x, jax.Array):
            number = id(x)
            _COMPARED[number] = weakref.ref(x, lambda _, number=number: _COMPARED.pop(number, None))


def _was_compared(x: Any) -> bool:
    return (seen := _COMPARED.get(id(x))) is not None and seen() is x


def _strong(leaf: Any) -> Any:
    """The leaf with a strong dtype, as a step returns it: else the second step compiles again."""
    if isinstance(leaf, bool | int | float | complex):
        return np.asarray(leaf, jnp.result_type(leaf))
    if getattr(leaf, "weak_type", False):
        return jax.lax.convert_element_type(leaf, leaf.dtype)
    return leaf


def _without_buffers_of(leaf: Any, sharding: NamedSharding) -> Any:
    """The leaf; a copy, where `jax.device_put` would keep its buffer for one of several devices."""
    if isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array):
        return leaf
    moves = leaf.sharding != sharding and leaf.sharding.device_set & sharding.device_set
    stays_whole = sharding.shard_shape(leaf.shape) == leaf.shape
    if not moves or not stays_whole or not leaf.is_fully_addressable:
        return leaf
    return jax.device_put(leaf, leaf.sharding, may_alias=False)


def _is_whole(leaf: Any) -> bool:
    """Whether this process has all of an array of numbers."""
    if isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array | np.ndarray):
        return False
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return False
    return isinstance(leaf, np.ndarray) or leaf.is_fully_addressable


def _is_typed(leaf: Any) -> bool:
    """Whether this is an array of numbers that other processes have too, by its type."""
    if isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array):
        return False
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended) or leaf.is_fully_addressable:
        return False
    return leaf.is_fully_replicated and len(leaf.addressable_shards) > 0


def _as_numpy(leaf: Any) -> np.ndarray:
    """A copy, which XLA may use as its buffer, in the dtype that `jax.device_put` gives it."""
    return np.array(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))


def _all_take_part(sharding: NamedSharding) -> bool:
    """Whether the mesh has devices of every process: otherwise some do not call this."""
    return len({d.process_index for d in sharding.device_set}) == jax.process_count()


def _require_equal(names: Sequence[str], values: Sequence[np.ndarray]) -> None:
    kinds = [f"{name} {x.shape} {x.dtype}" for name, x in zip(names, values, strict=True)]
    # Names and shapes first: if they differ, the number of checksums may differ too.
    _require_same_text("; ".join(kinds), "names, shapes or dtypes", "make the same parameters")
    rows = _gathered(np.asarray([zlib.crc32(x.tobytes()) for x in values], np.uint32))
    if (differs := rows != rows[:1]).any():
        other, which = np.argwhere(differs)[0]
        raise ValueError(
            f"process {other} has other values of {names[which] or 'the array'} than process 0, "
            "but all need the same; make them from the same seed on devices of one kind, or read "
            "them from the same file."
        )


def _require_same_text(text: str, what: str, cure: str) -> None:
    """Raises a ValueError, with what differs, unless all processes have the same text."""
    own = text.encode(errors="backslashreplace")
    kinds = [zlib.crc32(x) for x in (what.encode(), own)]
    found = _gathered(np.asarray([*kinds, len(own)], np.uint32))
    if (found == found[:1]).all():
        return
    if (found[:, 0] != kinds[0]).any():
        raise ValueError(
            f"processes do not make the same calls in the same order: this one compares {what}, "
            "another one something else. Call tx.init, jaxcomm.replicate and the first "
            "jaxcomm.global_batch in every process; jax.eval_shape(tx.init, params) compares "
            "nothing."
        )
    found = found[:, 1:]
    other = int(np.argwhere((found != found[:1]).any(1))[0, 0])
    letters = np.zeros(int(found[:, 1].max()), np.uint8)
    letters[: len(own)] = np.frombuffer(own, np.uint8)
    rows = _gathered(letters)[[0, other]]
    texts = [bytes(row[:n]).decode() for row, n in zip(rows, found[[0, other], 1], strict=True)]
    start = max(len(os.path.commonprefix(texts)) - _BEFORE, 0)
    zero, they = ("..." * (start > 0) + t[start : start + _SHOWN] for t in texts)
    raise ValueError(
        f"process {other} has other {what} than process 0, but all need the same; {cure}. "
        f"Process 0 says {zero or 'nothing'!r}, process {other} {they or 'nothing'!r}."
    )


def _gathered(own: np.ndarray) -> np.ndarray:
    """The vectors of all processes, which may have different numbers of devices."""
    first: dict[int, Any] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    mesh = Mesh([first[i] for i in sorted(first)], ("processes",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, PartitionSpec("processes"))
        of_all = jax.make_array_from_process_local_data(rows, own[None])
        return np.asarray(_everywhere(mesh)(of_all).addressable_data(0))


@functools.cache
def _everywhere(mesh: Mesh) -> Any:
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
