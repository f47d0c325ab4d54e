"""A model of scanned layers, the methods that exchange it, and the oracle of an unrolled one."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxcomm
from jaxcomm.transforms._buckets import LAYER
from jaxcomm.transforms._stacks import part_of, paths_of

P = PartitionSpec
WORLD, LAYERS, WIDTH, STEPS = 4, 3, 6, 3
Params = dict[str, Any]

INT8, VOTE, OKTOPK = "int8, errors fed back", "majority vote", "Ok-Topk"
# A new method enters here.
METHODS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "mean": lambda: jaxcomm.mean("data"),
    "mean in bfloat16": lambda: jaxcomm.mean("data", "bfloat16"),
    "cnat": lambda: jaxcomm.mean("data", "cnat"),
    INT8: lambda: jaxcomm.mean("data", "int8", error_feedback=True),
    "random_k, errors fed back": lambda: jaxcomm.mean("data", "random_k", error_feedback=True),
    "scaled_sign, errors fed back": lambda: jaxcomm.mean(
        "data", "scaled_sign", error_feedback=True
    ),
    VOTE: lambda: jaxcomm.majority_vote("data"),
    "votes with scales, errors fed back": lambda: jaxcomm.majority_vote(
        "data", error_feedback=True
    ),
    "Signum": lambda: optax.chain(
        jaxcomm.local("data", optax.trace(0.9)), jaxcomm.majority_vote("data", ties="zero")
    ),
    "votes on corrected gradients": lambda: optax.chain(
        jaxcomm.control_variates(jaxcomm.mean("data", "bfloat16"), 2), jaxcomm.majority_vote("data")
    ),
    OKTOPK: lambda: jaxcomm.sparse_mean("data", 0.2),
    "TopkA with momentum correction": lambda: jaxcomm.sparse_mean(
        "data", 0.2, "topk_allgather", momentum_correction=0.9
    ),
    "PowerSGD": lambda: jaxcomm.low_rank_mean("data", 2),
    "1-bit Adam": lambda: jaxcomm.one_bit_adam("data", 1e-2, dense_steps=2),
    "factored Adam in one bit": lambda: jaxcomm.factored_adam(
        jaxcomm.mean("data", "scaled_sign", error_feedback=True), 1e-2, weight_decay=0.1
    ),
    "warm-up, then qsgd": lambda: jaxcomm.dense_first(jaxcomm.mean("data", "qsgd"), 2),
}
# Keys of each layer, residuals; the others are slow.
QUICK = [INT8, VOTE]
# XLA joins a product and a sum to one rounding or not, depending on what is around: a momentum, a
# product of matrices. All others have the same bits.
ROUNDED = ["TopkA with momentum correction", "PowerSGD", "1-bit Adam", "factored Adam in one bit"]


MARKS = {True: pytest.mark.newest, False: pytest.mark.slow}


def initial() -> Params:
    rng = np.random.default_rng(0)
    normal = lambda *shape: 0.4 * rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return {
        "blocks": {"b": normal(LAYERS, WIDTH), "w": normal(LAYERS, WIDTH, WIDTH)},
        "embed": normal(5, WIDTH),
    }


def batch(seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((4 * WORLD, n)).astype(np.float32) for n in (5, WIDTH)]


def apply_layer(x: jax.Array, layer: Params) -> jax.Array:
    return jnp.tanh(x @ layer["w"] + layer["b"][None]) + x


def block(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
    return apply_layer(x, jaxcomm.exchanged(layer)), None


def scanned(params: Params, batch: Any, body: Any = block) -> jax.Array:
    x, _ = jax.lax.scan(body, batch[0] @ params["embed"], params["blocks"])
    return jnp.mean((x - batch[1]) ** 2)


def mesh_of(model: int = 1) -> jax.sharding.Mesh:
    if model == 1:
        return jaxcomm.data_mesh(devices=jax.devices()[:WORLD])
    kinds, devices = (jax.sharding.AxisType.Auto,) * 2, jax.devices()[: WORLD * model]
    return jax.make_mesh((WORLD, model), ("data", "model"), kinds, devices=devices)


def placed(mesh: jax.sharding.Mesh) -> Params:
    params = jaxcomm.replicate(initial())
    if "model" in mesh.axis_names:
        sharding = NamedSharding(mesh, P(None, None, "model"))
        params["blocks"]["w"] = jax.device_put(params["blocks"]["w"], sharding)
    return params


def program(
    exchange: jaxcomm.InBackward, loss_fn: Any = scanned, microbatches: int = 1
) -> Callable[..., Any]:
    """A step as a user writes it, without an optimizer: `(params, state, batch)` to updates."""

    def step(params: Params, state: Any, batch: Any) -> Any:
        gradient = jaxcomm.accumulate(jaxcomm.value_and_grad(loss_fn, "data"), microbatches)
        loss, grads = gradient(exchange.attach(params, state), batch)
        updates, state = exchange.update(grads, state, params)
        return updates, state, loss

    return step


class Run(NamedTuple):
    """The updates of some steps on other batches, the state behind them, the bytes of a step."""

    updates: list[Any]
    state: Any
    sent: Any


def run(
    exchange: jaxcomm.InBackward,
    loss_fn: Any = scanned,
    microbatches: int = 1,
    steps: int = STEPS,
    state: Any = None,
) -> Run:
    """Steps on the mesh that is set, by a program that is compiled once."""
    params = placed(jax.sharding.get_mesh())  # type: ignore[arg-type]
    state = exchange.init(params) if state is None else state
    batches = [jaxcomm.global_batch(batch(seed), "data") for seed in range(steps)]
    step = jax.jit(program(exchange, loss_fn, microbatches))
    step, found = step.lower(params, state, batches[0]).compile(), []
    for data in batches:
        updates, state, _ = step(params, state, data)
        found.append(jax.tree.map(np.asarray, updates))
    return Run(found, state, jaxcomm.wire_report(step).bytes_max)


def assert_equal(found: Any, expected: Any, rounding: float = 0.0) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(found)
    for (path, a), b in zip(leaves, jax.tree.leaves(expected), strict=True):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, rounding, rounding, err_msg=name)


class After:
    """The oracle: the layers of an unrolled model, each exchanged after the backward pass."""

    def __init__(self, exchange: optax.GradientTransformation) -> None:
        self.exchange = optax.with_extra_args_support(exchange)

    def layer(self, tree: Params, i: int, axis: int) -> Any:
        """Layer i alone, in the tree of all parameters."""
        part = {**tree, "blocks": jax.tree.map(lambda x: x.take(i, axis), tree["blocks"])}
        return part_of(part, [path.startswith("blocks") for path in paths_of(part)])

    def rest(self, tree: Params) -> Any:
        return part_of(tree, [not path.startswith("blocks") for path in paths_of(tree)])

    def init(self, params: Params) -> Any:
        layers = [self.exchange.init(self.layer(params, i, 0)) for i in range(LAYERS)]
        return layers, self.exchange.init(self.rest(params))

    def update(self, grads: Params, state: Any, params: Params) -> Any:
        local, layers = jaxcomm.unmark_local(grads), []
        for i, old in enumerate(state[0]):
            token = LAYER.set(jnp.int32(i))
            part = jaxcomm.mark_local(self.layer(local, i, 1))
            layers.append(self.exchange.update(part, old, self.layer(params, i, 0)))
            LAYER.reset(token)
        rest, state = self.exchange.update(self.rest(grads), state[1], self.rest(params))
        parts = [updates["blocks"] for updates, _ in layers]
        updates = {**rest, "blocks": jax.tree.map(lambda *x: jnp.stack(x), *parts)}
        return updates, ([state for _, state in layers], state)
