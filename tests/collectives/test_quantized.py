"""Codecs with scales, and those that round at random, through every algorithm."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jaxcomm
import oracles
from jaxcomm import codecs

ALGORITHMS = list(oracles.ALGORITHMS)
DETERMINISTIC: dict[str, codecs.Codec] = {
    "int8": codecs.int8(block_size=32),
    "int4": codecs.int4(block_size=32),
    "fp8_e4m3": codecs.fp8_e4m3(block_size=32),
    "cnat": codecs.cnat(rounding="nearest"),
}
RANDOM: dict[str, codecs.Codec] = {
    "cnat": codecs.cnat(),
    "qsgd": codecs.qsgd(levels=7, block_size=32),
    "terngrad": codecs.terngrad(),
    "int4": codecs.int4(block_size=32, rounding="random"),
    "random_k": codecs.random_k(0.25),
}

MakeMesh = Callable[[int], Mesh]


def on_all_devices(mesh: Mesh, **options: Any) -> Callable[..., Any]:
    """From (world, n) and a key to (world, n): what each device ends with, in rows."""
    spec = PartitionSpec("data")

    def one(x: jax.Array, key: jax.Array) -> jax.Array:
        return jaxcomm.pmean(x[0], "data", key=key, **options)[None]

    f = jax.shard_map(
        one, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False
    )
    return jax.jit(f)


def normal(world: int, n: int = 300) -> np.ndarray:
    return np.random.default_rng(world).standard_normal((world, n)).astype(np.float32)


def rounding_of(codec: codecs.Codec) -> oracles.Rounding:
    """What the codec makes of each message, as its own tests hold it to."""
    return lambda x: np.asarray(codec.decode(codec.encode(jnp.asarray(x)), x.shape[-1]))


@pytest.mark.newest
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("codec", DETERMINISTIC)
@pytest.mark.parametrize("world", [1, 3, 8])
def test_every_device_has_the_oracle_values(
    make_mesh: MakeMesh, world: int, codec: str, algorithm: str
) -> None:
    x, chosen = normal(world), DETERMINISTIC[codec]
    y = on_all_devices(make_mesh(world), codec=chosen, algorithm=algorithm)(x, jax.random.key(0))
    expected = oracles.ALGORITHMS[algorithm](x, rounding_of(chosen))
    assert (np.asarray(y) == np.asarray(y)[:1]).all()
    np.testing.assert_allclose(y[0], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("algorithm", ["direct", "ring"])
@pytest.mark.parametrize("codec", RANDOM)
def test_the_mean_of_many_means_is_the_mean(
    make_mesh: MakeMesh, codec: str, algorithm: str
) -> None:
    world, draws = 4, 300
    x = normal(world, 64)
    f = on_all_devices(make_mesh(world), codec=RANDOM[codec], algorithm=algorithm)
    means = []
    for draw in range(draws):
        y = np.asarray(f(x, jax.random.key(draw)))
        assert (y == y[:1]).all()
        means.append(y[0])
    means = np.array(means, np.float64)
    error = means.mean(0) - x.mean(0)
    deviation = means.std(0) / np.sqrt(draws)
    assert (means.std(0) > 0).mean() > 0.9
    assert (np.abs(error) < 5 * deviation + 1e-4).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("codec", [*RANDOM, "int8", "fp8_e4m3"])
@pytest.mark.parametrize("world", [3, 4])
def test_bytes_are_those_of_the_messages(
    make_mesh: MakeMesh, world: int, codec: str, algorithm: str
) -> None:
    n, chosen = 1000, (RANDOM | DETERMINISTIC)[codec]
    f = on_all_devices(make_mesh(world), codec=chosen, algorithm=algorithm)
    compiled = f.lower(jnp.ones((world, n)), jax.random.key(0)).compile()
    if isinstance(chosen, codecs.RandomK):  # Only the drawn values travel.
        n, chosen = chosen.drawn(n), chosen.values
    expected = oracles.bytes_sent(n, chosen.message_bytes, world, algorithm)
    assert jaxcomm.wire_report(compiled).bytes_max == expected


@pytest.mark.parametrize(
    ("second_hop", "step"),  # The largest relative error of the format.
    [("float32", 0.0), ("bfloat16", 2.0**-8), ("float16", 2.0**-10), ("cnat", 1.0)],
)
def test_the_second_hop_has_a_format_of_its_own(
    make_mesh: MakeMesh, second_hop: str, step: float
) -> None:
    world, n = 4, 1024
    f = on_all_devices(make_mesh(world), codec="int8", second_hop=second_hop)
    x = normal(world, n)
    report = jaxcomm.wire_report(f.lower(x, jax.random.key(0)).compile())
    there, back = codecs.int8(), codecs.from_name(second_hop)
    assert report.only("all-to-all").bytes_max == 3 * there.message_bytes(n // 4)
    assert report.only("all-gather").bytes_max == 3 * back.message_bytes(n // 4)
    y = np.asarray(f(x, jax.random.key(0)))
    assert (y == y[:1]).all()
    first = np.abs(x).max() / 127  # The step of int8, in its largest block.
    np.testing.assert_allclose(y[0], x.mean(0), rtol=step, atol=(1 + step) * first)


@pytest.mark.parametrize("aggregator", ["sharded", 2])
def test_one_aggregator_adds_rounds_and_returns(make_mesh: MakeMesh, aggregator: Any) -> None:
    world, x, codec = 4, normal(4, 256), codecs.cnat(rounding="nearest")
    f = on_all_devices(
        make_mesh(world), codec=codec, algorithm=jaxcomm.algorithms.direct(aggregator)
    )
    y = np.asarray(f(x, jax.random.key(0)))
    assert (y == y[:1]).all()
    rounding = rounding_of(codec)
    # The aggregator's own values stay whole; between equals they are rounded like the others'.
    rows = [row if r == aggregator else rounding(row) for r, row in enumerate(x)]
    if aggregator == "sharded":
        expected = oracles.direct(x, rounding)
    else:
        total = rows[2] + rows[0] + rows[1] + rows[3]
        expected = rounding(total * np.float32(1 / 4))
    np.testing.assert_allclose(y[0], expected, rtol=1e-6)
    report = jaxcomm.wire_report(f.lower(x, jax.random.key(0)).compile())
    sent = [float(b) for b in report.bytes_per_device]
    message = codec.message_bytes(256)
    if aggregator == 2:
        assert sent == [message, message, 3 * message, message]
    else:
        assert sent == [6 * codec.message_bytes(64)] * 4


def test_random_rounding_without_a_key_is_refused(mesh8: Mesh) -> None:
    f = jax.shard_map(
        lambda x: jaxcomm.pmean(x, "data", codec="cnat"),
        mesh=mesh8,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec(),
    )
    with pytest.raises(ValueError, match="cnat rounds at random and needs a key"):
        f(jnp.ones((8, 4)))


@pytest.mark.newest
@pytest.mark.parametrize("codec", RANDOM)
def test_under_the_checks_of_shard_map(mesh8: Mesh, codec: str) -> None:
    f = jax.shard_map(
        lambda x, key: jaxcomm.pmean(x, "data", codec=RANDOM[codec], key=key),
        mesh=mesh8,
        in_specs=(PartitionSpec("data"), PartitionSpec()),
        out_specs=PartitionSpec(),
    )
    x = normal(8)
    y = jax.jit(f)(x, jax.random.key(1))
    unchecked = on_all_devices(mesh8, codec=RANDOM[codec])(x, jax.random.key(1))
    np.testing.assert_array_equal(y[0], unchecked[0])
