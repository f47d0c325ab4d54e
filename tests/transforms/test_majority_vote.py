"""The table of properties of the majority vote: every view, mesh, algorithm and rule."""

import functools
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxcomm
import oracles
from jaxcomm import algorithms
from transforms.both_views import (
    APART,
    SHAPES,
    VIEWS,
    Program,
    View,
    by_name,
    each_view,
    gradients,
    nan_everywhere,
    place,
    run,
    same_on_all_devices,
)

LARGE = ["kernel", "head"]  # one bucket of 21 + 40 coordinates: 2 words
EXEMPT = ["bias", "scale"]
BAD = 1  # the step with a NaN
ALGORITHMS = {"direct": "direct", "far_first": algorithms.halving_doubling("far_first")}

GLOBAL, _, CHECKED = VIEWS[:3]
two_views = pytest.mark.parametrize("view", APART, ids=by_name)


def ballots(world: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Small integers, so that zeros and ties are frequent."""
    return {name: np.round(g) for name, g in gradients(world, seed).items()}


def majority(x: np.ndarray) -> np.ndarray:
    """The sign of most votes where neither a tie nor a coin can matter, and else NaN."""
    total, undecided = np.sign(x).sum(0), (x == 0).sum(0)
    return np.where(np.abs(total) > undecided, np.sign(total), np.nan)


@functools.cache
def plain(view: View, algorithm: str = "circulant", seed: int = 7) -> Program:
    chosen = ALGORITHMS.get(algorithm, algorithm)
    return Program(view, jaxcomm.majority_vote("data", chosen, seed=seed), gradients(4))


@functools.cache
def voted(view: View, algorithm: str = "circulant", seed: int = 7) -> list[Any]:
    """Two steps on equal ballots."""
    steps = plain(view, algorithm, seed).run(*[ballots(4)] * 2)
    return [updates for updates, _ in steps]


@each_view
def test_every_view_gives_the_majority(view: View) -> None:
    grads = ballots(4)
    for updates in voted(view):
        for name in LARGE:
            vote, expected = np.asarray(updates[name]), majority(grads[name])
            assert np.isnan(expected).any()
            np.testing.assert_array_equal(np.where(np.isnan(expected), expected, vote), expected)
            np.testing.assert_array_equal(np.abs(vote), 1, err_msg=name)
        for name in EXEMPT:
            np.testing.assert_array_equal(updates[name], np.sign(grads[name].mean(0)))
        for name, update in updates.items():
            assert update.shape == SHAPES[name]
            assert same_on_all_devices(update), name


@pytest.mark.parametrize("where", ["kernel", "head", "bias"])
@pytest.mark.parametrize("view", VIEWS, ids=by_name)
def test_a_bad_gradient_makes_every_vote_nan_everywhere(view: View, where: str) -> None:
    for value in (np.nan, -np.inf):
        bad = ballots(4)
        bad[where][2].flat[3] = value
        (spoiled, _), (again, _) = plain(view).run(bad, ballots(4))
        assert nan_everywhere(spoiled)
        jax.tree.map(np.testing.assert_array_equal, again, voted(view)[1])


@pytest.mark.parametrize("model", [1, 2])
def test_coins_are_the_same_in_every_view(model: int) -> None:
    first, *others = (voted(view) for view in VIEWS if view.model == model)
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_gives_the_same_votes(algorithm: str) -> None:
    other = voted(GLOBAL, algorithm)
    jax.tree.map(np.testing.assert_array_equal, voted(GLOBAL), other)
    assert all(same_on_all_devices(u) for updates in other for u in updates.values())


def test_coins_depend_on_the_step_and_on_the_seed() -> None:
    (first, second), (other, _) = voted(GLOBAL), voted(GLOBAL, seed=8)
    open_to_coins = np.isnan(majority(ballots(4)["head"]))
    for name, updates in {"step": second, "seed": other}.items():
        differ = np.asarray(first["head"]) != np.asarray(updates["head"])
        assert differ.any() and not differ[~open_to_coins].any(), name


@pytest.mark.parametrize("zero", ["random", "abstain"])
def test_a_row_without_gradient_walks_at_random_or_stays(zero: str) -> None:
    steps = 200
    grads = gradients(4)
    grads["head"][:, 1] = 0
    grads["head"][:3, 2] = 0  # of those who do not abstain, all vote alike
    with jax.set_mesh(GLOBAL.mesh(4)):
        tx = jaxcomm.majority_vote("data", "direct", zeros=zero)
        state = tx.init(place(GLOBAL, {name: jnp.zeros(s) for name, s in SHAPES.items()}))

        def step(state: Any, _: None) -> Any:
            updates, state = tx.update(grads, state)
            return state, updates["head"]

        _, votes = jax.jit(lambda s: jax.lax.scan(step, s, length=steps))(state)
    votes = np.asarray(votes)
    if zero == "abstain":
        np.testing.assert_array_equal(votes[:, 1], 0)
        np.testing.assert_array_equal(votes[:, 2], [np.sign(grads["head"][3, 2])] * steps)
        return
    row = votes[:, 1]
    np.testing.assert_array_equal(np.abs(row), 1)
    # Sums of fair coins: 5 standard deviations, over time, over time and columns, between steps.
    assert np.abs(row.mean(0)).max() < 5 / steps**0.5
    assert abs(row.mean()) < 5 / row.size**0.5
    assert abs((row[1:] * row[:-1]).mean()) < 5 / row[1:].size ** 0.5


@pytest.mark.parametrize("tie", ["random", "zero", "positive", "negative"])
def test_rules_for_ties(tie: str) -> None:
    grads = {"kernel": np.broadcast_to(np.float32([[[1]], [[-2]]]), (2, 8, 8)).copy()}
    grads["kernel"][:, 0] = 3
    ((updates, _),) = run(GLOBAL, jaxcomm.majority_vote("data", ties=tie), [grads])
    vote = np.asarray(updates["kernel"])
    np.testing.assert_array_equal(vote[0], 1)
    expected = {"random": {-1, 1}, "zero": {0}, "positive": {1}, "negative": {-1}}[tie]
    assert set(vote[1:].flat) == expected


def test_buckets_have_coins_of_their_own() -> None:
    tied = np.broadcast_to(np.float32([[[1]], [[-2]]]), (2, 8, 8))
    tx = jaxcomm.majority_vote("data", "direct", bucket_mib=1e-9)
    ((updates, _),) = run(GLOBAL, tx, [{"one": tied, "two": tied}])
    assert (np.asarray(updates["one"]) != np.asarray(updates["two"])).any()


def parts(view: View, name: str, x: np.ndarray) -> list[np.ndarray]:
    """The shards of a leaf along "model"; x may have a leading device axis."""
    return np.split(x, view.model, axis=-1) if name == "head" else [x]


@functools.cache
def fed_back(view: View) -> Program:
    tx = jaxcomm.majority_vote("data", "direct", error_feedback=True)
    return Program(view, tx, gradients(3))


@functools.cache
def with_error_feedback(view: View) -> tuple[list[Any], list[Any]]:
    """The gradients of three steps, and what comes of them."""
    batches = [gradients(3, seed) for seed in range(3)]
    batches[BAD]["head"][2, 0, 9] = np.nan
    return batches, fed_back(view).run(*batches)


def residuals(state: Any) -> dict[str, np.ndarray]:
    """Those of the large leaves, in the tree's order."""
    return dict(zip(["head", "kernel"], map(np.asarray, state.residual.values), strict=True))


@pytest.mark.newest
@two_views
def test_what_is_sent_and_what_is_kept_are_the_gradient(view: View) -> None:
    batches, steps = with_error_feedback(view)
    old = {name: np.zeros((3, *SHAPES[name]), np.float32) for name in LARGE}
    for i, (grads, (updates, state)) in enumerate(zip(batches, steps, strict=True)):
        new = residuals(state)
        for name in LARGE if i != BAD else ():
            pieces = [parts(view, name, x) for x in (grads[name], old[name], new[name])]
            update = parts(view, name, np.asarray(updates[name]))
            for grad, before, after, result in zip(*pieces, update, strict=True):
                ballot = grad + before
                scale = np.abs(ballot).mean((1, 2), keepdims=True)
                sent = scale * np.sign(ballot)
                np.testing.assert_allclose(sent + after, ballot, rtol=0, atol=1e-6)
                vote = np.sign(np.sign(ballot).sum(0))
                np.testing.assert_array_equal(np.sign(result), vote)
                np.testing.assert_allclose(result, vote * scale.mean(), rtol=1e-6)
        for name in EXEMPT if i != BAD else ():
            np.testing.assert_allclose(updates[name], grads[name].mean(0), rtol=0, atol=1e-6)
        assert all(same_on_all_devices(u) for u in updates.values())
        old = new


@two_views
def test_a_nan_reaches_every_update_and_no_residual(view: View) -> None:
    _, steps = with_error_feedback(view)
    assert nan_everywhere(steps[BAD][0])
    before, after = (residuals(steps[i][1]) for i in (BAD - 1, BAD))
    jax.tree.map(np.testing.assert_array_equal, before, after)


@two_views
def test_residuals_are_sharded_over_devices(view: View) -> None:
    _, steps = with_error_feedback(view)
    for name, x in zip(["head", "kernel"], steps[-1][1].residual.values, strict=True):
        assert x.shape == (3, *SHAPES[name]) and x.dtype == jnp.float32
        assert x.sharding.spec == PartitionSpec("data", *view.spec(name))
        assert len({str(shard.index) for shard in x.addressable_shards}) == 3 * len(
            parts(view, name, x)
        )


def test_values_whose_sum_overflows_have_a_scale() -> None:
    """A residual of theirs would overflow again in every later step."""
    good, large = gradients(3), gradients(3)
    large["head"][1] = 3e38  # finite, and their sum is not
    steps = fed_back(CHECKED).run(good, large, good, good)
    for updates, state in steps:
        assert all(np.isfinite(np.asarray(u)).all() for u in updates.values())
        assert all(np.isfinite(r).all() for r in residuals(state).values())
    np.testing.assert_allclose(np.abs(steps[1][0]["head"]), 1e38, rtol=1e-5)


@pytest.mark.parametrize("zero", ["random", "abstain"])
def test_with_error_feedback_what_a_zero_voted_is_kept(zero: str) -> None:
    grads = gradients(3)
    grads["head"][:, 1] = 0
    tx = jaxcomm.majority_vote("data", zeros=zero, error_feedback=True)
    program = fed_back(CHECKED) if zero == "random" else Program(GLOBAL, tx, grads)
    ((updates, state),) = program.run(grads)
    kept = residuals(state)["head"][:, 1]
    scale = np.abs(grads["head"]).mean((1, 2)) * (zero == "random")
    np.testing.assert_allclose(np.abs(kept), np.broadcast_to(scale[:, None], kept.shape), rtol=1e-6)
    if zero == "random":  # every device has coins of its own
        assert len(set(map(bytes, np.sign(kept)))) == 3
    else:
        np.testing.assert_array_equal(updates["head"][1], 0)


@pytest.mark.parametrize("model", [1, 2])
def test_the_spec_of_the_state(model: int) -> None:
    view = View("", manual=False, model=model)
    tx = optax.chain(
        jaxcomm.majority_vote("data", error_feedback=True), optax.sgd(0.1, momentum=0.9)
    )
    mesh = view.mesh(4)
    with jax.set_mesh(mesh):
        params = place(view, {name: jnp.zeros(shape) for name, shape in SHAPES.items()})
        state = tx.init(params)
    spec = jaxcomm.state_spec(tx, params, mesh)
    assert jax.tree.structure(spec) == jax.tree.structure(state)
    assert spec[0].step == PartitionSpec()
    per_device = [PartitionSpec("data", *view.spec(name)) for name in ("head", "kernel")]
    assert spec[0].residual.values == per_device
    plain = jaxcomm.state_spec(jaxcomm.majority_vote("data"), params, mesh)
    assert jax.tree.leaves(plain) == [PartitionSpec()]


@pytest.mark.parametrize(
    ("world", "error_feedback", "bucket_mib"),
    [(4, False, 32.0), (5, False, 1e-4), (3, True, 32.0)],
)
def test_bytes_are_those_of_the_formula(
    world: int, error_feedback: bool, bucket_mib: float
) -> None:
    exact = 8 + error_feedback  # bias 6, scale 1; a flag, or scales of 2 large leaves
    exact = Fraction(2 * (world - 1), world) * 4 * exact
    words_of_buckets = [2] if bucket_mib == 32.0 else [1, 2]
    votes = sum(2 * (world - 1) * 4 * -(-words // world) for words in words_of_buckets)
    program = fed_back(CHECKED) if error_feedback else plain(GLOBAL, "direct")
    if world == 5:
        tx = jaxcomm.majority_vote("data", "direct", bucket_mib=bucket_mib)
        program = Program(GLOBAL, tx, gradients(world))
    assert program.report().bytes_max == votes + exact


@pytest.mark.parametrize(
    ("algorithm", "zero", "known", "planes"),
    [("ring", "abstain", "ring", 2), (None, "random", "direct", 1)],
)
def test_bits_are_those_of_the_closed_forms(
    algorithm: str | None, zero: str, known: str, planes: int
) -> None:
    tx, n, flag = jaxcomm.majority_vote("data", algorithm, zeros=zero), 64 * 32, 6
    votes = planes * n / 8 * oracles.majority_bits(4, known)
    program = Program(GLOBAL, tx, {"w": np.zeros((4, 64, 32), np.float32)})
    assert program.report().bytes_max == votes + flag


def test_one_device_has_its_own_sign() -> None:
    grads = gradients(1)
    grads["head"][0, 1] = 0
    ((updates, _),) = run(CHECKED, jaxcomm.majority_vote("data", zeros="abstain"), [grads])
    for name, update in updates.items():
        np.testing.assert_array_equal(update, np.sign(grads[name][0]))


@pytest.mark.parametrize(
    ("view", "error_feedback"),
    [(GLOBAL, True), (CHECKED, False)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_gradients_of_16_bits_keep_their_dtype(view: View, error_feedback: bool) -> None:
    # Powers of two, whose mean magnitude, 1.5, and residuals have few digits.
    values = np.sign(gradients(3)["kernel"])[:, :2, :6] * np.float32([1, 2] * 3)
    grads = {"kernel": jnp.asarray(values, jnp.bfloat16)}
    tx = jaxcomm.majority_vote("data", error_feedback=error_feedback)
    ((updates, state),) = run(view, tx, [grads])
    assert updates["kernel"].dtype == jnp.bfloat16
    expected = majority(values) * (1.5 if error_feedback else 1)
    np.testing.assert_array_equal(np.asarray(updates["kernel"], np.float32), expected)
    for residual in state.residual.values:
        assert residual.dtype == jnp.float32
        np.testing.assert_array_equal(np.abs(residual), np.full((3, 2, 6), 0.5))


def test_a_tree_without_large_leaves() -> None:
    grads = {name: gradients(3)[name] for name in EXEMPT}
    tx = jaxcomm.majority_vote("data", error_feedback=True)
    ((updates, _),) = run(GLOBAL, tx, [grads])
    for name in EXEMPT:
        np.testing.assert_allclose(updates[name], grads[name].mean(0), rtol=0, atol=1e-6)


def test_two_axes_near_links_first() -> None:
    axes, kinds = ("host", "device"), (AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((2, 2), axes, kinds, devices=jax.devices()[:4])
    algorithm = algorithms.hierarchical(near=algorithms.direct(), far=algorithms.circulant())
    tx = jaxcomm.majority_vote(axes, algorithm, seed=7)
    sharding = NamedSharding(mesh, PartitionSpec(axes))
    with jax.set_mesh(mesh):
        state = tx.init({name: jnp.zeros(shape) for name, shape in SHAPES.items()})
        updates, _ = jax.jit(tx.update)(jax.device_put(ballots(4), sharding), state)
    jax.tree.map(np.testing.assert_array_equal, updates, voted(GLOBAL)[0])


@pytest.mark.parametrize(
    ("wrap", "cure"),
    [
        (lambda tx: optax.apply_if_finite(tx, 3), "around the optimizer only"),
        (lambda tx: optax.MultiSteps(tx, 2), "Use jaxcomm.multi_steps"),
    ],
)
def test_wrappers_that_cannot_work_are_refused(wrap: Any, cure: str) -> None:
    with jax.set_mesh(GLOBAL.mesh(4)), pytest.raises(ValueError, match=cure):
        wrap(jaxcomm.majority_vote("data")).init({"w": jnp.zeros((4, 2))})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"axis_name": 0}, TypeError, "name of a mesh axis or a tuple of names, got 0"),
        ({"algorithm": "tree"}, ValueError, "unknown algorithm 'tree'; choose one of"),
        ({"algorithm": algorithms.ring}, TypeError, "a factory must be called"),
        ({"algorithm": "native"}, ValueError, "XLA has no native majority vote; leave"),
        ({"algorithm": algorithms.native()}, ValueError, "XLA has no native majority vote"),
        ({"ties": "coin"}, ValueError, "ties must be one of random, zero.* got 'coin'"),
        ({"zeros": "skip"}, ValueError, "zeros must be one of random, abstain, got 'skip'"),
        ({"bucket_mib": 0}, ValueError, "positive number, got 0"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        jaxcomm.majority_vote(**({"axis_name": "data"} | arguments))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64])
def test_leaves_that_are_not_float_are_refused(dtype: Any) -> None:
    with jax.set_mesh(GLOBAL.mesh(4)), pytest.raises(TypeError, match="parameter n is"):
        jaxcomm.majority_vote("data").init({"n": jnp.zeros((3, 3), dtype)})


HIERARCHICAL = algorithms.hierarchical(near=algorithms.direct(), far=algorithms.ring())


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (algorithms.direct(aggregator=4), "aggregator 4 is not on the axis, which has 4 devices"),
        (HIERARCHICAL, r"two mesh axes, \(far, near\), got 'data'"),
        (algorithms.halving_doubling("shifted", 3), "shifted and .* the 4 devices .* got 3 x 1"),
    ],
)
def test_algorithms_that_do_not_fit_the_mesh(algorithm: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(GLOBAL, jaxcomm.majority_vote("data", algorithm), [gradients(4)])
