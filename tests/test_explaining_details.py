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
