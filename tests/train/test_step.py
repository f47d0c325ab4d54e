"""Eight devices against one, microbatches against one batch, the remainder of the test set."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import config_dict
from running import read_config

import jaxcomm
from train import models, state, step, sync

CLASSES = 10
PARTS = ("encode", "exchange", "decode")


def forward(params: Any, images: jax.Array) -> jax.Array:
    x = images.reshape(len(images), -1).astype(jnp.float32) / 16
    return jax.nn.relu(x @ params["w1"] + params["b1"]) @ params["w2"]


def parameters() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "w1": 0.2 * jax.random.normal(keys[0], (64, 32)),
        "b1": jnp.zeros(32),
        "w2": 0.2 * jax.random.normal(keys[1], (32, CLASSES)),
    }


def batches(steps: int, size: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 17, (steps, size, 8, 8, 1)).astype(np.uint8)
    labels = rng.integers(0, CLASSES, (steps, size)).astype(np.int32)
    return [{"image": i, "label": t} for i, t in zip(images, labels, strict=True)]


def losses_of(mesh: jax.sharding.Mesh, steps: int, microbatches: int = 1) -> list[float]:
    """Losses of training on a mesh, always on the same global batches."""
    config = config_dict.create(method="mean", codec="float32", algorithm=None, bucket_mib=0.001)
    with jax.set_mesh(mesh):
        data = [jaxcomm.global_batch(batch, sync.AXIS) for batch in batches(steps, 32)]
        gradient = step.make_gradient(forward, 0.1, microbatches)
        order = jaxcomm.backward_order(gradient, parameters(), data[0])
        tx = optax.chain(sync.build(config, order, steps), optax.sgd(0.5, momentum=0.9))
        now = state.init(parameters(), tx)
        run = step.compile_step(step.make_train_step(gradient, tx), now, data[0])
        losses = []
        for batch in data:
            now, metrics = run(now, batch)
            losses.append(float(metrics["loss"]))
    assert int(now.step) == steps
    return losses


@pytest.fixture(scope="module")
def one_device() -> list[float]:
    return losses_of(jaxcomm.data_mesh(devices=jax.devices()[:1]), 20)


@pytest.mark.parametrize("devices", [2, 8])
def test_devices_follow_one_device_on_the_whole_batch(
    one_device: list[float], devices: int
) -> None:
    many = losses_of(jaxcomm.data_mesh(devices=jax.devices()[:devices]), 20)
    np.testing.assert_allclose(many, one_device, rtol=1e-5)
    assert one_device[-1] < 0.9 * one_device[0]


def test_microbatches_change_nothing(one_device: list[float]) -> None:
    two = losses_of(jaxcomm.data_mesh(devices=jax.devices()[:2]), 20, microbatches=4)
    np.testing.assert_allclose(two, one_device, rtol=1e-5)


def test_dense_steps_are_steps_also_where_devices_exchange_rarely() -> None:
    """Ten steps, three at a time: the first and the second exchange are dense, the third is not."""
    config = config_dict.create(
        method="mean",
        codec="scaled_sign",
        error_feedback=True,
        dense_steps=4,
        every=3,
        outer_rate=1.0,
        outer_momentum=0.0,
        fragments=1,
    )
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        data = [jaxcomm.global_batch(batch, sync.AXIS) for batch in batches(10, 8)]
        gradient = step.make_gradient(forward, 0.1, 1)
        order = jaxcomm.backward_order(gradient, parameters(), data[0])
        tx = sync.joined(config, sync.build(config, order, 10), alone(optax.sgd(0.1)))
        now = state.init(parameters(), tx)
        run = step.compile_step(step.make_train_step(gradient, tx), now, data[0])
        sizes = []
        for batch in data:
            before = np.asarray(now.params["w1"])
            now, _ = run(now, batch)
            moved = np.abs(np.asarray(now.params["w1"]) - before)
            sizes.append(len(np.unique(moved.round(5))))
    # Nothing moves between exchanges; signs move all of a block equally far.
    assert sizes == [1, 1, sizes[2], 1, 1, sizes[5], 1, 1, sizes[8], 1]
    assert min(sizes[2], sizes[5]) > 100 > 10 > sizes[8]


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_a_local_optimizer_stands_in_front_of_the_exchange(name: str) -> None:
    """With one device it is the optimizer; with several, each has steps of its own."""
    config = optimizer(name=name, warmup_steps=0, weight_decay=0.1, nesterov=name == "adamw")
    config.clip_norm = 0.5
    how = config_dict.create(method="mean", codec="float32", every=1, local_optimizer=True)
    parts = state.make_optimizer(config, 10)

    def trained(devices: int, local: bool) -> dict[str, np.ndarray]:
        how.local_optimizer = local
        with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:devices])):
            tx = sync.joined(how, sync.build(how, (), 10), parts)
            now = state.init(parameters(), tx)
            run = jax.jit(step.make_train_step(step.make_gradient(forward, 0.0, 1), tx))
            for batch in batches(4, 8):
                now, _ = run(now, jaxcomm.global_batch(batch, sync.AXIS))
            shapes = [x.shape[0] for x in jax.tree.leaves(now.opt_state[0]) if x.ndim > 1]
            assert (shapes != [] and set(shapes) == {devices}) == local
            return jax.tree.map(np.asarray, now.params)

    alone, own, shared = trained(1, True), trained(2, True), trained(2, False)
    for name, expected in trained(1, False).items():
        np.testing.assert_allclose(alone[name], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(shared[name], expected, rtol=1e-3, atol=1e-4)
    assert np.abs(own["w1"] - shared["w1"]).max() > 1e-3  # each clips its own gradient


def test_the_outer_momentum_of_local_steps_is_nesterovs() -> None:
    config = config_dict.create(
        method="mean", codec="float32", every=2, fragments=1, outer_rate=1.0, outer_momentum=0.5
    )
    with jax.set_mesh(jaxcomm.data_mesh(sync.AXIS, jax.devices()[:2])):
        tx = sync.joined(config, sync.build(config, (), 10), alone(optax.sgd(1.0)))
        w = jaxcomm.replicate(jnp.zeros((1, 1)))
        at, ones = tx.init(w), jnp.ones((2, 1, 1))
        for _ in range(2):
            updates, at = tx.update(ones, at, w)
    np.testing.assert_allclose(updates, -(2 + 0.5 * 2))  # both devices went 2


def test_a_profile_names_the_parts_of_a_step() -> None:
    config = config_dict.create(method="mean", codec="int8", algorithm="ring", bucket_mib=0.001)
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        batch = jaxcomm.global_batch(batches(1, 8)[0], sync.AXIS)
        gradient = step.make_gradient(forward, 0.1, 1)
        order = jaxcomm.backward_order(gradient, parameters(), batch)
        tx = optax.chain(sync.build(config, order, 1), optax.sgd(0.5))
        run = jax.jit(step.make_train_step(gradient, tx))
        text = run.lower(state.init(parameters(), tx), batch).as_text(debug_info=True)
    names = re.findall(r'loc\("([^"]*)/[^"/]*"', text)
    wanted = {f"bucket{i}/{part}" for i in range(2) for part in PARTS}
    assert wanted | {"jvp(forward)", "transpose(jvp(forward))", "small/exchange"} <= {*names}


def test_evaluation_leaves_padding_out() -> None:
    images, labels = (np.concatenate([b[k] for b in batches(2, 32)]) for k in ("image", "label"))
    weights = (np.arange(64) < 51).astype(np.float32)
    logits = np.asarray(forward(parameters(), images))
    log_probabilities = np.asarray(jax.nn.log_softmax(logits))[np.arange(64), labels]
    with jax.set_mesh(jaxcomm.data_mesh()):
        test = [
            jaxcomm.global_batch(
                {"image": images[rows], "label": labels[rows], "weight": weights[rows]}, sync.AXIS
            )
            for rows in (slice(0, 32), slice(32, 64))
        ]
        found = step.evaluate(step.make_eval_step(forward), parameters(), test)
    assert found["test_accuracy"] == pytest.approx((logits.argmax(-1) == labels)[:51].mean())
    assert found["test_loss"] == pytest.approx(-log_probabilities[:51].mean(), rel=1e-5)


def alone(tx: optax.GradientTransformation) -> state.Optimizer:
    """A transformation as the whole optimizer."""
    return state.Optimizer(tx, optax.identity(), optax.identity())


def optimizer(**fields: Any) -> config_dict.ConfigDict:
    """That of the digits' ResNet, SGD with a rate of 0.1, and with other fields."""
    config = read_config("digits_resnet").optimizer
    config.update(fields)
    return config


