"""States on another number of devices: what they owe stays, for every method."""

import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm.transforms.per_device import PerDevice
from processes import run_processes

METHODS: dict[str, optax.GradientTransformation] = {
    "mean": jaxcomm.mean("data", "int8", error_feedback=True),
    "majority_vote": jaxcomm.majority_vote("data", error_feedback=True),
    "sparse_mean": jaxcomm.sparse_mean("data", 0.05),
    "low_rank_mean": jaxcomm.low_rank_mean("data", 2),
    "one_bit_adam": jaxcomm.one_bit_adam("data", 1e-3, dense_steps=2),
    "factored_adam": jaxcomm.factored_adam(
        jaxcomm.mean("data", "scaled_sign", error_feedback=True), 1e-3
    ),
    "control_variates": jaxcomm.control_variates(jaxcomm.mean("data")),
    "dense sparse_mean": jaxcomm.sparse_mean("data", 0.05, "topk_chunks", dense_steps=2),
    "dense low_rank_mean": jaxcomm.dense_first(jaxcomm.low_rank_mean("data", 2), 2),
}
SIZES = {"w": (30, 70), "b": (7,)}
BLOCKS = 3  # of 1024 values, that the second errors of `w` are


def is_own(x: object) -> bool:
    return isinstance(x, PerDevice)


