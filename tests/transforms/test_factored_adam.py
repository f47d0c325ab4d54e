"""Factored Adam: its equations, what it sends, what it refuses, and a run that only it survives."""

import functools
import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
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
from transforms.factored_adam_oracle import FactoredAdam

GLOBAL = VIEWS[0]
OPTIONS = {"b1": 0.8, "b2": 0.9, "eps": 1e-6}


def one_bit() -> optax.GradientTransformation:
    return jaxcomm.mean("data", jaxcomm.codecs.scaled_sign(8), error_feedback=True)


@functools.cache
def exact(view: View) -> Program:
    tx = jaxcomm.factored_adam(jaxcomm.mean("data"), 0.5, **OPTIONS)
    return Program(view, tx, gradients(4))


def uneven(seed: int) -> dict[str, np.ndarray]:
    """Gradients whose rows and columns are of different sizes; a row has none in the first step."""
    grads = gradients(4, seed)
    grads["kernel"] *= np.float32([[1], [0.01], [100 if seed else 0]])
    grads["head"] *= np.geomspace(0.1, 10, 10, dtype=np.float32)
    return grads


def assert_follows(found: Any, batches: list[dict[str, np.ndarray]], **more: bool) -> None:
    shapes = {name: g.shape[1:] for name, g in batches[0].items()}
    oracles = {name: FactoredAdam(s, **OPTIONS, **more) for name, s in shapes.items() if 0 not in s}
    for grads, (updates, _) in zip(batches, found, strict=True):
        for name, oracle in oracles.items():
            expected = 0.5 * oracle.step(grads[name])
            np.testing.assert_allclose(updates[name], expected, rtol=1e-4, atol=1e-6)


@each_view
def test_every_view_follows_the_equations(view: View) -> None:
    batches = [uneven(t) for t in range(5)]
    found = exact(view).run(*batches)
    assert_follows(found, batches)
    updates, state = found[-1]
    assert state.count == 5
    assert all(same_on_all_devices(x) for x in jax.tree.leaves([updates, state.squares]))


@pytest.mark.parametrize("view", APART, ids=by_name)
def test_nesterovs_momentum_is_that_of_optax(view: View) -> None:
    batches = [uneven(t) for t in range(5)]
    tx = jaxcomm.factored_adam(jaxcomm.mean("data"), 0.5, **OPTIONS, nesterov=True)
    assert_follows(run(view, tx, batches), batches, nesterov=True)


def test_stacked_layers_have_factors_of_their_own() -> None:
    rng, tx = np.random.default_rng(0), jaxcomm.factored_adam(jaxcomm.mean("data"), 0.5, **OPTIONS)
    sizes = np.float32([1, 1000])[:, None, None]
    batches = [{"w": (rng.standard_normal((3, 2, 8, 12)) * sizes).astype("f")} for _ in range(4)]
    assert_follows(run(GLOBAL, tx, batches), batches)


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [
        ((32, 4, 8), (32, 32)),  # to heads
        ((12, 3, 4, 4), (36, 16)),
        ((3, 16, 4, 8), (3, 16, 32)),  # in a stack
        ((4, 8, 32), (4, 8, 32)),  # from heads
        ((3, 3, 8, 16), (3, 3, 8, 16)),  # a convolution
        ((7, 7, 3, 64), (7, 21, 64)),
        ((64, 2, 16), (64, 32)),  # to few heads
        ((16, 12, 24), (16, 12, 24)),  # stacks of thin matrices
        ((32, 64, 8), (32, 64, 8)),
        ((64, 32, 64), (64, 32, 64)),  # one matrix would be 32 times longer than wide
    ],
)
def test_what_is_a_matrix_at_each_position(shape: tuple[int, ...], matrix: tuple[int, ...]) -> None:
    """Factors are those of this matrix, or of these matrices, and few."""
    tx = jaxcomm.factored_adam(jaxcomm.mean("data"), 0.5, **OPTIONS)
    rng, found = np.random.default_rng(0), []
    sizes = np.geomspace(0.1, 10, math.prod(shape), dtype=np.float32)
    batches = [sizes * rng.standard_normal((4, len(sizes)), np.float32) for _ in range(3)]
    for view_of in shape, matrix:
        steps = run(GLOBAL, tx, [{"w": g.reshape(4, *view_of)} for g in batches])
        found.append(steps)
    for (updates, state), (expected, of_matrix) in zip(*found, strict=True):
        np.testing.assert_allclose(updates["w"].ravel(), expected["w"].ravel(), rtol=1e-4)
        assert state.squares.shape == of_matrix.squares.shape
    assert_follows(found[1], [{"w": g.reshape(4, *matrix)} for g in batches])