def test_only_weights_decay() -> None:
    params = parameters()
    zeros = jax.tree.map(jnp.zeros_like, params)
    for name in ("sgd", "adamw", "muon"):
        config = optimizer(name=name, warmup_steps=0, weight_decay=0.1)
        tx = state.whole(state.make_optimizer(config, 10))
        updates, _ = tx.update(zeros, tx.init(params), params)
        assert float(jnp.abs(updates["w1"]).max()) > 0
        assert float(jnp.abs(updates["b1"]).max()) == 0


@pytest.mark.parametrize("name", ["digits_vit", "lm_transformer"])
def test_biases_and_scales_of_stacks_and_heads_do_not_decay(name: str) -> None:
    shape, classes = ((8, 8, 1), 10) if name == "digits_vit" else ((16,), 256)
    _, params = models.build(read_config(name).model, shape, classes, 0)
    found = state.decayed(params)
    for path, decays in jax.tree_util.tree_leaves_with_path(found):
        assert decays == (path[-1].key not in ("bias", "scale")), path
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(found), strict=True)
    assert max(x.ndim for x, decays in pairs if not decays) > 1


def test_the_mean_that_corrects_votes_has_their_exempt_leaves_and_buckets() -> None:
    config = config_dict.create(
        method="majority_vote", correct_every=4, exempt=("head/*",), bucket_mib=1e-9
    )
    params = {"head": {"kernel": jnp.ones((2, 3))}, "stem": {"kernel": jnp.ones((2, 3))}}
    with jax.set_mesh(jaxcomm.data_mesh(sync.AXIS, jax.devices()[:2])):
        tx = sync.build(config, ("head/kernel", "stem/kernel"), steps=10)
        corrects, votes = tx.init(jaxcomm.replicate(params))
    assert corrects.inner.layout == votes.layout