def owed(own: np.ndarray) -> np.ndarray:
    """Of parts of one bucket all of it; else the mean over devices."""
    is_part = own.shape == (len(own), -(-BLOCKS // len(own)) * 1024)
    return own.reshape(-1)[: BLOCKS * 1024] if is_part else own.astype(np.float64).mean(0)


@pytest.mark.parametrize("name", METHODS)
def test_what_is_owed_stays(name: str) -> None:
    tx, rng, state, wanted = METHODS[name], np.random.default_rng(0), None, None
    for world in (4, 2, 3, 4):
        with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:world])):
            params = jaxcomm.replicate({key: jnp.zeros(shape) for key, shape in SIZES.items()})
            if state is None:
                state = jax.tree.map(
                    lambda x: rng.normal(size=x.shape).astype(x.dtype), tx.init(params)
                )
                for leaf in jax.tree.leaves(state, is_leaf=is_own):
                    for own in leaf.values if is_own(leaf) else ():
                        if own.shape == (4, 1024):  # Behind the end of the bucket is nothing.
                            own[3] = 0
            else:
                state = jaxcomm.resize_state(tx, jax.tree.map(np.asarray, state), params)
                sharding = [leaf.sharding for leaf in jax.tree.leaves(tx.init(params))]
                assert [leaf.sharding for leaf in jax.tree.leaves(state)] == sharding
            found = [
                [owed(np.asarray(own)) for own in leaf.values]
                if is_own(leaf)
                else [np.asarray(leaf)]
                for leaf in jax.tree.leaves(state, is_leaf=is_own)
            ]
        wanted = wanted or found
        for leaf, other in zip(found, wanted, strict=True):
            for a, b in zip(leaf, other, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_arrays_may_come_in_parts(name: str) -> None:
    """Each device has a part of what all old devices kept, as a file may be read."""
    tx, rng = METHODS[name], np.random.default_rng(0)
    shapes = {key: jax.ShapeDtypeStruct(shape, "float32") for key, shape in SIZES.items()}
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
        old = jax.tree.map(
            lambda x: rng.normal(size=x.shape).astype(x.dtype), jax.eval_shape(tx.init, shapes)
        )
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        params = jaxcomm.replicate({key: jnp.zeros(shape) for key, shape in SIZES.items()})
        split = jax.tree.map(in_parts, old)
        assert any(not x.is_fully_replicated for x in jax.tree.leaves(split))
        found = jaxcomm.resize_state(tx, split, params)
        expected = jaxcomm.resize_state(tx, old, params)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.sharding == b.sharding and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def in_parts(x: np.ndarray) -> jax.Array:
    """Split over two devices along the last axis that they divide, but not along the first."""
    mesh = jax.sharding.get_mesh()
    dims = [i for i, n in enumerate(x.shape) if i and n % 2 == 0][-1:]
    spec = jax.P(*(["data" if i in dims else None for i in range(x.ndim)]))
    return jax.device_put(x, jax.NamedSharding(mesh, spec))


def test_no_device_has_what_all_old_ones_kept() -> None:
    """Of the residuals of eight devices, one device holds a part, and its new one."""
    tx, n = METHODS["mean"], 2**20
    module = importlib.import_module("jaxcomm.transforms.resize_state")
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
        shape = jax.ShapeDtypeStruct((1024, n // 1024), "float32")
        whole = jax.eval_shape(tx.init, shape)
        own = whole.residual.values[0]
        part = jax.NamedSharding(jax.sharding.get_mesh(), jax.P(None, "data"))
        old = jax.ShapeDtypeStruct((8, *own.shape[1:]), "float32", sharding=part)
        like = jax.ShapeDtypeStruct(
            own.shape, "float32", sharding=jax.NamedSharding(jax.sharding.get_mesh(), jax.P("data"))
        )
        memory = module._spread_program(like, 0, False).lower(old).compile().memory_analysis()
    assert memory.argument_size_in_bytes == 2 * 4 * n  # of eight copies
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 3 * 4 * n


def test_it_is_the_second_errors_that_are_dealt_out_anew() -> None:
    tx = METHODS["one_bit_adam"]
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
        params = jaxcomm.replicate({key: jnp.zeros(shape) for key, shape in SIZES.items()})
        saved = jax.tree.map(np.array, tx.init(params))
    saved.server_error.values[0][:BLOCKS] = np.arange(BLOCKS * 1024).reshape(BLOCKS, 1024)
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        params = jaxcomm.replicate(params)
        found = jaxcomm.resize_state(tx, saved, params).server_error.values[0]
    expected = [np.arange(2048), np.pad(np.arange(2048, 3072), (0, 1024))]
    np.testing.assert_array_equal(found, expected)


def test_shares_are_dealt_out_anew_where_their_lengths_stay() -> None:
    """3 blocks are one for each of 4 devices and for each of 3: no mean is taken."""
    tx = METHODS["one_bit_adam"]
    old, new = (jaxcomm.data_mesh(devices=jax.devices()[:n]) for n in (4, 3))
    with jax.set_mesh(old):
        saved = jax.tree.map(np.array, tx.init(jaxcomm.replicate(jnp.zeros((3, 1024)))))
    shape, values = saved.server_error.values[0].shape, np.arange(3 * 1024).reshape(3, 1024)
    assert shape == (4, 1024)
    saved.server_error.values[0][:3] = values
    with jax.set_mesh(new):
        found = jaxcomm.resize_state(tx, saved, jaxcomm.replicate(jnp.zeros((3, 1024))))
    np.testing.assert_array_equal(found.server_error.values[0], values)


def test_each_shard_of_a_further_axis_has_shares_of_its_own() -> None:
    """Two shards of 4 blocks: one for each of 4 devices, and then two for each of 2."""
    tx, split = METHODS["one_bit_adam"], jax.sharding.PartitionSpec("fsdp")
    meshes = [
        jax.sharding.Mesh(np.reshape(jax.devices()[: 2 * n], (n, 2)), ("data", "fsdp"))
        for n in (4, 2)
    ]

    def start(mesh: jax.sharding.Mesh) -> tuple[optax.GradientTransformation, Any]:
        params = {"w": jax.device_put(jnp.zeros((8, 1024)), jax.NamedSharding(mesh, split))}
        return jaxcomm.with_param_specs(tx, {"w": split}), params

    with jax.set_mesh(meshes[0]):
        own, params = start(meshes[0])
        saved = jax.tree.map(np.array, own.init(params))
    (error,) = saved.server_error.values
    assert error.shape == (4, 2048)
    error[...] = np.repeat(np.arange(8).reshape(2, 4).T, 1024, axis=1)  # by shard, in order
    with jax.set_mesh(meshes[1]):
        own, params = start(meshes[1])
        (found,) = jaxcomm.resize_state(own, saved, params).server_error.values
    np.testing.assert_array_equal(found, np.repeat([[0, 1, 4, 5], [2, 3, 6, 7]], 1024, axis=1))


def test_a_state_of_other_parameters_is_refused() -> None:
    tx = optax.chain(jaxcomm.mean("data"), optax.trace(0.9))
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        saved = jax.tree.map(np.asarray, tx.init(jaxcomm.replicate(jnp.zeros((2, 2)))))
        with pytest.raises(ValueError, match=r"it holds \(2, 2\) where this one has \(4, 4\)"):
            jaxcomm.resize_state(tx, saved, jaxcomm.replicate(jnp.zeros((4, 4))))


def test_another_split_by_a_further_axis_is_refused() -> None:
    """Buckets would be taken for others of the same length."""
    tx, split = METHODS["one_bit_adam"], jax.sharding.PartitionSpec("fsdp")
    saved: Any = None
    for shape in ((2, 4), (4, 2)):
        mesh = jax.sharding.Mesh(np.reshape(jax.devices()[:8], shape), ("data", "fsdp"))
        with jax.set_mesh(mesh):
            params = {"w": jax.device_put(jnp.zeros((8, 8)), jax.NamedSharding(mesh, split))}
            own = jaxcomm.with_param_specs(tx, {"w": split})
            if saved is None:
                saved = jax.tree.map(np.asarray, own.init(params))
                continue
            with pytest.raises(ValueError, match=r"over \(4,\) devices .* over \(2,\) here"):
                jaxcomm.resize_state(own, saved, params)


def in_lists_and_dictionaries(state: Any) -> Any:
    """A state as orbax restores it without a target."""
    found: Any = {}
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        *parts, last = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        node = found
        for part in parts:
            node = node.setdefault(part, {})
        node[last] = np.asarray(x)
    return found


def test_a_state_from_a_file_without_a_target() -> None:
    tx = optax.chain(METHODS["mean"], optax.trace(0.9))
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
        params = jaxcomm.replicate({key: jnp.zeros(shape) for key, shape in SIZES.items()})
        saved = jax.tree.map(lambda x: x + jnp.ones_like(x), tx.init(params))
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        params = jaxcomm.replicate(jax.tree.map(np.asarray, params))
        expected = jaxcomm.resize_state(tx, jax.tree.map(np.asarray, saved), params)
        found = jaxcomm.resize_state(tx, in_lists_and_dictionaries(saved), params)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert found[0].residual.values[0].shape == (2, 30, 70)


@pytest.mark.parametrize("around", [lambda tx: tx, lambda tx: jaxcomm.local("data", tx)])
def test_random_keys_of_optimizers_stay(around: Any) -> None:
    noise = optax.add_noise(0.1, 0.1, jax.random.key(3))
    tx = optax.chain(around(noise), METHODS["mean"])
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
        state = tx.init(jaxcomm.replicate(jnp.zeros((4, 4))))
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        params = jaxcomm.replicate(jnp.zeros((4, 4)))
        found = jaxcomm.resize_state(tx, state, params)
        expected = tx.init(params)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        keys = jnp.issubdtype(b.dtype, jax.dtypes.prng_key)
        raw = jax.random.key_data if keys else np.asarray
        np.testing.assert_array_equal(raw(a), raw(b))


def test_what_was_saved_is_not_the_buffer_of_the_state() -> None:
    tx = optax.trace(0.9)
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:1])):
        params = jaxcomm.replicate(jnp.zeros(64))
        room = np.zeros(64 + 16, np.float32)  # an array that XLA could use as it is
        start = -room.ctypes.data % 64 // 4
        saved = room[start : start + 64]
        found = jaxcomm.resize_state(tx, tx.init(params)._replace(trace=saved), params)
        saved[:] = 7
    assert not np.any(found.trace)


