"""`jaxcomm.mean` with error feedback, formats of its own for each hop, and exempt leaves."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jaxcomm
from jaxcomm import codecs
from jaxcomm.transforms._exchange import exchange_buckets
from transforms.both_views import (
    APART,
    SHAPES,
    VIEWS,
    Program,
    View,
    by_name,
    gradients,
    in_views,
    nan_everywhere,
    run,
    same_on_all_devices,
)

CODECS: dict[str, codecs.Codec] = {
    "bfloat16": codecs.bfloat16(),
    "random_k": codecs.random_k(0.25),
    "cnat": codecs.cnat(),
    "int4": codecs.int4(),
    "int2": codecs.int2(64),
    "scaled_sign": codecs.scaled_sign(),
}
WORLD, GLOBAL = 4, VIEWS[0]
LARGE = ("head", "kernel")
BAD = 2  # the step with an infinite gradient


@functools.cache
def fed_back(codec: str, view: View, seed: int = 0) -> Program:
    tx = jaxcomm.mean("data", CODECS[codec], error_feedback=True, seed=seed)
    return Program(view, tx, gradients(WORLD))


@functools.cache
def steps_of(codec: str, view: View) -> tuple[list[Any], list[Any]]:
    """The gradients of five steps, and what comes of them."""
    batches = [gradients(WORLD, seed) for seed in range(5)]
    batches[BAD]["bias"][2, 0] = np.inf
    return batches, fed_back(codec, view).run(*batches)


@pytest.mark.parametrize(("codec", "view"), in_views(CODECS, ["cnat"]), ids=by_name)
def test_updates_and_residuals_add_up_to_the_gradients(codec: str, view: View) -> None:
    batches, steps = steps_of(codec, view)
    applied = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    wanted = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for i, (grads, (updates, state)) in enumerate(zip(batches, steps, strict=True)):
        assert all(same_on_all_devices(u) for u in updates.values())
        if i == BAD:
            assert nan_everywhere(updates)
            before = steps[BAD - 1][1].residual.values
            jax.tree.map(np.testing.assert_array_equal, before, state.residual.values)
            continue
        residual = dict(zip(LARGE, state.residual.values, strict=True))
        for name in SHAPES:
            applied[name] += np.asarray(updates[name], np.float64)
            wanted[name] += grads[name].astype(np.float64).mean(0)
            owed = np.asarray(residual[name], np.float64).mean(0) if name in LARGE else 0
            np.testing.assert_allclose(applied[name] + owed, wanted[name], atol=1e-5, err_msg=name)
        assert all(np.abs(np.asarray(r)).max() > 0 for r in residual.values())
        assert all(r.sharding.spec[0] == "data" for r in residual.values())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_in_no_residual(codec: str, bad: float) -> None:
    """Wherever it is: also in the blocks that its device owns and never sends."""
    program, good = fed_back(codec, GLOBAL), gradients(WORLD)
    for device, place in itertools.product(range(WORLD), ((0, 0), (1, 2), (2, 6))):
        grads = {name: array.copy() for name, array in good.items()}
        grads["kernel"][device, *place] = bad
        (_, before), (updates, after) = program.run(good, grads)
        assert nan_everywhere(updates)
        jax.tree.map(np.testing.assert_array_equal, before.residual, after.residual)


@pytest.mark.parametrize("codec", CODECS)
def test_sums_at_the_end_of_the_range_leave_finite_residuals(codec: str) -> None:
    """Of a mean that is rounded up, N times as much is beyond the range."""
    largest = np.finfo(np.float32).max
    for value in (largest, largest / 2, largest / WORLD, largest / WORLD * (1 - 2e-7)):
        steps = [{name: np.full_like(x, value) for name, x in gradients(WORLD).items()}] * 3
        for _, state in fed_back(codec, GLOBAL).run(*steps):
            assert all(np.isfinite(r).all() for r in state.residual.values)


def test_a_mean_rounded_up_beyond_the_range_leaves_a_finite_residual() -> None:
    """Updates are finite, so nothing else would keep an infinite residual out."""
    tx = jaxcomm.mean("data", "float32", second_hop="cnat", algorithm="direct", error_feedback=True)
    grads = {"w": np.full((WORLD, 4, 16), np.finfo(np.float32).max / WORLD)}
    ((updates, state),) = Program(GLOBAL, tx, grads).run(grads)
    assert np.isfinite(updates["w"]).all() and np.isfinite(state.residual.values[0]).all()


@pytest.mark.parametrize("model", [1, 2])
def test_the_views_agree_bit_for_bit_where_rounding_is_random(model: int) -> None:
    first, *others = (steps_of("cnat", view)[1] for view in VIEWS if view.model == model)
    for other in others:
        for step, reference in zip(other, first, strict=True):
            for one, two in zip(jax.tree.leaves(step), jax.tree.leaves(reference), strict=True):
                np.testing.assert_array_equal(one, two)


def test_seeds_and_steps_round_differently() -> None:
    rounded = set()
    for seed in range(2):
        program = fed_back("cnat", APART[0], seed)
        for step in range(2):
            state = program.start._replace(step=program.start.step + step)
            ((updates, _),) = program.run(gradients(WORLD), state=state)
            rounded.add(np.asarray(updates["head"]).tobytes())
    assert len(rounded) == 4


def test_rounding_is_independent_between_devices_and_buckets() -> None:
    """cnat rounds x in [1, 2) to 1 or 2 with a variance of (x - 1)(2 - x); a mean has 1/N of it."""
    x = np.random.default_rng(0).uniform(1, 2, (16, 64)).astype(np.float32)
    grads = {name: np.broadcast_to(x, (WORLD, *x.shape)) for name in ("one", "two")}
    tx = jaxcomm.mean("data", "cnat", second_hop="float32", bucket_mib=1e-9)
    ((updates, _),) = run(GLOBAL, tx, [grads])
    one, two = (np.asarray(updates[name]) - x for name in ("one", "two"))
    variance = np.mean((x - 1) * (2 - x))
    for error in (one, two):
        assert np.mean(error**2) == pytest.approx(variance / WORLD, rel=0.2)
    assert abs(np.mean(one * two)) < 0.2 * variance / WORLD


@pytest.mark.parametrize("view", APART, ids=by_name)
def test_another_format_for_the_second_hop(view: View) -> None:
    tx = jaxcomm.mean("data", "float32", second_hop="bfloat16", algorithm="direct")
    grads = gradients(WORLD)
    ((updates, _),) = run(view, tx, [grads])
    for name in LARGE:
        mean = grads[name].mean(0)
        rounded = np.asarray(updates[name])
        assert (rounded.view(np.uint32) & 0xFFFF == 0).all()
        np.testing.assert_allclose(rounded, mean, rtol=2**-8, atol=1e-6)


def different_seeds(codec: codecs.Codec) -> np.ndarray:
    """The updates when device 2 has another key than the others."""
    ours, theirs = (jaxcomm.mean("data", codec, seed=seed) for seed in (0, 1))
    spec = PartitionSpec("data")
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:WORLD])):

        def update(grads: jax.Array) -> jax.Array:
            state, other = ours.init(jnp.zeros((3, 7))), jnp.int32(5)
            mine = jnp.where(jax.lax.axis_index("data") == 2, other, state.step)
            return theirs.update(jaxcomm.mark_local(grads[0]), state._replace(step=mine))[0][None]

        f = jax.jit(jax.shard_map(update, in_specs=spec, out_specs=spec, check_vma=False))
        return np.asarray(f(gradients(WORLD)["kernel"]))


def test_devices_that_draw_differently_are_caught() -> None:
    assert np.isnan(different_seeds(codecs.random_k(0.5))).all()
    assert np.isfinite(different_seeds(codecs.cnat())).all()


def test_devices_agree_that_keys_differ(make_mesh: Any) -> None:
    """The mean of these keys' words is nearly that of the first of them."""

    def update(seed: jax.Array) -> jax.Array:
        done = exchange_buckets(
            {0: jnp.ones(3)},
            [(0,)],
            lambda number, parts: (parts[0], None),
            small={},
            look_at="results",
            axis_name="data",
            equal_key=jax.random.key(seed[0]),
        )
        return done.finite[None]

    spec, mesh = PartitionSpec("data"), make_mesh(3)
    f = jax.jit(jax.shard_map(update, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    words = [int(jax.random.bits(jax.random.key(seed)) >> 22) for seed in range(400)]
    triples = itertools.product(range(40), range(40), range(400))
    seeds = next(
        t for t in triples if len(set(t)) == 3 and 2 * words[t[0]] == words[t[1]] + words[t[2]]
    )
    assert f(np.array(seeds)).tolist() == [False] * 3
    assert f(np.array([7, 7, 7])).tolist() == [True] * 3


def test_random_k_without_feedback_is_unbiased() -> None:
    tx, grads, steps = jaxcomm.mean("data", codecs.random_k(0.25)), gradients(WORLD), 400
    total = sum(np.asarray(u["kernel"], np.float64) for u, _ in run(GLOBAL, tx, [grads] * steps))
    # A draw has a variance of 3 x^2.
    mean = grads["kernel"].mean(0)
    assert (np.abs(total / steps - mean) < 5 * np.sqrt(3 / steps) * np.abs(mean) + 1e-6).all()


@pytest.mark.parametrize(
    ("exempt", "compressed"),
    [
        ((), {"head", "kernel"}),
        (["head"], {"kernel"}),
        (["h*", "k?rnel"], set()),
        (lambda path, shape: path != "bias", {"bias"}),
    ],
)
def test_exempt_leaves_are_exact(exempt: Any, compressed: set[str]) -> None:
    tx, grads = jaxcomm.mean("data", "bfloat16", exempt=exempt), gradients(WORLD)
    ((updates, _),) = run(GLOBAL, tx, [grads])
    rounded = {
        name for name in SHAPES if not np.allclose(updates[name], grads[name].mean(0), atol=1e-6)
    }
    assert rounded == compressed


DIRECT = jaxcomm.algorithms.direct()
NEAR_IN_A_FIXED_RANGE = jaxcomm.algorithms.hierarchical(
    near=DIRECT, far=DIRECT, near_codec=codecs.cnat("fixed")
)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"exempt": "head"}, TypeError, r"write \['head'\]"),
        ({"exempt": ["tail"]}, ValueError, "'tail', which fits no parameter; the paths are bias"),
        ({"error_feedback": "second_hop"}, ValueError, 'True, False or "first_hop"'),
        ({"codec": "cnat", "algorithm": "native"}, ValueError, "choose an algorithm other"),
        (
            {"codec": "bfloat16", "algorithm": "native", "error_feedback": True},
            ValueError,
            "rounds",
        ),
        ({"algorithm": "native", "second_hop": "int8"}, ValueError, "one all-reduce in one format"),
        ({"second_hop": "random_k"}, ValueError, "draws once for both hops"),
        (
            {"codec": "float16", "second_hop": codecs.cnat("fixed")},
            ValueError,
            "for values of a fixed range, and a mean in float16 scales them",
        ),
        (
            {"codec": "float16", "algorithm": NEAR_IN_A_FIXED_RANGE},
            ValueError,
            "for values of a fixed range, and a mean in float16 scales them",
        ),
        ({"second_hop": "int7"}, ValueError, "unknown codec 'int7'"),
    ],
)
def test_what_cannot_be_is_refused(options: Any, error: type[Exception], message: str) -> None:
    with jax.set_mesh(jaxcomm.data_mesh()), pytest.raises(error, match=message):
        jaxcomm.mean("data", **options).init({name: jnp.zeros(s) for name, s in SHAPES.items()})