@pytest.mark.parametrize("spec", [jax.P("model"), jax.P(None, "model"), jax.P(None, None, "model")])
def test_projections_to_heads_that_are_split(mesh4x2: Any, spec: jax.P) -> None:
    """Over inputs, heads or their width: as unsplit."""
    tx = jaxcomm.factored_adam(jaxcomm.mean("data"), 0.5, **OPTIONS)
    grads = np.random.default_rng(0).standard_normal((4, 16, 4, 6), np.float32)
    grads *= np.geomspace(0.1, 10, 16, dtype=np.float32)[:, None, None]
    found = []
    with jax.set_mesh(mesh4x2):
        for placed in jax.P(), spec:
            params = jax.device_put(jnp.zeros((16, 4, 6)), jax.NamedSharding(mesh4x2, placed))
            own = jax.device_put(grads, jax.NamedSharding(mesh4x2, jax.P("data", *placed)))
            updates, state = jax.jit(tx.update)(own, tx.init(params), params)
            found.append((np.asarray(updates), np.asarray(state.squares)))
    for split, whole in zip(*found, strict=True):
        np.testing.assert_allclose(split, whole, rtol=1e-4)
    assert found[0][1].size == 16 + 24


def test_attention_of_flax_costs_little(make_mesh: Any) -> None:
    """Its kernels have an axis of heads; rows of so few values would cost more than the signs."""
    signs = jaxcomm.mean("data", jaxcomm.codecs.scaled_sign(128), error_feedback=True)
    tx, heads = jaxcomm.factored_adam(signs, 1e-3), jax.ShapeDtypeStruct((768, 12, 64), "float32")
    with jax.set_mesh(make_mesh(4)):
        sent = jaxcomm.explain(tx, heads).bytes_max - jaxcomm.explain(signs, heads).bytes_max
    assert sent < 0.05 * heads.size


@pytest.mark.parametrize("name", ["bias", "norm/weight", "gain"])
def test_stacked_vectors_are_as_each_by_itself(name: str) -> None:
    """Told by their names, or by the axis of layers."""
    tx = jaxcomm.factored_adam(jaxcomm.mean("data"), 0.5, **OPTIONS)
    stacked = jaxcomm.with_layer_axis(tx, ["gain"]) if name == "gain" else tx
    sizes = np.float32([[1, 1e-3], [1e-3, 1]])
    batches = [sizes * g["head"][:, :2, :2] for g in (gradients(4, t) for t in range(3))]
    found = run(GLOBAL, stacked, [{name: g} for g in batches])
    each = run(GLOBAL, tx, [{"0": g[:, 0], "1": g[:, 1]} for g in batches])
    for (updates, _), (expected, _) in zip(found, each, strict=True):
        both = np.stack([expected["0"], expected["1"]])
        np.testing.assert_allclose(updates[name], both, rtol=1e-5)


@pytest.mark.parametrize("nesterov", [False, True])
def test_what_the_exchange_returned_is_taken_and_errors_are_kept(nesterov: bool) -> None:
    tx, b1 = jaxcomm.factored_adam(one_bit(), 0.5, **OPTIONS, nesterov=nesterov), OPTIONS["b1"]
    batches = [gradients(4, t) for t in range(6)]
    found = run(GLOBAL, tx, batches)
    total, momentum, square = np.zeros((3, 7)), np.zeros((3, 7)), FactoredAdam((3, 7), **OPTIONS)
    kept = b1**2 if nesterov else b1
    for grads, (_, state) in zip(batches, found, strict=True):
        square.step(grads["kernel"])
        root, bound = square.root(), (1 - OPTIONS["b2"]) ** -0.5
        known = np.clip(grads["kernel"] / np.where(root > 0, root + 1e-6, np.inf), -bound, bound)
        total += kept * momentum + (1 - kept) * known.mean(0)
        last, momentum = momentum, np.asarray(state.momentum["kernel"])
        total -= (1 + b1) * momentum - b1 * last if nesterov else momentum
        owed = np.asarray(state.inner.residual.values[1]).mean(0)  # of the bucket head, kernel
        np.testing.assert_allclose(total, owed, atol=1e-4)
    assert np.abs(total).max() > 0.01


@pytest.mark.parametrize("model", [1, 2])
def test_bytes_are_those_of_the_exchange_and_of_rows_and_columns(model: int) -> None:
    view = VIEWS[0] if model == 1 else VIEWS[3]
    both = exact(view).report().bytes_max
    alone = Program(view, jaxcomm.mean("data"), gradients(4)).report().bytes_max
    factors = 4 + 10 + 3 + 7 + 6 + 1  # head, kernel; bias and scale as they are
    world = 4 * model
    flag = model - 1  # whether the sharded leaf is finite, over the other axis
    assert both - alone == Fraction(2 * (world - 1), world) * 4 * factors + flag


