"""Which leaves travel together, behind the backward pass and inside of it."""

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxcomm.transforms._buckets import LAYER, buckets_of
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
