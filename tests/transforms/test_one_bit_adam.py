"""1-bit Adam: the published algorithm, its laws, its bytes, and the stage it is in."""

import functools
import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jaxcomm
from jaxcomm.collectives.one_bit import BLOCK, chunk_length, one_bit_mean
from jaxcomm.transforms.one_bit_adam import one_bit_adam
from transforms import one_bit_oracle
from transforms.both_views import (
    APART,
    SHAPES,
    VIEWS,
    Program,
    View,
    by_name,
    each_view,
    gradients,
    nan_everywhere,
    place,
    run,
    same_on_all_devices,
)

GLOBAL = VIEWS[0]
OPTIONS = {"b1": 0.9, "b2": 0.99, "eps": 1e-6}
WARMUP = 2


@functools.cache
def program(view: View, world: int = 4) -> Program:
    return Program(view, one_bit_adam("data", 0.5, dense_steps=WARMUP, **OPTIONS), gradients(world))


def skewed(world: int, seed: int) -> dict[str, np.ndarray]:
    """Gradients that every device pulls its own way."""
    pull = gradients(world, 1000)
    return {name: g + 2 * pull[name] for name, g in gradients(world, seed).items()}


# The exchange


def in_blocks(sizes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """How many values each block of leaves of these sizes has, and where the values lie."""
    counts = [min(n - at, BLOCK) for n in sizes for at in range(0, n, BLOCK)]
    places = [i * BLOCK + np.arange(count) for i, count in enumerate(counts)]
    return np.asarray(counts), np.concatenate(places)


@functools.cache
def exchanged(world: int, sizes: tuple[int, ...], steps: int = 50) -> tuple[np.ndarray, ...]:
    """Inputs [T, N, n], and what every device has after each step: mean and both errors."""
    n, (counts, places) = sum(sizes), in_blocks(sizes)
    length, rng = counts.size * BLOCK, np.random.default_rng(n)
    inputs = rng.standard_normal((steps, world, n)) + 2 * rng.standard_normal((world, n))
    inputs = (inputs * np.logspace(-3, 3, n)).astype(np.float32)

    def run(x: jax.Array) -> Any:
        def step(errors: Any, x: jax.Array) -> Any:
            whole = jnp.zeros(length).at[places].set(x)
            mean, *errors = one_bit_mean(whole, *errors, counts, "data")
            return errors, (mean[places], *errors)

        none = [jnp.zeros(length), jnp.zeros(chunk_length(length, world))]
        return [y[:, None] for y in jax.lax.scan(step, none, x[:, 0])[1]]

    spec = PartitionSpec(None, "data")
    mesh = jaxcomm.data_mesh(devices=jax.devices()[:world])
    run = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    return inputs, *map(np.asarray, run(inputs))


each_size = pytest.mark.parametrize(
    ("world", "sizes"),
    [(1, (40,)), (3, (5, 77, 1024)), (4, (130, 4500)), (5, (3000, 3000)), (4, (5,))],
)


@each_size
def test_the_exchange_is_the_published_one(world: int, sizes: tuple[int, ...]) -> None:
    inputs, means, workers, servers = exchanged(world, sizes)
    n, (counts, places) = sum(sizes), in_blocks(sizes)
    padding = np.setdiff1d(np.arange(servers[0].size), places)
    worker, server = np.zeros((world, n), np.float32), np.zeros(n, np.float32)
    for t, x in enumerate(inputs):
        mean, worker, server = one_bit_oracle.exchange(x, worker, server, list(sizes))
        np.testing.assert_array_equal(means[t, 0] > 0, mean > 0)
        np.testing.assert_allclose(means[t, 0], mean, rtol=1e-5)
        # A sign that differed would be off by two scales.
        size = np.abs(x).max()
        np.testing.assert_allclose(workers[t][:, places], worker, atol=1e-5 * size)
        flat = servers[t].reshape(-1)
        np.testing.assert_allclose(flat[places], server, atol=1e-5 * size)
        np.testing.assert_array_equal(flat[padding], 0)
        np.testing.assert_array_equal(workers[t][:, padding[padding < counts.size * BLOCK]], 0)


@each_size
def test_what_is_not_sent_yet_is_owed(world: int, sizes: tuple[int, ...]) -> None:
    inputs, means, workers, servers = exchanged(world, sizes)
    _, places = in_blocks(sizes)
    assert (means.view(np.uint32) == means[:, :1].view(np.uint32)).all()
    owed = workers[-1].mean(0)[places] + servers[-1].reshape(-1)[places]
    np.testing.assert_allclose(
        means[:, 0].sum(0, np.float64) + owed,
        inputs.mean(1, np.float64).sum(0),
        atol=2e-4 * np.abs(inputs).max(),
    )


# The transformation


def oracles_of(world: int, view: View, warmup: int) -> dict[str, one_bit_oracle.OneBitAdam]:
    """One for each leaf as a device sees it."""
    sizes = {"bias": 6, "scale": 1, "kernel": 21}
    sizes |= {"head 0": 20, "head 1": 20} if view.model > 1 else {"head": 40}
    return {
        name: one_bit_oracle.OneBitAdam(
            world, n, warmup, exempt=name in ("bias", "scale"), **OPTIONS
        )
        for name, n in sizes.items()
    }


def expected_step(oracles: Any, grads: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    flat = {name: g.reshape(len(g), -1) for name, g in grads.items()}
    expected = {name: oracles[name].step(g) for name, g in flat.items() if name in oracles}
    if "head" not in oracles:
        halves = np.split(grads["head"], 2, axis=2)
        steps = [oracles[f"head {i}"].step(h.reshape(len(h), -1)) for i, h in enumerate(halves)]
        expected["head"] = np.concatenate([step.reshape(4, 5) for step in steps], axis=1)
    return {name: expected.get(name, np.zeros(0)).reshape(s) for name, s in SHAPES.items()}


def follow(view: View, world: int, steps: int) -> None:
    oracles = oracles_of(world, view, WARMUP)
    batches = [skewed(world, 100 + t) for t in range(steps)]
    trained = program(view, world).run(*batches)
    for grads, (updates, _) in zip(batches, trained, strict=True):
        for name, step in expected_step(oracles, grads).items():
            np.testing.assert_allclose(updates[name], 0.5 * step, rtol=2e-3, atol=1e-6)
            np.testing.assert_array_equal(np.asarray(updates[name]) > 0, step > 0)
    updates, state = trained[-1]
    assert (state.count, state.frozen_at) == (steps, WARMUP)
    assert all(same_on_all_devices(x) for x in [*updates.values(), *jax.tree.leaves(state.m)])
    for errors in (state.worker_error, state.server_error):
        assert all(not x.sharding.is_fully_replicated for x in errors.values)


@pytest.mark.parametrize("world", [3, 4])
def test_fifty_steps_of_the_published_algorithm(world: int) -> None:
    follow(GLOBAL, world, steps=50)


@each_view
def test_every_view_follows_the_algorithm_and_compiles_once(view: View) -> None:
    follow(view, 4, steps=5)


@pytest.mark.standard_promotion  # of the schedule
def test_the_warm_up_is_adamw_on_the_mean() -> None:
    rate = optax.cosine_decay_schedule(0.1, 8)
    tx = one_bit_adam("data", rate, weight_decay=0.1, dense_steps=9)
    reference = optax.adamw(rate, weight_decay=0.1)
    with jax.set_mesh(GLOBAL.mesh(4)):
        ones = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
        params = expected = place(GLOBAL, ones)
        state, update = tx.init(params), jax.jit(tx.update)
        adam, adam_update = reference.init(expected), jax.jit(reference.update)
        for t in range(6):
            grads = gradients(4, t)
            updates, state = update(place(GLOBAL, grads, "data"), state, params)
            params = optax.apply_updates(params, updates)
            means = {name: g.mean(0) for name, g in grads.items()}
            updates, adam = adam_update(means, adam, expected)
            expected = optax.apply_updates(expected, updates)
            for name in SHAPES:
                np.testing.assert_allclose(params[name], expected[name], atol=3e-6)
    assert state.frozen_at == 0
    for name in SHAPES:
        np.testing.assert_allclose(state.m[name], adam[0].mu[name], atol=1e-6)
        np.testing.assert_allclose(state.v[name], adam[0].nu[name], atol=1e-6)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_bytes_of_each_stage_are_those_of_the_formula(world: int) -> None:
    report = program(GLOBAL, world).report()
    always = Fraction(2 * (world - 1), world) * 4 * (6 + 1)  # exempt values
    warmup = Fraction(2 * (world - 1), world) * 4 * 61
    blocks = math.ceil(2 / world)  # of each owner: kernel and head have a block each
    always += 2 * (world - 1) * 4 * 33 * blocks
    sent = {branch: r.bytes_max for (_, branch), r in report.by_branch().items()}
    assert (sent or {0: always, 1: always}) == {0: always + warmup, 1: always}


def test_each_bucket_has_its_payloads_and_its_errors() -> None:
    tx = one_bit_adam("data", 0.1, dense_steps=1, bucket_mib=1e-4, bucket_order=("head",))
    buckets = Program(GLOBAL, tx, gradients(4))
    report = buckets.report()
    assert [x.shape for x in buckets.start.worker_error.values] == [(4, 1024), (4, 1024)]
    assert [x.shape for x in buckets.start.server_error.values] == [(4, 1024), (4, 1024)]
    for op in ("all-to-all", "all-gather"):
        found = report.only(op).collectives
        assert [set(c.dtypes) for c in found] == [{"u32"}] * 2
        assert [c.branch for c in found] == [(), ()]


@pytest.mark.parametrize("view", [*APART, VIEWS[5]], ids=by_name)
def test_a_bad_gradient_makes_every_update_nan_and_leaves_the_state(view: View) -> None:
    good, steps = gradients(4), []
    dense, frozen = [("head", np.nan), ("bias", np.inf)], [("head", np.inf), ("bias", np.nan)]
    for where, value in [*dense, *frozen, ("head", np.nan)]:
        bad = gradients(4)
        bad[where][2].flat[3] = value
        steps += [bad, good]
    steps = program(view).run(*steps)
    before = program(view).start
    for (spoiled, kept), (updates, state) in zip(steps[::2], steps[1::2], strict=True):
        assert nan_everywhere(spoiled)
        jax.tree.map(np.testing.assert_array_equal, kept, before)
        assert all(np.isfinite(u).all() for u in updates.values())
        before = state
    assert (before.count, before.frozen_at) == (5, WARMUP)


@pytest.mark.parametrize("view", [GLOBAL, VIEWS[5]], ids=by_name)
def test_the_warm_up_ends_when_the_variance_is_stable(view: View) -> None:
    b2, threshold = 0.75, 0.9  # norms 4 steps apart are compared
    sizes = [4.0, 3.0, 2.0, 1.5, 1.0, 1.5, 2.5, 4.0, *[6.0] * 12]
    tx = one_bit_adam("data", 0.1, b2=b2, variance_stability=threshold)
    grads, v, norms, expected = gradients(4), 0.0, [], 0
    for t, size in enumerate(sizes, 1):
        v = b2 * v + (1 - b2) * size**2  # the variance is this times one and the same tree
        norms.append(v / (1 - b2**t))
        ratio = norms[-1] / norms[-5] if t > 4 else 0.0
        expected = expected or (t if threshold <= ratio <= 1 / threshold else 0)
    assert 12 < expected < len(sizes), "neither shrinking nor growing is stable"
    batches = [{name: np.float32(size) * g for name, g in grads.items()} for size in sizes]
    before = None
    for t, (_, state) in enumerate(run(view, tx, batches), 1):
        assert state.frozen_at == (expected if t >= expected else 0)
        if t > expected:
            jax.tree.map(np.testing.assert_array_equal, state.v, before)
        before = state.v


@pytest.mark.parametrize(
    "options",
    [
        {"total_steps": 20},
        {"total_steps": 20, "variance_stability": 0.99},
        {"dense_steps": 3, "variance_stability": 0.99},
    ],
    ids=str,
)
def test_the_length_of_the_run_ends_the_warm_up(options: Any) -> None:
    """With the default b2 stability alone cannot: it compares norms that are 1000 steps apart."""
    states = [s for _, s in run(GLOBAL, one_bit_adam("data", 0.1, **options), [gradients(4)] * 5)]
    assert [int(state.frozen_at) for state in states] == [0, 0, 3, 3, 3]


def test_what_never_had_a_gradient_stays_where_it_is() -> None:
    batches = [gradients(4, t) for t in range(6)]
    for grads in batches:
        grads["kernel"][:, 1] = 0
    for updates, _ in program(GLOBAL).run(*batches):
        np.testing.assert_array_equal(updates["kernel"][1], 0)
        assert (np.asarray(updates["kernel"][0]) != 0).all()


def test_moments_of_16_bit_gradients_are_float32() -> None:
    tx = one_bit_adam("data", 0.1, weight_decay=0.1, dense_steps=1)
    dtypes = {"v": jnp.bfloat16, "w": jnp.float16}
    with jax.set_mesh(GLOBAL.mesh(2)):
        params = {name: np.ones((4, 3), dtype) for name, dtype in dtypes.items()}
        state, update = tx.init(params), jax.jit(tx.update)
        values = np.float32([1, 3])[:, None, None] * np.ones((2, 4, 3), np.float32)
        grads = {name: values.astype(dtype) for name, dtype in dtypes.items()}
        for _ in range(2):
            updates, state = update(grads, state, params)
    assert {x.dtype for x in jax.tree.leaves((state.m, state.v))} == {np.dtype(np.float32)}
    for name, dtype in dtypes.items():
        assert updates[name].dtype == dtype
        np.testing.assert_allclose(np.asarray(updates[name], np.float32), -0.11, rtol=1e-2)


def test_small_gradients_beside_large_ones_take_steps_of_the_same_size() -> None:
    """In one message: of a scale that they shared they would have the large ones' momentum."""
    sizes, rng = {"a": 1.0, "b": 1e-4, "c": 1.0, "d": 1e-4}, np.random.default_rng(0)
    batches = [
        {name: size * rng.standard_normal((2, 33, 32), np.float32) for name, size in sizes.items()}
        for _ in range(12)
    ]
    steps = run(GLOBAL, one_bit_adam("data", 0.1, dense_steps=2), batches)
    for updates, _ in steps:
        a, b, c, d = (np.sqrt(np.mean(np.square(updates[name]))) for name in sizes)
        np.testing.assert_allclose([b, d], [a, c], rtol=0.5)


@pytest.mark.standard_promotion  # of the schedule
def test_devices_that_disagree_find_the_common_optimum() -> None:
    world, steps = 4, 300
    rng = np.random.default_rng(0)
    A = rng.standard_normal((world, 12, 6)).astype(np.float32) / np.sqrt(12).astype(np.float32)
    target = 3 * rng.standard_normal((world, 6, 5)).astype(np.float32)  # each wants its own
    normal = np.einsum("dij,dik->djk", A, A)
    best = np.linalg.solve(normal.sum(0), np.einsum("djk,dkl->jl", normal, target))

    def distance(tx: Any) -> float:
        def step(w: Any, state: Any) -> Any:
            updates, state = tx.update(jnp.einsum("djk,dkl->djl", normal, w[None] - target), state)
            return optax.apply_updates(w, updates), state

        with jax.set_mesh(GLOBAL.mesh(world)):
            w = jaxcomm.replicate(jnp.zeros((6, 5)))
            state, step = tx.init(w), jax.jit(step)
            for _ in range(steps):
                w, state = step(w, state)
        return max(np.abs(shard.data - best).max() for shard in w.addressable_shards)

    rate = optax.cosine_decay_schedule(0.1, steps)
    assert distance(one_bit_adam("data", rate, dense_steps=30)) < 0.15
    assert distance(optax.chain(jaxcomm.no_exchange("data"), optax.adam(rate))) > 1


def test_without_large_leaves_it_is_adam_with_a_frozen_variance() -> None:
    tx = one_bit_adam("data", 0.1, dense_steps=1)
    with jax.set_mesh(GLOBAL.mesh(2)):
        state, update = tx.init(jnp.zeros(3)), jax.jit(tx.update)
        for g in (1.0, 2.0):
            updates, state = update(np.full((2, 3), g, np.float32), state)
    m, v = 0.9 * 0.1 * 1 + 0.1 * 2, 1.0  # v stays 0.001 / (1 - 0.999)
    np.testing.assert_allclose(updates, -0.1 * m / (1 - 0.9**2) / np.sqrt(v), rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dense_steps": None}, ValueError, "say when the warm-up ends"),
        (
            {"total_steps": 100},
            ValueError,
            "give either total_steps or dense_steps, got",
        ),
        ({"dense_steps": None, "total_steps": 0}, ValueError, "total_steps must be a whole number"),
        ({"dense_steps": 0}, ValueError, "dense_steps must be a whole number >= 1"),
        ({"dense_steps": 1.5}, ValueError, "dense_steps must be a whole number >= 1"),
        ({"dense_steps": "10"}, TypeError, "dense_steps must be a Python number"),
        ({"dense_steps": None, "variance_stability": 1.1}, ValueError, r"be in \(0, 1\], got 1.1"),
        ({"b1": 1.0}, ValueError, r"b1 must be in \[0, 1\), got 1.0"),
        ({"b2": -0.1}, ValueError, r"b2 must be in \[0, 1\), got -0.1"),
        ({"b2": np.ones(())}, TypeError, "static_args must name all other numbers"),
        ({"eps": -1e-8}, ValueError, "eps must be >= 0"),
        ({"weight_decay": float("nan")}, ValueError, "weight_decay must be >= 0"),
        ({"learning_rate": "0.1"}, TypeError, "learning_rate must be a number or a schedule"),
        ({"learning_rate": jnp.ones(3)}, TypeError, "learning_rate must be a number or a sch"),
        ({"bucket_mib": 0}, ValueError, "bucket_mib must be a positive number"),
        ({"axis_name": 0}, TypeError, "axis_name must be the name"),
    ],
)
def test_bad_arguments_raise_at_once(options: Any, error: Any, message: str) -> None:
    good = {"learning_rate": 0.1, "axis_name": "data", "dense_steps": 10}
    with pytest.raises(error, match=message):
        one_bit_adam(**(good | options))


def test_bad_input_raises() -> None:
    tx = one_bit_adam("data", 0.1, weight_decay=0.1, dense_steps=1)
    with jax.set_mesh(GLOBAL.mesh(2)):
        with pytest.raises(TypeError, match="parameter n is int32"):
            tx.init({"n": jnp.zeros((2, 2), jnp.int32)})
        state = tx.init({"w": jnp.zeros((2, 2))})
        with pytest.raises(ValueError, match=r"call tx.update\(grads, state, params\)"):
            jax.jit(tx.update)({"w": jnp.zeros((2, 2, 2))}, state)
        with pytest.raises(ValueError, match="already averaged over the devices"):
            tx.update({"w": jnp.zeros((2, 2))}, state, {"w": jnp.zeros((2, 2))})


def test_the_learning_rate_can_be_injected() -> None:
    numbers = ("b1", "b2", "eps", "weight_decay", "dense_steps", "bucket_mib")
    make = optax.inject_hyperparams(one_bit_adam, static_args=numbers)
    tx = make("data", learning_rate=0.25, dense_steps=1)
    with jax.set_mesh(GLOBAL.mesh(2)):
        state = tx.init(jnp.zeros((2, 2)))
        updates, _ = jax.jit(tx.update)(jnp.ones((2, 2, 2)), state)
    np.testing.assert_allclose(updates, -0.25, rtol=1e-4)
