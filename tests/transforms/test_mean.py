"""The table of properties of the mean of gradients: every view, mesh, codec and algorithm."""

import functools
import itertools
import re
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxcomm
import oracles
from pairs import pairwise
from transforms.both_views import (
    SHAPES,
    VIEWS,
    Program,
    View,
    by_name,
    gradients,
    nan_everywhere,
    place,
    run,
    same_on_all_devices,
)

LARGE = ["kernel", "head"]  # the bucket: compressed leaves in the tree's order reversed
GLOBAL, MANUAL, CHECKED = VIEWS[:3]
# With the newest jax too: what every view makes of two hops.
NEWEST = list(itertools.product(["bfloat16"], ["direct"], VIEWS))
CASES = [
    *itertools.product(["float32"], ["native"], VIEWS),
    *itertools.product(["bfloat16"], ["native"], VIEWS[2:4]),
    *itertools.product(["float16"], ["direct"], VIEWS),
    ("float32", "direct", GLOBAL),
    *pairwise(list(oracles.ROUNDING), [n for n in oracles.ALGORITHMS if n != "direct"], VIEWS),
]


@functools.cache
def program(codec: str, algorithm: str, view: View) -> Program:
    return Program(view, jaxcomm.mean("data", codec, algorithm), gradients(4))


def expected_means(grads: dict[str, np.ndarray], view: View, codec: str, algorithm: str) -> Any:
    """Exempt leaves: the mean. The rest: the oracle's, on the bucket that each column holds."""
    means = {name: g.mean(0) for name, g in grads.items()}
    if algorithm == "native":
        return means  # XLA's order of the additions is its own

    def bucket(*parts: np.ndarray) -> list[np.ndarray]:
        flat = np.concatenate([p.reshape(len(p), -1) for p in parts], axis=1)
        mean = oracles.mean(flat, codec, algorithm)
        pieces = np.split(mean, np.cumsum([p[0].size for p in parts])[:-1])
        return [piece.reshape(p.shape[1:]) for piece, p in zip(pieces, parts, strict=True)]

    if view.model == 1:
        means["kernel"], means["head"] = bucket(grads["kernel"], grads["head"])
        return means
    (means["kernel"],) = bucket(grads["kernel"])
    halves = [bucket(half)[0] for half in np.split(grads["head"], view.model, axis=2)]
    return means | {"head": np.concatenate(halves, axis=1)}


@pytest.mark.parametrize(
    ("codec", "algorithm", "view"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.newest) for case in NEWEST)],
    ids=by_name,
)
def test_the_oracle_and_nan_everywhere_if_any_is_bad(
    codec: str, algorithm: str, view: View
) -> None:
    good, bad = gradients(4), gradients(4)
    bad["head"][1, 2, 7] = np.inf
    (updates, _), (spoiled, _), (again, _) = program(codec, algorithm, view).run(good, bad, good)
    expected = expected_means(good, view, codec, algorithm)
    for name, update in updates.items():
        assert update.shape == SHAPES[name]
        rounded = 2e-2 if algorithm == "native" else 0.0
        tolerance = rounded if name in LARGE else 1e-6
        np.testing.assert_allclose(update, expected[name], rtol=0, atol=tolerance, err_msg=name)
        np.testing.assert_array_equal(again[name], update)
    assert all(same_on_all_devices(u) for u in updates.values())
    assert nan_everywhere(spoiled)


@pytest.mark.newest
@pytest.mark.parametrize("view", VIEWS, ids=by_name)
def test_one_bad_element_anywhere_makes_every_update_nan_everywhere(view: View) -> None:
    for where, value in itertools.product(["kernel", "head", "bias"], [np.nan, np.inf, -np.inf]):
        grads = gradients(4)
        grads[where][2].flat[3] = value
        ((updates, _),) = program("bfloat16", "direct", view).run(grads)
        assert nan_everywhere(updates), (where, value)


@pytest.mark.parametrize("model", [1, 2])
@pytest.mark.parametrize(
    "codec",
    [*(pytest.param(c, marks=pytest.mark.newest) for c in ("float32", "bfloat16")), "float16"],
)
def test_both_views_compile_to_the_same_collectives(codec: str, model: int) -> None:
    found = []
    for view in [v for v in VIEWS if v.model == model]:
        report = program(codec, "native" if codec == "float32" else "direct", view).report()
        found.append(sorted((c.op, str(c.dtypes), c.sent) for c in report.collectives))
    assert all(other == found[0] for other in found[1:])
    # One for the exempt leaves and the flag, and a bucket's: one in float32, or two of 16 bits and
    # one that agrees on float16's scale. With a further axis there are two buckets, as leaves
    # sharded over it travel apart, and the flag goes along it too. XLA before jax 0.12 joins
    # all-reduces of one type though they take turns.
    buckets, of_a_bucket = model, {"float32": 1, "bfloat16": 2, "float16": 3}[codec]
    exchanges = 1 + buckets * of_a_bucket + (model > 1)
    joined = {"float32": buckets, "bfloat16": 0, "float16": model - 1}[codec]
    assert exchanges - joined <= len(found[0]) <= exchanges


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.newest), 8])
def test_bytes_are_those_of_the_formula(world: int) -> None:
    mean = program("bfloat16", "direct", GLOBAL)
    if world != 4:
        mean = Program(GLOBAL, jaxcomm.mean("data", "bfloat16"), gradients(world))
    bucket, exempt = 21 + 40, 6 + 1
    exact = Fraction(2 * (world - 1), world) * 4 * exempt
    assert mean.report().bytes_max == oracles.bytes_sent(bucket, 2, world) + exact


