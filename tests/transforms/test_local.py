"""A transformation of each device's own gradients: momentum and clipping before the exchange."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxcomm
from transforms.both_views import (
    APART,
    SHAPES,
    VIEWS,
    Program,
    View,
    by_name,
    each_view,
    gradients,
    place,
    run,
)

GLOBAL, _, CHECKED, GLOBAL_BY_MODEL = VIEWS[:4]
WORLD, DECAY, RATE = 3, 0.9, 0.01


def momenta(batches: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """Those of every device, after every step."""
    result = [batches[0]]
    for grads in batches[1:]:
        last = result[-1]
        result.append({name: np.float32(DECAY) * last[name] + g for name, g in grads.items()})
    return result


@each_view
def test_every_device_has_its_own_momentum(view: View) -> None:
    tx = optax.chain(jaxcomm.local("data", optax.trace(DECAY)), jaxcomm.mean("data"))
    batches = [gradients(WORLD, seed) for seed in range(3)]
    names = [name for name in SHAPES if name != "empty"]
    for expected, (updates, state) in zip(momenta(batches), run(view, tx, batches), strict=True):
        own = {x.shape[1:]: x for x in state[0].inner.values}
        for name in names:
            x = own[SHAPES[name]]
            np.testing.assert_allclose(x, expected[name], rtol=0, atol=1e-6)
            np.testing.assert_allclose(updates[name], expected[name].mean(0), rtol=0, atol=1e-6)
            assert x.sharding.spec == PartitionSpec("data", *view.spec(name))
            assert all(shard.data.shape[0] == 1 for shard in x.addressable_shards)


@pytest.mark.parametrize("view", APART, ids=by_name)
def test_every_device_clips_by_its_own_norm(view: View) -> None:
    tx = optax.chain(jaxcomm.local("data", optax.clip_by_global_norm(1.0)), jaxcomm.mean("data"))
    sizes = np.float32([0.01, 1, 100])
    grads = {
        name: g * sizes.reshape(-1, *[1] * (g.ndim - 1)) for name, g in gradients(WORLD).items()
    }
    norms = np.sqrt([sum((g[r] ** 2).sum() for g in grads.values()) for r in range(WORLD)])
    assert norms[0] < 1 < norms[1]
    ((updates, _),) = run(view, tx, [grads])
    for name, g in grads.items():
        expected = np.mean([g[r] / max(norms[r], 1) for r in range(WORLD)], axis=0)
        np.testing.assert_allclose(updates[name], expected, rtol=0, atol=1e-6)


def test_the_result_stays_on_its_device() -> None:
    tx = jaxcomm.local("data", optax.scale(2.0))
    twice = Program(GLOBAL, tx, gradients(4))
    with jax.set_mesh(twice.mesh):
        updates, _ = twice.update(place(GLOBAL, gradients(4), "data"), twice.start)
    assert twice.report().bytes_max == 0
    for shard in updates["kernel"].addressable_shards:
        np.testing.assert_array_equal(shard.data, 2 * gradients(4)["kernel"][shard.index[0]])


@pytest.mark.standard_promotion
def test_counters_and_several_moments_are_kept_too() -> None:
    inner = optax.scale_by_adam()
    batches = [gradients(WORLD, seed) for seed in range(2)]
    tx = optax.chain(jaxcomm.local("data", inner), jaxcomm.mean("data"))
    steps = run(CHECKED, tx, batches)
    expected, update = [], jax.jit(inner.update)
    for r in range(WORLD):
        state = inner.init({name: jnp.zeros(shape) for name, shape in SHAPES.items()})
        for grads in batches:
            updates, state = update({name: g[r] for name, g in grads.items()}, state)
        expected.append(updates)
    for name in SHAPES:
        mean = np.mean([e[name] for e in expected], axis=0)
        np.testing.assert_allclose(steps[-1][0][name], mean, rtol=0, atol=1e-5)


@pytest.mark.parametrize("view", VIEWS[3:6:2], ids=by_name)
def test_parameters_of_one_shape_may_be_sharded_differently(view: View) -> None:
    tx = optax.chain(jaxcomm.local("data", optax.trace(DECAY)), jaxcomm.mean("data"))
    specs = {
        "kernel": PartitionSpec(None, "model"),
        "out": PartitionSpec("model"),
        "replicated": PartitionSpec(),
    }
    batches = [
        {name: np.random.default_rng(i).standard_normal((WORLD, 4, 4)) for name in specs}
        for i in range(2)
    ]
    batches = jax.tree.map(np.float32, batches)
    mesh = view.mesh(WORLD)
    with jax.set_mesh(mesh):
        params = {
            n: jax.device_put(jnp.zeros((4, 4)), NamedSharding(mesh, s)) for n, s in specs.items()
        }
        state, spec = tx.init(params), jaxcomm.state_spec(tx, params, mesh)
        step = tx.update
        leading = {name: PartitionSpec("data", *s) for name, s in specs.items()}
        if view.manual:
            step = jax.shard_map(
                lambda g, s: tx.update(jax.tree.map(lambda x: x[0], g), s),
                in_specs=(leading, spec),
                out_specs=(specs, spec),
                check_vma=view.checks,
            )
        step = jax.jit(step)
        for grads in batches:
            placed = {
                n: jax.device_put(g, NamedSharding(mesh, leading[n])) for n, g in grads.items()
            }
            updates, state = step(placed, state)
        assert step._cache_size() == 1
    for name, expected in momenta(batches)[-1].items():
        np.testing.assert_allclose(updates[name], expected.mean(0), rtol=0, atol=1e-6)


def signum(axis_name: Any = "data") -> optax.GradientTransformation:
    return optax.chain(
        jaxcomm.local(axis_name, optax.trace(DECAY)),
        jaxcomm.majority_vote(axis_name),
        optax.sgd(RATE),
    )


def signum_updates(batches: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """Bernstein et al. 2019, algorithm 1, for an odd number of devices."""

    def one(name: str, m: np.ndarray) -> np.ndarray:
        votes = np.sign(m).sum(0) if len(SHAPES[name]) > 1 else m.mean(0)
        return np.float32(-RATE) * np.sign(votes)

    return [{name: one(name, m) for name, m in ms.items()} for ms in momenta(batches)]


@pytest.mark.parametrize("view", APART, ids=by_name)
def test_signum(view: View) -> None:
    batches = [gradients(WORLD, seed) for seed in range(5)]
    steps = run(view, signum(), batches)
    for (updates, _), expected in zip(steps, signum_updates(batches), strict=True):
        jax.tree.map(np.testing.assert_array_equal, updates, expected)


def test_signum_over_steps() -> None:
    batches = [gradients(WORLD, seed) for seed in range(4)]
    steps = run(GLOBAL, jaxcomm.multi_steps(signum(), 2), batches)
    means = [{n: (a[n] + b[n]) / 2 for n in a} for a, b in (batches[:2], batches[2:])]
    for (updates, _), expected in zip(steps[1::2], signum_updates(means), strict=True):
        jax.tree.map(np.testing.assert_array_equal, updates, expected)


def test_signum_over_two_axes() -> None:
    axes, kinds = ("host", "device"), (AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((2, 2), axes, kinds, devices=jax.devices()[:4])
    batches = [gradients(4, seed) for seed in range(2)]
    tx = signum(axes)
    with jax.set_mesh(mesh):
        state = tx.init({name: jnp.zeros(shape) for name, shape in SHAPES.items()})
        step, sharding = jax.jit(tx.update), NamedSharding(mesh, PartitionSpec(axes))
        for grads, expected in zip(batches, signum_updates(batches), strict=True):
            updates, state = step(jax.device_put(grads, sharding), state)
            for name, e in expected.items():  # zero where votes tie
                np.testing.assert_array_equal(np.where(e == 0, 0, updates[name]), e)
        assert step._cache_size() == 1


@pytest.mark.parametrize("view", [GLOBAL, GLOBAL_BY_MODEL], ids=by_name)
def test_the_spec_of_the_chain(view: View) -> None:
    mesh = view.mesh(4)
    with jax.set_mesh(mesh):
        params = place(view, {name: jnp.zeros(shape) for name, shape in SHAPES.items()})
        state = signum().init(params)
    spec = jaxcomm.state_spec(signum(), params, mesh)
    assert jax.tree.structure(spec) == jax.tree.structure(state)
    assert set(spec[0].inner.values) == {PartitionSpec("data", *view.spec(n)) for n in SHAPES}
    assert jax.tree.leaves(spec[1]) == [PartitionSpec()]


def test_init_inside_the_manual_region_holds_one_device() -> None:
    def step(grads: Any) -> Any:
        own = jax.tree.map(lambda g: g[0], grads)
        tx = signum()
        state = tx.init(jax.tree.map(jnp.zeros_like, own))
        assert all(x.shape[0] == 1 for x in state[0].inner.values)
        return tx.update(own, state)[0]

    with jax.set_mesh(CHECKED.mesh(WORLD)):
        step = jax.shard_map(step, in_specs=PartitionSpec("data"), out_specs=PartitionSpec())
        updates = jax.jit(step)(place(CHECKED, gradients(WORLD), "data"))
    (expected,) = signum_updates([gradients(WORLD)])
    jax.tree.map(np.testing.assert_array_equal, updates, expected)


def test_swapped_arguments_are_refused_at_once() -> None:
    with pytest.raises(TypeError, match="axis_name must be the name of a mesh axis"):
        jaxcomm.local(optax.trace(DECAY), "data")  # pyright: ignore[reportArgumentType]


def test_bad_parameters_and_meshes_are_refused() -> None:
    tx = jaxcomm.local("batch", optax.trace(DECAY))
    with pytest.raises(ValueError, match="no mesh is set; call jax.set_mesh"):
        tx.init({"w": jnp.zeros(3)})
    with jax.set_mesh(GLOBAL.mesh(2)):
        with pytest.raises(ValueError, match="axis 'batch' is not in the mesh"):
            tx.init({"w": jnp.zeros(3)})
        with pytest.raises(TypeError, match="parameter n is int32"):
            jaxcomm.local("data", optax.trace(DECAY)).init({"n": jnp.zeros(3, jnp.int32)})


def test_along_explicit_axes() -> None:
    """Beside a leaf that is sharded, and whose columns stay where they are."""
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), kinds, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        split = jax.device_put(jnp.ones((4, 8)), jax.P(None, "model"))
        params = {"split": split, "whole": jax.device_put(jnp.ones((4, 3)), jax.P())}
        tx = optax.chain(jaxcomm.local("data", optax.trace(0.5)), jaxcomm.mean("data"))
        x = jax.device_put(jnp.arange(8.0).reshape(2, 4), jax.P("data", None))
        loss = lambda p, x: (x @ p["split"]).sum() + (x @ p["whole"]).sum()  # noqa: E731
        gradient = jaxcomm.value_and_grad(loss, "data")
        step = jax.jit(lambda s: tx.update(gradient(params, x)[1], s, params))
        _, state = step(tx.init(params))
        updates, _ = step(state)
    for update in updates.values():
        wanted = np.broadcast_to(1.5 * np.float32([[2], [3], [4], [5]]), update.shape)
        np.testing.assert_allclose(update, wanted, rtol=1e-6)


def test_empty_parameters_along_an_explicit_axis() -> None:
    kinds = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((4,), ("data",), axis_types=kinds, devices=jax.devices()[:4])
    local = jaxcomm.local("data", optax.clip_by_global_norm(1.0))
    steps = jaxcomm.local_steps(optax.sgd(0.1), 2, optax.sgd(1.0), jaxcomm.mean("data"))
    with jax.set_mesh(mesh):
        params = jaxcomm.replicate({"w": jnp.ones((8, 8)), "e": jnp.zeros((0, 4))})
        x = jaxcomm.global_batch(np.ones((8, 4), np.float32), "data")
        for tx, at in ((local, lambda p, s: p), (steps, lambda p, s: jaxcomm.local_params(s))):

            def step(params: Any, state: Any, tx: Any = tx, at: Any = at) -> Any:
                loss = lambda p, x: jnp.sum(p["w"]) * jnp.mean(x)  # noqa: E731
                _, grads = jaxcomm.value_and_grad(loss, "data")(at(params, state), x)
                return tx.update(grads, state, params)

            updates, _ = jax.jit(step)(params, tx.init(params))
            assert np.isfinite(np.asarray(jaxcomm.unmark_local(updates)["w"])).all()


def test_a_state_that_grows_is_refused_by_each_device(mesh8: Any) -> None:
    """That of `optax.monitor` has None before the first update."""
    grown = optax.GradientTransformation(
        lambda params: {"norm": None}, lambda u, s, p=None: (u, {"norm": optax.tree.norm(u)})
    )
    tx = optax.chain(jaxcomm.local("data", grown), jaxcomm.mean("data"))
    with jax.set_mesh(mesh8):
        params = jaxcomm.replicate({"w": jnp.ones((4, 2))})
        grads = jax.tree.map(lambda x: jnp.ones((8, *x.shape)), params)
        with pytest.raises(ValueError, match="0 arrays after `init` and 1 after `update`"):
            jax.eval_shape(tx.update, grads, tx.init(params), params)
