"""What else shards round apart, keep, and refuse."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxcomm
from jaxcomm.collectives.algorithms import _default
from jaxcomm.kernels import _device
from transforms.test_gather import (
    WORLD,
    Program,
    bucket_of,
    case_program,
    gradients,
    leaves_of,
)

P = PartitionSpec


def four() -> jax.sharding.Mesh:
    return jaxcomm.data_mesh(devices=jax.devices()[:WORLD])


def test_buckets_of_shards_are_as_large_as_asked() -> None:
    """In float32 bytes of whole leaves: 160 and 672, and 960 by itself."""
    for kib, buckets in ((1, 2), (2, 1)):
        tx = jaxcomm.sharded(jaxcomm.mean("data", "int8", bucket_mib=kib / 1024), "int8")
        report = Program(tx).report()
        for op in "all-to-all", "all-gather":
            assert len(report.only(op).collectives) == buckets, (kib, op)


def test_a_layer_is_not_cut_out_along_what_is_split() -> None:
    with jax.set_mesh(four()):
        by_layer = NamedSharding(jax.sharding.get_mesh(), P("data"))
        params = {"w": jax.device_put(jnp.zeros((4, 8, 3)), by_layer)}
        tx = jaxcomm.sharded(jaxcomm.mean("data"))
        at = jaxcomm.sharded_params(params, tx.init(params))

        def loss(params: Any, x: jax.Array) -> jax.Array:
            first = jax.tree.map(lambda leaf: leaf[0], params)
            return jnp.sum(jaxcomm.gather(first)["w"]) * jnp.sum(x)

        with pytest.raises(ValueError, match="parameter w is split along the axis that was sliced"):
            jax.eval_shape(jaxcomm.value_and_grad(loss, "data"), at, jnp.ones(4))


def gathered_in_cnat(seed: int, step: int) -> list[np.ndarray]:
    """Two parameters and three layers of 1.5, which is rounded to 1 or 2."""
    tx = jaxcomm.sharded(jaxcomm.mean("data", seed=seed), gather="cnat")

    def loss(params: Any, batch: jax.Array) -> Any:
        layer = lambda x, own: (x, jaxcomm.gather(own))  # noqa: E731
        _, layers = jax.lax.scan(layer, 0.0, params["stack"])
        whole = [*(jaxcomm.gather(params[name]) for name in "ab"), *layers]
        return sum(jnp.sum(x) for x in whole) * jnp.sum(batch), whole

    with jax.set_mesh(four()):
        shapes = {"a": (16, 16), "b": (16, 16), "stack": (3, 16, 16)}
        params = {name: jnp.full(shape, 1.5) for name, shape in shapes.items()}
        params = jaxcomm.shard(params, "data", layers=["stack"])
        state = tx.init(params)._replace(step=jnp.int32(step))
        gradient = jax.jit(jaxcomm.value_and_grad(loss, "data", has_aux=True))
        (_, whole), _ = gradient(jaxcomm.sharded_params(params, state), jnp.ones(4))
    return [np.asarray(x) for x in whole]


def test_each_rounding_of_shards_has_its_own_words() -> None:
    """Of a parameter, a layer, a step, also of one that float32 cannot count to, and a seed."""
    found = [*gathered_in_cnat(0, 5), *gathered_in_cnat(1, 5), *gathered_in_cnat(0, 6)]
    found += [*gathered_in_cnat(0, 2**24), *gathered_in_cnat(0, 2**24 + 1)]
    for i, one in enumerate(found):
        assert all(0.2 < np.mean(one != other) < 0.8 for other in found[:i])


def test_what_keys_are_for() -> None:
    module = sys.modules["jaxcomm.transforms.gather"]
    with jax.set_mesh(four()):
        tx = jaxcomm.sharded(jaxcomm.mean("data", "cnat"))
        params = jaxcomm.shard({"w": jnp.zeros((8, 8))}, "data")
        scheme = tx.init(params).scheme
        bucket = module._Bucket(scheme, False, 1, ("w",), (-1,))
        purposes = module._THERE, module._BACK, module._KEPT
        keys = [module._key_of(bucket, [jnp.zeros((8, 3))], purpose) for purpose in purposes]
    assert len({tuple(jax.random.key_data(key).tolist()) for key in keys}) == 3


def test_without_an_exchange_a_device_has_its_own_gradient_of_its_shard() -> None:
    grads = gradients(0)
    ((_, updates, _),) = Program(jaxcomm.sharded(jaxcomm.no_exchange("data"))).run(grads)
    sent = np.stack([bucket_of({n: g[r] for n, g in grads.items()}) for r in range(WORLD)])
    for name, value in leaves_of(sent[np.arange(WORLD), np.arange(WORLD)]).items():
        np.testing.assert_array_equal(updates[name], value)


def test_a_misspelt_exempt_pattern_of_shard() -> None:
    with jax.set_mesh(four()), pytest.raises(ValueError, match="exempt names 'v', which fits no"):
        jaxcomm.shard({"w": jnp.zeros((8, 8))}, "data", exempt=["v"])


def test_parameters_are_not_gathered_in_a_few_of_their_values() -> None:
    with pytest.raises(ValueError, match="cannot be gathered in random_k"):
        jaxcomm.sharded(jaxcomm.mean("data"), "random_k")


def test_a_state_of_another_residual_dtype_is_refused() -> None:
    old, new = (
        jaxcomm.sharded(jaxcomm.mean("data", "int8", error_feedback=True, residual_dtype=dtype))
        for dtype in ("float32", "bfloat16")
    )
    with jax.set_mesh(four()):
        params = jaxcomm.shard({"w": jnp.zeros((8, 8))}, "data")
        state = old.init(params)
        loss = lambda p, x: jnp.sum(jaxcomm.gather(p)["w"]) * jnp.sum(x)  # noqa: E731
        at = jaxcomm.sharded_params(params, state)
        _, grads = jax.jit(jaxcomm.value_and_grad(loss, "data"))(at, jnp.ones(4))
        with pytest.raises(ValueError, match="residual_dtype is bfloat16.*resize_state"):
            new.update(grads, state)


def test_gradients_of_other_parameters() -> None:
    tx = jaxcomm.sharded(jaxcomm.mean("data"))
    with jax.set_mesh(four()):
        params = jaxcomm.shard({"a": jnp.zeros((8, 8)), "c": jnp.zeros((8, 8))}, "data")
        others = {"b": params["a"], "c": params["c"]}
        state, other = tx.init(params), tx.init(others)
        loss = lambda p, x: sum(map(jnp.sum, jax.tree.leaves(jaxcomm.gather(p)))) * jnp.sum(x)  # noqa: E731
        at = jaxcomm.sharded_params(others, other)
        _, grads = jax.jit(jaxcomm.value_and_grad(loss, "data"))(at, jnp.ones(4))
        with pytest.raises(ValueError, match="parameters a, c, ... and the gradients are of b, c"):
            tx.update(grads, state)


def test_wrappers_around_shards_are_refused() -> None:
    tx = optax.apply_if_finite(optax.chain(jaxcomm.sharded(jaxcomm.mean("data"))), 3)
    with jax.set_mesh(four()), pytest.raises(ValueError, match="optax.apply_if_finite looks at"):
        tx.init(jaxcomm.shard({"w": jnp.zeros((8, 8))}, "data"))


def test_a_bad_value_in_what_is_whole_is_seen_in_all_shards() -> None:
    good, bad = gradients(0), gradients(7)
    bad["bias"][2, 1] = np.nan
    (_, _, before), (_, nothing, after) = case_program("int4, errors fed back").run(good, bad)
    assert all(np.isnan(leaf).all() for leaf in nothing.values())
    jax.tree.map(np.testing.assert_array_equal, after.residual, before.residual)


def test_what_is_frozen_and_whole_does_not_move() -> None:
    """A bias, and a matrix that nothing splits."""
    tx = jaxcomm.sharded(jaxcomm.set_to_zero("data"))
    with jax.set_mesh(four()):
        params = jaxcomm.shard({"w": jnp.ones((8, 8)), "b": jnp.ones(8)}, "data")
        params["odd"] = jaxcomm.replicate(jnp.ones((3, 5)))
        state = tx.init(params)
        loss = lambda p, x: sum(map(jnp.sum, jax.tree.leaves(jaxcomm.gather(p)))) * jnp.sum(x)  # noqa: E731
        at = jaxcomm.sharded_params(params, state)
        _, grads = jax.jit(jaxcomm.value_and_grad(loss, "data"))(at, jnp.arange(4.0))
        updates, _ = jax.jit(tx.update)(grads, state)
    for leaf in jax.tree.leaves(updates):
        assert all(not np.any(shard.data) for shard in leaf.addressable_shards)


def test_leaves_without_elements() -> None:
    tx = jaxcomm.sharded(jaxcomm.mean("data", "int8", error_feedback=True))
    with jax.set_mesh(four()):
        params = jaxcomm.shard({"w": jnp.ones((8, 8)), "none": jnp.ones((0, 8))}, "data")
        state = tx.init(params)
        loss = lambda p, x: sum(map(jnp.sum, jax.tree.leaves(jaxcomm.gather(p)))) * jnp.sum(x)  # noqa: E731
        at = jaxcomm.sharded_params(params, state)
        _, grads = jax.jit(jaxcomm.value_and_grad(loss, "data"))(at, jnp.ones(4))
        updates, _ = jax.jit(tx.update)(grads, state)
    assert updates["none"].shape == (0, 8)


@pytest.mark.parametrize("spec", [P("hosts", "devices"), P(("devices", "hosts"))])
def test_what_is_split_otherwise_is_refused(spec: PartitionSpec) -> None:
    """Over two dimensions, or in another order of the axes: rows would be those of others."""
    mesh = jax.sharding.Mesh(np.reshape(jax.devices()[:4], (2, 2)), ("hosts", "devices"))
    tx = jaxcomm.sharded(jaxcomm.mean(("hosts", "devices")))
    with jax.set_mesh(mesh):
        params = {"w": jax.device_put(jnp.zeros((8, 8)), NamedSharding(mesh, spec))}
        with pytest.raises(ValueError, match="w is split by .* sharded needs one dimension over"):
            tx.init(params)


def test_a_further_axis_of_one_device() -> None:
    mesh = jax.sharding.Mesh(np.reshape(jax.devices()[:4], (4, 1)), ("data", "model"))
    tx = jaxcomm.sharded(jaxcomm.mean("data", "int8", error_feedback=True))
    with jax.set_mesh(mesh):
        params = jaxcomm.shard({"w": jnp.ones((8, 8))}, "data")
        state = tx.init(params)
        loss = lambda p, x: jnp.sum(jaxcomm.gather(p)["w"]) * jnp.mean(x)  # noqa: E731
        at = jaxcomm.sharded_params(params, state)
        _, grads = jax.jit(jaxcomm.value_and_grad(loss, "data"))(at, jnp.ones(4))
        updates, _ = jax.jit(tx.update)(grads, state)
    np.testing.assert_allclose(updates["w"], 1, rtol=1e-4)


def test_what_is_split_and_exempt_keeps_no_residual() -> None:
    tx = jaxcomm.sharded(jaxcomm.mean("data", "int4", error_feedback=True, exempt=["w"]))
    with jax.set_mesh(four()):
        params = jaxcomm.shard({"v": jnp.zeros((8, 4)), "w": jnp.zeros((8, 8))}, "data")
        assert [x.shape for x in tx.init(params).residual.values] == [(4, 8, 4)]


def test_what_does_not_divide_is_refused() -> None:
    mesh = four()
    struct = jax.ShapeDtypeStruct((6, 8), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    with pytest.raises(ValueError, match=r"w of shape \(6, 8\) does not divide evenly over the 4"):
        jaxcomm.state_spec(jaxcomm.sharded(jaxcomm.mean("data")), {"w": struct}, mesh)


def test_a_state_of_another_number_of_devices() -> None:
    tx = jaxcomm.sharded(jaxcomm.mean("data"))
    whole = {"w": jnp.zeros((8, 8))}
    with jax.set_mesh(four()):
        state = tx.init(jaxcomm.shard(whole, "data"))
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        with pytest.raises(ValueError, match="for 4 devices along 'data', and the mesh now has 2"):
            jaxcomm.sharded_params(jaxcomm.shard(whole, "data"), state)


def test_replicated_residuals_of_shards() -> None:
    """Inside jax.shard_map, where each device would take that of the first."""
    mesh = four()
    tx = jaxcomm.sharded(jaxcomm.mean("data", "int8", error_feedback=True))
    with jax.set_mesh(mesh):
        params = jaxcomm.shard({"w": jnp.zeros((8, 8))}, "data")
        state = tx.init(params)
        specs = {"w": params["w"].sharding.spec}
        f = jax.shard_map(
            lambda p, s: jaxcomm.sharded_params(p, s)["w"].residual,
            in_specs=(specs, P()),
            out_specs=P("data"),
            check_vma=False,
        )
        with pytest.raises(ValueError, match="leading axis of 4 here, expected 1"):
            jax.eval_shape(f, params, state)


def test_shards_go_directly_between_cpu_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring would round every partial sum."""
    monkeypatch.setattr(_device, "is_between_cpu_processes", lambda: True)
    with jax.set_mesh(four()):
        params = jaxcomm.shard({"w": jnp.zeros((8, 8))}, "data")
        state = jaxcomm.sharded(jaxcomm.mean("data", "bfloat16")).init(params)
    assert state.scheme.algorithm == _default.Default("shards")


