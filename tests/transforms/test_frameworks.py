"""Whole training steps: a parameter dict, Flax NNX and a linen-style TrainState, in both views."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import jaxcomm

pytestmark = pytest.mark.standard_promotion
P = PartitionSpec
STEPS = 20


def batches(rows: int = 16) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return [(normal(rows, 5), normal(rows, 3)) for _ in range(STEPS)]


class Net(nnx.Module):
    """Two layers and a norm."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(5, 16, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.last = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.tanh(self.norm(self.first(x))))


def nnx_loss(model: Net, batch: Any) -> jax.Array:
    return jnp.mean((model(batch[0]) - batch[1]) ** 2)


def initial_params() -> dict[str, jax.Array]:
    rng = np.random.default_rng(1)
    return {
        "w1": jnp.asarray(rng.standard_normal((5, 16)), jnp.float32),
        "b1": jnp.zeros(16),
        "w2": jnp.asarray(rng.standard_normal((16, 4)), jnp.float32),
        "w3": jnp.asarray(rng.standard_normal((4, 3)), jnp.float32),
    }


def dict_loss(params: dict[str, jax.Array], batch: Any) -> jax.Array:
    hidden = jnp.tanh(batch[0] @ params["w1"] + params["b1"])
    return jnp.mean((jnp.tanh(hidden @ params["w2"]) @ params["w3"] - batch[1]) ** 2)


def on_one_device(params: Any, loss: Any, optimizer: Any, data: Any) -> Any:
    """Plain optax on the whole batch."""
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    for batch in data:
        params, state = step(params, state, batch)
    return params


@functools.cache
def dict_on_one_device(rows: int = 16) -> Any:
    """24 rows: with momentum; 16: with Adam."""
    optimizer = optax.sgd(0.1, momentum=0.9) if rows == 24 else optax.adam(1e-2)
    return on_one_device(initial_params(), dict_loss, optimizer, batches(rows))


