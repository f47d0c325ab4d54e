"""Messages between devices, sent so that both directions of every link are busy.

Between CPU processes XLA sends through gloo. There, a late process sends its data immediately, and
the announcement of its receive buffer queues behind the data. So two processes that send to each
other take turns, which takes twice as long as the link allows. In an all-reduce gloo announces the
buffers first, and both directions are busy. Two devices that send to each other in a round
therefore do an all-reduce of their words modulo 2^32, and each subtracts its own.

On GPUs, between the devices of one process, and for short messages, XLA's own operations are used.

Inside `first_only`, programs do all the work of an exchange but send next to nothing. So the work
can be timed separately, including the time that devices wait for each other in an exchange.
"""

import contextvars
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm import _axes, _hosts
from jaxcomm._axes import Axis, AxisName, Part
from jaxcomm._context import holding
from jaxcomm._order import tied, zero_of
from jaxcomm.kernels import _device

# Below these sizes latency dominates: bytes to one device, and bytes from one device to all. Where
# many devices send at once, even short messages overflow the queue of a link that they share. Lost
# packets wait for timeouts: 32 hosts in two clusters took 46 s instead of 1.4.
LEAST_BYTES, LEAST_TOGETHER = 8192, 65536
LEAST_SWAPPED = 32768  # an all-reduce is two messages, one after the other
_FIRST_ONLY: contextvars.ContextVar[bool] = contextvars.ContextVar("first_only", default=False)


def first_only() -> AbstractContextManager[None]:
    """Programs traced inside send only the first number of each message.

    A device fills in the rest of what it receives with the rest of its own message.
    """
    return holding(_FIRST_ONLY, True)


