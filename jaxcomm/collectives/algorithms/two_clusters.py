"""Votes of two clusters, with the link between them busy almost all the time.

Devices 0 to m-1 are one cluster, m to 2m-1 the other; all messages between them share one link. A
count of m votes has b = ceil(log2(m+1)) bits. Each cluster decides half of the coordinates, so
counts of b/2 bits per coordinate cross the link in each direction, and results of 1/2 bit. Other
algorithms send more across, or leave the link idle: in a ring, counts of few votes cross it too,
and in `hierarchical` nothing crosses while the clusters count by themselves.

Here the vector is cut into segments, and each segment into 2m blocks, one for each device to
decide. A segment takes four turns, and each turn starts the next segment:

    turn   within each cluster               across
    1      votes, to who counts the block
    2                                        counts of blocks that the other cluster decides
    3      results of blocks decided here    the same results
    4      results that came across

A turn has m rounds, in which each device sends one message to each other device of its cluster and
one across. A device is node 1 to m of its cluster, and node 0 is the other cluster. In round d,
node j sends to node j + d modulo m+1: node m+1-d sends across, to node d there. So node j counts
two blocks, its own and that of node m+1-j of the other cluster. If m is even, no two devices send
to each other in a round.
"""

import dataclasses
import itertools
from collections.abc import Generator, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm._axes import AxisName
from jaxcomm.collectives import _sending
from jaxcomm.collectives.algorithms._algorithm import Algorithm, length, message_id
from jaxcomm.collectives.algorithms.direct import Direct
from jaxcomm.collectives.reductions import Majority, Prepared, Reduction
from jaxcomm.kernels import _device
from jaxcomm.kernels.bitplanes import planes_for


@dataclasses.dataclass(frozen=True)
class TwoClusters(Algorithm):
    """Counts within two clusters while counts and results of other segments cross between them.

    Messages within a cluster travel at the same time as those across, padded to one length. The
    segments are as long as lets both take equally long (`weights`).

    Wire: with m devices in a cluster, about (b+1)/2 bits per weight, b = ceil(log2(m+1)), and a
    fill and a drain: 2.28, 2.70 and 3.22 bits for m = 4, 8 and 16, in 8m rounds. With every round
    as long as its longest message, they take the time of 2.33, 2.72 and 3.22 bits.
    """

    name = "two_clusters"

    def require_world(self, world: int) -> None:
        """See `Algorithm.require_world`: an even number, or a single device."""
        if world > 1 and world % 2:
            raise ValueError(
                "two_clusters needs an even number of devices, half of them in each cluster, got "
                f'{world}; choose another algorithm, such as "two_way_ring".'
            )

    def require_own_blocks(self, axis_name: AxisName) -> None:
        """See `Algorithm.require_own_blocks`: a device owns a block of each segment."""
        raise ValueError(
            f"two_clusters leaves each device of {axis_name!r} several blocks, so parameters "
            "cannot be split over them; choose direct, ring or circulant."
        )

    @property
    def for_means(self) -> Algorithm:
        """There is none: sums of a mean are as wide as its values, and a ring wastes nothing."""
        raise ValueError('two_clusters is for votes; between clusters a mean goes by "ring".')

    def all_reduce(
        self, prepared: Prepared, axis_name: AxisName, reduction: Reduction
    ) -> tuple[Any, Any]:
        """See `Algorithm.all_reduce`."""
        assert isinstance(reduction, Majority)  # others ask `for_means`
        world = jax.lax.axis_size(axis_name)
        self.require_world(world)
        if world == 1:  # no message
            return Direct().all_reduce(prepared, axis_name, reduction)
        place = _Place.on(axis_name)
        words = length(prepared.vector)
        lengths = block_lengths(words, place.near)
        votes, coins = (
            _segments(x, lengths, place) for x in (prepared.vector, prepared.replicated)
        )
        running = [_decided(reduction, place, *parts) for parts in zip(votes, coins, strict=True)]
        sent: dict[int, _Message] = {}
        decided: dict[int, Any] = {}
        for turn in itertools.count():
            if turn < len(running):
                sent[turn] = next(running[turn])
            if not sent:
                break
            arrived, sent = _exchanged(sent, place), {}
            for number, message in arrived.items():
                try:
                    sent[number] = running[number].send(message)
                except StopIteration as end:
                    decided[number] = end.value
        in_order = [decided[number] for number in range(len(running))]
        return jax.tree.map(lambda *parts: jnp.concatenate(parts)[:words], *in_order), None


