"""Auxiliary values of a loss: what all devices have in common comes back as it is."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import jaxcomm

SEED = np.uint32(2**31 + 2**7 + 1)  # float32 does not hold it
BATCH = np.arange(16, dtype=np.float32).reshape(16, 1) % 7


def loss_fn(w: Any, x: jax.Array, seed: Any) -> tuple[jax.Array, dict[str, Any]]:
    own = jax.lax.axis_index("data")
    aux = {
        "seed": jnp.stack([seed, seed + 1]),
        "rows": len(x),
        "weight": 2 * w["w"],
        "drawn": jax.random.bits(jax.random.fold_in(jax.random.key(0), own)) >> 8,
        "all": jax.lax.psum(jnp.sum(x > 3), "data"),
        "own": jnp.sum(x > 3),
    }
    return jnp.mean((x * w["w"]) ** 2), aux


def gradient(microbatches: int) -> Any:
    f = jaxcomm.value_and_grad(loss_fn, "data", has_aux=True)
    return jaxcomm.accumulate(f, microbatches)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_it_is_not_averaged(microbatches: int, make_mesh: Any) -> None:
    with jax.set_mesh(mesh := make_mesh(4)):
        params = {"w": jaxcomm.replicate(jnp.float32(1.7))}
        args = params, jaxcomm.global_batch(BATCH, "data"), SEED
        run = jax.jit(gradient(microbatches))
        (_, aux), _ = run(*args)
        report = jaxcomm.wire_report(run.lower(*args).compile())
        drawn = jax.shard_map(
            lambda x: loss_fn({"w": x[0, 0]}, x, SEED)[1]["drawn"][None],
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P("data"),
        )(BATCH)
    assert aux["seed"].dtype == jnp.uint32
    np.testing.assert_array_equal(aux["seed"], [SEED, SEED + 1])
    assert aux["rows"] == 4 // microbatches and aux["rows"].dtype == jnp.int32
    assert aux["weight"] == 2 * np.float32(1.7)
    # These differ; and a sum over the devices differs between microbatches.
    above = int((BATCH > 3).sum())
    assert aux["own"] == above / 4 / microbatches and aux["own"].dtype == jnp.float32
    np.testing.assert_allclose(aux["drawn"], np.mean(drawn), rtol=1e-6)
    np.testing.assert_array_equal(aux["all"], above / microbatches)
    assert aux["all"].dtype == (jnp.int32 if microbatches == 1 else jnp.float32)
    averaged = [c for c in report.collectives if c.shapes in (((3,),), ((4,),))]
    assert [c.shapes for c in averaged] == [((2 + microbatches,),)]  # the loss and those


def test_inside_shard_map_types_tell_it(make_mesh: Any) -> None:
    """Without the checks, further arguments may be another device's, and all is averaged.

    So it is over microbatches, which types do not tell apart.
    """
    above = int((BATCH > 3).sum())
    with jax.set_mesh(make_mesh(4)):
        params, batch = {"w": jnp.float32(1.7)}, jaxcomm.global_batch(BATCH, "data")
        for checks, microbatches in ((True, 1), (False, 1), (True, 2)):

            @jax.jit
            @jax.shard_map(in_specs=(P(), P("data"), P()), out_specs=P(), check_vma=checks)
            def run(params: Any, x: jax.Array, seed: Any, microbatches: int = microbatches) -> Any:
                return gradient(microbatches)(params, x, seed)[0][1]

            aux, exact = run(params, batch, SEED), checks and microbatches == 1
            assert aux["seed"].dtype == (jnp.uint32 if exact else jnp.float32)
            assert (int(aux["seed"][0]) == SEED) == exact
            np.testing.assert_array_equal(aux["own"], above / 4 / microbatches)
            np.testing.assert_array_equal(aux["all"], np.asarray(above / microbatches))


def test_parameters_of_its_own_differ(make_mesh: Any) -> None:
    tx = jaxcomm.local_steps(optax.sgd(0.01), 3, optax.sgd(1.0), jaxcomm.mean("data"))
    with jax.set_mesh(make_mesh(4)):
        params, batch = {"w": jnp.float32(1.7)}, jaxcomm.global_batch(BATCH, "data")
        state = tx.init(jaxcomm.replicate(params))

        @jax.jit
        def step(state: Any) -> Any:
            own = jaxcomm.local_params(state)
            (_, aux), grads = gradient(2)(own, batch, SEED)
            return aux, jaxcomm.unmark_local(own)["w"], tx.update(grads, state, params)[1]

        _, _, state = step(state)
        aux, own, state = step(state)
    assert aux["seed"][0] == SEED
    assert np.ptp(own) > 0.1
    np.testing.assert_allclose(aux["weight"], 2 * np.mean(own), rtol=1e-6)


def test_a_carried_state_keeps_its_types(make_mesh: Any) -> None:
    """So that a step is compiled once."""
    traced = []

    def loss(w: jax.Array, x: jax.Array, state: Any) -> Any:
        mean = jax.lax.pmean(x.mean(), "data")
        return jnp.mean(w * x), {"count": state["count"] + 1, "mean": mean.astype(jnp.bfloat16)}

    @jax.jit
    def step(w: jax.Array, x: jax.Array, state: Any) -> Any:
        traced.append(0)
        return jaxcomm.value_and_grad(loss, "data", has_aux=True)(w, x, state)[0][1]

    with jax.set_mesh(make_mesh(4)):
        state = jaxcomm.replicate({"count": jnp.uint32(0), "mean": jnp.bfloat16(0)})
        for _ in range(3):
            state = step(jnp.float32(1), jaxcomm.global_batch(BATCH, "data"), state)
    assert state["count"] == 3 and state["count"].dtype == jnp.uint32
    assert state["mean"] == jnp.bfloat16(BATCH.mean()) and len(traced) == 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Picky:
    """Looks at what is put into it."""

    x: Any

    def __post_init__(self) -> None:
        assert self.x.ndim == 1


@pytest.mark.parametrize("microbatches", [1, 2])
def test_containers_get_arrays_only(microbatches: int, make_mesh: Any) -> None:
    def loss(w: jax.Array, x: jax.Array) -> Any:
        return jnp.mean(w * x), (Picky(w * jnp.ones(3)), Picky(x.mean(0)))

    with jax.set_mesh(make_mesh(4)):
        f = jaxcomm.accumulate(jaxcomm.value_and_grad(loss, "data", has_aux=True), microbatches)
        (_, (same, own)), _ = jax.jit(f)(jnp.float32(2), jaxcomm.global_batch(BATCH, "data"))
    np.testing.assert_array_equal(same.x, [2, 2, 2])
    np.testing.assert_allclose(own.x, BATCH.mean(0), rtol=1e-6)


@pytest.mark.parametrize("hidden", ["sequential_vmap", "callback"])
def test_what_cannot_be_seen_to_be_the_same_is_averaged(hidden: str, make_mesh: Any) -> None:
    """A rule of `vmap` that no operand calls hides the name of the axis; a callback, its host."""
    number = itertools.count()

    @jax.custom_batching.sequential_vmap
    def of_device(x: jax.Array) -> jax.Array:
        return x * jax.lax.axis_index("data").astype(jnp.float32)

    def loss(w: jax.Array, x: jax.Array) -> Any:
        if hidden == "callback":
            kind = jax.ShapeDtypeStruct((), jnp.float32)
            return jnp.mean(w * x), io_callback(lambda: np.float32(next(number)), kind)
        return jnp.mean(w * x), of_device(jnp.float32(1))

    with jax.set_mesh(make_mesh(4)):
        f = jax.jit(jaxcomm.value_and_grad(loss, "data", has_aux=True))
        (_, aux), _ = f(jnp.float32(1), jaxcomm.global_batch(BATCH, "data"))
    assert aux == 1.5


def test_microbatches_gather_parameters_anew(make_mesh: Any) -> None:
    tx = jaxcomm.sharded(jaxcomm.mean("data"), "cnat")

    def loss(params: Any, x: jax.Array) -> Any:
        w = jaxcomm.gather(params)["w"]
        return jnp.mean(x @ w[:1]), w

    with jax.set_mesh(make_mesh(4)):
        w = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
        params = jaxcomm.shard({"w": w}, "data")
        f = jaxcomm.value_and_grad(loss, "data", has_aux=True)
        run = jax.jit(lambda p, s, x: jaxcomm.accumulate(f, 4)(jaxcomm.sharded_params(p, s), x))
        (_, mean), _ = run(params, tx.init(params), jaxcomm.global_batch(BATCH, "data"))
    powers = np.frexp(np.abs(mean))[0] == 0.5
    assert 0.2 < powers.mean() < 0.8  # the others are means of different powers of two
