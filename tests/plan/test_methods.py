"""What the planner says that methods send is what their programs send."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm import collectives, plan
from jaxcomm.collectives.algorithms import _default
from jaxcomm.plan.families import FAMILIES, Method, methods
from jaxcomm.plan.predict import choose, predictions
from jaxcomm.plan.sending import buckets_of, sent, values_of_bucket
from jaxcomm.plan.simulate import Simulation

SHAPE = (96, 128)
WORLD = 4
QUICK = {"xla_backend_optimization_level": 0}
MATRIX = {"w": np.zeros(SHAPE, np.float32)}
FEW = ["int8/direct", "bfloat16/ring", "vote/ring", "powersgd2/native", "topk_dsa"]


def bytes_of_the_program(
    method: Method, make_mesh: Any, params: dict[str, jax.Array] = MATRIX, world: int = WORLD
) -> float:
    """What a device sends in the compiled exchange of one matrix, the flag included."""
    with jax.set_mesh(make_mesh(world)):
        tx = method.transformation("data")
        state = jax.eval_shape(tx.init, jaxcomm.replicate(params))
        grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct((world, *p.shape), p.dtype), params)
        compiled = jax.jit(tx.update).lower(grads, state).compile(QUICK)
        return float(jaxcomm.wire_report(compiled).bytes_max)


def bytes_of_the_plan(
    method: Method, params: dict[str, jax.Array] = MATRIX, world: int = WORLD
) -> float:
    star = plan.fabrics.star("star", world, "1Gbit")
    load = plan.workload(params, 1.0)
    parts = sent(method, load, world, True)
    network = Simulation(star)
    return sum(p.times * network.exchange(p.algorithm, p.reduction, p.values).sent for p in parts)


def one_level() -> list[Method]:
    return [m for m in methods() if not m.family.startswith("float16") and m.every == 1]


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(m, id=m.name, marks=() if m.name in FEW else pytest.mark.slow)
        for m in one_level()
    ],
)
def test_bytes_are_those_of_the_program(method: Method, make_mesh: Any) -> None:
    predicted, found = bytes_of_the_plan(method), bytes_of_the_program(method, make_mesh)
    # The flag, thresholds and blocks that are padded to whole words or groups; among 4 devices a
    # direct exchange halves encoded blocks, where the plan encodes halves, with a scale more.
    assert 0.99 * predicted <= found <= 1.01 * predicted + 200, method.name


def test_lists_that_devices_gave_away_come_back(make_mesh: Any) -> None:
    """On 6 devices, of which two give theirs to neighbours first."""
    method = Method("gtopk", "own")
    predicted = bytes_of_the_plan(method, world=6)
    found = bytes_of_the_program(method, make_mesh, world=6)
    assert 0.99 * predicted <= found <= 1.01 * predicted + 100


@pytest.mark.parametrize("method", [Method("int8", "direct"), Method("float32", "ring")])
def test_exempt_leaves_are_sent_in_float32(method: Method, make_mesh: Any) -> None:
    vectors = {"b": np.zeros(3 * 2**10, np.float32), "norm": np.zeros(2**10, np.float32)}
    exempt = 1.5 * 4 * 2**12
    predicted = bytes_of_the_plan(method, MATRIX | vectors)
    assert predicted == bytes_of_the_plan(method) + exempt
    assert predicted == pytest.approx(
        bytes_of_the_program(method, make_mesh, MATRIX | vectors), abs=200
    )
    load = plan.workload(vectors, 1.0)
    (part,) = sent(method, load, WORLD, True)
    assert (part.algorithm, part.values) == (jaxcomm.algorithms.native(), 2**12)
    assert [p.values for p in sent(Method("powersgd2", "native"), load, WORLD, True)] == [2**12]


def test_a_projection_is_split_where_the_program_splits_it(make_mesh: Any) -> None:
    method, heads = Method("powersgd2", "native"), {"w": np.zeros((64, 4, 16), np.float32)}
    predicted = bytes_of_the_plan(method, heads)
    assert predicted == 1.5 * 4 * 2 * (64 + 64)
    assert predicted == pytest.approx(bytes_of_the_program(method, make_mesh, heads), abs=50)


def test_every_family_can_be_made() -> None:
    for method in methods(two_levels=True):
        if method.algorithm == "hierarchical":
            assert method.transformation(("far", "near"))
        else:
            assert method.transformation("data")
            assert set(method.config) <= {
                *("method", "codec", "algorithm", "error_feedback", "density", "rank"),
                *("local_optimizer", "every"),
            }


def test_an_optimizer_leaves_out_what_loses_accuracy_in_front_of_it() -> None:
    names = {kind: {m.family for m in methods(optimizer=kind)} for kind in ("sgd", "adam", "muon")}
    assert names["sgd"] == set(FAMILIES)
    left_out = set(FAMILIES) - names["adam"]
    assert left_out == {"vote", *jaxcomm.sparse.BY_NAME, "powersgd1", "powersgd2", "powersgd4"}
    assert names["adam"] - names["muon"] == {"cnat", "int4"}
    assert names["muon"] < names["adam"]
    with pytest.raises(ValueError, match="optimizer is one of 'sgd', 'adam', 'muon', got 'adamw'"):
        methods(optimizer="adamw")
    slow = plan.cluster(plan.fabrics.star("star", 4, "50Mbit"))
    adam = plan.plan(slow, plan.workload(4e6, 100.0), "any", optimizer="adam")
    assert adam.choice.method == Method("scaled_sign", "direct", every=4)
    in_every_step = next(row for row in adam.rows if row.method.every == 1)
    assert in_every_step.method.family == "scaled_sign"
    assert "error feedback after jaxcomm.local of the optimizer, or" in in_every_step.method.needs
    vote = [Method("vote", "ring")]
    for optimizer, message in (("adam", "vote/ring lost accuracy with 'adam'"), ("lion", "got 'l")):
        with pytest.raises(ValueError, match=message):
            plan.plan(slow, plan.workload(4e6, 100.0), chosen=vote, optimizer=optimizer)


def test_qualities_contain_each_other() -> None:
    names = [{m.name for m in methods(q)} for q in ("exact", "16bit", "unbiased", "any")]
    for fewer, more in zip(names, names[1:], strict=False):
        assert fewer < more
    assert "float32/native" in names[0] and "cnat/direct" in names[2] - names[1]
    with pytest.raises(ValueError, match="unknown quality 'best'; write one of exact"):
        methods("best")


def test_the_usual_algorithm_is_that_of_a_bucket() -> None:
    """Of 262,144 votes, which are rather short, beside more exempt values."""
    load = plan.workload({"w": np.zeros((512, 512)), "b": np.zeros(614_400)}, 1.0)
    circulant, direct = (Method("vote", name) for name in ("circulant", "direct"))
    values = values_of_bucket(circulant, load, True)
    assert values == 2**18
    assert values_of_bucket(Method("float32", "native"), load, True) == load.values
    assert circulant.is_usual(4, True, values) and not direct.is_usual(4, True, values)
    room = plan.cluster(plan.fabrics.star("star", 4, "1Gbit"))
    found = predictions(room, load, chosen=[direct, circulant])
    same = [dataclasses.replace(row, step=1.0) for row in found if row.method.family == "vote"]
    assert choose(same, load, room)[0].method == circulant


def test_of_equals_more_bits_are_preferred() -> None:
    room = plan.cluster(plan.fabrics.star("star", 4, "1Gbit"))
    load = plan.workload(4e6, 1.0)
    asked = ["topk_dsa", "oktopk", "topk_chunks", "vote", "powersgd1", "powersgd4", "scaled_sign"]
    asked += ["int4", "int8"]
    while asked:
        chosen = [m for m in methods() if m.family in asked]
        found = [dataclasses.replace(r, step=1.0) for r in predictions(room, load, chosen=chosen)]
        choice = choose([r for r in found if r.method in chosen], load, room)[0]
        assert choice.method.family == asked.pop()


def test_a_method_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="unknown family 'foo'; write one of float32, bfloat16"):
        Method("foo", "ring")
    with pytest.raises(ValueError, match="vote goes by 'direct' or .*, got the algorithm 'native'"):
        Method("vote", "native")


@pytest.mark.parametrize(("sent_as", "bits"), [("votes", 1), ("16 bits", 16), ("8 bits", 8)])
@pytest.mark.parametrize(
    ("world", "few"), [(4, "halving_doubling"), (8, "halving_doubling"), (6, "circulant")]
)
def test_the_default_of_short_vectors_has_few_rounds(
    sent_as: str, bits: int, world: int, few: str
) -> None:
    """Between CPU processes; votes that are not quite as short have rather few rounds."""
    is_vote = sent_as == "votes"
    short = 24 if is_vote else 6 * world
    few = few if is_vote else "circulant"
    long = "direct" if is_vote else "ring"
    medium = "circulant" if is_vote and world != 6 else long

    def of(kib: float, between_cpus: bool = True) -> str:
        values = math.floor(8 * 1024 * kib / bits)
        return _default.usual(sent_as, world, between_cpus, values).name

    assert of(short) == few
    assert [of(short + 0.01), of(64)] == [medium] * 2
    assert [of(64.01), _default.usual(sent_as, world, True, None).name] == [long] * 2
    assert of(short, between_cpus=False) == "direct"


def test_the_default_of_coarse_codes_is_direct_but_for_cnat_on_few_devices() -> None:
    assert _default.usual("codes", 4, True, 1).name == "direct"
    chosen = [_default.usual("cnat", world, True).name for world in (2, 3, 8, 9)]
    assert chosen == ["direct", "two_way_ring", "two_way_ring", "direct"]
    assert _default.usual("cnat", 8, False).name == "direct"


@pytest.mark.parametrize("sent_as", ["16 bits", "8 bits", "cnat", "codes"])
def test_the_default_of_means_on_many_devices_has_few_rounds(sent_as: str) -> None:
    assert _default.usual(sent_as, 32, True).name in ("ring", "direct")
    assert _default.usual(sent_as, 33, True).name == "circulant"
    assert _default.usual(sent_as, 33, False).name == "direct", "not between CPU processes"


@pytest.mark.parametrize(
    ("sent_as", "values", "algorithm"),
    [
        ("votes", 8 * 24 * 1024, "halving_doubling"),
        ("votes", 8 * 24 * 1024 + 1, "circulant"),
        ("votes", 8 * 64 * 1024 + 1, "direct"),
        ("bfloat16", 15 * 1024, "circulant"),
        ("bfloat16", 15 * 1024 + 1, "ring"),
        ("int8", 30 * 1024, "circulant"),
        ("int8", 64 * 1024, "ring"),
        ("cnat", 16 * 1024, "two_way_ring"),
    ],
)
def test_values_are_counted_and_not_the_words_that_hold_them(
    sent_as: str, values: int, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program of the default is the one of the algorithm that it stands for.

    Of means on 5 devices, as on 4 the circulant graph of means is a ring.
    """
    monkeypatch.setattr(_default._device, "is_between_cpu_processes", lambda: True)

    def program(algorithm: str | None) -> str:
        if sent_as == "votes":
            tx = jaxcomm.majority_vote("data", algorithm)
        else:
            tx = jaxcomm.mean("data", sent_as, algorithm)
        world = 4 if sent_as == "votes" else 5
        with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:world])):
            state = tx.init(jax.ShapeDtypeStruct((1, values), "float32"))
            grads = jax.ShapeDtypeStruct((world, 1, values), "float32")
            return jax.jit(tx.update).lower(grads, state).as_text()

    assert program(None) == program(algorithm)
    others = {"halving_doubling", "circulant", "direct", "ring", "two_way_ring"} - {algorithm}
    assert [other for other in others if program(None) == program(other)] == []


