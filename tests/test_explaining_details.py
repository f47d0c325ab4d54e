"""What `jaxcomm.explain` says of codecs, empty leaves and axes that nothing is split over."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxcomm
from jaxcomm import codecs


@pytest.mark.parametrize(
    ("codec", "options", "text"),
    [
        ("bfloat16", {}, "any optimizer after it"),
        ("cnat", {}, "any optimizer after it"),
        ("int4", {}, "any optimizer after it"),
        ("terngrad", {}, "SGD without momentum after it: fewer than 4 bits"),
        (codecs.qsgd(levels=1), {}, "SGD without momentum after it: fewer than 4 bits"),
        ("bfloat16", {"second_hop": "terngrad"}, "SGD without momentum after it: fewer than 4"),
        (codecs.random_k(0.01), {}, "SGD without momentum after it: fewer than 4 bits"),
        ("int2", {"error_feedback": True}, "error feedback: below int4"),
    ],
)
def test_what_a_mean_needs_depends_on_its_bits(codec: Any, options: Any, text: str) -> None:
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
        tx = jaxcomm.mean("data", codec, **options)
        ((name, needs),) = jaxcomm.explain(tx, {"w": jnp.zeros((32, 32))}).needs
    assert name == "mean" and needs.startswith(text)


def test_empty_leaves_are_not_sent() -> None:
    params = {"w": jnp.zeros((8, 8)), "none": jnp.zeros((5, 0)), "b": jnp.zeros(3)}
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
        found = jaxcomm.explain(jaxcomm.mean("data", "int8"), params)
    travels = {leaf.path: (leaf.travels, leaf.messages) for leaf in found.leaves}
    assert travels["none"] == ("not sent", ())
    assert travels["b"] == ("float32, native", ("exempt",))


def test_it_is_buckets_that_devices_of_another_axis_send_alike() -> None:
    """A bias that is split sends its own part, though no compressed parameter is split."""
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), kinds, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        split = NamedSharding(mesh, PartitionSpec("model"))
        bias = jax.device_put(jnp.zeros(6400), split)
        params = {"w": jaxcomm.replicate(jnp.zeros((8, 8))), "b": bias}
        text = str(jaxcomm.explain(jaxcomm.mean("data", "int8"), params))
    assert "send the same buckets: no parameter that is compressed" in " ".join(text.split())


@pytest.mark.filterwarnings("ignore:the error of terngrad")
def test_each_part_has_needs_of_its_own() -> None:
    parts = {"a": jaxcomm.mean("data", "int8"), "b": jaxcomm.mean("data", "terngrad")}
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
        params = {"v": jnp.zeros((8, 8)), "w": jnp.zeros((8, 8))}
        found = jaxcomm.explain(optax.partition(parts, {"v": "a", "w": "b"}), params)
        assert len(found.needs) == 2
        low_rank = jaxcomm.low_rank_mean("data", 1, "terngrad")
        tx = optax.partition({"a": parts["a"], "b": low_rank}, {"v": "a", "w": "b"})
        assert ("mean", "any optimizer after it") in jaxcomm.explain(tx, params).needs


def test_a_float32_mean_of_what_is_split_over_a_further_axis(mesh4x2: Any) -> None:
    with jax.set_mesh(mesh4x2):
        sharding = NamedSharding(mesh4x2, PartitionSpec(None, "model"))
        params = {"w": jax.ShapeDtypeStruct((64, 32), "float32", sharding=sharding)}
        found = jaxcomm.explain(jaxcomm.mean("data", "int8"), params)
    assert found.dense_bytes == 1.5 * 4 * 64 * 16


def test_a_second_hop_is_shown_and_may_be_coarse(mesh8: Any) -> None:
    with jax.set_mesh(mesh8):
        tx = jaxcomm.mean("data", "int8", second_hop="terngrad")
        found = jaxcomm.explain(tx, {"w": jnp.zeros((64, 64))})
    assert "fewer than 4 bits" in dict(found.needs)["mean"]
    assert found.leaves[0].travels == "int8, terngrad back, direct"


def test_devices_along_an_axis_of_one_send_nothing_alike() -> None:
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 1), ("data", "model"), kinds, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        assert jaxcomm.explain(jaxcomm.mean("data", "int8"), {"w": jnp.zeros((64, 64))}).alike == ()


def test_between_hosts_of_one_device_nothing_is_counted_apart(mesh8: Any, hosts_of: Any) -> None:
    hosts_of(*range(8))
    with jax.set_mesh(mesh8):
        found = jaxcomm.explain(jaxcomm.mean("data", "int8"), {"w": jnp.zeros((64, 64))})
    assert found.host_bytes is None


def test_hops_of_scanned_layers_are_counted(mesh8: Any) -> None:
    tx = jaxcomm.in_backward(jaxcomm.mean("data", "bfloat16", algorithm="direct"), ["blocks"])
    with jax.set_mesh(mesh8):
        found = jaxcomm.explain(tx, {"blocks": {"w": jnp.zeros((3, 16, 16))}})
    (bucket,) = [message for message in found.messages if message.leaves]
    assert [times for _, times, _ in bucket.hops] == [3, 3]
    assert "all-to-all x 3" in str(found) and "all-gather x 3" in str(found)


def test_the_density_is_what_is_selected(mesh8: Any) -> None:
    """Every chunk has an entry, and a short last one as many as the others."""
    shapes = {"one": 4096, "short": 4096 + 224}
    with jax.set_mesh(mesh8):
        for density, shown in ((1e-4, ("0.00024", "0.00046")), (1 / 32, ("0.03125", "0.059"))):
            tx = jaxcomm.sparse_mean("data", density, "topk_chunks", bucket_mib=0.001)
            found = jaxcomm.explain(tx, {k: jnp.zeros((n // 8, 8)) for k, n in shapes.items()})
            assert [leaf.travels for leaf in found.leaves] == [
                f"topk_chunks, density {share}" for share in shown
            ]


def test_the_decay_of_a_residual_is_shown(mesh8: Any) -> None:
    with jax.set_mesh(mesh8):
        tx = jaxcomm.sparse_mean("data", 0.05, residual_decay=0.99)
        found = jaxcomm.explain(tx, {"w": jnp.zeros((64, 64))})
    assert found.leaves[0].travels == "oktopk, density 0.05, decay 0.99"


def test_it_is_said_where_nothing_is_compressed(mesh8: Any) -> None:
    vector, both = {"v": jnp.zeros(4096)}, {"v": jnp.zeros(4096), "w": jnp.zeros((64, 64))}
    with jax.set_mesh(mesh8):
        tx = jaxcomm.mean("data", "int8")
        assert "Nothing is compressed: all parameters have at most" in str(
            jaxcomm.explain(tx, vector)
        )
        everything = jaxcomm.mean("data", "int8", exempt=lambda path, shape: False)
        for found in (jaxcomm.explain(tx, both), jaxcomm.explain(everything, vector)):
            assert not found.is_exempt and "Nothing is compressed" not in str(found)
        assert not jaxcomm.explain(jaxcomm.no_exchange("data"), vector).is_exempt