def ppermute(x: jax.Array, axis: Axis, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """What this device's source sends, of any shape and dtype; zeros where there is no source.

    Args:
      x: what each source sends.
      axis: the mesh axis, axes, or part of them.
      pairs: (source, target), as `_axes.place_on` numbers devices.

    Wire: the array once.
    """
    axis_name, pairs = _axes.whole_of(axis), _axes.pairs_on(axis, pairs)
    swaps = swaps_of(pairs) if _by_gloo(axis, x.nbytes, LEAST_SWAPPED) else []
    others = [pair for pair in pairs if pair not in swaps]
    if not others and swaps:
        return swapped(x, axis_name, swaps)
    send = functools.partial(_axes.ppermute, axis_name=axis_name, pairs=others)
    found = _first_of(send, x, axis_name) if _FIRST_ONLY.get() else send(x)
    if not swaps:
        return found
    # No device is both in a swap and in another message, so each needs one of the two results.
    in_swap = jnp.isin(jax.lax.axis_index(axis_name), jnp.asarray([a for a, _ in swaps], jnp.int32))
    return jnp.where(in_swap, swapped(x, axis_name, swaps), found)


def all_to_all(message: Any, axis: Axis) -> Any:
    """Block i of device r becomes block r of device i.

    Args:
      message: a pytree of arrays, whose first axes are cut into N blocks of equal length.
      axis: the mesh axis, axes, or part of them.

    Wire: (N-1)/N of the message.
    """
    world, axis_name, groups = _axes.world_of(axis), _axes.whole_of(axis), _axes.groups_on(axis)

    def send(x: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x, axis_name, 0, 0, tiled=True, axis_index_groups=groups)

    def one(x: jax.Array) -> jax.Array:
        least = min(LEAST_BYTES, LEAST_TOGETHER // world)
        if world > 1 and _by_gloo(axis, x.nbytes // world, least):
            return by_rounds(x, axis)
        if _FIRST_ONLY.get():
            return _first_of(send, x, axis_name, world)
        return send(x)

    with jax.named_scope("exchange"):
        return jax.tree.map(one, message)


def all_gather(message: Any, axis: Axis, *, tiled: bool = False) -> Any:
    """The arrays of all devices, for every array of a pytree.

    Args:
      message: what this device gives.
      axis: the mesh axis, axes, or part of them.
      tiled: whether they are joined along their first axis instead of stacked along a new one.

    Wire: N-1 times the message.
    """
    world, axis_name, groups = _axes.world_of(axis), _axes.whole_of(axis), _axes.groups_on(axis)
    gathered = functools.partial(jax.lax.all_gather, axis_name=axis_name, axis_index_groups=groups)

    def one(x: jax.Array) -> jax.Array:
        is_swap = world == 2 and _by_gloo(axis, x.nbytes, LEAST_SWAPPED)
        if not is_swap:  # gloo does more than two by a ring
            if not _FIRST_ONLY.get():
                return gathered(x, tiled=tiled)
            copies = jnp.broadcast_to(x, (world, *x.shape))
            copies = _first_of(lambda own: gathered(own[0]), copies, axis_name, world)
            return copies.reshape(-1, *x.shape[1:]) if tiled else copies
        other = ppermute(x, axis, ((0, 1), (1, 0)))
        place = _axes.place_on(axis)
        both = jnp.stack([other, other])
        both = jax.lax.dynamic_update_index_in_dim(both, x, place, 0)
        return both.reshape(-1, *x.shape[1:]) if tiled else both

    with jax.named_scope("exchange"):
        return jax.tree.map(one, message)


def after(arrived: Any, message: Any) -> Any:
    """The message, which XLA on CPU cannot send before something has arrived."""
    zero = zero_of(_as_words(jax.tree.leaves(arrived)[0].reshape(-1)[:1]))
    return jax.tree.map(functools.partial(tied, zero=zero), message)


def swaps_of(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The pairs whose target also sends to their source."""
    sent = set(pairs)
    return [(source, target) for source, target in pairs if (target, source) in sent]


def swapped(x: jax.Array, axis_name: AxisName, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """`ppermute` of a swap as an all-reduce of each pair."""
    idle = set(range(jax.lax.axis_size(axis_name))).difference(*pairs)
    groups = [[a, b] for a, b in pairs if a < b] + [[device] for device in sorted(idle)]
    mine = _as_words(x)

    def summed(words: jax.Array) -> jax.Array:
        total = functools.partial(jax.lax.psum, axis_name=axis_name, axis_index_groups=groups)
        if _FIRST_ONLY.get():
            return _first_of(lambda twice: total(twice - words[None, :1]), words + words, axis_name)
        return total(words)

    if _axes.checks_on(axis_name):  # the checks do not support groups
        both = _axes.as_varying(_axes.unchecked(summed)(mine), _axes.varying_axes(mine))
    else:
        both = summed(mine)
    return _from_words(both - mine, x)


def by_rounds(x: jax.Array, axis: Axis) -> jax.Array:
    """`all_to_all` of one array in N-1 rounds: in round k, r sends to r + k.

    Only where k is N/2 do two devices send to each other, which is a swap. The rounds are
    independent, so XLA chooses their order, the same on all devices; each waits for its messages.
    """
    world, me = _axes.world_of(axis), _axes.place_on(axis)
    blocks = x.reshape(world, -1)
    found = blocks  # a device's block for itself stays where it is
    for k in range(1, world):
        sent = jax.lax.dynamic_slice_in_dim(blocks, (me + k) % world, 1)
        arrived = ppermute(sent, axis, [(r, (r + k) % world) for r in range(world)])
        found = jax.lax.dynamic_update_slice_in_dim(found, arrived, (me - k) % world, 0)
    return found.reshape(x.shape)


def _first_of(
    send: Callable[[jax.Array], jax.Array], x: jax.Array, axis_name: AxisName, blocks: int = 1
) -> jax.Array:
    """A message of which only the first number of each block is sent; the rest is the device's own.

    First every device sends the whole message to itself. XLA fuses nothing across this send, so the
    other operations are those of a program that sends, and what follows waits for all of it.
    """
    itself = [(device, device) for device in range(jax.lax.axis_size(axis_name))]
    whole = _axes.ppermute(x, axis_name, itself).reshape(blocks, -1)
    first = send(whole[:, :1])
    return jax.lax.dynamic_update_slice(whole, first, (0, 0)).reshape(x.shape)


def _by_gloo(axis: Axis, message_bytes: int, least: int) -> bool:
    """Whether messages travel by gloo and are long enough to be sent by other operations."""
    if message_bytes < least or not _device.is_between_cpu_processes():
        return False
    return not (isinstance(axis, Part) and _is_within_hosts(axis))


def _is_within_hosts(part: Part) -> bool:
    """Whether each group is of one host, which of CPUs is a process."""
    return part.stride == 1 and _hosts.devices_per_host(part.of) % part.size == 0


def _as_words(x: jax.Array) -> jax.Array:
    """The bits of an array, uint32[n]; the last word ends in zeros."""
    flat = x.reshape(-1).astype(jnp.uint8) if x.dtype == bool else x.reshape(-1)
    width = flat.dtype.itemsize
    if width < 4:
        flat = jnp.pad(flat, (0, -flat.size % (4 // width))).reshape(-1, 4 // width)
    return jax.lax.bitcast_convert_type(flat, jnp.uint32).reshape(-1)


def _from_words(words: jax.Array, like: jax.Array) -> jax.Array:
    """The array with these bits, in the shape and dtype of `like`."""
    dtype = jnp.dtype(jnp.uint8) if like.dtype == bool else like.dtype
    if dtype.itemsize > 4:
        words = words.reshape(-1, dtype.itemsize // 4)
    flat = jax.lax.bitcast_convert_type(words, dtype).reshape(-1)
    return flat[: like.size].reshape(like.shape).astype(like.dtype)
