"""Every method in every framework and view: the same parameters after the same steps.

What the parameters must be, the tests of each method hold against their oracles; here a plain
dict in the global view stands for them. All but a few run on a mesh with a further axis, over which
the kernels are sharded.
"""

import functools
from collections.abc import Callable
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
STEPS, WORLD = 4, 4
SGD = optax.sgd(0.05, momentum=0.9)

# A new method enters here.
METHODS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "mean": lambda: optax.chain(jaxcomm.mean("data"), SGD),
    "mean in bfloat16": lambda: optax.chain(jaxcomm.mean("data", "bfloat16"), SGD),
    "mean in float16 on a ring": lambda: optax.chain(jaxcomm.mean("data", "float16", "ring"), SGD),
    "cnat": lambda: optax.chain(jaxcomm.mean("data", "cnat"), SGD),
    "int8, errors fed back": lambda: optax.chain(
        jaxcomm.mean("data", "int8", error_feedback=True), SGD
    ),
    "random_k, errors fed back": lambda: optax.chain(
        jaxcomm.mean("data", "random_k", error_feedback=True), SGD
    ),
    "majority vote": lambda: optax.chain(jaxcomm.majority_vote("data"), optax.sgd(0.01)),
    "scaled_sign, errors fed back": lambda: optax.chain(
        jaxcomm.mean("data", "scaled_sign", error_feedback=True), SGD
    ),
    "votes with scales, errors fed back": lambda: optax.chain(
        jaxcomm.majority_vote("data", error_feedback=True), SGD
    ),
    "Signum": lambda: optax.chain(
        jaxcomm.local("data", optax.trace(0.9)),
        jaxcomm.majority_vote("data", ties="zero"),
        optax.sgd(0.01),
    ),
    "votes on corrected gradients": lambda: optax.chain(
        jaxcomm.control_variates(jaxcomm.mean("data", "bfloat16"), 2),
        jaxcomm.majority_vote("data"),
        optax.sgd(0.01),
    ),
    "Ok-Topk": lambda: optax.chain(jaxcomm.sparse_mean("data", 0.1), SGD),
    "TopkA with momentum correction": lambda: optax.chain(
        jaxcomm.sparse_mean("data", 0.1, "topk_allgather", momentum_correction=0.9), optax.sgd(0.05)
    ),
    "PowerSGD": lambda: optax.chain(jaxcomm.low_rank_mean("data", 2), SGD),
    "1-bit Adam": lambda: jaxcomm.one_bit_adam("data", 1e-2, dense_steps=2),
    "factored Adam in one bit": lambda: jaxcomm.factored_adam(
        jaxcomm.mean("data", "scaled_sign", error_feedback=True), 1e-2
    ),
    "warm-up, then qsgd": lambda: optax.chain(
        jaxcomm.dense_first(jaxcomm.mean("data", "qsgd"), 2), optax.adamw(1e-2, weight_decay=1e-3)
    ),
    "DiLoCo": lambda: jaxcomm.local_steps(
        optax.adam(1e-2),
        every=2,
        outer=optax.sgd(0.7, momentum=0.9, nesterov=True),
        exchange=jaxcomm.mean("data", "int8", error_feedback=True),
        fragments=2,
        delay=1,
    ),
    "multi_steps": lambda: jaxcomm.multi_steps(
        optax.chain(jaxcomm.mean("data", "bfloat16"), optax.clip_by_global_norm(1.0), SGD), 2
    ),
}