@pytest.mark.parametrize("view", VIEWS, ids=by_name)
def test_gradients_of_16_bits_are_added_in_32(view: View) -> None:
    values = np.float32([256, 1, 1, 1])[:, None, None]  # in bfloat16, 256 + 1 is 256
    grads = {
        "head": jnp.asarray(np.broadcast_to(values, (4, 4, 10)), jnp.bfloat16),
        "kernel": jnp.asarray(np.broadcast_to(values, (4, 3, 7)), jnp.float16),
    }
    rounded = oracles.round_bfloat16(np.float32(259 / 4))
    ((updates, _),) = run(view, jaxcomm.mean("data", "bfloat16"), [grads])
    for name, g in grads.items():
        assert updates[name].dtype == g.dtype
        np.testing.assert_array_equal(updates[name], np.full(g.shape[1:], rounded))


def test_buckets_take_turns_in_their_order_and_change_nothing() -> None:
    rng = np.random.default_rng(0)
    sizes = {"a": 4, "b": 8, "c": 12, "d": 16, "e": 20}  # numbers of values
    grads = {n: rng.standard_normal((4, 4, s // 4)).astype(np.float32) for n, s in sizes.items()}

    def exchanged(mib: float, order: Any = None) -> tuple[Any, list[int]]:
        """The updates, and in order the values in each bucket, and a 0 where one waits."""
        tx = jaxcomm.mean("data", "bfloat16", bucket_mib=mib, bucket_order=order)
        buckets = Program(GLOBAL, tx, grads)
        ((updates, _),) = buckets.run(grads)
        hop = r"stablehlo\.optimization_barrier|stablehlo\.all_to_all.*-> tensor<4x(\d+)xui16>"
        found = re.findall(hop, buckets.lowered().as_text())
        assert len(buckets.report().only("all-to-all").collectives) == len(
            list(filter(None, found))
        )
        while not found[-1]:  # behind the last bucket they keep the steps of a reduction apart
            found.pop()
        return updates, [4 * int(n or 0) for n in found]

    one, order = exchanged(8.0)
    assert order == [60]
    for mib, bucket_order, expected in [
        (1e-9, ("b", "e", "a", "d", "c"), [8, 0, 20, 0, 4, 0, 16, 0, 12]),
        (32 * 4 / 2**20, None, [20, 0, 16 + 12, 0, 8 + 4]),
        (32 * 4 / 2**20, ("c", "a"), [12 + 4, 0, 20, 0, 16 + 8]),
    ]:
        several, order = exchanged(mib, bucket_order)
        assert order == expected
        for name in grads:
            np.testing.assert_array_equal(one[name], several[name])


def test_no_exchange_sends_nothing_and_leaves_devices_apart() -> None:
    grads = gradients(4)
    alone = Program(GLOBAL, jaxcomm.no_exchange("data"), grads)
    ((updates, _),) = alone.run(grads)
    assert alone.report().bytes_max == 0
    for shard in updates["kernel"].addressable_shards:
        np.testing.assert_array_equal(shard.data, grads["kernel"][shard.device.id])


@pytest.mark.parametrize("view", [GLOBAL, MANUAL], ids=lambda v: v.name)
def test_partition_gives_each_leaf_its_own_method(view: View) -> None:
    labels = {name: "exact" if name == "head" else "half" for name in SHAPES}
    tx = optax.partition(
        {"exact": jaxcomm.mean("data"), "half": jaxcomm.mean("data", "bfloat16")}, labels
    )
    grads = gradients(4)
    ((updates, _),) = run(view, tx, [grads])
    np.testing.assert_allclose(updates["head"], grads["head"].mean(0), atol=1e-6)
    flat = grads["kernel"].reshape(4, -1)
    half = oracles.mean(flat, "bfloat16", "direct").reshape(3, 7)
    np.testing.assert_array_equal(updates["kernel"], half)


def test_inject_hyperparams() -> None:
    make = optax.inject_hyperparams(jaxcomm.mean, static_args=("bucket_mib",))
    grads = gradients(4)
    ((updates, _),) = run(GLOBAL, make("data", codec="bfloat16"), [grads])
    np.testing.assert_allclose(updates["kernel"], grads["kernel"].mean(0), atol=2e-2)
    with pytest.raises(TypeError, match='static_args=\\("bucket_mib",\\)'):
        run(GLOBAL, optax.inject_hyperparams(jaxcomm.mean)("data"), [grads])


def test_gradients_may_be_donated() -> None:
    grads = gradients(4)
    with jax.set_mesh(GLOBAL.mesh(4)):
        tx = jaxcomm.mean("data", "bfloat16")
        params = place(GLOBAL, {name: jnp.zeros(shape) for name, shape in SHAPES.items()})
        state = tx.init(params)

        def step(params: Any, state: Any, grads: Any) -> Any:
            updates, state = tx.update(grads, state)
            return optax.apply_updates(params, updates), state

        step = jax.jit(step, donate_argnums=(0, 1))
        new, state = step(params, state, place(GLOBAL, grads, "data"))
        assert params["kernel"].is_deleted()
        new, state = step(new, state, place(GLOBAL, grads, "data"))
    np.testing.assert_allclose(new["kernel"], 2 * grads["kernel"].mean(0), atol=4e-2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"axis_name": 0},
            TypeError,
            "axis_name must be the name of a mesh axis or a tuple of names, got 0",
        ),
        ({"axis_name": ("data", "data")}, ValueError, "names an axis twice"),
        (
            {"axis_name": "data", "codec": "bf16"},
            ValueError,
            "unknown codec 'bf16'; .*mean 'bfloat16'",
        ),
        ({"axis_name": "data", "codec": jnp.bfloat16}, TypeError, r"jaxcomm.codecs.bfloat16\(\)"),
        ({"axis_name": "data", "codec": jaxcomm.codecs.qsgd}, TypeError, r"codecs.qsgd\(\)"),
        ({"axis_name": "data", "algorithm": "tree"}, ValueError, "unknown algorithm 'tree'"),
        (
            {"axis_name": ("far", "near"), "algorithm": "hierarchical"},
            ValueError,
            r"write jaxcomm.algorithms.hierarchical\(near=jaxcomm.algorithms.ring\(\), far=",
        ),
        ({"axis_name": "data", "bucket_mib": 0}, ValueError, "positive number, got 0"),
        ({"axis_name": "data", "bucket_mib": "32"}, ValueError, "positive number, got '32'"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        jaxcomm.mean(**arguments)


def test_init_without_a_mesh_says_what_to_type() -> None:
    with pytest.raises(ValueError, match="call jax.set_mesh\\(jaxcomm.data_mesh\\(\\)\\) first"):
        jaxcomm.mean("data").init({"w": jnp.zeros(3)})


def test_init_names_the_axes_that_there_are() -> None:
    with jax.set_mesh(GLOBAL.mesh(4)), pytest.raises(ValueError, match="axes are 'data'"):
        jaxcomm.mean("batch").init({"w": jnp.zeros(3)})


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64])
def test_leaves_that_are_not_float_are_refused(dtype: Any) -> None:
    with jax.set_mesh(GLOBAL.mesh(4)), pytest.raises(TypeError, match="parameter n is"):
        jaxcomm.mean("data").init({"n": jnp.zeros(3, dtype)})


def test_parameters_sharded_over_the_data_axis_are_refused() -> None:
    mesh = GLOBAL.mesh(4)
    w = jax.device_put(jnp.zeros((8, 2)), NamedSharding(mesh, PartitionSpec("data")))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="is sharded over 'data'"):
        jaxcomm.mean("data").init({"w": w})


