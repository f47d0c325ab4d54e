"""The bytes of a step on average over a run: every branch by the share of steps that take it."""

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from transforms.both_views import APART, VIEWS, Program, View, by_name, gradients

WORLD = 4
MEAN = jaxcomm.mean("data", "bfloat16")
METHODS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "mean": lambda: MEAN,
    "float32": lambda: jaxcomm.mean("data"),
    "multi_steps": lambda: jaxcomm.multi_steps(MEAN, 4),
    "control_variates": lambda: optax.chain(jaxcomm.control_variates(MEAN, 8), MEAN),
    "dense_first": lambda: jaxcomm.dense_first(MEAN, 10),
    "dense, accumulated": lambda: jaxcomm.multi_steps(jaxcomm.dense_first(MEAN, 10), 4),
    "1-bit Adam": lambda: jaxcomm.one_bit_adam("data", 0.1, dense_steps=10),
}


@pytest.fixture(autouse=True)
def names_count() -> Iterator[None]:
    """The names of branches, which the cache of compiled programs ignores by default."""
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)


@functools.cache
def report(method: str, view: View = VIEWS[0]) -> jaxcomm.WireReport:
    return Program(view, METHODS[method](), gradients(WORLD)).report()


def sent(method: str) -> float:
    return float(report(method).bytes_max)


@pytest.mark.parametrize("view", APART, ids=by_name)
def test_what_is_periodic_says_how_often(view: View) -> None:
    found = report("multi_steps", view)
    assert [branch.name for branch in found.named] == ["multi_steps: exchange"]
    assert found.per_step() == float(found.bytes_max) / 4
    assert found.per_step({"multi_steps: exchange": 0.5}) == float(found.bytes_max) / 2
    assert "multi_steps: exchange" in str(found)
    assert json.loads(json.dumps(found.as_dict())) == found.as_dict()


def test_a_program_without_branches() -> None:
    assert report("mean").per_step() == sent("mean")


def test_branches_beside_what_always_runs() -> None:
    assert report("control_variates").per_step() == sent("mean") * (1 + 1 / 8)


def test_stages_need_their_shares() -> None:
    found = report("dense_first")
    assert {branch.name for branch in found.named} == {"from step 0", "from step 10"}
    mixed = 0.1 * sent("float32") + 0.9 * sent("mean")
    assert found.per_step({"from step 0": 0.1}) == pytest.approx(mixed)
    assert found.per_step({"from step 0": 0.1, "from step 10": 0.9}) == pytest.approx(mixed)
    ((name, _),) = found.conditionals
    assert found.per_step({(name, 0): 1}) == sent("float32")


def test_what_sends_nothing_needs_no_shares() -> None:
    """As on one device."""
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:1])):
        tx, params = METHODS["dense_first"](), {"w": jnp.zeros((8, 8))}
        grads = {"w": np.zeros((1, 8, 8), np.float32)}
        lowered = jax.jit(tx.update).lower(grads, tx.init(params), params)
        found = jaxcomm.wire_report(lowered.compile())
    assert found.conditionals and found.per_step() == 0


def test_branches_in_branches() -> None:
    mixed = 0.1 * sent("float32") + 0.9 * sent("mean")
    assert report("dense, accumulated").per_step({"from step 0": 0.1}) == pytest.approx(mixed / 4)


def test_dense_steps_of_one_bit_adam() -> None:
    found = report("1-bit Adam")
    frozen = found.per_step({"one_bit_adam: dense": 0})
    assert found.per_step({"one_bit_adam: dense": 1}) == found.bytes_max
    dense = float(found.bytes_max) - frozen
    assert found.per_step({"one_bit_adam: dense": 0.05}) == pytest.approx(frozen + 0.05 * dense)
    assert 0 < frozen < found.bytes_max
    with pytest.raises(ValueError, match="needs the share of 'one_bit_adam: dense': per_step"):
        found.per_step()


def test_fragments_of_local_steps() -> None:
    tx = jaxcomm.local_steps(optax.sgd(0.1), 8, optax.sgd(1.0), MEAN, fragments=2)
    with jax.set_mesh(VIEWS[0].mesh(WORLD)):
        params = jaxcomm.replicate({"a": jnp.zeros((8, 8)), "b": jnp.zeros((8, 8))})
        grads = {name: np.zeros((WORLD, 8, 8), np.float32) for name in params}
        lowered = jax.jit(tx.update).lower(grads, tx.init(params), params)
    found = jaxcomm.wire_report(lowered.compile())
    names = ["local_steps: fragment 1", "local_steps: fragment 2"]
    assert sorted(branch.name for branch in found.named) == names
    assert found.per_step() == pytest.approx(float(found.bytes_max) * 2 / 8)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({}, r"needs the share of 'from step 0' or of 'from step 10': per_step"),
        ({"from step 5": 0.1}, "no branch of the program is called 'from step 5'; it has 'from st"),
        ({"from step 0": 1.5}, "a share is a number from 0 to 1, got 1.5"),
        ({"from step 0": 0.5, "from step 10": 0.4}, "'from step 10' must add up to 1"),
        ({"from step 0": -0.5}, "a share is a number from 0 to 1, got -0.5"),
    ],
)
def test_bad_shares(shares: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        report("dense_first").per_step(shares)


def test_what_a_loop_sends_counts_by_its_trips() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 5, lambda _, x: jax.lax.psum(x, "data") / WORLD, x)

    mesh, spec = VIEWS[0].mesh(WORLD), jax.P("data")
    f = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    found = jaxcomm.wire_report(jax.jit(f).lower(jnp.zeros((WORLD, 64))).compile())
    assert found.per_step() == found.bytes_max == 5 * 1.5 * 4 * 64


def test_it_is_that_of_the_device_that_sends_most() -> None:
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
        step = jax.shard_map(
            lambda x: jax.lax.ppermute(x, "data", [(0, 1)]),
            in_specs=jax.P("data"),
            out_specs=jax.P("data"),
        )
        compiled = jax.jit(step).lower(jax.ShapeDtypeStruct((4, 100), "float32")).compile()
    found = jaxcomm.wire_report(compiled)
    assert found.per_step() == found.bytes_max == 400 == 4 * found.bytes_mean
