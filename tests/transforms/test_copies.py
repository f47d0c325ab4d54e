"""Parameters that stand for others can be copied, and still say what to do with them."""

import copy
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxcomm


@pytest.mark.parametrize("kind", ["sharded", "in_backward"])
def test_a_copy_is_what_it_is_of(mesh8: Any, kind: str) -> None:
    with jax.set_mesh(mesh8):
        mean = jaxcomm.mean("data", "int8")
        if kind == "sharded":
            params = jaxcomm.shard({"w": jnp.zeros((8, 8))}, "data")
            state = optax.chain(jaxcomm.sharded(mean), optax.sgd(0.1)).init(params)
            at = jaxcomm.sharded_params(params, state)
        else:
            params = jaxcomm.replicate({"layers": {"w": jnp.zeros((3, 8, 8))}})
            tx = jaxcomm.in_backward(mean, ["layers"])
            at = tx.attach(params, tx.init(params))
    (leaf,) = jax.tree.leaves(
        at, is_leaf=lambda x: hasattr(type(x), "_cure") or hasattr(type(x), "_unused")
    )
    for made in (copy.copy(leaf), copy.deepcopy(leaf)):
        assert made.value.shape == leaf.value.shape
        with pytest.raises(AttributeError, match="it has no 'shape'"):
            made.shape  # noqa: B018