@pytest.mark.parametrize("method", ["factored_adam", "one_bit_adam"])
def test_methods_that_are_optimizers_decay_weights_only(method: str) -> None:
    config = config_dict.create(method=method, weight_decay=0.1)
    with jax.set_mesh(jaxcomm.data_mesh(sync.AXIS, jax.devices()[:2])):
        params = {"kernel": jnp.ones((2, 3)), "bias": jnp.ones((2, 3)), "scale": jnp.ones(3)}
        params = jaxcomm.replicate(params)
        tx = sync.build(config, (), steps=10)
        grads = jax.tree.map(lambda x: jnp.zeros((2, *x.shape)), params)
        updates, _ = jax.jit(tx.update)(jaxcomm.mark_local(grads), tx.init(params), params)
    assert {name: float(u.max()) for name, u in updates.items()} == {
        "kernel": pytest.approx(-0.1),
        "bias": 0,
        "scale": 0,
    }


def test_the_learning_rate_warms_up_and_falls_to_zero() -> None:
    config = optimizer(learning_rate=0.5, warmup_steps=4, momentum=0.0, weight_decay=0.0)
    tx = state.whole(state.make_optimizer(config, 12))
    params = {"w": jnp.ones(())}
    now, rates = tx.init(params), []
    for _ in range(13):
        updates, now = tx.update({"w": jnp.ones(())}, now, params)
        rates.append(-float(updates["w"]))
    np.testing.assert_allclose(rates[:5], [0, 0.125, 0.25, 0.375, 0.5], rtol=1e-6)
    assert rates[12] == pytest.approx(0, abs=1e-7) and sorted(rates[4:]) == rates[:3:-1]


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon", "scale"])
def test_the_learning_rate_is_that_of_the_step_also_after_skipped_ones(name: str) -> None:
    config = optimizer(name=name, warmup_steps=3, momentum=0.0, weight_decay=0.0)
    tx = state.whole(state.make_optimizer(config, 8))
    params = {"w": jnp.ones(())}
    now, rates = tx.init(params), []
    for number in range(8):
        gradient = jnp.nan if number in (1, 2, 5) else 1.0
        updates, now = tx.update({"w": jnp.asarray(gradient)}, now, params)
        rates.append(abs(float(updates["w"])))
    expected = np.array(state.learning_rates(config, 8))
    expected[[1, 2, 5]] = 0
    np.testing.assert_allclose(rates, expected, rtol=1e-5)


