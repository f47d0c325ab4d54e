"""Which device adds the values of which place: every round of N places has N owners.

Places are dealt in rounds, like cards: round q deals the places q N to q N + N - 1, one to each
device, and begins at a device that a hash of q and of the step chooses. So each owner gets about as
many large values as any other, wherever they lie, and no message has to say where the owners' parts
begin. In the next step other devices own these places.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm._axes import Axis
from jaxcomm.codecs.entries import Entries
from jaxcomm.collectives._behind import behind_next
from jaxcomm.collectives._sending import all_to_all
from jaxcomm.collectives.sparse._sparse import add_lists
from jaxcomm.kernels import reductions, select
from jaxcomm.kernels._apart import once

_GROUP = 32  # entries that are compared with each other
_FEW = 8  # owners that a CPU compares with each entry


class Dealt(NamedTuple):
    """A device's entries, a row for each owner, in the order of their places.

    Attributes:
      values: float32[N, c]; 0 in slots without an entry.
      offsets: int32[N, c], the rounds that dealt the places; `width` in slots without an entry.
      places: int32[N, c]; n in slots without an entry.
    """

    values: jax.Array
    offsets: jax.Array
    places: jax.Array


@dataclasses.dataclass(frozen=True)
class Owners:
    """The owners of the places of a vector in one step.

    Attributes:
      n: the length of the vector.
      world: the number N of devices.
      step: int32, equal on all devices.
    """

    n: int
    world: int
    step: jax.Array

    @property
    def width(self) -> int:
        """The number of rounds, and so of each owner's places."""
        return -(-self.n // self.world)

    def of(self, places: jax.Array) -> jax.Array:
        """The owner of each place."""
        later = places % self.world + self._first(places // self.world)
        return jnp.where(later >= self.world, later - self.world, later)

    def places(self, owner: jax.Array, offsets: jax.Array) -> jax.Array:
        """The places that these rounds deal to an owner; n for rounds that do not exist."""
        later = owner - self._first(offsets)
        places = offsets * self.world + jnp.where(later < 0, later + self.world, later)
        return jnp.where(offsets < self.width, places, self.n)

    def deal(self, found: select.Selected, room: int) -> Dealt:
        """The entries for each owner; a row has room for the first `room` of them."""
        is_entry = found.indices < self.n
        owner = once(self._of_entries)(found.indices)
        rank = once(functools.partial(_ranks, world=self.world))(owner)
        slots = self.world * room
        slot = jnp.where(is_entry & (rank < room), owner * room + rank, slots)
        values = jnp.zeros(slots, jnp.float32).at[slot].set(found.values, mode="drop")
        places = jnp.full(slots, self.n, jnp.int32).at[slot].set(found.indices, mode="drop")
        offsets = jnp.where(places < self.n, places // self.world, self.width)
        return Dealt(*(x.reshape(self.world, room) for x in (values, offsets, places)))

    def split_and_reduce(
        self, found: select.Selected, room: int, entries: Entries, axis: Axis
    ) -> tuple[jax.Array, Dealt]:
        """Sends entries to their owners, which add them: float32[width], and what was sent."""
        dealt = self.deal(found, room)
        arrived = behind_next(all_to_all(entries.encode(dealt.values, dealt.offsets), axis))
        sums = add_lists(jnp.zeros(self.width, jnp.float32), *entries.decode(arrived))
        return sums, dealt._replace(values=entries.rounded(dealt.values))

    def _of_entries(self, indices: jax.Array) -> jax.Array:
        """The owner of each entry, and N for slots without an entry."""
        return jnp.where(indices < self.n, self.of(indices), self.world)

    def _first(self, offsets: jax.Array) -> jax.Array:
        """The device at which a round begins."""
        return select.hashed(offsets, self.step, self.world)


def _ranks(owner: jax.Array, world: int) -> jax.Array:
    """How many entries before each one have the same owner; N stands for no owner."""
    groups = jnp.pad(owner, (0, -owner.size % _GROUP), constant_values=world).reshape(-1, _GROUP)
    alike = groups[:, :, None] == groups[:, None, :]
    before = jnp.tril(jnp.ones((_GROUP, _GROUP), bool), -1)[None]
    rank = jnp.sum(alike & before, axis=2, dtype=jnp.int32)
    scattered = functools.partial(_in_earlier_groups, world=world)
    at_once = functools.partial(_in_earlier_groups_at_once, world=world)
    rank += jax.lax.platform_dependent(
        groups,
        cpu=at_once if world <= _FEW else scattered,
        default=at_once if world <= _GROUP else scattered,
    )
    return rank.reshape(-1)[: owner.size]


def _in_earlier_groups(groups: jax.Array, world: int) -> jax.Array:
    """How many entries of earlier groups have the owner of each entry, `(groups, entries)`."""
    group = jnp.arange(groups.shape[0], dtype=jnp.int32)[:, None]
    counts = jnp.zeros((groups.shape[0], world), jnp.int32).at[group, groups].add(1, mode="drop")
    earlier = reductions.running_sum(counts) - counts
    return earlier.at[group, groups].get(mode="fill", fill_value=0)


def _in_earlier_groups_at_once(groups: jax.Array, world: int) -> jax.Array:
    """The same for few owners, in fewer kernels: each entry is compared with all of them."""
    is_of = groups[:, :, None] == jax.lax.broadcasted_iota(jnp.int32, (1, 1, world), 2)
    counts = jnp.sum(is_of, axis=1, dtype=jnp.int32)
    earlier = reductions.running_sum(counts) - counts
    return jnp.sum(jnp.where(is_of, earlier[:, None], 0), axis=2, dtype=jnp.int32)