@pytest.mark.parametrize("view", [*APART, VIEWS[5]], ids=by_name)
def test_a_bad_gradient_makes_every_update_nan_and_leaves_the_state(view: View) -> None:
    good, *bad = (gradients(4) for _ in range(4))
    bad[0]["head"][2].flat[3] = np.inf
    bad[1]["bias"][2].flat[3] = np.nan
    bad[2]["kernel"][1].flat[3] = 1e30  # whose square is not finite
    for grads in bad:
        (_, start), (spoiled, kept), (updates, state) = exact(view).run(good, grads, good)
        assert nan_everywhere({n: u for n, u in spoiled.items() if u.size})
        # The exchange counts every step, as its keys follow from the number.
        kept, start = (s._replace(inner=s.inner.residual) for s in (kept, start))
        jax.tree.map(np.testing.assert_array_equal, kept, start)
        assert all(np.isfinite(u).all() for u in updates.values())
        assert state.count == 2


def test_finite_squares_whose_sum_is_not_leave_the_state() -> None:
    tx = jaxcomm.factored_adam(jaxcomm.mean("data"), 0.5, **OPTIONS)
    good, large = ({"w": np.ones((4, 2, 1024), np.float32)} for _ in range(2))
    large["w"][1, 0] = 1e18
    (_, start), (spoiled, kept), (updates, _) = run(GLOBAL, tx, [good, large, good])
    assert nan_everywhere(spoiled) and np.isfinite(updates["w"]).all()
    jax.tree.map(np.testing.assert_array_equal, kept.squares, start.squares)


def test_a_step_whose_rate_is_not_finite_does_not_count() -> None:
    def rate(count: Any) -> Any:
        return jnp.where(count == 1, jnp.inf, 0.1)

    tx = jaxcomm.factored_adam(one_bit(), rate, **OPTIONS)
    (_, before), (updates, after), (again, _) = run(GLOBAL, tx, [gradients(4, i) for i in range(3)])
    assert nan_everywhere({n: u for n, u in (updates | again).items() if u.size})
    assert np.any(before.inner.residual.values[1])
    kept = [s._replace(inner=s.inner.residual) for s in (before, after)]
    jax.tree.map(np.testing.assert_array_equal, *kept)


def test_a_column_whose_squares_add_up_to_infinity_leaves_the_state() -> None:
    """Rows are means of other values, and stay finite."""
    large = gradients(4)
    large["head"][1, :, 2] = 1.2e19  # whose square is finite
    tx = jaxcomm.factored_adam(jaxcomm.mean("data"), 0.1, **OPTIONS)
    (_, before), (updates, after) = run(GLOBAL, tx, [gradients(4), large])
    assert nan_everywhere(updates)
    jax.tree.map(np.testing.assert_array_equal, after.squares, before.squares)


@pytest.mark.standard_promotion  # of optax
def test_decay_and_mask_are_those_of_adamw() -> None:
    mask = {name: name in ("head", "bias") for name in SHAPES}
    ones = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    adamw = optax.adamw(0.5, weight_decay=0.1, mask=mask)
    none = jax.tree.map(np.zeros_like, ones)
    expected, _ = adamw.update(none, adamw.init(ones), ones)
    for chosen in (mask, lambda params: {name: mask[name] for name in params}):
        for tx in (
            jaxcomm.factored_adam(jaxcomm.mean("data"), 0.5, weight_decay=0.1, mask=chosen),
            jaxcomm.one_bit_adam("data", 0.5, weight_decay=0.1, mask=chosen, dense_steps=9),
        ):
            with jax.set_mesh(GLOBAL.mesh(2)):
                params = place(GLOBAL, ones)
                grads = {n: np.zeros((2, *x.shape), np.float32) for n, x in ones.items()}
                updates, _ = jax.jit(tx.update)(
                    place(GLOBAL, grads, "data"), tx.init(params), params
                )
            for name in SHAPES:
                np.testing.assert_allclose(updates[name], expected[name], rtol=1e-6)


