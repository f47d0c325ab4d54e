"""Residuals in bfloat16: half of the memory, and nothing that many steps would lose."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm.transforms.per_device import PerDevice
from transforms.both_views import (
    VIEWS,
    Program,
    View,
    by_name,
    gradients,
    in_views,
    nan_everywhere,
)

WORLD, GLOBAL = 4, VIEWS[0]
METHODS: dict[str, Callable[..., Any]] = {
    "int4": functools.partial(jaxcomm.mean, "data", "int4", error_feedback=True),
    "cnat": functools.partial(jaxcomm.mean, "data", "cnat", error_feedback=True),
    "first hop": functools.partial(jaxcomm.mean, "data", "int4", error_feedback="first_hop"),
    "random_k": functools.partial(jaxcomm.mean, "data", "random_k", error_feedback=True),
    "vote": functools.partial(jaxcomm.majority_vote, "data", error_feedback=True),
    "sparse": functools.partial(jaxcomm.sparse_mean, "data", 0.2),
    "corrected": functools.partial(jaxcomm.sparse_mean, "data", 0.2, momentum_correction=0.9),
    "low rank": functools.partial(jaxcomm.low_rank_mean, "data", 1),
}
each_method = pytest.mark.parametrize("name", METHODS)


@functools.cache
def program(name: str, view: View, dtype: str) -> Program:
    return Program(view, METHODS[name](residual_dtype=dtype), gradients(WORLD))


def in_float32(state: Any) -> Any:
    """The same state, with its residuals in float32."""

    def widened(node: Any) -> Any:
        if not isinstance(node, PerDevice):
            return node
        return PerDevice(
            [x.astype(jnp.float32) for x in node.values], node.specs, node.are_shares, node.shards
        )

    return jax.tree.map(widened, state, is_leaf=lambda node: isinstance(node, PerDevice))


@pytest.mark.parametrize(("name", "view"), in_views(METHODS, ["int4"]), ids=by_name)
def test_a_step_is_that_of_float32_but_for_the_rounding(name: str, view: View) -> None:
    """From the same residuals: the same updates, and one of the two nearest residuals."""
    halves, floats = (program(name, view, dtype) for dtype in ("bfloat16", "float32"))
    state, is_rounded = halves.start, False
    for seed in range(3):
        grads = gradients(WORLD, seed)
        (wanted, exact), *_ = floats.run(grads, state=in_float32(state))
        (updates, state), *_ = halves.run(grads, state=state)
        jax.tree.map(np.testing.assert_array_equal, updates, wanted)
        for half, full in zip(state.residual.values, exact.residual.values, strict=True):
            assert half.dtype == jnp.bfloat16 and full.dtype == jnp.float32
            assert half.sharding.spec == full.sharding.spec
            bits, found = np.asarray(full).view(np.uint32), np.asarray(half).view(np.uint16)
            up = found - (bits >> 16).astype(np.uint16)
            assert np.all((up == 0) | ((up == 1) & (bits & 0xFFFF != 0)))
            is_rounded |= bool((up == 1).any() and ((up == 0) & (bits & 0xFFFF != 0)).any())
    assert is_rounded


@each_method
def test_what_is_not_finite_leaves_the_residuals_as_they_were(name: str) -> None:
    good, bad = gradients(WORLD), gradients(WORLD, 1)
    bad["kernel"][2, 1, 3] = np.inf
    (_, before), (updates, after) = program(name, GLOBAL, "bfloat16").run(good, bad)
    assert nan_everywhere(updates)
    jax.tree.map(np.testing.assert_array_equal, before.residual, after.residual)


def persistent(dtype: str, steps: int = 400) -> float:
    """How much of a small gradient arrives beside large ones, which fill the residuals."""
    tx = jaxcomm.mean("data", "scaled_sign", error_feedback=True, residual_dtype=dtype)
    rng = np.random.default_rng(0)
    grads = {"w": rng.choice([-1, 1], (2, 8, 64)).astype(np.float32) * np.float32(0.7)}
    grads["w"][:, :, ::2] = 1e-3
    ran = Program(GLOBAL, tx, grads)
    total, state = np.zeros((8, 64)), ran.start
    for _ in range(steps):
        ((updates, state),) = ran.run(grads, state=state)
        total += np.asarray(updates["w"])
    total += np.asarray(state.residual.values[0], np.float64).mean(0)
    return float(total[:, ::2].mean() / (steps * 1e-3))


def test_small_gradients_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert abs(persistent("bfloat16") - 1) < 0.1
    nearest = jax.jit(lambda x, words: x.astype(jnp.bfloat16))
    monkeypatch.setattr("jaxcomm.transforms._residuals.round_at_random", nearest)
    assert abs(persistent("bfloat16") - 1) > 0.3  # a control: rounded to nearest


def test_devices_and_steps_round_differently_and_copies_alike() -> None:
    """Along an axis over which a leaf is replicated, its residuals are equal."""
    same = {name: np.repeat(g[:1], WORLD, 0) for name, g in gradients(WORLD).items()}
    view = next(view for view in VIEWS if view.model == 2 and not view.manual)
    (_, first), (_, second) = program("vote", view, "bfloat16").run(same, same)
    kernel = first.residual.values[1]  # of `head` and `kernel`: the latter is whole
    rounded = [np.asarray(kernel[i]).tobytes() for i in range(WORLD)]
    assert len(set(rounded)) == WORLD
    assert np.asarray(second.residual.values[1]).tobytes() != np.asarray(kernel).tobytes()
    by_device: dict[str, set[bytes]] = {}
    for shard in kernel.addressable_shards:
        by_device.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
    assert all(len(copies) == 1 for copies in by_device.values())


def test_the_state_has_half_of_the_bytes() -> None:
    params = {"w": jax.ShapeDtypeStruct((64, 32), jnp.float32)}
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:WORLD])):
        for dtype, bytes_ in ((np.float32, 4), (jnp.bfloat16, 2), ("bfloat16", 2)):
            tx = jaxcomm.mean("data", "int4", error_feedback=True, residual_dtype=dtype)
            assert jaxcomm.explain(tx, params).own_bytes == bytes_ * 64 * 32


def net(params: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
        own = jaxcomm.exchanged(jaxcomm.gather(params))
        return x + jnp.tanh(x @ own["kernel"]), None

    return jnp.mean((jax.lax.scan(layer, x, params["layers"])[0] - 1) ** 2)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("way", ["sharded", "in_backward"])
def test_layers_in_loops(way: str, microbatches: int) -> None:
    """The loss goes down as with float32 residuals; each layer rounds in its own way."""
    losses, rng = {}, np.random.default_rng(0)
    kernel, x = rng.standard_normal((3, 16, 16)) * 0.1, rng.standard_normal((24, 16))
    for dtype in ("float32", "bfloat16"):
        mean = jaxcomm.mean("data", "int4", error_feedback=True, residual_dtype=dtype)
        exchange: Any = jaxcomm.sharded(mean, gather="int8")
        if way == "in_backward":
            exchange = jaxcomm.in_backward(mean, ["layers"])
        tx = optax.chain(exchange, optax.sgd(0.5))
        with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:WORLD])):
            params = {"layers": {"kernel": jnp.asarray(kernel, jnp.float32)}}
            if way == "sharded":
                params = jaxcomm.shard(params, "data", layers=["layers/*"])
            else:
                params = jaxcomm.replicate(params)
            state = tx.init(params)
            batch = jaxcomm.global_batch(np.float32(x), "data")

            @jax.jit
            def step(params, state, batch, tx=tx, exchange=exchange):
                if way == "sharded":
                    at = jaxcomm.sharded_params(params, state)
                else:
                    at = exchange.attach(params, state)
                f = jaxcomm.value_and_grad(net, "data")
                f = f if microbatches == 1 else jaxcomm.accumulate(f, microbatches)
                loss, grads = f(at, batch)
                updates, state = tx.update(grads, state, params)
                return optax.apply_updates(params, updates), state, loss

            found = []
            for _ in range(15):
                params, state, loss = step(params, state, batch)
                found.append(float(loss))
        residuals = [x for x in jax.tree.leaves(state) if jnp.ndim(x) == 4]
        assert [x.dtype for x in residuals] == [dtype]
        assert np.abs(np.asarray(residuals[0], np.float32)).max(axis=(-1, -2)).min() > 0
        losses[dtype] = found
    assert losses["float32"][-1] < 0.6 * losses["float32"][0]
    np.testing.assert_allclose(losses["bfloat16"], losses["float32"], rtol=0.02)


@pytest.mark.parametrize("microbatches", [1, 3, 7])
def test_small_gradients_of_shards_add_up_over_microbatches(microbatches: int) -> None:
    """Residuals that were multiplied by 3, and divided again, would be rounded to nearest."""
    mean = jaxcomm.mean("data", "int4", error_feedback=True, residual_dtype="bfloat16")
    tx = optax.chain(jaxcomm.sharded(mean))
    small, steps = 5e-5, 600
    slopes = np.full((4, 256), 0.7, np.float32)
    slopes[:, ::2] = small
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:WORLD])):
        params = jaxcomm.shard({"w": jnp.zeros((4, 256))}, "data")
        state, batch = tx.init(params), jaxcomm.global_batch(np.ones(8 * microbatches), "data")

        def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
            return jnp.sum(jaxcomm.gather(params)["w"] * slopes) * jnp.mean(batch)

        @jax.jit
        def step(state, batch):
            f = jaxcomm.value_and_grad(loss_fn, "data")
            f = f if microbatches == 1 else jaxcomm.accumulate(f, microbatches)
            _, grads = f(jaxcomm.sharded_params(params, state), batch)
            return tx.update(grads, state, params)

        total = np.zeros((4, 256))
        for _ in range(steps):
            updates, state = step(state, batch)
            total += np.asarray(updates["w"])
        (residual,) = (x for x in jax.tree.leaves(state) if jnp.ndim(x) == 3)
    assert residual.dtype == jnp.bfloat16
    total += np.asarray(residual, np.float64).mean(0)
    np.testing.assert_allclose(total[:, ::2].mean(), steps * small, rtol=0.02)
    np.testing.assert_allclose(total[:, 1::2], steps * slopes[:, 1::2], rtol=1e-3)
    # Two devices that sent the same to the others do not round what they keep alike.
    shards = np.asarray(residual, np.float32).reshape(WORLD, 4, WORLD, -1)[:2, :, 2:]
    assert shards.any() and (shards[0] != shards[1]).any()


def rounded_up(state: Any, exact: Any) -> list[np.ndarray]:
    """Where each residual was rounded away from zero."""
    pairs = zip(state.residual.values, exact.residual.values, strict=True)
    return [np.abs(np.asarray(a, np.float32)) > np.abs(np.asarray(b)) for a, b in pairs]


def test_parts_and_shards_round_differently() -> None:
    """Of a partition, whose parts have one seed; and along an axis that splits a leaf."""
    mean = METHODS["vote"]
    rows = np.random.default_rng(0).standard_normal((WORLD, 8, 32)).astype(np.float32)

    def of(dtype: str) -> Any:
        parts = {"a": mean(residual_dtype=dtype), "b": mean(residual_dtype=dtype)}
        return optax.partition(parts, {"v": "a", "w": "b"})

    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:WORLD])):
        found, params = {}, {"v": jnp.zeros((8, 32)), "w": jnp.zeros((8, 32))}
        for dtype in ("float32", "bfloat16"):
            tx = of(dtype)
            _, found[dtype] = jax.jit(tx.update)({"v": rows, "w": rows}, tx.init(params))
    by_dtype = [found[dtype].inner_states for dtype in ("bfloat16", "float32")]
    one, two = (rounded_up(*(s[p].inner_state for s in by_dtype))[0] for p in "ab")
    assert 0.3 < np.mean(one != two) < 0.7
    mesh = VIEWS[3].mesh(WORLD)
    with jax.set_mesh(mesh):
        split = {"w": jax.device_put(jnp.zeros((8, 64)), NamedSharding(mesh, P(None, "model")))}
        grads = {"w": np.concatenate([rows, rows], 2)}
        grads = jax.device_put(grads, NamedSharding(mesh, P("data", None, "model")))
        states = []
        for dtype in ("bfloat16", "float32"):
            tx = mean(residual_dtype=dtype)
            states.append(jax.jit(tx.update)(grads, tx.init(split))[1])
    (up,) = rounded_up(*states)
    assert 0.3 < np.mean(up[..., :32] != up[..., 32:]) < 0.7


def test_a_state_of_another_dtype_is_refused_and_resized() -> None:
    params = {"w": jnp.ones((8, 8))}
    half = jaxcomm.mean("data", "int4", error_feedback=True, residual_dtype="bfloat16")
    full = jaxcomm.mean("data", "int4", error_feedback=True)
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        by_device = NamedSharding(jax.sharding.get_mesh(), P("data"))
        grads = {"w": jax.device_put(np.random.default_rng(0).random((2, 8, 8)), by_device)}
        for old, new, dtype in ((full, half, "bfloat16"), (half, full, "float32")):
            _, state = jax.jit(old.update)(grads, old.init(params))
            with pytest.raises(ValueError, match=f"residual_dtype is {dtype}.*resize_state"):
                new.update(grads, state)
            saved = jax.tree.map(jax.device_get, state)
            resized = jaxcomm.resize_state(new, saved, params)
            # Numpy's files do not know bfloat16.
            raw = jax.tree.map(lambda x: x.view("V2") if x.dtype == jnp.bfloat16 else x, saved)
            again = jaxcomm.resize_state(old, raw, params).residual.values[0]
            assert again.dtype == saved.residual.values[0].dtype
            found, kept = resized.residual.values[0], saved.residual.values[0]
            assert found.dtype == dtype
            mean = np.asarray(kept, np.float64).mean(0)
            np.testing.assert_allclose(np.asarray(found[1], np.float64), mean, rtol=2**-8)
            jax.jit(new.update)(grads, resized)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: METHODS["int4"](residual_dtype="float16"), ValueError, "got 'float16'"),
        (lambda: METHODS["sparse"](residual_dtype=None), ValueError, "got None"),
        (lambda: METHODS["low rank"](residual_dtype="16 bits"), TypeError, "got '16 bits'"),
        (lambda: METHODS["vote"](residual_dtype=16), TypeError, "got 16"),
        (
            lambda: jaxcomm.mean("data", "int4", residual_dtype="bfloat16"),
            ValueError,
            "add error_feedback=True",
        ),
        (
            lambda: jaxcomm.sparse_mean("data", error_feedback=False, residual_dtype=jnp.bfloat16),
            ValueError,
            "without error feedback there are none",
        ),
    ],
)
def test_other_dtypes_are_refused(make: Callable[[], Any], error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_leaves_of_a_bucket_round_differently() -> None:
    """Alike, their errors would add up."""
    rows = np.random.default_rng(0).standard_normal((4, 8, 32)).astype(np.float32)
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
        params, kept = {"v": jnp.zeros((8, 32)), "w": jnp.zeros((8, 32))}, {}
        for dtype in ("float32", "bfloat16"):
            tx = jaxcomm.majority_vote("data", error_feedback=True, residual_dtype=dtype)
            grads = jaxcomm.mark_local({"v": jnp.asarray(rows), "w": jnp.asarray(rows)})
            _, state = jax.jit(tx.update)(grads, tx.init(params))
            kept[dtype] = [np.abs(np.asarray(x, np.float32)) for x in state.residual.values]
    one, two = (a > b for a, b in zip(kept["bfloat16"], kept["float32"], strict=True))
    assert 0.3 < np.mean(one != two) < 0.7
