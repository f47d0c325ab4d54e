"""Codecs with scales, and those that round at random, through every algorithm."""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jaxcomm
import oracles
from algorithm_table import CASES, NAMED, bytes_sent, mean_on_all, mean_program
from codec_oracles import HALF, blockwise, cnat_window, fp8
from jaxcomm import codecs, collectives
from jaxcomm.collectives.algorithms._algorithm import message_id
from jaxcomm.collectives.reductions import CodedMean
from pairs import every_pair

NEAREST = codecs.cnat(rounding="nearest")
DETERMINISTIC: dict[str, tuple[codecs.Codec, oracles.Rounding]] = {
    "int8": (codecs.int8(32), lambda x: blockwise(x, HALF, 32, 127, "max")),
    "int4": (codecs.int4(32), lambda x: blockwise(x, HALF, 32, 7, "max")),
    "fp8_e4m3": (codecs.fp8_e4m3(32), lambda x: fp8(x, 32, 4, 448)),
    "cnat": (NEAREST, lambda x: cnat_window(x, HALF)),
}
RANDOM: dict[str, codecs.Codec] = {
    "cnat": codecs.cnat(),
    "qsgd": codecs.qsgd(levels=7, block_size=32),
    "terngrad": codecs.terngrad(),
    "int4": codecs.int4(block_size=32, rounding="random"),
    "random_k": codecs.random_k(0.25),
}

MakeMesh = Callable[[int], Mesh]


def normal(world: int, n: int = 300) -> np.ndarray:
    return np.random.default_rng(world).standard_normal((world, n)).astype(np.float32)


def by_message(rounding: oracles.Rounding) -> oracles.Rounding:
    """The oracle of a codec is of one message; leading axes are messages of their own."""
    return lambda x: np.apply_along_axis(rounding, -1, x)


def assert_bytes(program: jax.stages.Compiled, codec: codecs.Codec, world: int, name: str) -> None:
    n = 300
    if codec.name == "random_k":  # Only the drawn values travel.
        n, codec = codec.drawn(n), codec.values
    expected = bytes_sent(CASES[name], n, codec.message_bytes, world)
    assert jaxcomm.wire_report(program).bytes_max == expected


@every_pair(newest=True, world=[1, 3, 8], codec=DETERMINISTIC, algorithm=NAMED)
def test_oracle_values_on_every_device_and_bytes(
    make_mesh: MakeMesh, world: int, codec: str, algorithm: str
) -> None:
    x, (chosen, rounding), case = normal(world), DETERMINISTIC[codec], CASES[algorithm]
    program = mean_program(make_mesh(world), 300, codec=chosen, algorithm=case.of(world))
    assert case.oracle is not None
    expected = case.oracle(x, by_message(rounding))
    np.testing.assert_allclose(mean_on_all(program, x), expected, rtol=1e-6, atol=1e-7)
    assert_bytes(program, chosen, world, algorithm)


# That every codec goes through every algorithm, the test above asks of those that do not draw.
@every_pair(meeting=1, codec=RANDOM, algorithm=NAMED, world=[3, 4])
def test_the_mean_of_many_means_is_the_mean_and_bytes(
    make_mesh: MakeMesh, codec: str, algorithm: str, world: int
) -> None:
    draws, x, case = 100, normal(world), CASES[algorithm]
    program = mean_program(make_mesh(world), 300, codec=RANDOM[codec], algorithm=case.of(world))
    assert_bytes(program, RANDOM[codec], world, algorithm)
    means = np.array([mean_on_all(program, x, seed=draw) for draw in range(draws)], np.float64)
    error = means.mean(0) - x.mean(0)
    deviation = means.std(0) / np.sqrt(draws)
    assert (means.std(0) > 0).mean() > 0.9
    # Of rare roundings few are seen, so the deviation of a single value may seem too small.
    assert (np.abs(error) < 5 * np.maximum(deviation, np.median(deviation))).all()
    assert np.square(error).mean() < 1.5 * np.square(deviation).mean()


