"""What `orthogonalize` refuses: options, what is no matrix, and states that do not fit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers

import jaxcomm
from transforms.test_orthogonalize import mesh_of, orthogonal

P = PartitionSpec


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"beta": 0.9}, TypeError, "unexpected keyword argument 'beta'"),
        ({"ns_steps": 2.5}, ValueError, "ns_steps must be a whole number of at least 1, got 2.5"),
        ({"ns_steps": 0}, ValueError, "ns_steps must be"),
        ({"consistent_rms": np.ones(2)}, ValueError, "consistent_rms must be"),
        ({"codec": "float16"}, ValueError, "cannot be sent in float16"),
        ({"consistent_rms": 0}, ValueError, "consistent_rms must be None or positive, got 0"),
        ({"consistent_rms": True}, ValueError, "consistent_rms must be"),
        ({"codec": "cnat"}, ValueError, "cannot be sent in cnat"),
        ({"codec": "int2"}, ValueError, "cannot be sent in int2"),
        ({"codec": "bf16"}, ValueError, "unknown codec 'bf16'"),
        ({"ns_coeffs": (1, 2)}, ValueError, "ns_coeffs must have shape"),
        ({"preconditioning": "x"}, ValueError, "Unknown preconditioning x"),
    ],
)
def test_bad_options_are_refused_at_once(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        jaxcomm.orthogonalize(**options)


@pytest.mark.parametrize(
    ("dimensions", "shape", "spec", "message"),
    [
        (None, (8,), P(), "w of shape .8,. is not a matrix; say what its axes are"),
        (None, (2, 8, 8), P(), "with_layer_axis.tx, .'w'"),
        ({"v": None}, (8, 8), P(), "for w, got 'nothing'"),
        ({"w": 0}, (8, 8), P(), "for w, got 0"),
        (MuonDimensionNumbers(0, 0), (8, 8), P(), "does not fit parameter w of 2 axes"),
        (MuonDimensionNumbers(0, 2), (8, 8), P(), "does not fit parameter w of 2 axes"),
        (MuonDimensionNumbers((), 1), (8, 8), P(), "does not fit parameter w of 2 axes"),
        (None, (8, 8), P("hosts", "devices"), "along two axes of a matrix; split one of them"),
    ],
)
def test_what_is_no_matrix_is_refused(
    dimensions: Any, shape: tuple[int, ...], spec: PartitionSpec, message: str
) -> None:
    mesh = mesh_of(AxisType.Auto)
    with jax.set_mesh(mesh):
        params = {"w": jax.device_put(jnp.ones(shape), NamedSharding(mesh, spec))}
        with pytest.raises((TypeError, ValueError), match=message):
            jaxcomm.orthogonalize(dimensions).init(params)


def test_other_updates_are_refused() -> None:
    tx = jaxcomm.orthogonalize()
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        w = jaxcomm.shard(jnp.eye(4), "data")
        state = tx.init(w)
        with pytest.raises(ValueError, match="made for 1 parameters and got 2 updates"):
            tx.update((w, w), state)
        with pytest.raises(ValueError, match=r"shape \(2, 4, 4\), expected \(4, 4\); put orthog"):
            tx.update(jnp.stack([w, w]), state)
        inside = jax.shard_map(
            lambda w: tx.update(w, state)[0], in_specs=P(), out_specs=P(), check_vma=False
        )
        with pytest.raises(ValueError, match="split over 'data', and inside a jax.shard_map over"):
            inside(jaxcomm.replicate(jnp.eye(4)))
        with pytest.raises(ValueError, match="expected a OrthogonalizeState"):
            tx.update(w, optax.EmptyState())


def test_what_is_like_another_parameter_is_refused() -> None:
    w = jnp.eye(2)
    both = {"a": {"b": w}, "a/b": w}
    with pytest.raises(ValueError, match="two parameters are called a/b"):
        jaxcomm.orthogonalize().init(both)
    for dtype in (jnp.complex64, jnp.int32):
        with pytest.raises(TypeError, match="parameter tree is .*gradients are exchanged for"):
            jaxcomm.orthogonalize().init(w.astype(dtype))
    with pytest.raises(ValueError, match="parameter bias of shape .* is not a matrix"):
        jaxcomm.orthogonalize().init({"bias": w})
    tx = jaxcomm.orthogonalize()
    with pytest.raises(ValueError, match="made for a parameter 'a' where this update is of 'c'"):
        tx.update({"c": w}, tx.init({"a": w}))
    with pytest.raises(ValueError, match="map over the states of the others in the chain"):
        optax.tree.map_params(tx, lambda x: x, tx.init({"a": w}))


def test_a_state_that_does_not_fit_the_placement_is_refused() -> None:
    tx, x = jaxcomm.orthogonalize(), jnp.ones((8, 8))
    mesh = jaxcomm.data_mesh(devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        w = jaxcomm.shard(x, "data")
        state = tx.init(w)
    with jax.set_mesh(None), pytest.raises(ValueError, match="no mesh is set"):
        tx.update(w, state)
    for other, message in (
        (jax.make_mesh((4,), ("model",)), "split over 'data', and the mesh has the axes 'model'"),
        (jax.make_mesh((3,), ("data",), devices=jax.devices()[:3]), "cannot be split by"),
    ):
        with jax.set_mesh(other), pytest.raises(ValueError, match=message):
            tx.update(x, state)
    explicit = jax.make_mesh((4,), ("data",), (AxisType.Explicit,), devices=jax.devices()[:4])
    with jax.set_mesh(explicit):
        rows, columns = (jax.device_put(x, NamedSharding(explicit, s)) for s in (P("data"), P()))
        for before, after in ((rows, columns), (columns, rows)):
            with pytest.raises(ValueError, match="is sharded by .* and its parameter was by"):
                tx.update(after, tx.init(before))


def test_parts_inside_a_region_are_refused_and_whole_groups_are_not() -> None:
    """Inside a `jax.shard_map` over the axis of the exchange alone, others are as outside."""
    mesh = jax.make_mesh((2, 2), ("data", "fsdp"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    x = np.random.default_rng(7).standard_normal((4, 8), np.float32)
    tx = jaxcomm.orthogonalize()
    with jax.set_mesh(mesh):
        w = jaxcomm.shard(x, "fsdp")
        state = tx.init(w)
        within = jax.shard_map(
            lambda w: tx.update(w, state)[0], in_specs=P(), out_specs=P(), axis_names={"data"}
        )
        np.testing.assert_allclose(jax.jit(within)(w), orthogonal(x, ([0], [1])), atol=2e-5)

        def parts(w: jax.Array) -> jax.Array:
            return tx.update(w, tx.init(w))[0]

        inside = jax.shard_map(parts, in_specs=P("fsdp"), out_specs=P("fsdp"))
        with pytest.raises(ValueError, match="tree differs along 'fsdp' inside this jax.shard_map"):
            jax.jit(inside)(w)