def test_inside_shard_map_without_checks() -> None:
    """As with them."""
    mesh, found = four(), []
    tx = jaxcomm.sharded(jaxcomm.mean("data", "int4", error_feedback=True))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 8, 8)).astype(np.float32)
    with jax.set_mesh(mesh):
        params = jaxcomm.shard({"w": jnp.ones((8, 8))}, "data")
        specs, state = {"w": params["w"].sharding.spec}, tx.init(params)
        of_state = jaxcomm.state_spec(tx, params, mesh)

        def step(params: Any, state: Any, x: jax.Array) -> Any:
            loss = lambda p, x: jnp.sum(jaxcomm.gather(p)["w"] * x[0])  # noqa: E731
            at = jaxcomm.sharded_params(params, state)
            return tx.update(jaxcomm.value_and_grad(loss, "data")(at, x)[1], state)

        for checks in (True, False):
            f = jax.shard_map(
                step,
                in_specs=(specs, of_state, P("data")),
                out_specs=(specs, of_state),
                check_vma=checks,
            )
            updates, after = jax.jit(f)(params, state, x)
            found.append([np.asarray(updates["w"]), np.asarray(after.residual.values[0])])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.any(one)


def test_nothing_with_a_state_comes_first() -> None:
    tx = jaxcomm.sharded(jaxcomm.mean("data"))
    with jax.set_mesh(four()):
        params = jaxcomm.shard({"w": jnp.ones((8, 4))}, "data")
        for first, name in ((optax.trace(0.9), "trace"), (optax.scale_by_adam(), "scale_by_adam")):
            with pytest.raises(ValueError, match=f"{name} comes before jaxcomm.sharded in the"):
                optax.chain(first, tx).init(params)
        optax.chain(optax.identity(), tx, optax.adam(0.1)).init(params)
        optax.chain(optax.chain(tx, optax.adam(0.1)), optax.trace(0.9)).init(params)
