"""A donated state is written where it was: nothing of a residual's size is copied."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxcomm
from jaxcomm.plan.exchanges import Exchange

ROWS, COLUMNS = 48, 96

METHODS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "scaled_sign": lambda: jaxcomm.mean("data", "scaled_sign", error_feedback=True),
    "vote": lambda: jaxcomm.majority_vote("data", error_feedback=True),
    "oktopk": lambda: jaxcomm.sparse_mean("data", 0.1),
    "low_rank": lambda: jaxcomm.low_rank_mean("data", 2),
}


@pytest.mark.parametrize("method", METHODS)
def test_no_residual_is_copied(make_mesh: Any, method: str) -> None:
    with jax.set_mesh(make_mesh(4)):
        tx = optax.chain(METHODS[method](), optax.sgd(0.1))
        params = jaxcomm.replicate({"w": jnp.ones((ROWS, COLUMNS))})
        gradient = jaxcomm.value_and_grad(lambda p, x: jnp.sum(jnp.square(x @ p["w"])), "data")

        def step(params: Any, state: Any, x: jax.Array) -> Any:
            _, grads = gradient(params, x)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        x = jaxcomm.global_batch(jnp.ones((8, ROWS)), "data")
        program = jax.jit(step, donate_argnums=(0, 1)).lower(params, tx.init(params), x).compile()
    assert copies_of_residuals(program) == []


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"vote"}))
def test_nor_where_an_exchange_is_timed(make_mesh: Any, method: str) -> None:
    """Votes with feedback are not timed."""
    exchange = Exchange(make_mesh(4), "data", METHODS[method](), [(ROWS, COLUMNS)])
    assert copies_of_residuals(exchange.lower().compile()) == []


def copies_of_residuals(program: Any) -> list[str]:
    text = program.as_text()
    assert f"f32[1,{ROWS},{COLUMNS}]" in text  # a device's residual
    return re.findall(rf"f32\[1,{ROWS},{COLUMNS}\]\S* copy\(.*", text)
