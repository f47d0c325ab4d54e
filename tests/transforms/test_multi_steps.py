"""Accumulation over steps: the same mean, one exchange in k."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import _axes, _branches
from transforms.both_views import APART, VIEWS, Program, View, by_name, gradients, run

GLOBAL, K = VIEWS[0], 3


@functools.cache
def program(codec: str, view: View) -> Program:
    """In bfloat16 with state of each device, which both branches of the conditional hand on."""
    mean = jaxcomm.mean("data", codec, error_feedback=codec == "bfloat16")
    inner = optax.chain(mean, optax.sgd(1.0, momentum=0.9))
    return Program(view, jaxcomm.multi_steps(inner, K), gradients(4))


@pytest.mark.parametrize(
    ("codec", "view"),
    [
        *(("float32", view) for view in VIEWS),
        *(pytest.param("bfloat16", view, marks=pytest.mark.newest) for view in APART),
        ("bfloat16", VIEWS[5]),
    ],
    ids=by_name,
)
def test_k_steps_are_one_step_on_the_mean(codec: str, view: View) -> None:
    batches = [gradients(4, seed) for seed in range(7)]
    steps = program(codec, view).run(*batches)
    momentum = {name: np.zeros(g.shape[1:], np.float32) for name, g in batches[0].items()}
    for i, (updates, _) in enumerate(steps):
        if (i + 1) % K:
            assert all((np.asarray(u) == 0).all() for u in updates.values())
            continue
        for name in momentum:
            mean = np.mean([b[name] for b in batches[i + 1 - K : i + 1]], (0, 1))
            momentum[name] = np.float32(0.9) * momentum[name] + mean
            tolerance = 1e-5 if codec == "float32" else 2e-2
            np.testing.assert_allclose(updates[name], -momentum[name], atol=tolerance)
    assert steps[-1][1].mini_step == len(batches) % K


@pytest.mark.parametrize("view", APART, ids=by_name)
def test_bytes_over_k_steps(view: View) -> None:
    fed_back = jaxcomm.mean("data", "bfloat16", error_feedback=True)
    every = Program(view, fed_back, gradients(4)).report()
    once_in_k = program("bfloat16", view).report()
    waiting, exchanging = (
        sum(max(c.sent) for c in once_in_k.collectives if c.branch[-1][1] == taken)
        for taken in (0, 1)
    )
    assert waiting == 0
    assert exchanging == every.bytes_max
    assert all(c.branch for c in once_in_k.collectives)


@pytest.mark.parametrize("view", [GLOBAL, VIEWS[5]], ids=by_name)
def test_a_bad_gradient_spoils_its_k_steps_and_no_further(view: View) -> None:
    tx = jaxcomm.multi_steps(jaxcomm.mean("data"), 2)
    good, bad = gradients(4), gradients(4)
    bad["kernel"][1, 0, 0] = np.nan
    steps = [updates for updates, _ in run(view, tx, [bad, good, good, good])]
    for updates, expected in zip(steps, [0.0, np.nan, 0.0], strict=False):
        np.testing.assert_array_equal(updates["bias"], np.full(6, expected))
    np.testing.assert_allclose(steps[3]["bias"], good["bias"].mean(0), atol=1e-6)


def test_the_accumulator_is_sharded_and_its_spec_says_so(mesh8: Any) -> None:
    tx = jaxcomm.multi_steps(optax.chain(jaxcomm.mean("data"), optax.adam(1e-3)), 2)
    params = {"w": jnp.zeros((4, 2)), "b": jnp.zeros(2)}
    with jax.set_mesh(mesh8):
        state = tx.init(params)
    spec = jaxcomm.state_spec(tx, params, mesh8)
    assert jax.tree.structure(spec) == jax.tree.structure(state)
    assert spec.accumulated.values == [jax.sharding.PartitionSpec("data")] * 2
    assert spec.mini_step == jax.sharding.PartitionSpec()
    for array in state.accumulated.values:
        assert array.shape[0] == 8
        assert all(shard.data.shape[0] == 1 for shard in array.addressable_shards)


def test_along_explicit_axes() -> None:
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), kinds, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        params = jax.device_put(jnp.ones((4, 8)), jax.P(None, "model"))
        tx = jaxcomm.multi_steps(jaxcomm.mean("data", "int8"), 2)
        x = jax.device_put(jnp.arange(8.0).reshape(2, 4), jax.P("data", None))
        gradient = jaxcomm.value_and_grad(lambda w, x: (x @ w).sum(), "data")
        step = jax.jit(lambda s: tx.update(gradient(params, x)[1], s, params))
        nothing, state = step(tx.init(params))
        updates, _ = step(state)
        assert (np.asarray(nothing) == 0).all() and nothing.sharding.spec == params.sharding.spec
        expected = np.broadcast_to(np.array([[2.0], [3.0], [4.0], [5.0]]), (4, 8))
        np.testing.assert_allclose(updates, expected, rtol=0.02)


def test_the_spec_of_one_bare_array() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    spec = jax.P(None, "model")
    with jax.set_mesh(mesh):
        tx = optax.chain(jaxcomm.mean("data"), optax.sgd(0.1, momentum=0.9))
        params = jax.device_put(jnp.ones((4, 8)), spec)
        assert jaxcomm.state_spec(tx, params, mesh)[1][0].trace == spec


@pytest.mark.parametrize("k", [0, -2, 1.0])
def test_k_must_be_a_positive_integer(k: Any) -> None:
    with pytest.raises(ValueError, match="positive number of steps"):
        jaxcomm.multi_steps(jaxcomm.mean("data"), k)


def test_an_inner_transformation_without_an_exchange_is_refused(mesh8: Any) -> None:
    with jax.set_mesh(mesh8), pytest.raises(ValueError, match="put jaxcomm.mean inside it"):
        jaxcomm.multi_steps(optax.sgd(0.1), 2).init({"w": jnp.zeros(3)})


@pytest.mark.parametrize("optimizer", [optax.adam(0.1), optax.sgd(0.1, momentum=0.9)])
def test_an_optimizer_behind_would_see_zeros(
    mesh8: Any, optimizer: optax.GradientTransformation
) -> None:
    mean = jaxcomm.mean("data")
    with jax.set_mesh(mesh8):
        params = jaxcomm.replicate({"w": jnp.ones((8, 8))})
        with pytest.raises(ValueError, match="count the steps in between.*Put it inside: jax"):
            optax.chain(jaxcomm.multi_steps(mean, 4), optimizer).init(params)
        jaxcomm.multi_steps(optax.chain(mean, optimizer), 4).init(params)
        optax.chain(jaxcomm.multi_steps(mean, 4), optax.sgd(0.1)).init(params)


def test_parameters_split_over_an_explicit_axis_beside_an_automatic_one() -> None:
    kinds = (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=kinds, devices=jax.devices()[:4])
    tx = jaxcomm.multi_steps(jaxcomm.mean("data"), 2)
    with jax.set_mesh(mesh):
        params = {"w": jax.device_put(np.ones((8, 16), np.float32), jax.P(None, "model"))}
        state, x = tx.init(params), jaxcomm.global_batch(np.ones((8, 4), np.float32), "data")

        @jax.jit
        def step(params: Any, state: Any) -> Any:
            loss = lambda p, x: jnp.sum(p["w"]) * jnp.mean(x)  # noqa: E731
            _, grads = jaxcomm.value_and_grad(loss, "data")(params, x)
            return tx.update(grads, state, params)

        first, state = step(params, state)
        second, _ = step(params, state)
    assert (np.asarray(first["w"]) == 0).all() and (np.asarray(second["w"]) == 1).all()


@pytest.mark.parametrize(
    "follower",
    [
        optax.sgd(optax.linear_schedule(0.1, 0.0, 4)),
        optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
    ],
)
def test_a_schedule_outside_would_count_the_steps_in_between(mesh8: Any, follower: Any) -> None:
    accumulated, params = jaxcomm.multi_steps(jaxcomm.mean("data"), 4), {"w": jnp.zeros(3)}
    with jax.set_mesh(mesh8):
        optax.chain(accumulated, optax.sgd(0.1)).init(params)
        jaxcomm.multi_steps(optax.chain(jaxcomm.mean("data"), follower), 4).init(params)
        with pytest.raises(
            ValueError, match="(scale_by_schedule|inject_hyperparams) follows multi"
        ):
            optax.chain(accumulated, follower).init(params)


@pytest.mark.parametrize(
    "follower",
    [
        optax.contrib.madgrad(0.1),
        optax.contrib.simplified_ademamix(0.1, alpha=1.0),
        optax.signum(0.1) if hasattr(optax, "signum") else optax.ema(0.9),
        optax.rprop(0.1),
        optax.lbfgs(0.1, linesearch=None),
        optax.optimistic_gradient_descent(0.1),
        optax.apply_every(2),
        optax.apply_if_finite(optax.ema(0.9), 3),
    ],
)
def test_no_state_outside_sees_the_steps_in_between(mesh8: Any, follower: Any) -> None:
    accumulated, params = jaxcomm.multi_steps(jaxcomm.mean("data"), 4), {"w": jnp.zeros(3)}
    with jax.set_mesh(mesh8):
        jaxcomm.multi_steps(optax.chain(jaxcomm.mean("data"), follower), 4).init(params)
        for chain in (
            optax.chain(accumulated, follower),
            optax.named_chain(("exchange", accumulated), ("optimizer", follower)),
        ):
            with pytest.raises(ValueError, match="follows multi_steps.*Put it inside"):
                chain.init(params)
        only_looks = optax.apply_if_finite(optax.chain(optax.zero_nans(), optax.sgd(0.1)), 3)
        of_the_user = optax.GradientTransformation(
            lambda params: {"rate": jnp.float32(0.1)}, lambda u, s, p=None: (u, s)
        )
        plateau = optax.contrib.reduce_on_plateau()
        optax.chain(accumulated, only_looks, of_the_user, plateau).init(params)


@pytest.mark.parametrize("around", [lambda x: x, lambda x: optax.masked(x, {"w": True})])
def test_weights_outside_would_decay_in_the_steps_in_between(mesh8: Any, around: Any) -> None:
    accumulated, params = jaxcomm.multi_steps(jaxcomm.mean("data"), 4), {"w": jnp.zeros(3)}
    decay, sgd = around(optax.add_decayed_weights(0.1)), optax.sgd(0.1)
    with jax.set_mesh(mesh8):
        for chain in (
            optax.chain(accumulated, optax.chain(decay, sgd)),
            optax.named_chain(("exchange", accumulated), ("decay", decay), ("sgd", sgd)),
        ):
            state = chain.init(params)
            with pytest.raises(ValueError, match="add_decayed_weights follows multi_steps"):
                jax.eval_shape(chain.update, {"w": jnp.zeros((8, 3))}, state, params)
        none = optax.chain(accumulated, around(optax.add_decayed_weights(0.0)), sgd)
        jax.eval_shape(none.update, {"w": jnp.zeros((8, 3))}, none.init(params), params)
        before = optax.chain(jaxcomm.local("data", optax.identity()), accumulated, sgd)
        jax.eval_shape(before.update, {"w": jnp.zeros((8, 3))}, before.init(params), params)


@pytest.mark.parametrize("view", [GLOBAL, VIEWS[2]], ids=by_name)
def test_the_loop_of_gpus_is_the_branch_of_cpus(
    view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPUs, collectives of a loop and of what surrounds it would not keep their order."""
    fed_back = jaxcomm.mean("data", "int8", error_feedback=True)
    tx = jaxcomm.multi_steps(optax.chain(fed_back, optax.sgd(0.1, momentum=0.9)), 2)
    batches = [gradients(4, seed) for seed in range(4)]
    compiled = lambda: str(Program(view, tx, batches[0]).lowered().compile().as_text())  # noqa: E731
    of_the_loop = "[|multi_steps: exchange=2]/while/"
    assert of_the_loop not in compiled()
    branch = run(view, tx, batches)
    monkeypatch.setattr(_branches, "_as_a_loop", lambda: True)
    assert of_the_loop in compiled()
    jax.tree.map(np.testing.assert_array_equal, branch, run(view, tx, batches))


