"""gTopk: pairs merge their lists and keep the k largest, until all have the same list."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm import _axes
from jaxcomm._axes import Axis
from jaxcomm.codecs.entries import Entries
from jaxcomm.collectives import _sending
from jaxcomm.collectives.algorithms import halving_doubling
from jaxcomm.collectives.sparse._by_threshold import ByThreshold
from jaxcomm.collectives.sparse._sparse import SparseResult, take_out
from jaxcomm.kernels import bitplanes, select

Pairs = tuple[tuple[int, int], ...]

_ROOM = 1.25  # times k: room for the values above a reused threshold without a tolerance


class _List(NamedTuple):
    """Values in the order of their places; a slot without an entry has the place n."""

    values: jax.Array
    places: jax.Array


@dataclasses.dataclass(frozen=True)
class Gtopk(ByThreshold):
    """A butterfly in which both devices of a pair keep the k largest of the sum of their lists.

    In round j, device r merges with r XOR 2^j; after log2 N rounds all devices have the list that
    the published tree gives. A value leaves its device's residual only if its place survived every
    merge on that device's path. With N = 2^q + r devices, r of them first give their lists to a
    neighbour. In the end the neighbour returns the result, and which of the places survived.

    Wire: log2 N lists of k entries of 6 bytes, each with 4 bytes for every 2^16 values where
    n > 2^16, for N = 2^q; otherwise the busiest device sends one list and k bits more, in two more
    rounds. The merges sort 2k entries.

    References:
      S. Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for
      Low Bandwidth Networks", ICDCS 2019, arXiv:1901.04359.
    """

    name = "gtopk"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.values != "float32":
            raise ValueError(
                f'gtopk needs values="float32", got {self.values!r}: sums would be rounded at '
                "every merge, and no residual could keep the difference."
            )

    def exchange(
        self, x: jax.Array, threshold: jax.Array, step: jax.Array, axis: Axis
    ) -> tuple[SparseResult, jax.Array]:
        """See `SparseAllReduce.exchange`."""
        world, n, k = _axes.world_of(axis), x.size, self.k(x.size)
        entries = Entries(self.values, n)
        found, threshold = self._largest_k(x, threshold, step)
        mine = _List(entries.rounded(found.values), found.indices)
        best, alive = _merged_by_all(_sorted(mine), mine.places, n, entries, axis)

        mean = jnp.zeros_like(x).at[best.places].add(best.values, mode="drop") / world
        survived = alive & (mine.places < n)
        errors, taken = take_out(x, mine.values, mine.places, survived)
        delivered = jnp.minimum(found.count, k)
        applied = jnp.sum(best.places < n, dtype=jnp.int32)
        counts = found.count, delivered, applied
        outcome = SparseResult(mean, errors, taken, *counts, [best.values])
        return outcome, self.scaled(threshold, found.count, k)

    def _largest_k(
        self, x: jax.Array, last: jax.Array, step: jax.Array
    ) -> tuple[select.Selected, jax.Array]:
        """The k largest of the values above a threshold, which may be that of an earlier step."""
        k = self.k(x.size)
        if self.recompute_every == 1:
            return self.largest(x, k, k)
        room = min(x.size, math.ceil((self.tolerance or _ROOM) * k))
        found, threshold = self.about_k(x, last, step, room)
        best, _ = self.largest(found.values, k, k)
        places = found.indices.at[best.indices].get(mode="fill", fill_value=x.size)
        return select.Selected(best.values, places, found.count), threshold


def _merged_by_all(
    best: _List, mine: jax.Array, n: int, entries: Entries, axis: Axis
) -> tuple[_List, jax.Array]:
    """The list that all devices end with, and which of this device's places survived."""
    world, me = _axes.world_of(axis), _axes.place_on(axis)
    rounds = [step.pairs for step in halving_doubling().rounds(world)]
    fold = rounds.pop(0) if world & (world - 1) else ()
    alive = given_alive = jnp.ones(mine.shape, bool)
    given = best
    if fold:
        given = _sent(best, entries, axis, fold)
        best = _merged(best, given, n)
        alive = _holds(best, mine)
        given_alive = _holds(best, given.places)
    for pairs in rounds:
        best = _merged(best, _sent(best, entries, axis, pairs), n)
        alive &= _holds(best, mine)
        if fold:
            given_alive &= _holds(best, given.places)
    if fold:
        back = tuple((target, source) for source, target in fold)
        is_given = jnp.isin(me, jnp.asarray([source for source, _ in fold], jnp.int32))
        final = _sent(best, entries, axis, back)
        best = jax.tree.map(lambda a, b: jnp.where(is_given, a, b), final, best)
        # The given list is in the order of places, so the answer is too.
        answer = _sending.ppermute(bitplanes.pack(given_alive), axis, back)
        order = jnp.argsort(mine)
        alive = jnp.where(
            is_given,
            jnp.zeros_like(alive).at[order].set(bitplanes.unpack(answer, mine.size)),
            alive,
        )
    return best, alive


