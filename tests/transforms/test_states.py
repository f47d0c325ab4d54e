"""A state goes to the transformation that made it, with the same options."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm

PARAMS = {"b": jnp.zeros(4), "v": jnp.zeros((8, 4)), "w": jnp.zeros((4, 8))}
Make = Callable[..., optax.GradientTransformation]
MAKE: dict[str, Make] = {
    "mean": lambda **options: jaxcomm.mean("data", "int8", **options),
    "vote": lambda **options: jaxcomm.majority_vote("data", **options),
    "sparse": lambda **options: jaxcomm.sparse_mean("data", 0.1, **options),
    "low rank": lambda rank=1, **options: jaxcomm.low_rank_mean("data", rank, **options),
    "adam": lambda **options: jaxcomm.one_bit_adam("data", 1e-3, dense_steps=2, **options),
}
FED_BACK = jaxcomm.mean("data", "int8", error_feedback=True)
FEEDBACK, NONE = {"error_feedback": True}, {"error_feedback": False}
KEPT = "the state has {} arrays of {}, expected {}.*Make tx as in the run"


def update(tx: optax.GradientTransformation, state: Any) -> Any:
    grads = jaxcomm.mark_local(jax.tree.map(lambda p: jnp.ones((4, *p.shape)), PARAMS))
    return jax.jit(tx.update)(grads, state, jaxcomm.replicate(PARAMS))


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("mean", NONE, FEEDBACK, KEPT.format(0, "residual", 2)),
        ("mean", FEEDBACK, NONE, KEPT.format(2, "residual", 0)),
        ("vote", NONE, FEEDBACK, KEPT.format(0, "residual", 2)),
        ("sparse", {}, {"momentum_correction": 0.9}, KEPT.format(0, "velocity", 3)),
        ("low rank", {}, {"rank": 2}, "the state has 8 numbers of v's factor, expected 16 at rank"),
        *[
            (
                name,
                {},
                {"exempt": ["w"]},
                "w is not exempt .* by the options it is[.] Make",
            )
            for name in MAKE
        ],
        (
            "mean",
            {"exempt": ["w"]},
            {},
            "w is exempt .*, and by the options it is not[.] Make",
        ),
    ],
)
def test_other_options(make_mesh: Any, name: str, old: Any, new: Any, message: str) -> None:
    with jax.set_mesh(make_mesh(4)):
        made, asked = MAKE[name](**old), MAKE[name](**new)
        state = made.init(jaxcomm.replicate(PARAMS))
        update(made, state)
        with pytest.raises(ValueError, match=message):
            update(asked, state)
        if "arrays" in message:
            with pytest.raises(ValueError, match="the state is not one of this transformation"):
                jaxcomm.resize_state(asked, jax.device_get(state), jaxcomm.replicate(PARAMS))


def test_another_transformation(make_mesh: Any) -> None:
    with jax.set_mesh(make_mesh(4)):
        for name in MAKE:
            other = MAKE["sparse" if name == "mean" else "mean"]().init(jaxcomm.replicate(PARAMS))
            with pytest.raises(ValueError, match=f"got a {type(other).__name__}. Make tx as"):
                update(MAKE[name](), other)


STATES: dict[str, Callable[[], Any]] = {
    **{name: functools.partial(make) for name, make in MAKE.items()},
    "accumulated": lambda: jaxcomm.multi_steps(optax.chain(FED_BACK, optax.sgd(0.1)), 2),
    "local": lambda: jaxcomm.local("data", optax.trace(0.9)),
    "factored Adam": lambda: jaxcomm.factored_adam(FED_BACK, 0.1),
    "corrected": lambda: jaxcomm.control_variates(jaxcomm.mean("data"), 2),
    "stages": lambda: jaxcomm.stages((0, jaxcomm.mean("data")), (2, FED_BACK)),
    "dense first": lambda: jaxcomm.dense_first(FED_BACK, 2),
    "in the backward pass": lambda: jaxcomm.in_backward(FED_BACK, ["w"]),
    "split": lambda: jaxcomm.sharded(FED_BACK),
    "local steps": lambda: jaxcomm.local_steps(optax.sgd(0.1), 2, optax.sgd(1.0), FED_BACK),
    "frozen": lambda: jaxcomm.set_to_zero("data"),
    "none": lambda: jaxcomm.no_exchange("data"),
}


@pytest.mark.parametrize("name", STATES)
def test_what_a_checkpoint_without_a_target_gives(name: str, make_mesh: Any) -> None:
    """Dictionaries and lists."""
    tx = STATES[name]()
    with (
        jax.set_mesh(make_mesh(4)),
        pytest.raises(ValueError, match="expected a .*State, got a dict.*restore it into tx.init"),
    ):
        update(tx, {"layout": {}, "step": jnp.zeros((), jnp.int32)})


@pytest.mark.parametrize("name", MAKE)
def test_other_names(name: str, make_mesh: Any) -> None:
    """What is kept for one parameter would go to another of the same shape."""
    tx = MAKE[name]()
    with jax.set_mesh(make_mesh(4)):
        params = jaxcomm.replicate({"l1": jnp.zeros((8, 8)), "l2": jnp.zeros((8, 8))})
        renamed = {"l2": params["l2"], "z": params["l1"]}
        grads = jaxcomm.mark_local({name: jnp.ones((4, 8, 8)) for name in renamed})
        state = tx.init(params)
        with pytest.raises(ValueError, match="a parameter 'l1' where this gradient is of 'l2'"):
            jax.jit(tx.update)(grads, state, renamed)
        with pytest.raises(ValueError, match="'l1' where tx.init now finds 'l2'|different arrays"):
            jaxcomm.resize_state(tx, jax.device_get(state), renamed)


def test_leaves_without_names(make_mesh: Any) -> None:
    """Such as those that a wrapper passes on as a list, in their order."""
    tx = MAKE["mean"](**FEEDBACK)
    grads = [jnp.ones((4, *p.shape)) for p in jax.tree.leaves(PARAMS)]
    with jax.set_mesh(make_mesh(4)):
        state = tx.init(jaxcomm.replicate(PARAMS))
        updates, state = jax.jit(tx.update)(jaxcomm.mark_local(grads), state)
        assert [x.shape for x in updates] == [p.shape for p in jax.tree.leaves(PARAMS)]
        again = jaxcomm.resize_state(tx, state, jaxcomm.replicate(jax.tree.leaves(PARAMS)))
        assert [x.shape for x in again.residual.values] == [(4, 8, 4), (4, 4, 8)]


def test_errors_of_other_buckets_are_refused(make_mesh: Any) -> None:
    grads = {name: np.ones((4, 8, 8), np.float32) for name in ("a", "c")}
    with jax.set_mesh(make_mesh(4)):
        params = jaxcomm.replicate({name: jnp.zeros((8, 8)) for name in grads})
        state = jaxcomm.one_bit_adam("data", 0.1, dense_steps=1).init(params)
        other = jaxcomm.one_bit_adam("data", 0.1, dense_steps=1, bucket_order=["a", "c"])
        with pytest.raises(ValueError, match="state belongs to other buckets.*bucket_order"):
            jax.jit(other.update)(jaxcomm.global_batch(grads, "data"), state, params)


def test_thresholds_of_other_buckets_are_refused(make_mesh: Any) -> None:
    """One that is used again would select nearly nothing of another bucket."""
    params = {name: jnp.zeros((32, 32)) for name in "ab"}
    make = functools.partial(jaxcomm.sparse_mean, "data", 0.1, bucket_mib=0.004)
    with jax.set_mesh(make_mesh(4)):
        state = make(bucket_order=["a", "b"]).init(params)
        grads = jaxcomm.mark_local({name: jnp.ones((4, 32, 32)) for name in "ab"})
        jax.jit(make(bucket_order=["a", "b"]).update)(grads, state)
        for other in make(bucket_order=["b", "a"]), jaxcomm.sparse_mean("data", 0.1):
            with pytest.raises(ValueError, match="state belongs to other buckets.*bucket_order"):
                other.update(grads, state)