def test_init_inside_jit_cannot_see_a_further_axis() -> None:
    with jax.set_mesh(VIEWS[3].mesh(4)), pytest.raises(ValueError, match="cannot see inside"):
        jax.jit(jaxcomm.mean("data").init)({"w": jnp.zeros((8, 2))})


def test_gradients_by_jax_grad_are_refused_in_the_global_view() -> None:
    tx = jaxcomm.mean("data")
    with jax.set_mesh(GLOBAL.mesh(4)):
        state = tx.init({"w": jnp.zeros((4, 2))})
        with pytest.raises(ValueError, match="a gradient by jax.grad is already averaged"):
            tx.update({"w": jnp.zeros((4, 2))}, state)
        others = jaxcomm.mark_local({"w": jnp.zeros((4, 4, 3))})
        with pytest.raises(ValueError, match=r"state was made for w of shape \(4, 2\), .*tx.init"):
            tx.update(others, state)


def test_gradients_that_are_already_summed_are_refused_in_the_manual_view() -> None:
    tx = jaxcomm.mean("data")
    mesh = GLOBAL.mesh(4)
    replicated = PartitionSpec()
    with jax.set_mesh(mesh):
        state = tx.init({"w": jnp.zeros(3)})

        def step(w: jax.Array, x: jax.Array) -> Any:
            grads = jax.grad(lambda p: (p["w"] * x[0]).sum())({"w": w})
            return tx.update(grads, state)[0]

        step = jax.shard_map(
            step, in_specs=(replicated, PartitionSpec("data")), out_specs=replicated
        )
        with pytest.raises(ValueError, match='it is already summed.*to="varying"'):
            jax.jit(step)(jnp.zeros(3), jnp.ones((4, 3)))


