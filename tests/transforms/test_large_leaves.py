"""Leaves and vectors beyond the sizes where means take another way."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxcomm
from jaxcomm import algorithms
from jaxcomm.transforms import _undecoded


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_large_leaf_of_a_plain_mean_is_added_in_32_bits(dtype: str) -> None:
    """It is an operand of its own, not joined with others."""
    values = jnp.asarray([256, 1, 1, 1], dtype)  # in bfloat16, 256 + 1 is 256
    params = {"large": jnp.ones((2**9, 2**9), dtype), "small": jnp.ones((3, 5), dtype)}
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
        tx = jaxcomm.mean("data")
        grads = jax.tree.map(lambda x: jnp.multiply.outer(values, x), params)
        updates, _ = jax.jit(tx.update)(grads, tx.init(jaxcomm.replicate(params)))
    for name, x in params.items():
        np.testing.assert_array_equal(updates[name], jnp.full(x.shape, 259 / 4, dtype))


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8"])
def test_one_bad_value_of_a_long_vector_is_seen(codec: str) -> None:
    """It makes every update NaN and leaves residuals as they are, also beside short vectors."""
    params = {"long": jnp.ones((2**7, 2**8)), "short": jnp.ones((3, 5))}
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
        tx = jaxcomm.mean("data", codec, bucket_mib=0.01, error_feedback=codec != "float32")
        state = tx.init(jaxcomm.replicate(params))
        grads = {name: jnp.ones((4, *x.shape)) for name, x in params.items()}
        grads["long"] = grads["long"].at[2, 100, 200].set(jnp.nan)
        updates, after = jax.jit(tx.update)(grads, state)
    assert all(np.isnan(u).all() for u in updates.values())
    jax.tree.map(np.testing.assert_array_equal, after.residual, state.residual)


@pytest.mark.parametrize("error_feedback", [False, True])
@pytest.mark.parametrize("zeros", ["random", "abstain"])
def test_large_leaves_are_voted_on_as_small_ones_are(zeros: str, error_feedback: bool) -> None:
    """Those whose bits fill whole words are packed apart, the others together, in one bucket."""
    shapes = {"apart": (2**9, 2**8), "half": (2**9, 2**8), "odd": (519, 257), "small": (3, 5)}
    params = {
        name: jnp.zeros(s, "bfloat16" if name == "half" else None) for name, s in shapes.items()
    }
    rng = np.random.default_rng(0)
    values = {name: rng.integers(-1, 2, (3, *s)) for name, s in shapes.items()}
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:3])):
        tx = jaxcomm.majority_vote("data", zeros=zeros, ties="zero", error_feedback=error_feedback)
        state = tx.init(jaxcomm.replicate(params))
        grads = {name: jnp.asarray(x, params[name].dtype) for name, x in values.items()}
        update = jax.jit(tx.update)
        updates, after = update(grads, state)
        spoiled, _ = update({**grads, "small": grads["small"].at[1, 2, 3].set(jnp.nan)}, after)
    for name, x in values.items():
        sign, undecided = np.sign(x.sum(0)), (x == 0).sum(0) if zeros == "random" else 0
        is_known = np.abs(x.sum(0)) >= undecided + (zeros == "random")
        scale = np.abs(x).mean() if error_feedback else 1
        found = np.asarray(updates[name], np.float32)
        np.testing.assert_allclose(found[is_known], scale * sign[is_known], rtol=2e-2)
        assert is_known.mean() > 0.3
        assert updates[name].dtype == params[name].dtype
        assert updates[name].shape == shapes[name]
    assert all(np.isnan(x).all() for x in jax.tree.leaves(spoiled))


@pytest.mark.parametrize(
    ("tx", "most"),
    [
        (jaxcomm.majority_vote("data"), 0.25),
        (jaxcomm.mean("data", "int4", error_feedback=True), 1.75),  # their sum with the residuals
    ],
    ids=["vote", "int4"],
)
def test_temporary_memory_of_large_leaves(tx: Any, most: float) -> None:
    """In vectors of the gradients' size, without what one device keeps."""
    params = {"a": jnp.zeros((2**9, 2**9)), "b": jnp.zeros((2**10, 2**7))}
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
        grads = jax.tree.map(lambda x: jnp.zeros((4, *x.shape)), params)
        state = tx.init(jaxcomm.replicate(params))
        lowered = jax.jit(tx.update, donate_argnums=1).lower(grads, state)
    memory = lowered.compile().memory_analysis()
    vector = sum(x.nbytes for x in params.values())
    assert memory.temp_size_in_bytes < most * vector


