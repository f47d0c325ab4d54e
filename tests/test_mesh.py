"""The mesh, and what is placed on it."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jaxcomm


def test_data_mesh_has_all_devices_along_one_automatic_axis() -> None:
    mesh = jaxcomm.data_mesh()
    assert mesh.axis_names == ("data",) and mesh.axis_types == (AxisType.Auto,)
    assert list(mesh.devices) == jax.devices()


def test_replicate_places_every_leaf_everywhere(mesh4x2: Any) -> None:
    with jax.set_mesh(mesh4x2):
        tree = jaxcomm.replicate({"a": np.arange(3), "b": [jnp.ones((2, 2)), jax.random.key(0)]})
    for leaf in jax.tree.leaves(tree):
        assert leaf.sharding.is_fully_replicated and len(leaf.sharding.device_set) == 8


def test_what_is_split_does_not_become_whole_without_a_word(mesh4x2: Any) -> None:
    with jax.set_mesh(mesh4x2):
        w = jax.device_put(np.ones((4, 4)), jax.NamedSharding(mesh4x2, jax.P(None, "model")))
        with pytest.warns(UserWarning, match="^layer/w is split over 'model', and replicate"):
            tree = jaxcomm.replicate({"layer": {"b": np.ones(3), "w": w}})
        assert tree["layer"]["w"].sharding.is_fully_replicated
        one = jax.make_mesh((8, 1), ("data", "model"), (AxisType.Auto,) * 2)
    with jax.set_mesh(one):  # an axis of one device splits nothing
        jaxcomm.replicate(jax.device_put(np.ones(4), jax.NamedSharding(one, jax.P("model"))))


def test_numbers_and_weak_types_get_a_dtype_of_their_own(mesh8: Any) -> None:
    """A step returns such, so with others the second step would be compiled once more."""
    with jax.set_mesh(mesh8):
        tree = jaxcomm.replicate({"a": jnp.full(3, 0.5), "b": 1.5, "c": 2, "d": jnp.float32(1)})
    assert [x.weak_type for x in tree.values()] == [False] * 4
    assert [x.dtype.name for x in tree.values()] == ["float32", "float32", "int32", "float32"]
    np.testing.assert_array_equal(tree["a"], np.full(3, 0.5))


def test_global_batch_spreads_rows_in_order(mesh8: Any) -> None:
    with jax.set_mesh(mesh8):
        batch = jaxcomm.global_batch(
            {"x": np.arange(16).reshape(16, 1), "y": np.arange(16)}, "data"
        )
    assert batch["x"].sharding.spec == PartitionSpec("data")
    rows = {shard.device: np.asarray(shard.data).ravel() for shard in batch["x"].addressable_shards}
    for r, device in enumerate(jax.devices()):
        np.testing.assert_array_equal(rows[device], [2 * r, 2 * r + 1])


@pytest.mark.parametrize("rows", [0, 3, 12])
def test_a_local_batch_that_does_not_divide_is_refused(mesh8: Any, rows: int) -> None:
    with jax.set_mesh(mesh8), pytest.raises(ValueError, match=f"has {rows} rows at x,.*8 local"):
        jaxcomm.global_batch({"x": np.zeros((rows, 2))}, "data")


def test_without_a_mesh_the_cure_is_named() -> None:
    for place in (lambda: jaxcomm.replicate(1.0), lambda: jaxcomm.global_batch([1.0], "data")):
        with pytest.raises(ValueError, match="call jax.set_mesh.jaxcomm.data_mesh"):
            place()


def test_an_axis_that_is_not_in_the_mesh_is_named(mesh8: Any) -> None:
    with jax.set_mesh(mesh8), pytest.raises(ValueError, match="'batch' is not in the mesh"):
        jaxcomm.global_batch(np.zeros(8), "batch")


def test_what_was_replicated_may_be_donated(mesh8: Any) -> None:
    with jax.set_mesh(mesh8):
        given = jaxcomm.replicate(jnp.arange(3.0))
        copy = jaxcomm.replicate(given)
        jax.jit(lambda x: x + 1, donate_argnums=0)(copy)
        np.testing.assert_array_equal(given, np.arange(3.0))


@pytest.mark.parametrize("place", [jaxcomm.replicate, lambda x: jaxcomm.shard(x, "data")])
def test_what_lay_on_one_device_stays_when_its_replica_is_donated(mesh8: Any, place: Any) -> None:
    given = jnp.arange(3.0)  # before the mesh is set, on its first device
    key = jax.random.key(1)
    with jax.set_mesh(mesh8):
        for x in (given, given, *([key] if place is jaxcomm.replicate else [])):
            jax.jit(lambda x: x, donate_argnums=0)(place(x))
        np.testing.assert_array_equal(given, np.arange(3.0))
        assert jax.random.bits(key).shape == ()


def test_random_keys_are_rows_of_a_batch(mesh8: Any) -> None:
    keys = jax.random.split(jax.random.key(0), 16)
    with jax.set_mesh(mesh8):
        batch = jaxcomm.global_batch({"x": np.zeros((16, 2)), "key": keys}, "data")
    assert batch["key"].sharding.spec == PartitionSpec("data")
    np.testing.assert_array_equal(*map(jax.random.key_data, (batch["key"], keys)))


def test_what_is_no_array_is_named(mesh8: Any) -> None:
    with jax.set_mesh(mesh8), pytest.raises(TypeError, match="leaf act is .*eqx.partition"):
        jaxcomm.replicate({"act": jnp.tanh, "w": jnp.ones(2)})
    with jax.set_mesh(mesh8), pytest.raises(TypeError, match="parameter act is .*nnx.split"):
        jaxcomm.value_and_grad(lambda p, x: 0.0, "data")({"act": jnp.tanh}, jnp.ones(8))
    with jax.set_mesh(mesh8), pytest.raises(ValueError, match="is 1, which has no rows"):
        jaxcomm.global_batch([1, 2, 3, 4], "data")


def test_shards_are_cut_out_of_no_copy(mesh8: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a whole model on one device there may be no room for two."""
    put, shapes = jax.device_put, []

    def counted(x: Any, *where: Any, **options: Any) -> Any:
        shapes.append(jax.tree.map(jnp.shape, x))
        return put(x, *where, **options)

    given = {"w": jnp.ones((64, 8)), "b": jnp.ones(8)}
    with jax.set_mesh(mesh8):
        monkeypatch.setattr(jax, "device_put", counted)
        placed = jaxcomm.shard(given, "data")
    assert shapes == [(8,), [(8,), (64, 8)]] and placed["w"].sharding.spec[0] == "data"