def test_a_state_of_other_parameters_or_another_mesh_is_refused() -> None:
    tx = jaxcomm.mean("data")
    with jax.set_mesh(GLOBAL.mesh(4)):
        state = tx.init({"w": jnp.zeros(3)})
        with pytest.raises(ValueError, match="made for 1 parameters and got 2 gradients"):
            tx.update({"v": jnp.zeros((4, 3)), "w": jnp.zeros((4, 3))}, state)
    with jax.set_mesh(GLOBAL.mesh(2)):
        with pytest.raises(ValueError, match="made for 4 devices along 'data', and the mesh now"):
            tx.update({"w": jnp.zeros((2, 3))}, state)


@pytest.mark.parametrize(
    ("wrap", "cure"),
    [
        (lambda tx: optax.apply_if_finite(tx, 3), "around the optimizer only"),
        (lambda tx: optax.MultiSteps(tx, 2), "Use jaxcomm.multi_steps"),
        (optax.flatten, r"optax.flatten\(optimizer\)"),
        (
            lambda tx: optax.conditionally_transform(tx, lambda step: step > 3),
            "change the exchange with jaxcomm.stages",
        ),
        (
            lambda tx: optax.conditionally_mask(tx, lambda step: step > 3),
            "conditionally_mask would hide local gradients",
        ),
    ],
)
def test_wrappers_that_cannot_work_are_refused(wrap: Any, cure: str) -> None:
    tx = wrap(optax.chain(jaxcomm.mean("data"), optax.sgd(0.1)))
    with jax.set_mesh(GLOBAL.mesh(4)), pytest.raises(ValueError, match=cure):
        tx.init({"w": jnp.zeros((4, 2)), "b": jnp.zeros(3)})


@pytest.mark.parametrize(
    "method",
    [
        lambda order: jaxcomm.mean("data", bucket_order=order),
        lambda order: jaxcomm.majority_vote("data", bucket_order=order),
        lambda order: jaxcomm.sparse_mean("data", 0.1, bucket_order=order),
        lambda order: jaxcomm.one_bit_adam("data", 0.1, dense_steps=3, bucket_order=order),
    ],
)
def test_a_bucket_order_that_names_no_parameter(method: Any) -> None:
    params = {"w": jnp.zeros((4, 2)), "v": jnp.zeros((3, 2))}
    with jax.set_mesh(GLOBAL.mesh(4)):
        method(["v"]).init(params)
        with pytest.raises(
            ValueError, match="bucket_order names 'u', which is not a parameter.* v, w"
        ):
            method(["w", "u"]).init(params)
        with pytest.raises(TypeError, match=r"bucket_order must be a list of paths.*write \['w'\]"):
            method("w").init(params)
        # A part of a partition may be given the order of all.
        both = {"a": method(["v", "w"]), "b": jaxcomm.mean("data")}
        optax.partition(both, {"w": "a", "v": "b"}).init(params)


@pytest.mark.parametrize("params", [{}, None, ()])
def test_no_parameters(params: Any) -> None:
    with (
        jax.set_mesh(GLOBAL.mesh(4)),
        pytest.raises(ValueError, match="there are no parameters in"),
    ):
        jaxcomm.mean("data").init(params)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "cnat", "int8", "fp8_e4m3", "random_k"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_bad_value_is_seen_with_and_without_a_flag(name: str, bad: float) -> None:
    """Means carry it to all devices; random_k, which draws few values, needs its flag."""
    codec = jaxcomm.codecs.random_k(0.05) if name == "random_k" else name
    grads = {"w": np.ones((4, 40, 30), np.float32)}
    grads["w"][2, 39, 29] = bad
    ((updates, _),) = run(GLOBAL, jaxcomm.mean("data", codec), [grads])
    assert np.isnan(np.asarray(updates["w"])).all()


def test_a_number_of_devices_that_an_algorithm_cannot_take_is_refused_at_init(mesh8: Any) -> None:
    tx = jaxcomm.mean("data", "int8", jaxcomm.algorithms.direct(aggregator=9))
    with jax.set_mesh(mesh8), pytest.raises(ValueError, match="aggregator 9 is not on the axis"):
        tx.init({"w": jnp.zeros((8, 8))})
