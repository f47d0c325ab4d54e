"""optax's extra arguments reach the transformations inside of ours."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from transforms.both_views import SHAPES, VIEWS, View, gradients, place

MEAN = jaxcomm.mean("data")
WORLD = 4


def by_value() -> optax.GradientTransformationExtraArgs:
    """Scales by an extra argument."""

    def update(updates: Any, state: Any, params: Any = None, *, value: Any, **rest: Any) -> Any:
        del params, rest
        return jax.tree.map(lambda g: g * value, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


WRAPPERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "local": lambda: optax.chain(jaxcomm.local("data", by_value()), MEAN),
    "multi_steps": lambda: jaxcomm.multi_steps(optax.chain(MEAN, by_value()), 1),
    "stages": lambda: jaxcomm.stages((0, optax.chain(MEAN, by_value())), (9, MEAN)),
    "dense_first": lambda: jaxcomm.dense_first(MEAN, 9, dense=optax.chain(MEAN, by_value())),
    "control_variates": lambda: optax.chain(
        jaxcomm.control_variates(optax.chain(jaxcomm.local("data", by_value()), MEAN), every=1),
        MEAN,
        by_value(),
    ),
}


@pytest.mark.parametrize("view", [VIEWS[0], VIEWS[2]], ids=lambda view: view.name)
@pytest.mark.parametrize("name", WRAPPERS)
def test_extra_arguments_pass_through(name: str, view: View) -> None:
    tx, grads = WRAPPERS[name](), gradients(WORLD)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)

    def update(grads: Any, state: Any, value: Any) -> Any:
        return tx.update(grads, state, None, value=value, other="unused")[0]

    with jax.set_mesh(view.mesh(WORLD)):
        params = place(view, {key: jnp.zeros(shape) for key, shape in SHAPES.items()})
        state, value = tx.init(params), jnp.float32(2)
        if view.manual:
            spec, P = jaxcomm.state_spec(tx, params, jax.sharding.get_mesh()), jax.P
            f = jax.shard_map(
                lambda g, s, v: update(jax.tree.map(lambda x: x[0], g), s, v),
                in_specs=(P("data"), spec, P()),
                out_specs=P(),
            )
        else:
            f = update
        found = jax.jit(f)(place(view, grads, "data"), state, value)
    for key, g in grads.items():
        np.testing.assert_allclose(found[key], 2 * g.mean(0), rtol=1e-5, atol=1e-6)
