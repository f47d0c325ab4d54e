"""Gradients that are set to zero before an exchange are not frozen, and are refused."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxcomm


def zeros_in_front() -> dict[str, optax.GradientTransformation]:
    """Ways to set the gradient of "base" to zero before an exchange."""
    base, kept = {"base": True, "head": False}, optax.identity()
    freeze = optax.transforms.freeze(base)
    return {
        "freeze": freeze,
        "masked": optax.masked(optax.set_to_zero(), base),
        "partition": optax.partition({True: optax.set_to_zero(), False: kept}, base),
        "in a chain": optax.chain(kept, freeze),
        "local": jaxcomm.local("data", freeze),
        "local chain": jaxcomm.local("data", optax.chain(freeze, optax.trace(0.9))),
    }


EXCHANGES = {
    "vote": lambda: jaxcomm.majority_vote("data"),
    "int2": lambda: jaxcomm.mean("data", "int2", error_feedback=True),
    "one_bit_adam": lambda: jaxcomm.one_bit_adam("data", 1e-3, dense_steps=2),
}


@pytest.mark.parametrize("how", zeros_in_front())
def test_zeros_do_not_freeze_and_are_refused_in_front(mesh8: Any, how: str) -> None:
    """Votes have no zero: what was to be frozen moved like the rest."""
    first, vote = zeros_in_front()[how], jaxcomm.majority_vote("data")
    with jax.set_mesh(mesh8):
        params = jaxcomm.replicate({"base": jnp.ones((8, 4)), "head": jnp.ones((4, 2))})
        for exchange in EXCHANGES.values():
            with pytest.raises(ValueError, match=r'write optax.partition\(\{"trained": chain'):
                optax.chain(first, exchange()).init(params)
        with pytest.raises(ValueError, match="before the exchange sets local gradients to zero"):
            optax.named_chain(("first", first), ("vote", vote)).init(params)
        optax.chain(vote, zeros_in_front()["freeze"], optax.sgd(0.1)).init(params)
        for zero in (jaxcomm.mean("data"), jaxcomm.majority_vote("data", zeros="abstain")):
            optax.chain(first, zero, optax.sgd(0.1)).init(params)


def test_a_transformation_that_holds_itself(mesh8: Any) -> None:
    def restarted() -> optax.GradientTransformation:
        def update(updates: Any, state: Any, params: Any = None) -> Any:
            return updates, tx.init(params)

        tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
        return tx

    with jax.set_mesh(mesh8):
        first = jaxcomm.local("data", optax.chain(restarted(), optax.trace(0.9)))
        optax.chain(first, jaxcomm.majority_vote("data")).init(jaxcomm.replicate(jnp.ones((8, 4))))


def test_what_may_stand_in_front_of_a_part_that_is_frozen(mesh8: Any) -> None:
    with jax.set_mesh(mesh8):
        params = jaxcomm.replicate({"base": jnp.ones((8, 4)), "head": jnp.ones((4, 2))})
        kinds = {"base": "frozen", "head": "trained"}
        parts = {"trained": jaxcomm.mean("data"), "frozen": jaxcomm.set_to_zero("data")}
        clip = jaxcomm.local("data", optax.chain(optax.zero_nans(), optax.clip(1.0)))
        optax.chain(clip, optax.partition(parts, kinds)).init(params)