class _Place(NamedTuple):
    """Where a device is.

    Attributes:
      axis_name: the mesh axis, or axes.
      near: m, the devices of a cluster.
      cluster: 0 or 1, traced.
      node: 1 to m, traced.
    """

    axis_name: AxisName
    near: int
    cluster: jax.Array
    node: jax.Array

    @classmethod
    def on(cls, axis_name: AxisName) -> "_Place":
        world, me = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
        near = world // 2
        return cls(axis_name, near, me // near, me % near + 1)


class _Message(NamedTuple):
    """What a device sends in a turn, or what has arrived: uint32 words.

    Attributes:
      near: `(m, words)`, to or from each node of the cluster, itself included.
      across: `(words,)`.
    """

    near: jax.Array
    across: jax.Array


def _decided(
    reduction: Majority, place: _Place, votes: Any, coins: Any
) -> Generator[_Message, _Message, Any]:
    """The four turns of a segment: yields what this device sends, gets what has arrived.

    Args:
      reduction: the vote.
      place: of this device.
      votes: this device's, `(2, m, words)`: row (0, j-1) is the block of node j here, and (1, j-1)
        the one that node j counts for the other cluster.
      coins: the same of what is replicated.

    Returns:
      The results of all blocks, as planes in the order of the vector.
    """
    world, m = 2 * place.near, place.near
    none = jnp.zeros((m, 0), jnp.uint32)
    both = jax.tree.map(lambda v: jnp.concatenate([v[0], v[1]], axis=1), votes)
    start = reduction.start(both, world)
    with jax.named_scope("encode"):
        ballots = reduction.encode(start, (1,) * m, message_id(1, 0))
    arrived = yield _Message(ballots.reshape(m, -1), none[0])

    with jax.named_scope("decode"):
        near = arrived.near.reshape(ballots.shape)
        counts = reduction.decode_and_merge(near, (1,) * m, start)
    mine, theirs = (jax.tree.map(lambda p, i=i: jnp.split(p, 2, 1)[i], counts) for i in (0, 1))
    with jax.named_scope("encode"):
        message = reduction.encode(theirs, (m,), message_id(m, 0))
    arrived = yield _Message(none, message.reshape(-1))

    with jax.named_scope("decode"):
        across = arrived.across.reshape(message.shape)
        full = reduction.merge(mine, reduction.decode(across, (m,), mine))
    tossed = jax.tree.map(lambda c: c[0, place.node - 1][None], coins)
    with jax.named_scope("encode"):
        result = reduction.finish(full, tossed, world).reshape(1, -1)
    arrived = yield _Message(jnp.tile(result, (m, 1)), result[0])

    here = arrived.near
    arrived = yield _Message(jnp.tile(arrived.across, (m, 1)), none[0])

    there = arrived.near[::-1]  # node j here has them of node m+1-j there
    first = jnp.where(place.cluster == 0, here, there)
    second = jnp.where(place.cluster == 0, there, here)
    n = jax.tree.leaves(votes)[0].shape[-1]
    results = jnp.concatenate([first, second]).reshape(world, -1, n)
    with jax.named_scope("decode"):
        return jax.tree.map(jnp.ravel, reduction.decode_result(results, n))


def _exchanged(sent: dict[int, _Message], place: _Place) -> dict[int, _Message]:
    """One turn: what has arrived for each segment that sends."""
    m = place.near
    near = jnp.concatenate([message.near for message in sent.values()], axis=1)
    across = jnp.concatenate([message.across for message in sent.values()])
    longest = max(near.shape[1], across.size)
    rows = jnp.pad(near, ((0, 0), (0, longest - near.shape[1])))
    rows = jnp.concatenate([jnp.pad(across, (0, longest - across.size))[None], rows])
    arrived = rows  # what a device sends to itself stays
    before = None
    for distance in range(1, m + 1):
        pairs = round_of(distance, m, near.size > 0, across.size > 0)
        if not pairs:
            continue
        message = jax.lax.dynamic_slice_in_dim(rows, (place.node + distance) % (m + 1), 1)
        if before is not None and _device.is_between_cpu_processes():
            message = _sending.after(before, message)
        with jax.named_scope("exchange"):
            before = message = _sending.ppermute(message, place.axis_name, pairs)
        at = (place.node - distance) % (m + 1)
        arrived = jax.lax.dynamic_update_slice_in_dim(arrived, message, at, 0)
    # What follows the last of these ends is padding.
    nears = jnp.split(arrived[1:], _ends(message.near.shape[1] for message in sent.values()), 1)
    acrosses = jnp.split(arrived[0], _ends(message.across.size for message in sent.values()))
    return {number: _Message(*parts) for number, *parts in zip(sent, nears, acrosses, strict=False)}


def _ends(sizes: Iterable[int]) -> list[int]:
    return list(itertools.accumulate(sizes))


def round_of(distance: int, near: int, to_near: bool, across: bool) -> list[tuple[int, int]]:
    """(source, target) of the messages of a round that are not empty."""
    pairs = []
    for first, other in ((0, near), (near, 0)):
        for node in range(1, near + 1):
            target = (node + distance) % (near + 1)
            if target and to_near:
                pairs.append((first + node - 1, first + target - 1))
            if not target and across:
                pairs.append((first + node - 1, other + distance - 1))
    return pairs


def weights(near: int) -> tuple[int, ...]:
    """How long the segments of a vector are, as integers.

    While the counts of a segment cross, b/2 bits of each of its coordinates, the votes of the next
    go round within the clusters, one bit of each: so it is b/2 times as long. The last ones are
    short again, as nothing crosses with their results.
    """
    bits = planes_for(near)
    return (4, 2 * bits, bits * bits, 4, 4)


def block_lengths(words: int, near: int) -> list[int]:
    """The words of each block of each segment; short vectors have fewer segments."""
    parts = list(itertools.accumulate(weights(near)))
    ends = [-(-words * part // (2 * near * parts[-1])) for part in parts]
    return [n for n in (end - start for start, end in itertools.pairwise([0, *ends])) if n]


def _segments(planes: Any, lengths: list[int], place: _Place) -> list[Any]:
    """Each segment as blocks `(2, m, words)`, in the order that `_decided` takes."""

    def cut(vector: jax.Array) -> list[jax.Array]:
        vector = jnp.pad(vector, (0, 2 * place.near * sum(lengths) - vector.size))
        parts = jnp.split(vector, _ends(2 * place.near * n for n in lengths)[:-1])
        return [in_order(part.reshape(2, place.near, -1)) for part in parts]

    def in_order(blocks: jax.Array) -> jax.Array:
        mine = jax.lax.dynamic_index_in_dim(blocks, place.cluster, keepdims=False)
        theirs = jax.lax.dynamic_index_in_dim(blocks, 1 - place.cluster, keepdims=False)
        return jnp.stack([mine, theirs[::-1]])

    leaves, treedef = jax.tree.flatten(planes)
    cuts = [cut(leaf) for leaf in leaves]
    return [treedef.unflatten([cut[i] for cut in cuts]) for i in range(len(lengths))]


def two_clusters() -> TwoClusters:
    """Votes of two clusters of devices with one slow link between them.

    The first half of the axis is one cluster, the second half the other. Counts are sent within the
    clusters while counts and results of earlier parts of the vector cross between them, in many
    rounds. It is for long vectors and slow links, where it takes less time than a ring.

    Returns:
      The algorithm, for `algorithm=` of `jaxcomm.majority_vote`, and for an even number of devices.

    Wire: a device sends 2.28, 2.70 and 3.22 bits per weight among N = 8, 16 and 32 devices, in
    4N rounds; in each round the link between the clusters carries one message each way.
    """
    return TwoClusters()