def test_devices_round_independently(make_mesh: MakeMesh) -> None:
    """Of N equal inputs, which each become 1 or 2, the mean has 1/N of the variance of one."""
    world, n = 4, 1024
    program = mean_program(make_mesh(world), n, codec=codecs.cnat(), second_hop="float32")
    y = mean_on_all(program, np.full((world, n), 1.5, np.float32))
    assert y.mean() == pytest.approx(1.5, abs=0.05)
    assert y.var() == pytest.approx(0.25 / world, rel=0.2)
    assert set(y) == {1, 1.25, 1.5, 1.75, 2}


def test_leaves_round_independently(make_mesh: MakeMesh) -> None:
    def means(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jaxcomm.pmean((x, x), "data", "cnat", key=jax.random.key(0))

    spec = jax.sharding.PartitionSpec
    f = jax.shard_map(means, mesh=make_mesh(2), in_specs=spec("data"), out_specs=spec())
    one, other = jax.jit(f)(np.full(2048, 1.5, np.float32))
    assert 0.2 < np.mean(one != other) < 0.8


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "circulant"])
def test_rounds_round_independently(make_mesh: MakeMesh, algorithm: str) -> None:
    """Only device 0 has values to round; it sends its blocks in different rounds."""
    world, n = 4, 1024
    program = mean_program(
        make_mesh(world), n, codec=codecs.cnat(), second_hop="float32", algorithm=algorithm
    )
    x = np.zeros((world, n), np.float32)
    x[0] = 1.5
    sums = 4 * mean_on_all(program, x).reshape(world, -1)
    sent = [block for block in sums if set(block) != {1.5}]
    assert len(sent) == world - 1  # and one is its own
    for one, other in itertools.combinations(sent, 2):
        assert set(one) == set(other) == {1, 2}
        assert 0.35 < (one == other).mean() < 0.65