INT4 = jaxcomm.codecs.int4()
# In the order in which they are joined: those that are decoded alone come first.
BLOCKS = {"z": (2**9, 3 * 2**8), "y": (2**10, 2**7), "odd": (257, 519), "few": (3, 5)}
BY_HOSTS: dict[str, Any] = {
    "near": algorithms.direct(),
    "far": algorithms.direct(),
    "near_codec": "float32",
    "devices_per_host": 2,
}
MEANS = {
    "int4": {"codec": "int4"},
    "random": {"codec": jaxcomm.codecs.int4(rounding="random")},
    "scaled_sign": {"codec": jaxcomm.codecs.scaled_sign(128)},
    "two hops": {"codec": "int2", "second_hop": "int8"},
    "first hop": {"codec": "int4", "error_feedback": "first_hop"},
    "by hosts": {
        "codec": jaxcomm.codecs.int4(rounding="random"),
        "algorithm": algorithms.hierarchical(**BY_HOSTS),
    },
}


@pytest.mark.parametrize(
    ("name", "world", "model"),
    [*((name, 4, 1) for name in MEANS), ("int4", 4, 2), ("scaled_sign", 3, 1)],
)
def test_a_mean_that_stays_encoded_is_that_of_the_decoded_vector(
    name: str, world: int, model: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, in updates and residuals; and a step with a NaN is not taken."""
    mesh = jax.make_mesh(
        (world, model),
        ("data", "model"),
        (AxisType.Auto,) * 2,
        devices=jax.devices()[: world * model],
    )
    params = {leaf: jnp.zeros(shape) for leaf, shape in BLOCKS.items()}
    rng = np.random.default_rng(0)
    steps = [
        {leaf: rng.standard_normal((world, *shape), np.float32) for leaf, shape in BLOCKS.items()}
        for _ in range(2)
    ]
    bad = {**steps[0], "odd": steps[0]["odd"].copy()}
    bad["odd"][2, 100, 200] = np.nan

    def run(*grads: dict[str, np.ndarray]) -> tuple[Any, Any]:
        with jax.set_mesh(mesh):
            tx = jaxcomm.mean("data", **{"error_feedback": True, **MEANS[name]})
            split = {"z": jax.device_put(params["z"], jax.P("model"))}
            state, updates = tx.init(jaxcomm.replicate(params) | split), None
            update = jax.jit(tx.update)
            for step in grads:
                updates, state = update(jax.tree.map(jnp.asarray, step), state)
        return updates, state

    took = []
    monkeypatch.setattr(_undecoded, "finished", noting(took, _undecoded.finished))
    updates, state = run(*steps)
    spoiled, after = run(*steps, bad)
    assert took
    assert all(np.isnan(x).all() for x in jax.tree.leaves(spoiled))
    jax.tree.map(np.testing.assert_array_equal, after.residual, state.residual)
    monkeypatch.setattr(_undecoded, "stays_encoded", lambda *_: False)
    took.clear()
    expected, kept = run(*steps)
    assert not took
    jax.tree.map(np.testing.assert_array_equal, (updates, state), (expected, kept))


def noting(calls: list[Any], f: Callable[..., Any]) -> Callable[..., Any]:
    """f, which notes that it was called."""

    def noted(*args: Any) -> Any:
        calls.append(args)
        return f(*args)

    return noted


class Halved(type(INT4)):
    """Decodes in its own way, as a user's codec may."""

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        return super().decode(payload, n) / 2

    def decode_and_sum(self, payloads: jax.Array, n: int) -> jax.Array:
        return super().decode_and_sum(payloads, n) / 2

    def sum_with_own(self, payloads: jax.Array, own: jax.Array, place: jax.Array) -> jax.Array:
        return super().sum_with_own(payloads, 2 * own, place) / 2

    def error(self, x: jax.Array, payload: jax.Array) -> jax.Array:
        return x - self.decode(payload, x.shape[-1])


def test_a_codec_that_decodes_in_its_own_way_loses_nothing() -> None:
    codec = Halved(**{f.name: getattr(INT4, f.name) for f in dataclasses.fields(INT4)})
    x = np.random.default_rng(0).standard_normal((4, 2**9, 2**9), np.float32)
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
        tx = jaxcomm.mean("data", codec, error_feedback=True)
        state = tx.init({"w": jaxcomm.replicate(jnp.zeros(x.shape[1:]))})
        updates, state = jax.jit(tx.update)({"w": jnp.asarray(x)}, state)
    (residual,) = state.residual.values
    np.testing.assert_allclose(4 * updates["w"] + residual.sum(0), x.sum(0), atol=1e-5)
