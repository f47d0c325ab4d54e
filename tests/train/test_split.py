"""The training program with parameters that are split: over all devices, or within groups."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from running import read_config

import jaxcomm
from train import measure, models, replicas, state, step, sync
from train.errors import UserError

WORLD, LENGTH, VOCABULARY = 4, 12, 32
GPT = {
    "name": "transformer",
    "dtype": "float32",
    "width": 32,
    "depth": 2,
    "heads": 4,
    "mlp_width": 64,
    "recompute": True,
}


def settings(**options: Any) -> Any:
    config = read_config("digits_vit").sync
    with config.unlocked():
        config.update({"codec": "float32", **options})
    return config


def batches(steps: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, VOCABULARY, (steps, 8, LENGTH + 1)).astype(np.int32)
    return [{"image": row[:, :-1], "label": row[:, 1:]} for row in rows]


def trained(
    steps: int = 3, optimizer: optax.GradientTransformation | None = None, **options: Any
) -> tuple[list[float], Any, jaxcomm.WireReport]:
    """Losses, the last state and what a step sends, on four devices."""
    config = settings(**options)
    jax.set_mesh(sync.make_mesh(config, jax.devices()[:WORLD]))
    graph, params = models.build(GPT, (LENGTH,), VOCABULARY, 0)
    gradient = step.make_gradient(step.make_forward(graph), 0.0, 1)
    tx = optax.chain(sync.build(config, (), steps), optimizer or optax.adam(1e-2))
    now = state.init(params, tx, lambda p: sync.place(p, config))
    data = [sync.global_batch(batch) for batch in batches(steps)]
    run = step.compile_step(step.make_train_step(gradient, tx), now, data[0])
    losses = []
    for batch in data:
        now, metrics = run(now, batch)
        losses.append(float(metrics["loss"]))
    return losses, now, jaxcomm.wire_report(run)


def kernels_of(now: Any) -> list[jax.Array]:
    """Without biases: that of the keys has no gradient but rounding errors, which Adam scales."""
    return [x for x in jax.tree.leaves(now.params) if x.ndim > 3 or x.shape == (VOCABULARY, 32)]


def between(report: jaxcomm.WireReport) -> jaxcomm.WireReport:
    """What is sent between groups."""
    (own,) = [r for k, r in report.by_axes(jax.sharding.get_mesh()).items() if sync.AXIS in k]
    return own


def test_losses_are_those_of_replicated_training() -> None:
    """In the three forms: on all devices, split over all of them, split within groups of two."""
    expected, copied, _ = trained()
    in_groups, now, report = trained(fsdp=2)
    np.testing.assert_allclose(in_groups, expected, rtol=1e-6)
    for ours, theirs in zip(kernels_of(now), kernels_of(copied), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    kernel = now.params["stack"]["expand"]["kernel"]
    moment = now.opt_state[1][0].mu["stack"]["expand"]["kernel"]
    for x in (kernel, moment):
        assert x.addressable_shards[0].data.size == kernel.size / 2
    small = sum(x.size for x in jax.tree.leaves(now.params)) - sum(
        x.size for x in jax.tree.leaves(now.params) if not x.sharding.is_fully_replicated
    )
    split = sum(x.size for x in jax.tree.leaves(now.params)) - small
    # Of two groups: half of each array there and back, beside loss, accuracy and a flag.
    assert 0 <= between(report).bytes_max - 4 * (split / 2 + small) < 16
    check = replicas.make_check(now.params, "mean")
    check(now.params, 4)
    found, now, report = trained(gather="float32")
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for ours, theirs in zip(kernels_of(now), kernels_of(copied), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    kernel = now.params["stack"]["expand"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size / WORLD
    moment = now.opt_state[1][0].mu["stack"]["expand"]["kernel"]
    assert moment.addressable_shards[0].data.size == kernel.size / WORLD
    # Layers are gathered one by one, and again on the way back.
    layers = [c for c in report.only("all-gather").collectives if c.times == GPT["depth"]]
    assert len(layers) == 2
    check = replicas.make_check(now.params, "mean")  # of what is copied
    check(now.params, 4)
    less, _, small = trained(gather="int8", codec="int4", error_feedback=True)
    np.testing.assert_allclose(less, expected, rtol=1e-2)
    assert small.bytes_max < 0.35 * report.bytes_max


def test_muon_sends_parts_of_matrices_once_each_way() -> None:
    """Of a stack of two layers; the device that makes one orthogonal has it whole."""
    config = read_config("digits_vit").optimizer
    config.name, config.learning_rate, config.warmup_steps = "muon", 0.02, 0
    expected, copied, _ = trained(optimizer=state.whole(state.make_optimizer(config, 9)))
    for options, world in (({"fsdp": 2}, 2), ({"gather": "float32"}, WORLD)):
        optimizer = state.whole(state.make_optimizer(config, 9))
        found, now, report = trained(optimizer=optimizer, **options)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        for ours, theirs in zip(kernels_of(now), kernels_of(copied), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-4)
        there_and_back = [c for c in report.only("all-to-all").collectives if c.branch]
        stacks = {2048: (2, 2), 1024: (6, 2)}  # matrices of each shape, by their values
        dealt = sum(n * -(-g // world) for n, groups in stacks.items() for g in groups)
        assert [c.shapes for c in there_and_back] == [((1, dealt // world),) * world] * 2


def test_the_norm_of_split_gradients_is_that_of_the_whole() -> None:
    """So that they are clipped like others, in all three forms."""
    clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))
    expected, _, _ = trained(optimizer=clipped)
    unclipped, _, _ = trained(optimizer=optax.sgd(1.0))
    assert abs(unclipped[-1] - expected[-1]) > 1e-3
    for options in ({"fsdp": 2}, {"gather": "float32"}):
        found, _, _ = trained(optimizer=clipped, **options)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_bytes_count_the_norm_that_is_taken_where_a_step_is_not_skipped() -> None:
    """Of split gradients it is an all-reduce, inside of a conditional of optax."""
    clipped = state.skipping(optax.clip_by_global_norm(0.1), optax.sgd(1.0))
    for options in ({"fsdp": 2}, {"gather": "float32"}):
        _, now, report = trained(steps=1, optimizer=clipped, **options)
        assert report.conditionals
        sent = measure.Sent(report, settings(**options), now.params)
        assert sent.in_step(1, 0) == pytest.approx(float(report.bytes_max) / sent.params)


def test_what_cannot_be_split() -> None:
    for options, message in (
        ({"gather": "int9"}, "config.sync.gather: there is no 'int9'; did you mean"),
        ({"gather": "int8", "method": "sparse_mean", "density": 0.1}, "sharded takes what"),
        ({"gather": "scaled_sign"}, "cannot be gathered in scaled_sign"),
    ):
        with pytest.raises(UserError, match=message):
            sync.build(settings(**options), (), 10)
    with jax.set_mesh(sync.make_mesh(settings(fsdp=2), jax.devices()[:WORLD])):
        with pytest.raises(UserError, match=r"config.sync.fsdp: parameter w of shape \(3, 5\)"):
            sync.place({"w": jnp.zeros((3, 5))}, settings(fsdp=2))
    jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:WORLD]))
    with pytest.raises(UserError, match=r"config.sync.gather: parameter w of shape \(3, 5\)"):
        sync.place({"w": jnp.zeros((3, 5))}, settings(gather="int8"))
    votes = sync.build(settings(gather="int8", method="majority_vote"), (), 10)
    assert votes.init(sync.place({"w": jnp.zeros((8, 5))}, settings(gather="int8"))).scheme.signs


def test_parameters_that_are_split_have_no_order_and_keep_what_is_exempt_whole() -> None:
    config = settings(gather="int8", exempt=("head/*",))
    jax.set_mesh(sync.make_mesh(config, jax.devices()[:WORLD]))
    params = {"head": {"kernel": jnp.zeros((8, 5))}, "stem": {"kernel": jnp.zeros((8, 5))}}
    placed = sync.place(params, config)
    assert placed["head"]["kernel"].is_fully_replicated
    assert not placed["stem"]["kernel"].is_fully_replicated
    sync.build(config, ("head/kernel", "stem/kernel"), 10).init(placed)