@pytest.mark.parametrize(
    ("second_hop", "step"),  # The largest relative error of the format.
    [("float32", 0.0), ("bfloat16", 2.0**-8), ("float16", 2.0**-10), ("cnat", 1.0)],
)
def test_the_second_hop_has_a_format_of_its_own(
    make_mesh: MakeMesh, second_hop: str, step: float
) -> None:
    world, n = 4, 1024
    program = mean_program(make_mesh(world), n, codec="int8", second_hop=second_hop)
    x = normal(world, n)
    report = jaxcomm.wire_report(program)
    there, back = codecs.int8(), codecs.from_name(second_hop)
    assert report.only("all-to-all").bytes_max == 3 * there.message_bytes(n // 4)
    assert report.only("all-gather").bytes_max == 3 * back.message_bytes(n // 4)
    first = np.abs(x).max() / 127  # The step of int8, in its largest block.
    y = mean_on_all(program, x)
    np.testing.assert_allclose(y, x.mean(0), rtol=step, atol=(1 + step) * first)


@pytest.mark.parametrize("world", [4, 8])
def test_around_a_ring_int8_loses_little_more(make_mesh: MakeMesh, world: int) -> None:
    """Why `Default` sends int8 around a ring, and coarser codes directly."""
    x = normal(world, 2**14) * np.exp(normal(world + 1, 2**14)[:world])
    exact = x.mean(0, dtype=np.float64)

    def error(algorithm: str) -> float:
        program = mean_program(make_mesh(world), 2**14, codec=codecs.int8(), algorithm=algorithm)
        return float(np.linalg.norm(mean_on_all(program, x) - exact) / np.linalg.norm(exact))

    direct, ring = error("direct"), error("ring")
    assert direct < ring < 1.7 * direct and ring < 0.06


def test_one_aggregator_adds_rounds_and_returns(make_mesh: MakeMesh) -> None:
    world, x, case = 4, normal(4, 256), CASES["aggregator"]
    program = mean_program(make_mesh(world), 256, codec=NEAREST, algorithm=case.of(world))
    assert case.oracle is not None
    expected = case.oracle(x, by_message(DETERMINISTIC["cnat"][1]))
    np.testing.assert_allclose(mean_on_all(program, x), expected, rtol=1e-6)
    message = NEAREST.message_bytes(256)
    sent = [float(b) for b in jaxcomm.wire_report(program).bytes_per_device]
    assert sent == [message, message, 3 * message, message]


def test_random_rounding_without_a_key_is_refused(mesh8: Mesh) -> None:
    f = jax.shard_map(
        lambda x: jaxcomm.pmean(x, "data", codec="cnat"),
        mesh=mesh8,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec(),
    )
    with pytest.raises(ValueError, match="cnat rounds at random and needs a key"):
        jax.eval_shape(f, jnp.ones((8, 4)))


@pytest.mark.parametrize(
    "codec", [pytest.param(c, marks=[pytest.mark.newest] * (c == "random_k")) for c in RANDOM]
)
def test_under_the_checks_of_shard_map(make_mesh: MakeMesh, codec: str) -> None:
    mesh, x = make_mesh(3), normal(3)
    f = jax.shard_map(
        lambda x, key: jaxcomm.pmean(x, "data", codec=RANDOM[codec], key=key),
        mesh=mesh,
        in_specs=(PartitionSpec("data"), PartitionSpec()),
        out_specs=PartitionSpec(),
    )
    y = jax.jit(f)(x, jax.random.key(1))
    unchecked = mean_program(mesh, 300, codec=RANDOM[codec], algorithm=CASES["direct"].of(3))
    np.testing.assert_array_equal(y[0], mean_on_all(unchecked, x, seed=1))


@pytest.mark.parametrize(("world", "one_way", "both_ways"), [(4, 1.14, 1.0), (8, 1.55, 1.27)])
def test_from_both_sides_a_ring_adds_less_to_the_error_of_cnat(
    make_mesh: MakeMesh, world: int, one_way: float, both_ways: float
) -> None:
    """Of noise, over the error of a direct exchange: why `Default` sends cnat that way."""
    x = normal(world, 2**16)
    exact = x.mean(0, dtype=np.float64)

    def error(algorithm: str) -> float:
        program = mean_program(make_mesh(world), 2**16, codec=codecs.cnat(), algorithm=algorithm)
        return float(np.linalg.norm(mean_on_all(program, x) - exact))

    direct = error("direct")
    assert error("ring") / direct == pytest.approx(one_way, rel=0.03)
    assert error("two_way_ring") / direct == pytest.approx(both_ways, rel=0.03)


def test_the_program_of_a_mean_does_not_grow_with_the_devices() -> None:
    """With errors kept too, where messages are decoded one by one."""
    reduction, _ = collectives.mean_of("int8", "direct", error_feedback=True)

    def merged(partials: jax.Array) -> jax.Array:
        return reduction.merge_all(partials)

    x = normal(100)
    found = np.asarray(jax.jit(merged)(x))
    np.testing.assert_array_equal(found, functools.reduce(np.add, x)[None])
    assert len(jax.make_jaxpr(merged)(normal(1000)).eqns) == len(jax.make_jaxpr(merged)(x).eqns)


def test_the_second_hop_rounds_with_words_of_its_own() -> None:
    """With those of a message of the first hop, the errors of both would be the same."""
    int8, x = codecs.int8(rounding="random"), jax.random.normal(jax.random.key(0), (1, 512))
    reduction = CodedMean(int8, int8, key=jax.random.key(1))
    results = np.asarray(reduction.finish(4 * x, None, 4))
    for devices, number in ((1, 0), (1, 1), (2, 0)):
        sent = reduction.encode(x, (1,), message_id(devices, number))
        assert np.any(np.asarray(sent) != results)