def test_a_state_of_another_method_is_named_as_such() -> None:
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        params = jaxcomm.replicate({key: jnp.zeros(shape) for key, shape in SIZES.items()})
        saved = jax.tree.map(np.asarray, METHODS["one_bit_adam"].init(params))
        for name in ("mean", "sparse_mean"):
            with pytest.raises(ValueError, match="not one of this transformation"):
                jaxcomm.resize_state(METHODS[name], saved, params)


def test_a_typed_state_of_another_method_or_exemption_is_refused() -> None:
    """Of the same shapes: residuals would become votes', or another parameter's."""
    params = {name: jnp.zeros((4, 4)) for name in ("a", "b")}
    mean = functools.partial(jaxcomm.mean, "data", "int8", error_feedback=True)

    def own_momentum(**how: Any) -> optax.GradientTransformation:
        momentum = jaxcomm.local("data", optax.trace(0.9))
        return optax.chain(momentum, jaxcomm.mean("data", "int8", **how))

    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
        saved = jax.tree.map(np.asarray, mean(exempt=["b"]).init(params))
        exact = jax.tree.map(np.asarray, own_momentum(exempt=["b"]).init(params))
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        params = jaxcomm.replicate(params)
        jaxcomm.resize_state(mean(exempt=["b"]), saved, params)
        with pytest.raises(ValueError, match="'a' is exempt here and was not exempt in the old"):
            jaxcomm.resize_state(mean(exempt=["a"]), saved, params)
        jaxcomm.resize_state(own_momentum(exempt=["a"]), exact, params)  # kept of all leaves
        vote = jaxcomm.majority_vote("data", error_feedback=True, exempt=["b"])
        with pytest.raises(ValueError, match="has a MeanState where this one has a MajorityVoteS"):
            jaxcomm.resize_state(vote, saved, params)


