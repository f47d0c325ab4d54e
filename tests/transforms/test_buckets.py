"""Which leaves travel together, behind the backward pass and inside of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxcomm
from jaxcomm.transforms._buckets import LAYER, buckets_of, joined, joined_sums, split
from jaxcomm.transforms._layout import Layout, Leaf

SIZES = {"down": 9, "up": 9, "out": 2, "key": 2, "query": 2, "value": 3}  # first gradient first


def buckets(limit: int) -> list[list[str]]:
    leaves = [Leaf(path, (n,), jnp.dtype("float32"), PartitionSpec()) for path, n in SIZES.items()]
    layout = Layout("data", 4, tuple(leaves))
    found = buckets_of(layout, tuple(range(len(leaves))), tuple(SIZES), 4 * limit)
    return [[leaves[i].path for i in bucket] for bucket in found]


@pytest.mark.parametrize(
    ("limit", "inside", "behind"),
    [
        # The last bucket has 10 of 16, or 13 of 20: `up` has no room in it.
        (16, ["down", "up", "out key query value"], ["down", "up out key query", "value"]),
        (20, ["down up", "out key query value"], ["down up out", "key query value"]),
        (28, ["down", "up out key query value"], ["down up out key query value"]),
    ],
)
def test_in_a_loop_the_last_bucket_is_smaller(
    limit: int, inside: list[str], behind: list[str]
) -> None:
    assert buckets(limit) == [bucket.split() for bucket in behind]
    token = LAYER.set(0)
    try:
        assert buckets(limit) == [bucket.split() for bucket in inside]
    finally:
        LAYER.reset(token)


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("behind", [None, 0, 5, 64])
def test_leaves_are_joined_in_their_order(odd: int, behind: int | None) -> None:
    rng = np.random.default_rng(0)
    shapes = {"a": (1, 64 + odd), "b": (64,), "c": (128 - odd, 1)}
    a, b = ({key: rng.standard_normal(s, np.float32) for key, s in shapes.items()} for _ in "ab")
    total = sum(x.size for x in a.values())
    size = None if behind is None else total + behind

    def vector(parts: dict[str, np.ndarray]) -> np.ndarray:
        flat = np.concatenate([part.reshape(-1) for part in parts.values()])
        return np.pad(flat, (0, behind or 0))

    one = jax.jit(lambda a: joined(a, size))(a)
    np.testing.assert_array_equal(one, vector(a))
    sums = jax.jit(lambda a, b: joined_sums(a, b, size))(a, b)
    np.testing.assert_array_equal(sums, vector(a) + vector(b))
    for key, part in split(sums, a).items():
        np.testing.assert_array_equal(part, a[key] + b[key])


def test_a_plain_mean_sends_one_vector() -> None:
    """XLA on CPU sends every operand of an all-reduce by itself, one after the other."""
    params = {"w": jnp.ones((8, 8)), "b": jnp.ones(8), "scale": jnp.ones(()), "no": jnp.ones((0,))}
    mesh = jaxcomm.data_mesh(devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        tx = jaxcomm.mean("data")  # `b` and `scale` are exempt
        devices = jnp.array([0.0, 1.0, 0.0, 3.0])  # each holds its own
        grads = jax.tree.map(lambda x: jnp.multiply.outer(devices, x), params)
        state = tx.init(jaxcomm.replicate(params))
        compiled = jax.jit(tx.update).lower(grads, state).compile()
        (sent,) = jaxcomm.wire_report(compiled).collectives
        updates, _ = compiled(grads, state)
    assert sent.op == "all-reduce" and sent.shapes == ((64 + 8 + 1,),)
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), updates, params))
