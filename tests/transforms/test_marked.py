"""Local gradients have a dtype that only an exchange takes; nothing else gets to a parameter."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec

import jaxcomm
from transforms.both_views import SHAPES, VIEWS, Program, View, gradients

pytestmark = pytest.mark.standard_promotion  # optax promotes
WORLD = 4
ONE_AXIS = VIEWS[:3]
REFUSED = "local gradient in float32, not exchanged: jaxcomm.mean or another exchange comes first"

Params = dict[str, jax.Array]
# Another gradient for every device.
BATCH = np.random.default_rng(0).standard_normal((2 * WORLD, 6)).astype(np.float32)


def loss_fn(params: Params, batch: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(batch @ params["a"].T + params["b"]) ** 2)


def start() -> Params:
    rng = np.random.default_rng(1)
    return {"a": rng.standard_normal((4, 6)).astype(np.float32), "b": np.zeros(4, np.float32)}


def train(tx: optax.GradientTransformation, view: View, steps: int = 1) -> Params:
    """Some steps as a user writes them."""
    mesh = view.mesh(WORLD)
    with jax.set_mesh(mesh):
        params = jaxcomm.replicate(start())
        state = tx.init(params)

        def step(params: Params, state: Any, batch: jax.Array) -> Any:
            _, grads = jaxcomm.value_and_grad(loss_fn, "data")(params, batch)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        if view.manual:
            spec, everywhere = jaxcomm.state_spec(tx, params, mesh), PartitionSpec()
            step = jax.shard_map(
                step,
                in_specs=(everywhere, spec, PartitionSpec("data")),
                out_specs=(everywhere, spec),
                check_vma=view.checks,
            )
        step = jax.jit(step)
        for _ in range(steps):
            params, state = step(params, state, jaxcomm.global_batch(BATCH, "data"))
    return jax.tree.map(np.asarray, params)


each_view = pytest.mark.parametrize("view", ONE_AXIS, ids=lambda view: view.name)


@each_view
@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(0.1),
        optax.sgd(0.1, momentum=0.9),
        optax.sgd(optax.linear_schedule(0.1, 0.0, 9)),
        optax.adam(0.1),
        optax.identity(),
        optax.set_to_zero(),
    ],
    ids=["sgd", "momentum", "schedule", "adam", "identity", "zero"],
)
def test_an_optimizer_alone(tx: optax.GradientTransformation, view: View) -> None:
    with pytest.raises(Exception, match=REFUSED):
        train(tx, view)


BEFORE = {
    "clip": lambda: optax.clip(0.1),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(0.1),
    "adam": lambda: optax.scale_by_adam(),
    "trace": lambda: optax.trace(0.9),
    "decay": lambda: optax.add_decayed_weights(0.1),
    "scale": lambda: optax.scale(2),
    "schedule": lambda: optax.scale_by_schedule(optax.constant_schedule(2.0)),
    "noise": lambda: optax.add_noise(0.1, 0.1, 0),
    "sign": lambda: optax.scale_by_sign(),
    "centralize": lambda: optax.centralize(),
    "normalize": lambda: optax.normalize_by_update_norm(),
}


@each_view
@pytest.mark.parametrize("name", BEFORE)
def test_what_computes_before_the_exchange(name: str, view: View) -> None:
    with pytest.raises(Exception, match="local gradient in float32|abstract method"):
        train(optax.chain(BEFORE[name](), jaxcomm.mean("data"), optax.sgd(0.1)), view)


@each_view
def test_on_each_device_it_may(view: View) -> None:
    clip = jaxcomm.local("data", optax.clip_by_global_norm(0.1))
    train(optax.chain(clip, jaxcomm.mean("data"), optax.sgd(0.1)), view)
    with pytest.raises(TypeError, match="local gradient in float32"):
        train(optax.chain(clip, optax.clip(0.1), jaxcomm.mean("data"), optax.sgd(0.1)), view)


@each_view
@pytest.mark.parametrize(
    "second",
    [jaxcomm.mean("data"), jaxcomm.majority_vote("data"), jaxcomm.set_to_zero("data")],
    ids=["mean", "vote", "zero"],
)
def test_a_second_exchange(second: optax.GradientTransformation, view: View) -> None:
    with pytest.raises(ValueError, match="Exchange once in a chain"):
        train(optax.chain(jaxcomm.mean("data"), second, optax.sgd(0.1)), view)


LABELS = {"a": "trained", "b": "frozen"}


def frozen_by(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    trained = optax.chain(jaxcomm.mean("data"), optax.sgd(0.5))
    return optax.partition({"trained": trained, "frozen": tx}, LABELS)


@each_view
def test_freezing_by_partition(view: View) -> None:
    behind = optax.partition({"trained": optax.sgd(0.5), "frozen": optax.set_to_zero()}, LABELS)
    before = train(frozen_by(jaxcomm.set_to_zero("data")), view, steps=3)
    after = train(optax.chain(jaxcomm.mean("data"), behind), view, steps=3)
    with_labels_of_a_function = optax.partition(
        {
            "trained": optax.chain(jaxcomm.mean("data"), optax.sgd(0.5)),
            "frozen": jaxcomm.set_to_zero("data"),
        },
        lambda tree: jax.tree_util.tree_map_with_path(lambda path, _: LABELS[path[-1].key], tree),
    )
    called = train(with_labels_of_a_function, view, steps=3)
    for name in LABELS:
        np.testing.assert_array_equal(before[name], after[name])
        np.testing.assert_array_equal(before[name], called[name])
    assert np.abs(before["a"] - start()["a"]).max() > 1e-3
    np.testing.assert_array_equal(before["b"], 0)


@each_view
@pytest.mark.parametrize(
    "tx",
    [
        frozen_by(optax.set_to_zero()),
        frozen_by(optax.sgd(0.1)),
        optax.masked(optax.chain(jaxcomm.mean("data"), optax.sgd(0.5)), {"a": True, "b": False}),
        optax.masked(frozen_by(jaxcomm.mean("data")), {"a": True, "b": False}),
        optax.masked(
            optax.chain(
                optax.partition({"x": jaxcomm.mean("data")}, {"a": "x", "b": "x"}), optax.sgd(0.5)
            ),
            {"a": True, "b": False},
        ),
    ],
    ids=["zero", "sgd", "masked", "masked partition", "masked chain of a partition"],
)
def test_a_leaf_that_nobody_exchanges(tx: optax.GradientTransformation, view: View) -> None:
    with pytest.raises(TypeError, match="jaxcomm.set_to_zero freezes what it leaves out"):
        train(tx, view)


def test_a_mask_that_hides_nothing() -> None:
    everything = optax.masked(jaxcomm.mean("data"), {"a": True, "b": True})
    expected = train(optax.chain(jaxcomm.mean("data"), optax.sgd(0.1)), VIEWS[0])
    found = train(optax.chain(everything, optax.sgd(0.1)), VIEWS[0])
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_frozen_leaves_send_nothing() -> None:
    only_kernel = {name: "trained" if name == "kernel" else "frozen" for name in SHAPES}
    tx = optax.partition(
        {"trained": jaxcomm.mean("data"), "frozen": jaxcomm.set_to_zero("data")}, only_kernel
    )
    for view in VIEWS:
        program = Program(view, tx, gradients(WORLD))
        ((updates, _),) = program.run(gradients(WORLD))
        for name in SHAPES:
            assert updates[name].shape == SHAPES[name]
            assert (name == "kernel") == bool(np.any(np.asarray(updates[name])))
        flag = 4 if view.model > 1 else 0  # whether the model axis is finite too
        sent = program.report().bytes_max
        assert 2 * 3 / 4 * 4 * 21 <= sent <= 2 * 3 / 4 * (4 * 21 + flag)


@pytest.mark.filterwarnings("ignore:tx.update runs outside jax.jit")
def test_optimizers_of_flax() -> None:
    with jax.set_mesh(VIEWS[0].mesh(WORLD)):
        batch = jaxcomm.global_batch(BATCH, "data")
        dense = nn.Dense(4)
        params = jaxcomm.replicate(dense.init(jax.random.key(0), BATCH))

        def linen_loss(params: Any, batch: jax.Array) -> jax.Array:
            return jnp.mean(jnp.square(dense.apply(params, batch)))

        def linen_step(state: TrainState) -> TrainState:
            _, grads = jaxcomm.value_and_grad(linen_loss, "data")(state.params, batch)
            return state.apply_gradients(grads=grads)

        def nnx_step(tx: optax.GradientTransformation) -> Any:
            model = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
            graph, params = nnx.split(model, nnx.Param)
            optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

            def loss(params: Any, batch: jax.Array) -> jax.Array:
                return jnp.mean(nnx.merge(graph, params)(batch) ** 2)

            _, grads = jaxcomm.value_and_grad(loss, "data")(params, batch)
            optimizer.update(model, grads)
            return nnx.state(model)

        bad, good = optax.sgd(0.1), optax.chain(jaxcomm.mean("data"), optax.sgd(0.1))
        for step in (nnx_step, lambda tx: linen_step(_train_state(dense, params, tx))):
            step(good)
            with pytest.raises(TypeError, match=REFUSED):
                step(bad)


def _train_state(model: nn.Module, params: Any, tx: optax.GradientTransformation) -> TrainState:
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_come_back(dtype: str) -> None:
    values = np.array([0.0, -0.0, 1.5, -2e-3, np.inf, -np.inf, np.nan])
    tree = {"x": jnp.asarray(values, dtype), "n": jnp.arange(3), "key": jax.random.key(0)}
    marked = jaxcomm.mark_local(tree)
    assert marked["x"].shape == tree["x"].shape and marked["x"].dtype != tree["x"].dtype
    again = jaxcomm.unmark_local(jaxcomm.mark_local(marked))
    assert again["x"].dtype == tree["x"].dtype
    assert np.asarray(again["x"]).tobytes() == np.asarray(tree["x"]).tobytes()
    assert marked["n"] is tree["n"] and marked["key"] is tree["key"]
    np.testing.assert_array_equal(jaxcomm.unmark_local(tree)["n"], np.arange(3))


@pytest.mark.parametrize("use", [jax.random.split, jax.random.normal, lambda k: k * 2])
def test_it_is_no_random_key(use: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="local gradient in"):
        use(jaxcomm.mark_local(jnp.float32(1)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_compiled_step_has_no_conversions(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same program as one that never marks anything, but for names."""
    tx = optax.chain(jaxcomm.mean("data", "cnat"), optax.sgd(0.1))
    with jax.set_mesh(VIEWS[0].mesh(WORLD)):
        params = jaxcomm.replicate(jax.tree.map(lambda x: x.astype(dtype), start()))
        state = tx.init(params)
        grad = jaxcomm.value_and_grad(loss_fn, "data")
        batch = jaxcomm.global_batch(BATCH, "data")

        def text() -> list[str]:
            def step(params: Params, state: Any, batch: jax.Array) -> Any:
                loss, grads = grad(params, batch)
                updates, state = tx.update(grads, state, params)
                return optax.apply_updates(params, updates), state, loss

            program = jax.jit(step).lower(params, state, batch).compile().as_text()
            assert program is not None
            instructions = [line.split(" = ")[1] for line in program.splitlines() if " = " in line]
            return sorted(line.split("(")[0] for line in instructions)

        found = text()
        monkeypatch.setattr(jaxcomm.gradients, "mark", lambda grads, kind, axes: grads)
        assert found == text()


def test_an_update_outside_of_jit_is_warned_of() -> None:
    tx = jaxcomm.mean("data")
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        state, grads = tx.init({"w": jnp.zeros(3)}), jaxcomm.mark_local({"w": jnp.ones((2, 3))})
        with pytest.warns(UserWarning, match="tx.update runs outside jax.jit") as caught:
            tx.update(grads, state)
        assert caught[0].filename == __file__
        jax.jit(tx.update)(grads, state)
        jax.jit(lambda state: tx.update(grads, state))(state)  # of constants


def test_what_is_no_key_says_what_it_is(mesh8: Any) -> None:
    tx = jaxcomm.local_steps(optax.sgd(0.1), 2, optax.sgd(1.0), jaxcomm.mean("data"))
    with jax.set_mesh(mesh8):
        own = jaxcomm.local_params(tx.init({"w": jnp.ones((8, 8))}))["w"]
        with pytest.raises(TypeError, match="not a random key, but each device's own parameters"):
            jax.random.split(own[0, 0, 0])
    with pytest.raises(TypeError, match="not a random key, but local gradient in float32"):
        jax.random.split(jaxcomm.mark_local(jnp.ones((2, 2)))[0, 0])
