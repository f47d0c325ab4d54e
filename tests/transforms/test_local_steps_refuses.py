"""What `jaxcomm.local_steps` refuses and warns of, and what its messages say to write instead."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxcomm

PARAMS = {"w": jnp.ones((8, 128))}
SGD, MEAN = optax.sgd(0.1), jaxcomm.mean("data")
LOOKAHEAD = optax.lookahead(SGD, 4, 0.5)


@pytest.mark.parametrize(
    ("inner", "outer", "exchange", "message"),
    [
        (0.1, SGD, MEAN, r"as inner, got 0.1, as in optax.adamw\(1e-3\)\."),
        (SGD, 0.7, MEAN, r"as outer, got 0.7, as in optax.sgd\(0.7, momentum=0.9, nesterov"),
        (SGD, SGD, "int4", r"as exchange, got 'int4', as in jaxcomm.mean\(\"data\", \"int4\""),
    ],
)
def test_an_argument_of_another_kind(inner: Any, outer: Any, exchange: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        jaxcomm.local_steps(inner, 4, outer, exchange)


@pytest.mark.parametrize(("inner", "outer"), [(SGD, LOOKAHEAD), (LOOKAHEAD, SGD)])
def test_lookahead_is_no_part_of_it(inner: Any, outer: Any) -> None:
    with pytest.raises(ValueError, match="every=sync_period and outer=optax.sgd.slow_step_size"):
        jaxcomm.local_steps(inner, 4, outer, MEAN)


@pytest.mark.standard_promotion  # optax promotes
@pytest.mark.parametrize("uphill", [optax.identity(), optax.trace(0.9), optax.scale_by_adam()])
@pytest.mark.parametrize("jitted", [False, True])
def test_an_optimizer_that_goes_uphill(mesh8: Any, uphill: Any, jitted: bool) -> None:
    """What is advised goes downhill, and what freezes everything goes nowhere."""
    downhill = optax.chain(uphill, optax.scale_by_learning_rate(0.1))
    start = jax.jit if jitted else lambda f: f
    with jax.set_mesh(mesh8):
        for which in ("inner", "outer"):
            good = {"inner": downhill, "outer": downhill, "exchange": MEAN, "every": 4}
            start(jaxcomm.local_steps(**good).init)(PARAMS)
            start(jaxcomm.local_steps(**good | {which: optax.set_to_zero()}).init)(PARAMS)
            with pytest.raises(ValueError, match=f"the {which} optimizer of local_steps goes up"):
                start(jaxcomm.local_steps(**good | {which: uphill}).init)(PARAMS)


@pytest.mark.standard_promotion  # optax promotes
def test_an_optimizer_that_is_not_uphill_by_its_first_step(mesh8: Any) -> None:
    """Schedules that begin at zero, projections that move parameters from zero, and SAM."""
    warm = optax.schedules.linear_schedule(0.0, 0.1, 10)
    project = optax.stateless(
        lambda u, p: jax.tree.map(lambda u, p: jnp.maximum(p + u, 0.1) - p, u, p)
    )
    sam = optax.contrib.sam(SGD, optax.chain(optax.contrib.normalize(), SGD), sync_period=5)
    with jax.set_mesh(mesh8):
        for inner in (optax.sgd(warm), optax.chain(SGD, project), sam):
            jaxcomm.local_steps(inner, 4, SGD, MEAN).init(PARAMS)
        uphill = optax.chain(optax.trace(0.9), optax.scale_by_schedule(warm))
        with pytest.raises(ValueError, match="the inner optimizer of local_steps goes uphill"):
            jaxcomm.local_steps(uphill, 4, SGD, MEAN).init(PARAMS)


@pytest.mark.parametrize(("before", "after"), [(0, 1), (2, 0)])
def test_a_state_without_its_delay(mesh8: Any, before: int, after: int) -> None:
    """It would exchange nothing any more, or has no movement to exchange."""
    first, second = (jaxcomm.local_steps(SGD, 4, SGD, MEAN, delay=n) for n in (before, after))
    with jax.set_mesh(mesh8):
        state, loss_fn = first.init(PARAMS), lambda params, x: x.sum() * params["w"].sum()
        f = jax.jit(jaxcomm.value_and_grad(loss_fn, "data"))
        _, grads = f(jaxcomm.local_params(state), jnp.ones(8))
        first.update(grads, state, PARAMS)
        made = "with" if before else "without"
        with pytest.raises(
            ValueError, match=f"made {made} a delay, and this one has delay={after}"
        ):
            second.update(grads, state, PARAMS)


@pytest.mark.parametrize("inner", [LOOKAHEAD, optax.lookahead(optax.chain(MEAN, SGD), 4, 0.5)])
def test_lookahead_is_not_inside_multi_steps(inner: Any) -> None:
    """Nor around them; it goes with microbatches of one step."""
    with pytest.raises(ValueError, match="inside multi_steps, which .* use jaxcomm.accumulate"):
        jaxcomm.multi_steps(inner, 2)


def test_patterns_for_fragments(mesh8: Any) -> None:
    """What is advised instead of patterns works."""
    params = {name: jnp.zeros((8, 8)) for name in ("v", "w")}
    two = {"every": 4, "outer": SGD, "fragments": 2}
    with jax.set_mesh(mesh8):
        tx = jaxcomm.local_steps(SGD, exchange=jaxcomm.mean("data", "int8", exempt=["v"]), **two)
        with pytest.raises(ValueError, match="fragments of local_steps, let exempt be a function"):
            tx.init(params)
        exempt = lambda path, shape: path == "v"  # noqa: E731
        tx = jaxcomm.local_steps(SGD, exchange=jaxcomm.mean("data", "int8", exempt=exempt), **two)
        said = {leaf.path: leaf.travels for leaf in jaxcomm.explain(tx, params).leaves}
    assert said["v"].startswith("float32") and said["w"].startswith("int8")


def test_it_is_not_inside_multi_steps(mesh8: Any) -> None:
    tx = jaxcomm.multi_steps(jaxcomm.local_steps(SGD, 4, SGD, MEAN), 2)
    with jax.set_mesh(mesh8), pytest.raises(ValueError, match=r"put optax.MultiSteps\(.*into it"):
        tx.init(PARAMS)
    inside = optax.MultiSteps(SGD, 2).gradient_transformation()
    with jax.set_mesh(mesh8):
        jaxcomm.local_steps(inside, 4, SGD, MEAN).init(PARAMS)


MUON = optax.contrib.muon(0.1)
FEW = (
    jaxcomm.mean("data", "scaled_sign", error_feedback=True),
    jaxcomm.sparse_mean("data", 0.1),
    jaxcomm.low_rank_mean("data", 1),
)
INT4 = jaxcomm.mean("data", "int4", error_feedback=True)


@pytest.mark.parametrize("inside", [False, True])
def test_few_bits_before_an_outer_optimizer_with_a_variance(mesh8: Any, inside: bool) -> None:
    """Once, at the user's line; also of an exchange that is in a chain."""
    own = jaxcomm.local("data", optax.identity())
    wrapped = [optax.chain(own, exchange) if inside else exchange for exchange in FEW]
    cases = [(exchange, optax.adam(0.1)) for exchange in wrapped]
    for exchange, outer in [*cases, (INT4, MUON)]:
        tx = jaxcomm.local_steps(SGD, 4, outer, exchange)
        with jax.set_mesh(mesh8):
            with pytest.warns(
                UserWarning, match="before an outer optimizer of local_steps"
            ) as seen:
                tx.init(PARAMS)
        assert len(seen) == 1 and seen[0].filename == __file__