class Net(nnx.Module):
    """Two layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(5, 16, rngs=rngs)
        self.last = nnx.Linear(16, 6, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.tanh(self.first(x)))


@functools.cache
def initial_params() -> Any:
    return nnx.to_pure_dict(nnx.state(Net(nnx.Rngs(0)), nnx.Param))


def loss_fn(params: Any, batch: Any) -> jax.Array:
    hidden = jnp.tanh(batch[0] @ params["first"]["kernel"] + params["first"]["bias"])
    return jnp.mean((hidden @ params["last"]["kernel"] + params["last"]["bias"] - batch[1]) ** 2)


def batches() -> list[Any]:
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return [(normal(16, 5), normal(16, 6)) for _ in range(STEPS)]


def on_mesh(model: int) -> jax.sharding.Mesh:
    if model == 1:
        return jaxcomm.data_mesh(devices=jax.devices()[:WORLD])
    kinds = (jax.sharding.AxisType.Auto,) * 2
    devices = jax.devices()[: WORLD * model]
    return jax.make_mesh((WORLD, model), ("data", "model"), kinds, devices=devices)


def placed(params: Any) -> Any:
    """Replicated, but for the kernels, sharded over "model": one bucket compiles faster."""
    params = jaxcomm.replicate(params)
    mesh = jax.sharding.get_mesh()
    if "model" in mesh.axis_names:
        for layer, spec in {"first": P(None, "model"), "last": P("model")}.items():
            kernel = jax.device_put(params[layer]["kernel"], NamedSharding(mesh, spec))
            params[layer]["kernel"] = kernel
    return params


def step_of(tx: optax.GradientTransformation) -> Callable[..., Any]:
    def step(params: Any, state: Any, batch: Any) -> Any:
        own = isinstance(state, jaxcomm.LocalStepsState)
        at = jaxcomm.local_params(state) if own else params
        loss, grads = jaxcomm.value_and_grad(loss_fn, "data")(at, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def sharded_like(*trees: Any) -> Any:
    """Where the arrays are, for XLA to leave them there."""
    return jax.tree.map(lambda x: x.sharding, trees)


def with_a_dict(tx: optax.GradientTransformation) -> Any:
    params = placed(initial_params())
    state, step = tx.init(params), jax.jit(step_of(tx))
    for batch in batches():
        params, state, _ = step(params, state, jaxcomm.global_batch(batch, "data"))
    assert step._cache_size() == 1
    return params


def in_shard_map(tx: optax.GradientTransformation, checks: bool) -> Any:
    mesh = jax.sharding.get_mesh()
    params = placed(initial_params())
    state, spec = tx.init(params), jaxcomm.state_spec(tx, params, mesh, {"data"})
    step = jax.jit(
        jax.shard_map(
            step_of(tx),
            in_specs=(P(), spec, P("data")),
            out_specs=(P(), spec, P()),
            axis_names={"data"},
            check_vma=checks,
        ),
        out_shardings=(*sharded_like(params, state), None),
    )
    for batch in batches():
        params, state, _ = step(params, state, batch)
    assert step._cache_size() == 1
    return params


def with_nnx(tx: optax.GradientTransformation) -> Any:
    model = Net(nnx.Rngs(0))
    nnx.update(model, placed(nnx.to_pure_dict(nnx.state(model, nnx.Param))))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model: Net, optimizer: Any, batch: Any) -> jax.Array:
        graph, params = nnx.split(model, nnx.Param)

        def loss_fn(params: Any, batch: Any) -> jax.Array:
            return jnp.mean((nnx.merge(graph, params)(batch[0]) - batch[1]) ** 2)

        loss, grads = jaxcomm.value_and_grad(loss_fn, "data")(params, batch)
        optimizer.update(model, grads)
        return loss

    for batch in batches():
        step(model, optimizer, jaxcomm.global_batch(batch, "data"))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def with_train_state(tx: optax.GradientTransformation) -> Any:
    state = TrainState.create(apply_fn=None, params=placed(initial_params()), tx=tx)
    state = state.replace(step=jnp.zeros((), jnp.int32))  # else a number, and a program more

    @jax.jit
    def step(state: TrainState, batch: Any) -> Any:
        loss, grads = jaxcomm.value_and_grad(loss_fn, "data")(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    for batch in batches():
        state, _ = step(state, jaxcomm.global_batch(batch, "data"))
    assert step._cache_size() == 1
    return state.params


FRAMEWORKS: dict[str, Callable[[optax.GradientTransformation], Any]] = {
    "shard_map": lambda tx: in_shard_map(tx, checks=False),
    "shard_map with checks": lambda tx: in_shard_map(tx, checks=True),
    "nnx": with_nnx,
    "TrainState": with_train_state,
}


# Where a method runs beside a dict in the global view on a mesh with a further axis, which all do.
# Every framework has methods whose states are of different kinds: counters, residuals, momenta of
# each device, thresholds of each bucket, an optimizer, stages, accumulated gradients.
EVERYWHERE = ["mean in bfloat16", "int8, errors fed back"]
TOPK = "TopkA with momentum correction"
FURTHER = {
    "shard_map": [*EVERYWHERE, "1-bit Adam", "multi_steps"],
    "shard_map with checks": METHODS,
    # Without coins: they follow the paths of leaves, which nnx names otherwise.
    "nnx": [*EVERYWHERE, "Signum", "1-bit Adam", "factored Adam in one bit"],
    "TrainState": [*EVERYWHERE, TOPK, "votes with scales, errors fed back", "warm-up, then qsgd"],
}
ON_ONE_AXIS = ["int8, errors fed back", TOPK, "votes on corrected gradients"]
# These are slow: they differ from another row in what a message holds, which no framework sees.
SLOW = ["mean", "mean in float16 on a ring", "scaled_sign, errors fed back"]
EXPLICIT_SLOW = [*SLOW, "cnat", "random_k, errors fed back", "majority vote"]


def each_method(slow: list[str], newest: str | None = None) -> pytest.MarkDecorator:
    marks = {
        m: [pytest.mark.slow] * (m in slow) + [pytest.mark.newest] * (m == newest) for m in METHODS
    }
    return pytest.mark.parametrize("method", [pytest.param(m, marks=marks[m]) for m in METHODS])


def moved(params: Any) -> bool:
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(initial_params()), strict=True)
    return all(not np.allclose(a, b, atol=1e-3) for a, b in pairs)


def assert_the_same(method: str, model: int, frameworks: list[str]) -> Any:
    """Returns the parameters of a dict in the global view."""
    with jax.set_mesh(on_mesh(model)):
        reference = with_a_dict(METHODS[method]())
        ends = {name: FRAMEWORKS[name](METHODS[method]()) for name in frameworks}
    assert moved(reference)
    for name, end in ends.items():
        for (path, a), b in zip(
            jax.tree_util.tree_leaves_with_path(end), jax.tree.leaves(reference), strict=True
        ):
            where = f"{name}: {jax.tree_util.keystr(path)}"
            np.testing.assert_allclose(a, b, atol=1e-5, err_msg=where)
    return reference


@each_method(SLOW, newest="int8, errors fed back")
def test_the_same_parameters_in_every_framework(method: str) -> None:
    assert_the_same(method, 2, [name for name, methods in FURTHER.items() if method in methods])


def on_explicit_axes(tx: optax.GradientTransformation) -> Any:
    """With the mesh and the batches of somebody who uses nothing of jaxcomm for them."""
    with jax.set_mesh(jax.make_mesh((WORLD,), ("data",), devices=jax.devices()[:WORLD])):
        params = jaxcomm.replicate(initial_params())
        state, step = tx.init(params), jax.jit(step_of(tx))
        for batch in batches():
            params, state, _ = step(params, state, batch)
    assert step._cache_size() == 1
    return params


@each_method(EXPLICIT_SLOW)
def test_the_same_parameters_on_explicit_axes(method: str) -> None:
    kinds = jax.make_mesh((WORLD,), ("data",), devices=jax.devices()[:WORLD]).axis_types
    assert kinds == (jax.sharding.AxisType.Explicit,)
    # On one axis also within a checked shard_map, where states are of different kinds.
    views = ["shard_map with checks"] if method in ON_ONE_AXIS else []
    reference = assert_the_same(method, 1, views)
    found = on_explicit_axes(METHODS[method]())
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(reference), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_step_compiles_once_on_one_device() -> None:
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:1])):
        with_a_dict(METHODS["int8, errors fed back"]())


# What no framework sees, but types do.
FURTHER_TYPES: dict[str, Callable[[], optax.GradientTransformation]] = {
    "TopkDSA": lambda: jaxcomm.sparse_mean("data", 0.1, "topk_dsa"),
    "gTopk": lambda: jaxcomm.sparse_mean("data", 0.1, "gtopk"),
    "Gaussiank": lambda: jaxcomm.sparse_mean("data", 0.1, "gaussiank"),
    "PowerSGD in bfloat16": lambda: jaxcomm.low_rank_mean("data", 2, codec="bfloat16"),
}


@pytest.mark.parametrize("method", [*METHODS, *FURTHER_TYPES])
def test_state_keeps_its_types_for_bfloat16_and_where_float64_is_on(method: str) -> None:
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), initial_params())
    batch = [jnp.asarray(x, jnp.bfloat16) for x in batches()[0]]
    tx = (METHODS | FURTHER_TYPES)[method]()
    with jax.set_mesh(on_mesh(1)), jax.enable_x64(True):
        state = jax.eval_shape(tx.init, params)
        new, after, _ = jax.eval_shape(step_of(tx), params, state, batch)
    types = [x.dtype for x in jax.tree.leaves(state)]
    assert jnp.float64 not in types
    assert [x.dtype for x in jax.tree.leaves(after)] == types
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(new))
