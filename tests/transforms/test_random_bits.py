"""Rounding and coins are independent between leaves, partitions, shards and steps."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxcomm
from transforms.both_views import VIEWS

GLOBAL, MODEL = VIEWS[0], VIEWS[3]
P = PartitionSpec
SHAPE = (8, 64)
METHODS: dict[str, Any] = {
    "cnat": lambda: jaxcomm.mean("data", "cnat"),
    "int4 at random": lambda: jaxcomm.mean("data", jaxcomm.codecs.int4(rounding="random")),
    "random_k": lambda: jaxcomm.mean("data", "random_k"),
    "ties of a vote": lambda: jaxcomm.majority_vote("data"),
    "zeros of a vote": lambda: jaxcomm.majority_vote("data", error_feedback=True),
}
SIGNS = np.where(np.arange(4) % 2 == 0, 1.0, -1.0)[:, None, None]


def equal_gradients(name: str) -> np.ndarray:
    """Gradients that say nothing of how they are rounded, or of who wins."""
    ones = np.ones((4, *SHAPE), np.float32)
    if name == "ties of a vote":
        return (ones * SIGNS).astype(np.float32)
    if name == "zeros of a vote":
        return ones * (np.arange(64) == 0)
    return ones * np.linspace(0.1, 1.0, 64, dtype=np.float32)


def steps(tx: Any, mesh: Any, grads: Any, specs: Any) -> list[Any]:
    """The updates of two steps on the same gradients."""
    with jax.set_mesh(mesh):
        place = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, P(*axes)))  # noqa: E731
        params = {k: place(jnp.zeros(SHAPE, jnp.float32), *specs.get(k, ())) for k in grads}
        grads = {k: place(g, "data", *specs.get(k, ())) for k, g in grads.items()}
        state, update, found = tx.init(params), jax.jit(tx.update), []
        for _ in range(2):
            updates, state = update(grads, state)
            found.append(jax.tree.map(np.asarray, updates))
    return found


@pytest.mark.parametrize("name", METHODS)
def test_leaves_of_two_partitions_and_two_steps(name: str) -> None:
    make, g = METHODS[name], equal_gradients(name)
    tx = optax.partition({"a": make(), "b": make()}, {"w": "a", "x": "b"})
    first, second = steps(tx, GLOBAL.mesh(4), {"w": g, "x": g}, {})
    assert np.mean(first["w"] != first["x"]) > 0.1
    assert np.mean(first["w"] != second["w"]) > 0.1


@pytest.mark.parametrize("name", ["cnat", "ties of a vote", "zeros of a vote"])
def test_buckets_of_a_step(name: str) -> None:
    methods = {
        "cnat": functools.partial(jaxcomm.mean, codec="cnat"),
        "ties of a vote": jaxcomm.majority_vote,
        "zeros of a vote": functools.partial(jaxcomm.majority_vote, error_feedback=True),
    }
    g, tx = equal_gradients(name), methods[name]("data", bucket_mib=1e-4)
    first, _ = steps(tx, GLOBAL.mesh(4), {"w": g, "x": g}, {})
    assert np.mean(first["w"] != first["x"]) > 0.1


@pytest.mark.parametrize("name", [*METHODS, "low rank"])
def test_noise_does_not_depend_on_the_generator_of_jax(name: str) -> None:
    """That of "unsafe_rbg" repeats itself: folding 1 and then 2 into a key is folding 2 and 1."""
    make = METHODS.get(name, lambda: jaxcomm.low_rank_mean("data", 2))
    usual = steps(make(), GLOBAL.mesh(4), {"w": equal_gradients(name)}, {})
    with jax.default_prng_impl("unsafe_rbg"):
        found = steps(make(), GLOBAL.mesh(4), {"w": equal_gradients(name)}, {})
    jax.tree.map(np.testing.assert_array_equal, usual, found)


@pytest.mark.parametrize("name", ["cnat", "ties of a vote"])
def test_shards_of_a_leaf_but_not_copies(name: str) -> None:
    g = equal_gradients(name)
    specs = {"sharded": (None, "model"), "copied": ()}
    same = np.concatenate([g[..., :32], g[..., :32]], axis=-1)  # both shards hold the same
    (found, _) = steps(METHODS[name](), MODEL.mesh(4), {"sharded": same, "copied": g}, specs)
    left, right = np.split(found["sharded"], 2, axis=-1)
    assert np.mean(left != right) > 0.1


@pytest.mark.standard_promotion  # of optax
def test_a_label_without_leaves() -> None:
    methods = [
        *METHODS.values(),
        lambda: jaxcomm.sparse_mean("data", 0.1, "topk_allgather"),
        lambda: jaxcomm.factored_adam(jaxcomm.mean("data"), 0.1),
        lambda: optax.chain(jaxcomm.local("data", optax.trace(0.9)), jaxcomm.mean("data")),
        lambda: optax.chain(jaxcomm.local("data", optax.clip(1.0)), jaxcomm.mean("data")),
        lambda: optax.chain(jaxcomm.local("data", optax.scale_by_adam()), jaxcomm.mean("data")),
    ]
    for make in methods:
        tx = optax.partition({"a": jaxcomm.mean("data"), "b": make()}, {"w": "a"})
        grads = {"w": np.ones((4, *SHAPE), np.float32)}
        (found, _) = steps(tx, GLOBAL.mesh(4), grads, {})
        np.testing.assert_array_equal(found["w"], np.ones(SHAPE))


def test_where_float64_is_on() -> None:
    """Wide integers would not be squared exactly where devices compare their keys."""
    grads = {"w": equal_gradients("random_k")}
    (usual, _) = steps(METHODS["random_k"](), GLOBAL.mesh(4), grads, {})
    with jax.enable_x64(True):
        (found, _) = steps(METHODS["random_k"](), GLOBAL.mesh(4), grads, {})
    assert np.isfinite(found["w"]).all() and np.any(found["w"])
    assert np.count_nonzero(found["w"]) == np.count_nonzero(usual["w"])


def test_a_seed_of_shards_is_a_number() -> None:
    with pytest.raises(TypeError, match=r'static_args=\("seed",\)'):
        jaxcomm.sharded(jaxcomm.mean("data", "cnat", seed=jnp.int32(3)))  # type: ignore[arg-type]


def test_devices_round_what_is_gathered_of_them_by_themselves() -> None:
    tx = jaxcomm.sharded(jaxcomm.mean("data"), gather="cnat")
    shard = np.linspace(0.1, 1.0, 16, dtype=np.float32)  # all four are equal

    def loss(w: Any, batch: Any) -> Any:
        whole = jaxcomm.gather(w)
        return jnp.sum(whole * batch[0]), whole

    with jax.set_mesh(GLOBAL.mesh(4)):
        w = jaxcomm.shard(jnp.broadcast_to(np.tile(shard, 4), SHAPE), "data")
        at, batch = jaxcomm.sharded_params(w, tx.init(w)), jaxcomm.global_batch(np.ones(4), "data")
        (_, whole), _ = jax.jit(jaxcomm.value_and_grad(loss, "data", has_aux=True))(at, batch)
    first, second, *_ = np.split(np.asarray(whole), 4, axis=1)
    assert np.mean(first != second) > 0.1