def reading(params: Any) -> Any:
    """An `init` that looks at values, and wants what `local_steps` gives: float32."""
    assert all(float(x.max()) == 1 and x.dtype == jnp.float32 for x in jax.tree.leaves(params))
    return optax.EmptyState()


def test_an_outer_optimizer_that_reads_parameters(mesh8: Any) -> None:
    outer = optax.chain(optax.GradientTransformation(reading, optax.identity().update), SGD)
    params = {"w": jnp.ones((8, 128), jnp.bfloat16)}
    with jax.set_mesh(mesh8):
        for exchange in (MEAN, *FEW):
            jaxcomm.local_steps(SGD, 4, outer, exchange).init(params)


def wanting_float32(params: Any) -> Any:
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
    return optax.EmptyState()


def test_moments_of_an_optimizer_that_wants_float32(mesh8: Any) -> None:
    """As `local_steps` gives it, whatever the parameters have."""
    wanting = optax.GradientTransformation(wanting_float32, optax.identity().update)
    outer = optax.chain(wanting, optax.adam(0.1))
    with jax.set_mesh(mesh8), pytest.warns(UserWarning, match="before an outer optimizer"):
        jaxcomm.local_steps(SGD, 4, outer, FEW[0]).init({"w": jnp.ones((8, 128), jnp.bfloat16)})


@pytest.mark.parametrize(
    ("outer", "exchange"),
    [(optax.sgd(0.7, momentum=0.9), FEW[0]), (optax.adam(0.1), INT4), (optax.adam(0.1), MEAN)],
)
def test_nothing_is_said_of_others(mesh8: Any, outer: Any, exchange: Any) -> None:
    with jax.set_mesh(mesh8), warnings.catch_warnings():
        warnings.simplefilter("error")
        jaxcomm.local_steps(optax.adam(0.1), 4, outer, exchange).init(PARAMS)
