"""An all-to-all that keeps both directions of every link busy.

Between CPU processes XLA sends through gloo, which moves the two directions between the same two
processes one after the other; TCP does not. XLA's own all-to-all shifts: in round k, device r sends
to r + k. For an even N, devices r and r + N/2 then send to each other in one round, which takes
twice as long as any other. Here the N(N-1) messages are dealt out to rounds in which no two devices
send to each other.

On GPUs, between the devices of one process, and for short messages it is XLA's own operation.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import _axes
from jaxcomm._axes import AxisName
from jaxcomm.kernels import _device

# rounds[t][r] is (target, part): what device r sends in round t.
Rounds = tuple[tuple[tuple[int, int], ...], ...]
_SEARCHED = 64  # for more devices, one slow round of N-1 does not matter
LEAST_BYTES = 8192  # of a message to one device; shorter ones are a matter of latency


def all_to_all(message: Any, axis_name: AxisName) -> Any:
    """Block i of device r becomes block r of device i, for every array `(N, ...)` of a pytree.

    Wire: (N-1)/N of the message.
    """
    world = jax.lax.axis_size(axis_name)
    between_cpus = _device.is_between_cpu_processes()

    def one(x: jax.Array) -> jax.Array:
        if between_cpus and world > 2 and x.nbytes // world >= LEAST_BYTES:
            return by_rounds(x, axis_name)
        return jax.lax.all_to_all(x, axis_name, split_axis=0, concat_axis=0, tiled=True)

    with jax.named_scope("exchange"):
        return jax.tree.map(one, message)


def by_rounds(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """`all_to_all` of one array by `ppermute`, one round after the other."""
    world, me = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    parts, rounds = rounds_for(world)
    rows = x.reshape(world, -1)
    padding = -rows.shape[1] % parts
    rows = jnp.pad(rows, ((0, 0), (0, padding))).reshape(world * parts, -1)
    found, last = rows, None  # a device's block for itself stays where it is
    for step in rounds:
        to = np.asarray([target * parts + part for target, part in step])
        into = np.empty(world, int)
        for source, (target, part) in enumerate(step):
            into[target] = source * parts + part
        sent = jax.lax.dynamic_slice_in_dim(rows, jnp.asarray(to)[me], 1)
        if last is not None:  # two rounds at once may meet on a pair
            sent, _ = jax.lax.optimization_barrier((sent, last))
        pairs = [(source, target) for source, (target, _) in enumerate(step)]
        last = _axes.ppermute(sent, axis_name, pairs)
        found = jax.lax.dynamic_update_slice_in_dim(found, last, jnp.asarray(into)[me], 0)
    return found.reshape(world, -1)[:, : x.size // world].reshape(x.shape)


@functools.cache
def rounds_for(world: int) -> tuple[int, Rounds]:
    """Rounds in which no two devices send to each other, for 3 devices and more.

    Returns:
      The number of parts of a message, and the rounds: permutations of the devices, in which every
      part of every message is once.
    """
    return 2 if world == 4 else 1, _in_parts(targets(world))


def targets(world: int) -> Iterator[list[int]]:
    """To whom each device sends, round by round; each pair is met once, or twice for 4 devices."""
    half = world // 2
    if world == 4:  # whole messages cannot: only cycles through all four will do
        yield from (_cycle((0, *rest)) for rest in itertools.permutations((1, 2, 3)))
        return
    shifts = [k for k in range(1, world) if 2 * k != world]
    if world % 2:
        mixed = []
    elif world & (world - 1):
        # Of the shifts by N/2 and s, either round takes each from one half of the devices.
        power = world & -world
        s = half - power
        shifts.remove(s)
        first = [half if r % power < power // 2 else s for r in range(world)]
        mixed = [first, [half + s - shift for shift in first]]
    elif 2 < world <= _SEARCHED:
        shifts = [k for k in shifts if k not in (2, 3)]
        mixed = _three_rounds(world)
    else:
        mixed = [[half] * world]
    for row in itertools.chain(([k] * world for k in shifts), mixed):
        yield [(r + k) % world for r, k in enumerate(row)]


def _cycle(order: tuple[int, ...]) -> list[int]:
    """Everyone sends to the next in a circle."""
    return [order[(order.index(r) + 1) % len(order)] for r in range(len(order))]


def _in_parts(rows: Iterable[list[int]]) -> Rounds:
    """A message that is sent in several rounds is sent in as many parts."""
    sent: dict[tuple[int, int], int] = {}
    rounds = []
    for row in rows:
        step = []
        for pair in enumerate(row):
            sent[pair] = sent.get(pair, -1) + 1
            step.append((pair[1], sent[pair]))
        rounds.append(tuple(step))
    return tuple(rounds)


def _three_rounds(world: int) -> list[list[int]]:
    """The shifts by N/2, 2 and 3 in three rounds, for N = 8, 16, 32 and 64.

    Found by trying: next is always a device for which the fewest choices are left.

    Returns:
      For each round and device, by how much it shifts.
    """
    shifts = (world // 2, 2, 3)
    chosen: dict[int, tuple[int, ...]] = {}  # of a device, the rounds of its three shifts

    def fits(r: int, rounds: tuple[int, ...]) -> bool:
        opposite = chosen.get((r + shifts[0]) % world)
        if opposite is not None and opposite[0] == rounds[0]:
            return False  # both would send to each other
        for shift, number in zip(shifts, rounds, strict=True):
            for i, other in enumerate(shifts):
                also = chosen.get((r + shift - other) % world)
                if also is not None and also[i] == number:
                    return False  # the target would receive twice in a round
        return True

    def search() -> bool:
        left = [r for r in range(world) if r not in chosen]
        if not left:
            return True
        orders = list(itertools.permutations(range(3)))
        choices = {r: [rounds for rounds in orders if fits(r, rounds)] for r in left}
        r = min(left, key=lambda r: len(choices[r]))
        for rounds in choices[r]:
            chosen[r] = rounds
            if search():
                return True
            del chosen[r]
        return False

    if not search():
        raise AssertionError(f"no three rounds were found for {world} devices")
    return [[shifts[chosen[r].index(t)] for r in range(world)] for t in range(3)]