def test_native_float32_sends_all_that_is_left() -> None:
    view, grads = APART[1], gradients(WORLD)
    ((first, coarse),) = fed_back("int4", view).run(grads)
    exact = Program(view, jaxcomm.mean("data", error_feedback=True), grads)
    ((second, state),) = exact.run(grads, state=coarse)
    assert all((np.asarray(r) == 0).all() for r in state.residual.values)
    for name in SHAPES:
        np.testing.assert_allclose(
            optax.tree.add(first, second)[name], 2 * grads[name].mean(0), atol=1e-5
        )


@pytest.mark.parametrize(
    ("feedback", "second_hop"), [(False, None), ("first_hop", None), (False, "scaled_sign")]
)
def test_scaled_signs_need_the_errors(feedback: Any, second_hop: str | None) -> None:
    codec = "int8" if second_hop else "scaled_sign"
    with pytest.raises(ValueError, match="biased; use jaxcomm.mean.*error_feedback=True"):
        jaxcomm.mean("data", codec, error_feedback=feedback, second_hop=second_hop)
    jaxcomm.mean("data", "scaled_sign", error_feedback="first_hop", second_hop="bfloat16")


@pytest.mark.parametrize("codec", [codecs.qsgd(), codecs.terngrad(), codecs.qsgd(1, 64)])
def test_errors_that_may_grow_are_warned_of(codec: codecs.Codec) -> None:
    with pytest.warns(UserWarning, match="residuals may grow"):
        jaxcomm.mean("data", codec, error_feedback=True)
    with pytest.warns(UserWarning, match="residuals may grow"):
        jaxcomm.mean("data", "int8", second_hop=codec, error_feedback=True)
    direct = jaxcomm.algorithms.direct()
    near = jaxcomm.algorithms.hierarchical(near=direct, far=direct, near_codec=codec)
    with pytest.warns(UserWarning, match="residuals may grow"):
        jaxcomm.mean(("far", "near"), "bfloat16", near, error_feedback=True)
    jaxcomm.mean("data", codec)
    jaxcomm.mean("data", codecs.qsgd(levels=7, block_size=32), error_feedback=True)


