"""Votes of two clusters: the oracle's result, who sends to whom, and the bits that cross."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
import oracles
from collectives.test_majority import TIES, MakeMesh, compiled_vote, problem
from jaxcomm.collectives import _sending
from jaxcomm.collectives.algorithms import two_clusters
from jaxcomm.collectives.algorithms.two_clusters import block_lengths, round_of
from jaxcomm.kernels import _device
from jaxcomm.kernels.bitplanes import planes_for


def turns(words: int, near: int, there: int = 1, back: int = 1) -> list[tuple[int, int]]:
    """Words to each node of the cluster and across, in each turn, by the table of the module."""
    lengths = [*block_lengths(words, near), 0, 0, 0]
    bits = there * planes_for(near)
    before = itertools.accumulate(lengths, lambda last, n: (n, *last[:3]), initial=(0, 0, 0, 0))
    return [
        (2 * there * a + back * c + back * d, bits * b + back * c)
        for a, b, c, d in itertools.islice(before, 1, None)
    ]


def sent_words(words: int, world: int, there: int, back: int) -> int:
    near = world // 2
    found = 0
    for to_near, across in turns(words, near, there, back):
        longest = max(to_near, across)
        found += longest * ((near - 1) * (to_near > 0) + (across > 0))
    return found


@pytest.mark.parametrize("world", [1, 2, 4, 6, 8])
@pytest.mark.parametrize("n", [1, 33, 3000])
def test_the_oracles_vote(make_mesh: MakeMesh, world: int, n: int) -> None:
    tie, zero = TIES[n % 4], "abstain" if n == 3000 else "random"
    program = compiled_vote(make_mesh(world), two_clusters(), tie, zero, n)
    x, shared, own = problem(world, n)
    expected = oracles.majority(x, tie, zero, shared, own)
    np.testing.assert_array_equal(program(x), np.broadcast_to(expected, x.shape))
    if world == 1:
        assert jaxcomm.wire_report(program).bytes_max == 0
        return
    there, back = 1 + (zero == "abstain"), 1 + (zero == "abstain" or tie == "zero")
    sent = jaxcomm.wire_report(program).bytes_max
    assert sent == 4 * sent_words(-(-n // 32), world, there, back)


def test_one_message_after_the_other_between_processes(
    make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between CPU processes a round waits for the one before, and the result is the same."""
    monkeypatch.setattr(_device, "is_between_cpu_processes", lambda: True)
    waited = []
    after = _sending.after
    monkeypatch.setattr(_sending, "after", lambda *a: waited.append(0) or after(*a))
    program = compiled_vote(make_mesh(4), two_clusters(), "random", "random", 3000)
    x, shared, own = problem(4, 3000)
    expected = oracles.majority(x, "random", "random", shared, own)
    np.testing.assert_array_equal(program(x), np.broadcast_to(expected, x.shape))
    assert len(waited) == 8  # in each of eight turns, the second round


@pytest.mark.parametrize("near", range(1, 9))
def test_a_turn_brings_a_message_to_each_node_and_one_across(near: int) -> None:
    seen, across = set(), []
    for distance in range(1, near + 1):
        pairs = round_of(distance, near, True, True)
        sources, targets = zip(*pairs, strict=True)
        assert sorted(sources) == sorted(targets) == list(range(2 * near))
        # Gloo would carry out the two directions of a pair one after the other.
        alone = [pair for pair in pairs if pair[::-1] not in pairs]
        assert len(alone) == len(pairs) or 2 * distance == near + 1
        assert not seen.intersection(pairs)
        seen.update(pairs)
        across += [pair for pair in pairs if pair[0] // near != pair[1] // near]
        assert len(across) == 2 * distance  # one each way in every round
    within = {
        (a, b) for a, b in itertools.permutations(range(2 * near), 2) if a // near == b // near
    }
    assert within | set(across) == seen
    assert sorted(a for a, _ in across) == sorted(b for _, b in across) == list(range(2 * near))


@pytest.mark.parametrize(("world", "bits"), [(2, 1.70), (4, 1.95), (6, 2.00), (8, 2.28)])
def test_the_bits_of_the_docs(world: int, bits: float, make_mesh: MakeMesh) -> None:
    sent = compiled_vote(make_mesh(world), two_clusters(), "random", "random", 10**6)
    found = jaxcomm.wire_report(sent).bytes_max
    assert 8 * float(found) / 10**6 == pytest.approx(bits, abs=0.006)


@pytest.mark.parametrize(("world", "bits"), [(8, 2.33), (16, 2.72), (32, 3.22)])
def test_the_time_of_its_rounds(world: int, bits: float) -> None:
    """Each round is as long as its longest message, which crosses in most of them."""
    words, near = 10**6, world // 2
    all_turns = turns(words, near)
    assert len(all_turns) * near == 4 * world
    assert sum(near * max(turn) for turn in all_turns) / words == pytest.approx(bits, abs=0.006)
    crossing = sum(near * across for _, across in all_turns) / words
    assert crossing == pytest.approx((planes_for(near) + 1) / 2, rel=1e-3)


def test_what_it_is_not_for(make_mesh: MakeMesh) -> None:
    with pytest.raises(ValueError, match="two_clusters is for votes; between clusters a mean goes"):
        jaxcomm.mean("data", "bfloat16", "two_clusters")
    near = jaxcomm.algorithms.direct()
    with pytest.raises(TypeError, match="needs an algorithm for each axis, one of direct, ring"):
        jaxcomm.algorithms.hierarchical(near=near, far=two_clusters())
    with pytest.raises(ValueError, match='even number of devices, .*got 3; .*"two_way_ring"'):
        compiled_vote(make_mesh(3), two_clusters(), "random", "random", 8)
    with jax.set_mesh(make_mesh(3)), pytest.raises(ValueError, match="even number of devices"):
        jaxcomm.majority_vote("data", "two_clusters").init({"w": jnp.zeros((8, 8))})
    vote = jaxcomm.sharded(jaxcomm.majority_vote("data", "two_clusters"), "float32")
    with (
        jax.set_mesh(make_mesh(4)),
        pytest.raises(ValueError, match="cannot be split over them; choose"),
    ):
        params = jaxcomm.shard({"w": jnp.ones((8, 8))}, "data")
        state = vote.init(params)
        loss = jaxcomm.value_and_grad(lambda p, x: (jaxcomm.gather(p)["w"] * x.sum()).sum(), "data")
        x = jaxcomm.global_batch(np.ones((4, 1), np.float32), "data")
        _, grads = loss(jaxcomm.sharded_params(params, state), x)
        vote.update(grads, state, params)