@pytest.mark.standard_promotion  # of the schedule
def test_devices_that_disagree_find_the_common_optimum_in_one_bit() -> None:
    world, steps = 4, 400
    rng = np.random.default_rng(0)
    A = rng.standard_normal((world, 12, 6)).astype(np.float32) / np.sqrt(12).astype(np.float32)
    target = 3 * rng.standard_normal((world, 6, 5)).astype(np.float32)  # each wants its own
    normal = np.einsum("dij,dik->djk", A, A)
    best = np.linalg.solve(normal.sum(0), np.einsum("djk,dkl->jl", normal, target))
    rate = optax.cosine_decay_schedule(0.2, steps)

    def distance(exchange: optax.GradientTransformation) -> float:
        tx = jaxcomm.factored_adam(exchange, rate)

        def step(carry: Any, _: None) -> Any:
            w, state = carry
            grads = jnp.einsum("djk,dkl->djl", normal, w[None] - target)
            updates, state = tx.update(grads, state)
            return (optax.apply_updates(w, updates), state), None

        with jax.set_mesh(GLOBAL.mesh(world)):
            w = jaxcomm.replicate(jnp.zeros((6, 5)))
            run = jax.jit(lambda carry: jax.lax.scan(step, carry, None, steps)[0])
            w, _ = run((w, tx.init(w)))
        return max(np.abs(shard.data - best).max() for shard in w.addressable_shards)

    assert distance(one_bit()) < 0.1
    assert distance(jaxcomm.no_exchange("data")) > 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"b1": 1.0}, ValueError, r"b1 must be in \[0, 1\), got 1.0"),
        ({"b2": 1}, ValueError, r"b2 must be in \[0, 1\), got 1"),
        ({"b2": np.ones(())}, TypeError, "b2 must be a Python number"),
        ({"eps": -1e-8}, ValueError, "eps must be >= 0"),
        ({"weight_decay": float("nan")}, ValueError, "weight_decay must be >= 0"),
        ({"learning_rate": "0.1"}, TypeError, "learning_rate must be a number or a schedule"),
    ],
)
def test_bad_arguments_raise_at_once(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        jaxcomm.factored_adam(**({"exchange": one_bit(), "learning_rate": 0.1} | options))


def test_bad_input_raises() -> None:
    params = {"w": jnp.zeros((2, 2))}
    with jax.set_mesh(GLOBAL.mesh(2)):
        with pytest.raises(ValueError, match="factored_adam needs inner transformations"):
            jaxcomm.factored_adam(optax.identity(), 0.1).init(params)
        with pytest.raises(ValueError, match="got a vote, whose updates are signs"):
            jaxcomm.factored_adam(jaxcomm.majority_vote("data"), 0.1).init(params)
        tx = jaxcomm.factored_adam(one_bit(), 0.1, weight_decay=0.1, mask={"v": True})
        state, grads = tx.init(params), {"w": jnp.zeros((2, 2, 2))}
        with pytest.raises(ValueError, match=r"call tx.update\(grads, state, params\)"):
            jax.jit(tx.update)(grads, state)
        with pytest.raises(ValueError, match="mask must have the structure of the parameters"):
            jax.jit(tx.update)(grads, state, params)
        with_momentum = optax.chain(optax.clip(1.0), optax.sgd(0.1, momentum=0.9))
        for behind in (optax.adam(0.1), optax.adafactor(0.1), optax.adan(0.1), with_momentum):
            for made in (tx, jaxcomm.one_bit_adam("data", 0.1, dense_steps=1)):
                with pytest.raises(ValueError, match="_adam are final"):
                    optax.chain(made, behind).init(params)
                with pytest.raises(ValueError, match="_adam are final"):
                    optax.chain(optax.chain(made), behind).init(params)
                with pytest.raises(ValueError, match="_adam are final"):
                    optax.named_chain(("a", made), ("b", behind)).init(params)
                with pytest.raises(ValueError, match="_adam are final"):
                    optax.chain(made, optax.inject_hyperparams(optax.sgd)(0.1)).init(params)
                optax.chain(made, optax.inject_hyperparams(optax.clip)(0.1)).init(params)
        optax.chain(jaxcomm.local("data", optax.trace(0.9)), tx, optax.scale(0.1)).init(params)
        short = state._replace(squares=state.squares[:1])
        with pytest.raises(ValueError, match=r"has \(1,\) squares, expected \(4,\)"):
            tx.update(grads, short, params)


def test_shards_that_are_made_inside_a_shard_map_have_squares_of_their_own(
    mesh4x2: jax.sharding.Mesh,
) -> None:
    """As with the state of all shards together, made outside."""
    tx = jaxcomm.factored_adam(jaxcomm.mean("data"), 0.1)
    axes, spec = ("data", "model"), {"b": jax.P("model")}
    params = {"b": np.ones(8, np.float32)}
    grads = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    grads = grads * np.where(np.arange(8) < 4, 1, 100)

    def update(params: Any, grads: Any, state: Any = None) -> Any:
        state = tx.init(params) if state is None else state
        return tx.update(jaxcomm.mark_local({"b": grads[0]}), state, params)[0]

    with jax.set_mesh(mesh4x2):
        params = jax.device_put(params, jax.NamedSharding(mesh4x2, spec["b"]))
        states = jaxcomm.state_spec(tx, params, mesh4x2)
        given = spec, jax.P(*axes)
        made = [
            jax.jit(jax.shard_map(update, in_specs=specs, out_specs=spec, check_vma=False))
            for specs in (given, (*given, states))
        ]
        inside, outside = made[0](params, grads), made[1](params, grads, tx.init(params))
    np.testing.assert_allclose(inside["b"], outside["b"], rtol=1e-6)