def _sent(mine: _List, entries: Entries, axis: Axis, pairs: Pairs) -> _List:
    """The list of this device's partner; an empty one on devices without a sender."""
    payload = entries.encode(mine.values, mine.places)
    return _List(*entries.decode(_sending.ppermute(payload, axis, pairs)))


def _merged(a: _List, b: _List, n: int) -> _List:
    """The k largest of the sum of two lists of k, in the order of their places."""
    k = a.values.size
    both = _sorted(
        _List(jnp.concatenate([a.values, b.values]), jnp.concatenate([a.places, b.places]))
    )
    same = jnp.concatenate([both.places[1:] == both.places[:-1], jnp.zeros(1, bool)])
    next_ = jnp.concatenate([both.values[1:], jnp.zeros(1, jnp.float32)])
    # The first of two equal places holds the sum, and the second is emptied.
    values = jnp.where(same, both.values + next_, both.values)
    second = jnp.concatenate([jnp.zeros(1, bool), same[:-1]])
    values = jnp.where(second | (both.places >= n), 0.0, values)
    _, kept = jax.lax.top_k(jnp.abs(values), k)
    values = values[kept]
    return _sorted(_List(values, jnp.where(values == 0, n, both.places[kept])))


def _sorted(entries: _List) -> _List:
    """The same in the order of places, so that the sum of two lists is the same on both devices."""
    places, values = jax.lax.sort((entries.places, entries.values), num_keys=1)
    return _List(values, places)


def _holds(entries: _List, places: jax.Array) -> jax.Array:
    """Whether each place is in the list, which is in the order of its places."""
    at = jnp.searchsorted(entries.places, places)
    return entries.places[jnp.minimum(at, entries.places.size - 1)] == places


def gtopk(recompute_every: int = 1, scaling: float = 1.012, tolerance: float | None = 2.0) -> Gtopk:
    """gTopk: pairs of devices merge their lists and keep the k largest, until all have the same.

    Args:
      recompute_every: as for `topk_allgather`.
      scaling: likewise.
      tolerance: likewise.

    Returns:
      The sparse all-reduce, for `jaxcomm.sparse_mean`.

    Raises:
      ValueError: for any other arguments.

    Wire: log2 N lists of k entries of 6 bytes at powers of two; otherwise the busiest device sends
    one list and k bits more. Where n > 2^16, a list has 4 bytes more for every 2^16 values.

    References:
      S. Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for
      Low Bandwidth Networks", ICDCS 2019, arXiv:1901.04359.

    Differs from the paper: a butterfly replaces the tree and the broadcast, which halves the rounds
    to log2 N. Among equal magnitudes a merge keeps the lower place. The published program sends
    entries of 16 bytes.
    """
    return Gtopk(
        values="float32",
        slack=1.0,
        recompute_every=recompute_every,
        scaling=scaling,
        tolerance=tolerance,
    )