def test_what_is_no_name_or_no_devices() -> None:
    for wrong in (4, ["data"]):
        with pytest.raises(TypeError, match=r'the name of an axis, such as "data", got .*devices='):
            jaxcomm.data_mesh(wrong)
    with pytest.raises(TypeError, match=r"a sequence of devices, got 4; write data_mesh\(devices="):
        jaxcomm.data_mesh(devices=4)


@pytest.mark.parametrize(
    "kinds", list(itertools.product((AxisType.Auto, AxisType.Explicit), repeat=2))
)
def test_placing_inside_jit_is_as_outside(kinds: Any) -> None:
    given = {"w": jnp.full((4, 6), 0.5), "b": np.ones(3, np.float32)}
    with jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"), kinds)):
        for axis in (None, "data", "model"):
            place = lambda p, a=axis: jaxcomm.shard(p, a) if a else jaxcomm.replicate(p)  # noqa: E731
            outside, inside = place(given), jax.jit(place)(given)
            for x, y in zip(*map(jax.tree.leaves, (outside, inside)), strict=True):
                assert (x.sharding, x.weak_type) == (y.sharding, y.weak_type)
                np.testing.assert_array_equal(x, y)
            both = jax.vmap(place)({"w": jnp.ones((3, 4, 6))})["w"]
            assert (
                both.sharding.shard_shape(both.shape)[1:]
                == outside["w"].addressable_shards[0].data.shape
            )


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_shapes_get_shardings_inside_jit(kind: AxisType) -> None:
    shapes, found = {"w": jax.ShapeDtypeStruct((4, 8), jnp.float32)}, []
    with jax.set_mesh(jax.make_mesh((8,), ("data",), (kind,))):
        jax.eval_shape(lambda: found.append(jaxcomm.shard(shapes, "data")))
        assert found[0]["w"].sharding.spec == jaxcomm.shard(shapes, "data")["w"].sharding.spec
        assert found[0]["w"].sharding.spec[1] == "data"