@pytest.mark.parametrize("limit", [None, 1e-3, 1e3])
def test_the_mean_gradient_is_clipped_as_plain_optax_does(limit: float | None) -> None:
    """On eight devices behind their exchange, and on the whole batch without any of ours."""
    config = optimizer(warmup_steps=0, weight_decay=0.0, clip_norm=limit)
    clip = optax.identity() if limit is None else optax.clip_by_global_norm(limit)
    plain = optax.chain(clip, *state.sgd(config, state.schedule(config, 4)))

    def loss(params: Any, batch: dict[str, np.ndarray]) -> jax.Array:
        logits, labels = forward(params, batch["image"]), jnp.asarray(batch["label"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    expected = parameters()
    own = plain.init(expected)
    for batch in batches(3, 32):
        updates, own = plain.update(jax.grad(loss)(expected, batch), own, expected)
        expected = optax.apply_updates(expected, updates)
    with jax.set_mesh(jaxcomm.data_mesh()):
        tx = optax.chain(jaxcomm.mean(sync.AXIS), state.whole(state.make_optimizer(config, 4)))
        now = state.init(parameters(), tx)
        run = jax.jit(step.make_train_step(step.make_gradient(forward, 0.0, 1), tx))
        for batch in batches(3, 32):
            now, _ = run(now, jaxcomm.global_batch(batch, sync.AXIS))
    moved = [
        float(np.sqrt(sum(np.square(p[name] - x).sum() for name, x in parameters().items())))
        for p in (jax.tree.map(np.asarray, now.params), expected)
    ]
    np.testing.assert_allclose(*moved, rtol=1e-4)
    assert (moved[0] < 2e-3) == (limit == 1e-3)
    for ours, theirs in zip(jax.tree.leaves(now.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_adam_takes_its_b2_from_the_config() -> None:
    params = {"w": jnp.ones((2, 2))}
    for b2 in (0.999, 0.9):
        tx = state.whole(state.make_optimizer(optimizer(name="adamw", b2=b2), 100))
        _, now = tx.update(params, tx.init(params), params)
        (nu,) = [
            x
            for p, x in jax.tree_util.tree_leaves_with_path(now)
            if ".nu" in jax.tree_util.keystr(p)
        ]
        np.testing.assert_allclose(nu, 1 - b2, rtol=1e-5)


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon", "scale"])
def test_a_step_that_is_not_finite_is_skipped(name: str) -> None:
    """Parameters are those of the other steps; the optimizer by itself would be NaN for ever."""
    config = optimizer(name=name, learning_rate=1e-2, warmup_steps=0, weight_decay=0.01)
    if name == "scale":
        exchange = jaxcomm.one_bit_adam("data", 1.0, dense_steps=2)
    else:
        exchange = jaxcomm.mean("data", "int8", error_feedback=True)
    rate = optax.scale(1e-2 if name == "scale" else -1e-2)  # of every step, also after a skip
    tx = optax.chain(exchange, state.whole(state.make_optimizer(config, 10)._replace(rate=rate)))
    good, bad = batches(4, 32), batches(1, 32)[0]
    bad["image"][3] = 255

    def overflowing(params: Any, images: jax.Array) -> jax.Array:
        return forward(params, images) * jnp.where(images.max() > 16, jnp.inf, 1.0)

    gradient = step.make_gradient(overflowing, 0.0, 1)
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
        run = jax.jit(step.make_train_step(gradient, tx))

        def parameters_after(steps: list[Any]) -> list[Any]:
            now, found = state.init(parameters(), tx), []
            for batch in steps:
                now, values = run(now, jaxcomm.global_batch(batch, sync.AXIS))
                found.append(jax.tree.map(np.asarray, now.params))
                assert values[step.FINITE] == (batch is not bad)
            return found

        with_bad = parameters_after([*good[:3], bad, good[3]])
        jax.tree.map(np.testing.assert_array_equal, with_bad[3], with_bad[2])
        jax.tree.map(np.testing.assert_array_equal, with_bad[4], parameters_after(good)[3])
        # However many there are: the run counts them and ends.
        *_, last = parameters_after([bad] * 30)
        assert np.isfinite(last["w1"]).all()


def test_gradients_that_are_not_finite_are_seen_behind_a_finite_loss() -> None:
    """Behind the exchange, and in local steps, each of which a device skips by itself."""

    def rootless(params: Any, images: jax.Array) -> jax.Array:
        nothing = 0 * params["w1"].sum() + jnp.where(images.max() > 200, 0.0, 1.0)
        return forward(params, images) + jnp.sqrt(nothing)

    gradient = step.make_gradient(rootless, 0.0, 1)
    bad = batches(1, 32)[0]
    bad["image"][:8] = 255  # of one device
    for method in (
        optax.chain(jaxcomm.mean("data"), optax.apply_if_finite(optax.sgd(0.1), 99)),
        jaxcomm.local_steps(optax.sgd(0.1), 2, optax.sgd(1.0), jaxcomm.mean("data")),
    ):
        with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
            run = jax.jit(step.make_train_step(gradient, method))
            now, found = state.init(parameters(), method), []
            for batch in (batches(1, 32)[0], bad):
                now, values = run(now, jaxcomm.global_batch(batch, sync.AXIS))
                found.append(float(values[step.FINITE]))
                assert np.isfinite(values["loss"])
        assert found == [1, 0]


def test_a_warm_up_as_long_as_the_run_ends_with_its_last_step() -> None:
    rates = state.learning_rates(optimizer(learning_rate=0.3, warmup_steps=4), 4)
    np.testing.assert_allclose(rates, [0.0, 0.1, 0.2, 0.3], atol=1e-7)