def test_explain_adds_up_what_gpus_exchange_in_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fragments are a conditional in a loop that has no name."""
    outer, mean = optax.sgd(0.7), jaxcomm.mean("data", "int8")
    fragments = jaxcomm.local_steps(optax.sgd(0.1), 4, outer, mean, fragments=2)
    params = {"w": np.zeros((64, 64), np.float32), "v": np.zeros((64, 64), np.float32)}
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
        for tx in (jaxcomm.multi_steps(mean, 2), fragments):
            monkeypatch.setattr(_branches, "_as_a_loop", lambda: False)
            branch = jaxcomm.explain(tx, params)
            monkeypatch.setattr(_branches, "_as_a_loop", lambda: True)
            assert jaxcomm.explain(tx, params).bytes_max == branch.bytes_max > 0


@pytest.mark.parametrize("world", [1, 4])
def test_a_single_gpu_has_a_branch(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is part of a CUDA graph there, where a loop makes the host wait."""
    monkeypatch.setattr(_axes, "platform", lambda: "cuda")
    tx = jaxcomm.multi_steps(jaxcomm.mean("data", "bfloat16"), 2)
    text = str(Program(GLOBAL, tx, gradients(world)).lowered().compile().as_text())
    kinds = [kind for kind in ("cond", "while") if f"[|multi_steps: exchange=2]/{kind}/" in text]
    assert kinds == (["while"] if world > 1 else ["cond"])


@pytest.mark.standard_promotion  # of optax
@pytest.mark.parametrize("make", [optax.contrib.prodigy, optax.contrib.dadapt_adamw])
def test_an_optimizer_may_promote_its_state(make: Any) -> None:
    """In two turns, among leaves of two dtypes; both branches return the same."""
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2, jnp.bfloat16)}
        grads = jax.tree.map(lambda x: jnp.ones((2, *x.shape), x.dtype), params)
        noise = optax.add_noise(0.0, 0.55, jax.random.key(0))  # a typed key is beside them
        tx = jaxcomm.multi_steps(optax.chain(jaxcomm.mean("data"), make(), noise), 2)
        step, state = jax.jit(tx.update), tx.init(params)
        for _ in range(2):
            updates, state = step(grads, state, params)
        plain = make()
        wanted, _ = plain.update(jax.tree.map(lambda g: g[0], grads), plain.init(params), params)
    for name in params:
        close = functools.partial(np.testing.assert_allclose, rtol=2e-2)
        close(*(np.asarray(x[name], np.float32) for x in (updates, wanted)))
        assert np.abs(np.asarray(updates[name], np.float32)).min() > 0