def test_buckets() -> None:
    load = plan.workload(25.6e6, 1.0)
    assert buckets_of(Method("float32", "native"), load, True) == (load.values,)
    assert len(buckets_of(Method("int8", "direct"), load, True)) == -(-4 * 25_600_000 // 2**23)
    assert set(FAMILIES) >= {*jaxcomm.sparse.BY_NAME}


def test_buckets_are_those_of_the_program(make_mesh: Any) -> None:
    """Whole leaves from the last on: a larger one travels by itself."""
    shapes = {"a": (1024, 1024), "b": (3, 1024, 1024), "c": (512, 1024), "d": (1024, 1024)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    load = plan.workload(params, 1.0)
    for method in (Method("int8", "direct"), Method("float32", "native")):
        sizes = buckets_of(method, load, False)
        assert sizes == ((512 + 1024) * 1024, 3 * 1024**2, 1024**2)
        with jax.set_mesh(make_mesh(2)):
            found = jaxcomm.explain(method.transformation("data"), params)
        buckets = [m for m in found.messages if m.name.startswith("bucket")]
        assert [sum(math.prod(shapes[p]) for p in m.leaves) for m in buckets] == [*sizes]


@pytest.mark.parametrize("between_cpus", [False, True])
@pytest.mark.parametrize("devices", [4, 6, 32, 64])
@pytest.mark.parametrize("values", [10_000, 10_000_000])
def test_the_usual_algorithm_is_the_default(
    devices: int, values: int, between_cpus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_default._device, "is_between_cpu_processes", lambda: between_cpus)
    kinds = {"vote": "votes", "bfloat16": "16 bits", "int8": "8 bits", "cnat": "cnat"}
    for family, sent_as in kinds.items():
        of_family = [Method(family, name) for name in FAMILIES[family].algorithms]
        found = [m.algorithm for m in of_family if m.is_usual(devices, between_cpus, values)]
        assert found == [_default.Default(sent_as).of(devices, values).name]
        if family != "vote":
            assert collectives.mean_of(family, None)[1] == _default.Default(sent_as)


def test_of_several_microbatches_the_last_backward_pass_makes_the_gradients() -> None:
    load = plan.workload(4e6, step_ms=300.0, accumulate=4)
    assert [load.ready(share) for share in (0.0, 0.5, 1.0)] == pytest.approx([1.0, 1.1, 1.2])