def test_a_model_that_is_made_inside_jit_is_never_whole(mesh8: Any) -> None:
    def init(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, (1024, 1024))

    with jax.set_mesh(mesh8):
        made = (init, lambda key: jaxcomm.shard(init(key), "data"))
        programs = [jax.jit(f).lower(jax.random.key(0)).compile() for f in made]
        whole, shards = (p.memory_analysis().temp_size_in_bytes for p in programs)
        assert shards < whole / 4 and jaxcomm.wire_report(programs[1]).bytes_max == 0


def test_where_nothing_can_be_placed(mesh8: Any) -> None:
    with jax.set_mesh(mesh8):
        with pytest.raises(ValueError, match="call it on each batch, before the jitted step"):
            jax.jit(lambda x: jaxcomm.global_batch(x, "data"))(jnp.ones(8))
        shapes = jax.eval_shape(lambda: jnp.ones(8))
        for place in (jaxcomm.replicate, lambda _: jaxcomm.shard(shapes, "data")):
            inside = jax.shard_map(place, in_specs=jax.P(), out_specs=jax.P())
            with pytest.raises(ValueError, match=r"a jax.shard_map over \['data'\], where each"):
                inside(jnp.ones(8))


def test_what_is_split_on_another_mesh_becomes_whole(mesh4x2: Any, mesh8: Any) -> None:
    """Such as parameters of a run with an axis that this mesh does not have."""
    w = jax.device_put(np.arange(4.0), jax.NamedSharding(mesh4x2, jax.P("model")))
    with jax.set_mesh(mesh8):
        whole = jaxcomm.replicate({"w": w})["w"]
    assert whole.sharding.is_fully_replicated and whole.sharding.mesh == mesh8
    np.testing.assert_array_equal(whole, np.arange(4.0))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_keep_their_generator(impl: str, mesh8: Any) -> None:
    keys = jax.random.split(jax.random.key(0, impl=impl), 16)
    with jax.set_mesh(mesh8):
        batch = jaxcomm.global_batch({"x": np.zeros((16, 2)), "key": keys}, "data")
        whole = jaxcomm.replicate(keys)
    for found in (batch["key"], whole):
        assert jax.random.key_impl(found) == impl
        np.testing.assert_array_equal(*map(jax.random.key_data, (found, keys)))


def test_which_dimension_is_split(mesh8: Any) -> None:
    """The largest that the devices divide, the last of equals; but not the axis of layers."""
    shapes = {"stack": (64, 8, 8), "w": (64, 8), "same": (8, 8), "empty": (0, 8), "b": (8,)}
    with jax.set_mesh(mesh8):
        params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
        placed = jaxcomm.shard(params, "data", layers=["stack"])
    specs = {name: x.sharding.spec for name, x in placed.items()}
    none = PartitionSpec()
    assert specs == {
        "stack": PartitionSpec(None, None, "data"),
        "w": PartitionSpec("data"),
        "same": PartitionSpec(None, "data"),
        "empty": none,
        "b": none,
    }
    one = jax.make_mesh((1, 8), ("hosts", "devices"), (AxisType.Auto,) * 2)
    with jax.set_mesh(one):  # as in the types of what a step returns
        w = jaxcomm.shard(jnp.zeros((8, 8)), ("hosts", "devices"))
    assert w.sharding.spec == PartitionSpec(None, "devices")