SAVE_OR_GO_ON = """
    import os, jax.numpy as jnp, numpy as np, optax, orbax.checkpoint as ocp
    import jaxcomm

    jax.set_mesh(jaxcomm.data_mesh())
    tx = optax.chain(jaxcomm.mean("data", "int8", error_feedback=True), optax.adam(0.1))
    params = jaxcomm.replicate({"w": jnp.zeros((30, 70))})
    state = tx.init(params)
    handler = ocp.StandardCheckpointHandler()
    manager = ocp.CheckpointManager(os.environ["FOLDER"], item_handlers=handler)

    def owed(state):
        state = jax.experimental.multihost_utils.process_allgather(state, tiled=True)
        return np.mean(state[0].residual.values[0], 0).sum()

    if manager.latest_step() is None:
        grad = jaxcomm.value_and_grad(lambda p, x: jnp.mean((x @ p["w"] - 1) ** 2), "data")
        rows = np.random.default_rng(jax.process_index()).standard_normal((2, 30), np.float32)
        step = jax.jit(lambda p, s, x: tx.update(grad(p, x)[1], s, p))
        updates, state = step(params, state, jaxcomm.global_batch(rows, "data"))
        manager.save(1, args=ocp.args.StandardSave({"params": updates, "state": state}))
        manager.wait_until_finished()
        before = owed(state)
        state = jaxcomm.resize_state(tx, state, params)  # split over the processes
        assert abs(before - owed(state)) < 1e-6
    else:
        mesh = jax.sharding.get_mesh()
        n = mesh.size

        def in_parts(x):
            dims = [i for i, length in enumerate(x.shape) if length % n == 0][-1:]
            spec = jax.P(*["data" if i in dims else None for i in range(len(x.shape))])
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec))

        like = jax.tree.map(in_parts, manager.item_metadata(1))
        saved = manager.restore(1, args=ocp.args.StandardRestore(like))
        assert any(not x.is_fully_replicated for x in jax.tree.leaves(saved["state"]))
        state = jaxcomm.resize_state(tx, saved["state"], params)
    print(f"{owed(state):.7f}")
"""


@pytest.mark.multiprocess
def test_processes_go_on_as_fewer(tmp_path: Any) -> None:
    """As the recipe says: no process reads all of the state."""
    env = {"FOLDER": str(tmp_path)}
    done = [run for n in (3, 2) for run in run_processes(n, SAVE_OR_GO_ON, env=env)]
    sums = [float(run.stdout.splitlines()[-1]) for run in done]
    assert max(sums) - min(sums) < 1e-6 and sums[0] != 0


def test_errors_of_other_buckets_are_refused() -> None:
    """All shapes are equal, but the errors of one leaf would go to the other."""
    params = {"a": jnp.zeros((32, 64)), "b": jnp.zeros((32, 64))}
    one_bit = functools.partial(jaxcomm.one_bit_adam, "data", 1e-3, dense_steps=2)
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        saved = jax.tree.map(np.asarray, one_bit(bucket_order=["a", "b"]).init(params))
        with pytest.raises(ValueError, match="state belongs to other buckets. Make tx with the"):
            jaxcomm.resize_state(one_bit(bucket_order=["b", "a"]), saved, params)
        jaxcomm.resize_state(one_bit(bucket_order=["a", "b"]), saved, params)


def test_the_mean_of_bfloat16_residuals_is_not_taken_in_bfloat16(mesh8: Any) -> None:
    tx = jaxcomm.mean("data", "int8", error_feedback=True, residual_dtype="bfloat16")
    w = jnp.zeros((2, 2))
    with jax.set_mesh(mesh8):
        saved = jax.tree.map(jax.device_get, tx.init(w))
    old = np.ones((8, 2, 2), jnp.bfloat16)
    old[0] = 256
    saved = saved._replace(residual=dataclasses.replace(saved.residual, values=[old]))
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        (found,) = jaxcomm.resize_state(tx, saved, w).residual.values
    expected = np.full((2, 2, 2), 263 / 8, np.float32)
    np.testing.assert_array_equal(found, expected.astype(jnp.bfloat16))