def assert_close(actual: Any, expected: Any, tolerance: float) -> None:
    for (path, a), e in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(a, e, atol=tolerance, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(
    ("world", "algorithm"),
    [
        (1, "native"),
        (2, "direct"),
        (3, "halving_doubling"),
        (3, "ring"),
        pytest.param(8, "native", marks=pytest.mark.newest),
        (8, "circulant"),
    ],
)
def test_float32_follows_one_device_on_the_whole_batch(
    make_mesh: Any, world: int, algorithm: str
) -> None:
    data = batches(24)
    optimizer = optax.sgd(0.1, momentum=0.9)
    expected = dict_on_one_device(24)
    tx = optax.chain(jaxcomm.mean("data", algorithm=algorithm), optimizer)
    with jax.set_mesh(make_mesh(world)):
        params = jaxcomm.replicate(initial_params())
        state = tx.init(params)

        @jax.jit
        def step(params: Any, state: Any, batch: Any) -> Any:
            loss, grads = jaxcomm.value_and_grad(dict_loss, "data")(params, batch)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        for batch in data:
            params, state, _ = step(params, state, jaxcomm.global_batch(batch, "data"))
        assert step._cache_size() == 1
    assert_close(params, expected, 1e-5)


@pytest.mark.parametrize(
    ("codec", "checks"), [("float32", False), ("float32", True), ("bfloat16", True)]
)
def test_manual_view_of_a_whole_step(mesh8: Any, codec: str, checks: bool) -> None:
    data = batches()
    expected = dict_on_one_device()
    tx = optax.chain(jaxcomm.mean("data", codec), optax.adam(1e-2))
    with jax.set_mesh(mesh8):
        params = jaxcomm.replicate(initial_params())
        state = tx.init(params)
        spec = jaxcomm.state_spec(tx, params, mesh8)

        def step(params: Any, state: Any, batch: Any) -> Any:
            loss, grads = jaxcomm.value_and_grad(dict_loss, "data")(params, batch)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        step = jax.jit(
            jax.shard_map(
                step, in_specs=(P(), spec, P("data")), out_specs=(P(), spec, P()), check_vma=checks
            )
        )
        for batch in data:
            params, state, _ = step(params, state, batch)
    assert_close(params, expected, 1e-4 if codec == "float32" else 5e-2)


@pytest.mark.newest
def test_nnx_model_with_its_optimizer(mesh8: Any) -> None:
    data = batches()
    single = Net(nnx.Rngs(0))
    graph, params = nnx.split(single, nnx.Param)
    loss = lambda p, b: nnx_loss(nnx.merge(graph, p), b)  # noqa: E731
    expected = on_one_device(params, loss, optax.adam(1e-2), data)
    with jax.set_mesh(mesh8):
        model = Net(nnx.Rngs(0))
        nnx.update(model, jaxcomm.replicate(nnx.state(model)))
        tx = optax.chain(jaxcomm.mean("data"), optax.adam(1e-2))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def step(model: Net, optimizer: Any, batch: Any) -> jax.Array:
            graph, params = nnx.split(model, nnx.Param)
            loss_fn = lambda p, b: nnx_loss(nnx.merge(graph, p), b)  # noqa: E731
            loss, grads = jaxcomm.value_and_grad(loss_fn, "data")(params, batch)
            optimizer.update(model, grads)
            return loss

        for batch in data:
            step(model, optimizer, jaxcomm.global_batch(batch, "data"))
    assert_close(nnx.state(model, nnx.Param), expected, 1e-4)


def test_local_steps_in_an_nnx_optimizer(mesh8: Any) -> None:
    """It keeps each array of a state in a variable of its own."""
    tx = jaxcomm.local_steps(optax.sgd(0.1), 1, optax.sgd(1.0), jaxcomm.mean("data"))
    single = Net(nnx.Rngs(0))
    graph, params = nnx.split(single, nnx.Param)
    loss = lambda p, b: nnx_loss(nnx.merge(graph, p), b)  # noqa: E731
    expected = on_one_device(params, loss, optax.sgd(0.1), batches()[:5])
    with jax.set_mesh(mesh8):
        model = Net(nnx.Rngs(0))
        nnx.update(model, jaxcomm.replicate(nnx.state(model)))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def step(model: Net, optimizer: Any, batch: Any) -> None:
            own = jaxcomm.local_params(optimizer.opt_state)
            optimizer.update(model, jaxcomm.value_and_grad(loss, "data")(own, batch)[1])

        for batch in batches()[:5]:
            step(model, optimizer, jaxcomm.global_batch(batch, "data"))
    assert_close(nnx.state(model, nnx.Param), expected, 1e-4)


@pytest.mark.parametrize("mesh_name", ["mesh8", "mesh4x2"])
def test_linen_style_train_state(request: Any, mesh_name: str) -> None:
    data = batches()
    expected = dict_on_one_device()
    mesh = request.getfixturevalue(mesh_name)
    with jax.set_mesh(mesh):
        params = jaxcomm.replicate(initial_params())
        if mesh_name == "mesh4x2":
            over_model = NamedSharding(mesh, P(None, "model"))
            params |= {n: jax.device_put(params[n], over_model) for n in ("w1", "w2")}
        tx = optax.chain(jaxcomm.mean("data"), optax.adam(1e-2))
        state = TrainState.create(apply_fn=None, params=params, tx=tx)
        state = state.replace(step=jnp.zeros((), jnp.int32))  # else a number, and a program more

        @jax.jit
        def step(state: TrainState, batch: Any) -> Any:
            loss, grads = jaxcomm.value_and_grad(dict_loss, "data")(state.params, batch)
            return state.apply_gradients(grads=grads), loss

        for batch in data:
            state, _ = step(state, jaxcomm.global_batch(batch, "data"))
    assert_close(state.params, expected, 1e-4)


def test_bfloat16_parameters_and_donation(mesh8: Any) -> None:
    cast = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)  # noqa: E731
    tx = optax.chain(jaxcomm.mean("data", "bfloat16"), optax.sgd(0.1))
    with jax.set_mesh(mesh8):
        params = jaxcomm.replicate(cast(initial_params()))
        state = tx.init(params)

        def step(params: Any, state: Any, batch: Any) -> Any:
            loss, grads = jaxcomm.value_and_grad(dict_loss, "data")(params, cast(batch))
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        step = jax.jit(step, donate_argnums=(0, 1))
        losses = []
        for batch in batches()[:1] * 20:
            params, state, loss = step(params, state, jaxcomm.global_batch(batch, "data"))
            losses.append(float(loss))
    assert all(p.dtype == jnp.bfloat16 for p in jax.tree.leaves(params))
    assert losses[-1] < losses[0] / 2
    assert step._cache_size() == 1


@jax.tree_util.register_pytree_node_class
class Named:
    """An array with names for its axes, as haliax has it: a node without a key for its child."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.array,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "Named":
        return cls(*children)


def test_biases_and_norms_whose_arrays_have_named_axes(mesh8: Any) -> None:
    """Also those of stacked layers; not what is in lists, such as the networks for a scale."""
    leaf = Named(jnp.ones((4, 32)))
    params = {"q": {"bias": leaf, "weight": leaf}, "ln": {"weight": leaf}, "scale": [leaf.array]}
    with jax.set_mesh(mesh8):
        assert (
            not jaxcomm.mean("data").init([leaf.array]).layout.leaves[0].exempt
        )  # its path is "0"
        state = jaxcomm.mean("data", "int8").init(params)
        named = jaxcomm.mean("data", "int8", exempt=["q/weight", "scale/0"]).init(params)
    compressed = [leaf.path for leaf in state.layout.leaves if not leaf.exempt]
    assert compressed == ["q/weight", "scale/0"]
    assert all(leaf.exempt for leaf in named.layout.leaves)