@pytest.mark.standard_promotion  # of optax
def test_few_bits_in_front_of_a_variance_say_what_to_take() -> None:
    """Once, by `init`; not where error feedback is sound, or bits are enough."""
    sign = jaxcomm.mean("data", "scaled_sign", error_feedback=True)
    bad = [
        optax.chain(sign, optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
        optax.chain(optax.chain(sign), optax.apply_if_finite(optax.rmsprop(0.1), 3)),
        optax.chain(jaxcomm.sparse_mean("data", 0.5), optax.adam(0.1)),
        optax.chain(
            jaxcomm.mean("data", "int8", second_hop="int2", error_feedback=True), optax.adam(0.1)
        ),
        optax.chain(jaxcomm.low_rank_mean("data", 1), optax.adam(0.1)),
        optax.chain(jaxcomm.majority_vote("data", error_feedback=True), optax.adam(0.1)),
        optax.named_chain(("signs", sign), ("adam", optax.adam(0.1))),
        *(
            optax.chain(sign, behind)
            for behind in (
                optax.adagrad(0.1),
                optax.adadelta(0.1),
                optax.adafactor(0.1),
                optax.adan(0.1),
                optax.contrib.prodigy(),
            )
        ),
    ]
    good = [
        optax.chain(sign, optax.sgd(0.1, momentum=0.9)),
        optax.chain(jaxcomm.low_rank_mean("data", 1), optax.sgd(0.1, momentum=0.9)),
        optax.chain(jaxcomm.mean("data", "int4", error_feedback=True), optax.adam(0.1)),
        optax.chain(jaxcomm.mean("data", "qsgd"), optax.adam(0.1)),
        optax.chain(
            jaxcomm.mean("data", "int8", second_hop="int4", error_feedback="first_hop"),
            optax.adam(0.1),
        ),
        optax.chain(jaxcomm.majority_vote("data"), optax.adam(0.1)),
        jaxcomm.factored_adam(sign, 0.1),
        optax.chain(  # both look at what follows them
            jaxcomm.control_variates(jaxcomm.mean("data", "int2", error_feedback=True), 8),
            jaxcomm.majority_vote("data", error_feedback=True),
            optax.sgd(0.1),
        ),
    ]
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        params = jaxcomm.replicate({"w": jnp.zeros((3, 3))})
        for tx in bad:
            with pytest.warns(UserWarning, match="jaxcomm.factored_adam") as found:
                tx.init(params)
            assert [warning.filename for warning in found] == [__file__], "not a line of optax"
        for tx in good:
            tx.init(params)  # a warning would be an error


def test_few_bits_before_muon_are_warned_of() -> None:
    fed_back = functools.partial(jaxcomm.mean, "data", error_feedback=True)
    muon, step = optax.contrib.muon(0.1), optax.contrib.scale_by_muon()
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        params = jaxcomm.replicate({"w": jnp.zeros((3, 3))})
        for exchange in (fed_back("int4"), fed_back("int2"), jaxcomm.sparse_mean("data", 0.5)):
            for optimizer in (muon, step):
                with pytest.warns(UserWarning, match=r"before Muon, .*Send int8 or more") as found:
                    optax.chain(exchange, optimizer).init(params)
                assert len(found) == 1 and found[0].filename == __file__
        # A warning would be an error.
        optax.chain(fed_back("int8"), muon).init(params)
        optax.chain(jaxcomm.mean("data", "bfloat16"), muon).init(params)
        own = optax.chain(optax.contrib.muon(1.0), optax.scale(-1.0))
        optax.chain(jaxcomm.local("data", own), fed_back("int2"), optax.scale(-0.1)).init(params)
        reads = optax.GradientTransformation(lambda p: float(p["w"].sum()), optax.identity().update)
        assert optax.chain(fed_back("int4"), reads).init(params)[1] == 0.0


@pytest.mark.parametrize("codec", ["scaled_sign", "int2"])
@pytest.mark.parametrize("is_long", [True, False])
def test_the_last_values_of_a_bucket_wait_no_longer_than_others(codec: str, is_long: bool) -> None:
    """Their block is filled up; zeros would make its scale, and all that is sent, too small."""
    block = 1024 if codec == "scaled_sign" else 256
    # Two values in a block of 1024 or 256, and one in a block of 4.
    n = WORLD * 64 * block + 2 if is_long else WORLD * (block + 4) - 2
    tx = jaxcomm.mean("data", codec, error_feedback=True)
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:WORLD])):
        state, update = tx.init({"w": jnp.zeros((2, n // 2))}), jax.jit(tx.update)
        grads, total = {"w": jnp.ones((WORLD, 2, n // 2))}, 0
        for _ in range(8):
            updates, state = update(grads, state)
            total += np.asarray(updates["w"])
    np.testing.assert_allclose(total, 8.0, rtol=1e-2)


@pytest.mark.parametrize("algorithm", ["direct", "circulant", "halving_doubling"])
def test_nor_where_there_are_fewer_blocks_than_devices(algorithm: str) -> None:
    """Halving-doubling cuts vectors of 7 devices into 4 blocks."""
    n, tx = 4127, jaxcomm.mean("data", "scaled_sign", algorithm, error_feedback=True)
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:7])):
        state, update = tx.init({"w": jnp.zeros((1, n))}), jax.jit(tx.update)
        for _ in range(4):
            updates, state = update({"w": jnp.ones((7, 1, n))}, state)
            np.testing.assert_allclose(updates["w"], 1.0, rtol=1e-2)
