"""Training with parameters and optimizer state split over the axis: FSDP."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxcomm
from jaxcomm import algorithms, codecs

P = PartitionSpec
Tree = dict[str, Any]
WORLD = 4


def normal(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


LAYERS, WIDTH = 3, 16


def weights() -> Tree:
    return {
        "bias": np.zeros(WIDTH, np.float32),
        "embed": normal((12, WIDTH), 0) * np.float32(0.3),
        "head": normal((WIDTH, 8), 1) * np.float32(0.3),
        "layers": {
            "bias": np.zeros((LAYERS, WIDTH), np.float32),
            "kernel": normal((LAYERS, WIDTH, WIDTH), 2) * np.float32(0.2),
        },
        "unused": {"kernel": np.ones((LAYERS, 4, 4), np.float32)},
    }


def net(params: Tree, batch: Any, policy: Any = None) -> jax.Array:
    """Scanned layers, each whole while it is used; the embedding is used twice."""
    ends = jaxcomm.gather({name: params[name] for name in ("bias", "embed", "head")})
    x = jnp.dot(batch[0], ends["embed"]) + ends["bias"][None]

    def layer(x: jax.Array, params: Tree) -> tuple[jax.Array, None]:
        own = jaxcomm.gather(params)
        return x + jnp.tanh(x @ own["kernel"] + own["bias"][None]), None

    x, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), x, params["layers"])
    back = jnp.mean((x @ ends["embed"].T - batch[0]) ** 2)
    return jnp.mean((x @ ends["head"] - batch[1]) ** 2) + back


def net_batches(number: int = 3) -> list[Any]:
    return [(normal((16, 12), 10 + i), normal((16, 8), 20 + i)) for i in range(number)]


def trained(params: Tree, tx: Any, loss_fn: Any, microbatches: int = 1, axis: Any = "data") -> Any:
    """Parameters, state and losses after three steps, and the program of one."""
    differentiate = jaxcomm.accumulate(jaxcomm.value_and_grad(loss_fn, axis), microbatches)
    state, losses = tx.init(params), []

    @jax.jit
    def step(params: Tree, state: Any, batch: Any) -> Any:
        is_sharded = any(isinstance(s, jaxcomm.ShardedState) for s in state)
        at = jaxcomm.sharded_params(params, state) if is_sharded else params
        loss, grads = differentiate(at, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for batch in net_batches():
        batch = jaxcomm.global_batch(batch, axis)
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    assert step._cache_size() == 1
    return params, state, losses, step.lower(params, state, batch).compile()


CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


@pytest.mark.standard_promotion  # of optax
@pytest.mark.parametrize(
    "microbatches",
    [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.newest)],
)
def test_in_float32_it_is_data_parallel_training(microbatches: int) -> None:
    """With scanned layers, recomputed; clipped by the norm of all; Adam's state is split too."""
    jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:WORLD]))
    whole = jaxcomm.replicate(weights())
    tx = optax.chain(jaxcomm.mean("data"), CLIPPED)
    expected, _, losses, _ = trained(whole, tx, net, microbatches)
    tx = optax.chain(jaxcomm.sharded(jaxcomm.mean("data")), CLIPPED)
    params = jaxcomm.shard(weights(), "data", layers=["layers/*", "unused/*"])
    params, state, found, program = trained(params, tx, net, microbatches)
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), params, expected)
    mu = state[1][1][0].mu
    assert mu["layers"]["kernel"].addressable_shards[0].data.size == LAYERS * WIDTH * WIDTH // WORLD
    report = jaxcomm.wire_report(program)
    ends, layers = 4 * (12 + 8) * WIDTH // WORLD, 4 * LAYERS * WIDTH * WIDTH // WORLD
    others = microbatches * (WORLD - 1)
    assert report.only("reduce-scatter").bytes_max == others * (ends + layers)
    # XLA gathers the ends once for both microbatches.
    gathers = WORLD - 1, others
    assert report.only("all-gather").bytes_max == gathers[0] * ends + gathers[1] * 2 * layers


@pytest.mark.standard_promotion
def test_what_came_from_far_may_be_kept_for_the_way_back() -> None:
    """ZeRO++'s hpZ, as a policy of `jax.checkpoint`: the second gather stays on its host."""
    mesh = jax.make_mesh(
        (2, 2), ("hosts", "devices"), (AxisType.Auto,) * 2, devices=jax.devices()[:WORLD]
    )
    jax.set_mesh(mesh)
    axes = ("hosts", "devices")
    algorithm = algorithms.hierarchical(near=algorithms.direct(), far=algorithms.direct())
    exchange = jaxcomm.sharded(jaxcomm.mean(axes, "bfloat16", algorithm), "int8")
    tx = optax.chain(exchange, optax.sgd(0.1))
    sent, losses = {}, {}
    for name in ("", "jaxcomm.far"):
        policy = jax.checkpoint_policies.save_only_these_names(name)
        loss_fn = functools.partial(net, policy=policy)
        params = jaxcomm.shard(weights(), axes)
        _, _, losses[name], program = trained(params, tx, loss_fn, axis=axes)
        report = jaxcomm.wire_report(program).only("all-gather")
        sent[name] = {k: r.bytes_max for k, r in report.by_axes(mesh).items()}
    assert losses[""] == losses["jaxcomm.far"]
    layers = LAYERS * codecs.int8().message_bytes(WIDTH * WIDTH // WORLD)
    assert sent[""]["hosts",] - sent["jaxcomm.far"]["hosts",] == layers
    assert sent[""]["devices",] == sent["jaxcomm.far"]["devices",]


@pytest.mark.standard_promotion
def test_layers_that_are_not_gathered_keep_their_residual_and_twice_is_refused() -> None:
    jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:WORLD]))
    tx = optax.chain(
        jaxcomm.sharded(jaxcomm.mean("data", "int4", error_feedback=True)), optax.sgd(0.1)
    )
    params = jaxcomm.shard(weights(), "data")
    state = tx.init(params)
    own = state[0].residual
    ones = [jax.device_put(np.ones(x.shape, np.float32), x.sharding) for x in own.values]
    state = (state[0]._replace(residual=type(own)(ones, own.specs)), *state[1:])

    @functools.partial(jax.jit, static_argnums=3)
    def step(params: Tree, state: Any, batch: Any, twice: bool) -> Any:
        def loss_fn(params: Tree, batch: Any) -> jax.Array:
            extra = jnp.sum(jaxcomm.gather(params["head"])) if twice else 0.0
            return net(params, batch) + extra

        at = jaxcomm.sharded_params(params, state)
        _, grads = jaxcomm.value_and_grad(loss_fn, "data")(at, batch)
        return tx.update(grads, state, params)

    batch = jaxcomm.global_batch(net_batches()[0], "data")
    updates, after = step(params, state, batch, False)
    embed, head, kernel, unused = after[0].residual.values
    assert all(np.abs(x).max() > 0 and not (np.asarray(x) == 1).any() for x in (embed, head))
    np.testing.assert_array_equal(unused, 1)
    np.testing.assert_array_equal(updates["unused"]["kernel"], 0)
    updates, after = step(params, state, batch, True)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(updates))
    jax.tree.map(np.testing.assert_array_equal, after[0].residual, state[0].residual)


@pytest.mark.standard_promotion
def test_frozen_parameters_are_gathered_and_send_no_gradient() -> None:
    jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:WORLD]))
    trained_ = optax.chain(jaxcomm.sharded(jaxcomm.mean("data", "bfloat16")), optax.adam(1e-2))
    frozen = jaxcomm.sharded(jaxcomm.set_to_zero("data"), "int8")
    labels = {name: "frozen" if name == "layers" else "trained" for name in weights()}
    tx = optax.partition({"trained": trained_, "frozen": frozen}, labels)
    params = jaxcomm.shard(weights(), "data")
    state = tx.init(params)

    @jax.jit
    def step(params: Tree, state: Any, batch: Any) -> Any:
        at = jaxcomm.sharded_params(params, state)
        _, grads = jaxcomm.value_and_grad(net, "data")(at, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    batch = jaxcomm.global_batch(net_batches()[0], "data")
    after, state = step(params, state, batch)
    after, _ = step(after, state, batch)
    assert step._cache_size() == 1
    jax.tree.map(np.testing.assert_array_equal, after["layers"], weights()["layers"])
    assert np.abs(after["embed"] - weights()["embed"]).max() > 1e-3
    report = jaxcomm.wire_report(step.lower(params, state, batch).compile())
    ends = 2 * (12 + 8) * WIDTH // WORLD
    assert report.only("all-to-all").bytes_max == (WORLD - 1) * ends
    layers = LAYERS * codecs.int8().message_bytes(WIDTH * WIDTH // WORLD)
    gathered = (WORLD - 1) * (2 * layers + 2 * ends)  # the ends in float32
    assert report.only("all-gather").bytes_max == gathered


def types_of(state: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding.spec), state)


@pytest.mark.newest
@pytest.mark.standard_promotion
def test_init_in_jit_and_eval_shape_and_inside_shard_map() -> None:
    mesh = jaxcomm.data_mesh(devices=jax.devices()[:WORLD])
    exchange = jaxcomm.sharded(jaxcomm.mean("data", "int4", error_feedback=True))
    with jax.set_mesh(mesh):
        structs = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, weights()))
        structs = jaxcomm.shard(structs, "data")
        tx = jaxcomm.with_param_specs(optax.chain(exchange, optax.adam(1e-2)), structs)
        spec = jaxcomm.state_spec(tx, structs, mesh)
        params = jaxcomm.shard(weights(), "data")
        expected = tx.init(params)
        state = jax.jit(tx.init, out_shardings=spec)(params)
        assert types_of(state[0]) == types_of(expected[0])
        assert jax.tree.structure(jax.eval_shape(tx.init, structs)) == jax.tree.structure(state)
        specs = jax.tree.map(lambda x: x.sharding.spec, params)
        inside = jax.jit(jax.shard_map(tx.init, in_specs=(specs,), out_specs=spec))(params)
        assert types_of(inside) == types_of(state)
        with pytest.raises(ValueError, match="cannot see here how parameter .* is split"):
            jax.eval_shape(exchange.init, structs)


def as_bfloat16(params: Tree) -> Tree:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)


def test_bad_input() -> None:
    """Each is one error before anything runs, which names what is wrong and what to write."""
    jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:WORLD]))
    mean = jaxcomm.mean("data", "int8")
    with pytest.raises(ValueError, match=r"parameter odd of shape \(6, 7\) .* exempt=\['odd'\]"):
        jaxcomm.shard({"odd": jnp.zeros((6, 7))}, "data")
    with pytest.raises(TypeError, match="layers must be a list"):
        jaxcomm.shard({"w": jnp.zeros((8, 8))}, "data", layers="w")
    with pytest.raises(TypeError, match="sharded takes what jaxcomm.mean"):
        jaxcomm.sharded(optax.chain(mean, optax.sgd(0.1)))
    with pytest.raises(TypeError, match=r"got sparse_mean; .* use jaxcomm.mean\(.*int4"):
        jaxcomm.sharded(jaxcomm.sparse_mean("data", 0.01))
    with pytest.raises(ValueError, match="unknown codec 'int9'"):
        jaxcomm.sharded(mean, "int9")
    with pytest.raises(ValueError, match="cannot be gathered in scaled_sign"):
        jaxcomm.sharded(mean, "scaled_sign")
    with pytest.raises(ValueError, match="leave out bucket_order"):
        jaxcomm.sharded(jaxcomm.mean("data", bucket_order=["w"]))
    with pytest.raises(ValueError, match="random_k draws"):
        jaxcomm.sharded(jaxcomm.mean("data", "random_k"))
    with pytest.raises(ValueError, match="second_hop is the format"):
        jaxcomm.sharded(jaxcomm.mean("data", "int8", second_hop="bfloat16"))
    with pytest.raises(ValueError, match="majority_vote with error feedback"):
        jaxcomm.sharded(jaxcomm.majority_vote("data", error_feedback=True))
    tx = jaxcomm.sharded(mean)
    whole = {"w": jnp.zeros((8, 8)), "b": jnp.zeros(8)}
    with pytest.raises(ValueError, match="parameter w of shape .* is not split over 'data'"):
        tx.init(jaxcomm.replicate(whole))
    params = jaxcomm.shard(whole, "data")
    with pytest.raises(ValueError, match="parameter w is sharded over 'data'"):
        mean.init(params)
    stack = jax.device_put(jnp.zeros((8, 8, 4)), NamedSharding(jax.sharding.get_mesh(), P("data")))
    with pytest.raises(ValueError, match="parameter w is split along its axis of layers"):
        jaxcomm.with_layer_axis(tx, ["w"]).init({"w": stack})
    state = tx.init(params)
    with pytest.raises(ValueError, match="no exchange has parameter c"):
        jaxcomm.sharded_params(params | {"c": jnp.zeros(3)}, state)
    with pytest.raises(ValueError, match="parameter b is exchanged twice"):
        jaxcomm.sharded_params(params, (state, state))
    with pytest.raises(ValueError, match="found none"):
        jaxcomm.sharded_params(params, optax.EmptyState())
    with pytest.raises(ValueError, match="were not exchanged as shards"):
        tx.update({name: jnp.zeros((WORLD, *x.shape)) for name, x in whole.items()}, state)
    at = jaxcomm.sharded_params(params, state)
    with pytest.raises(ValueError, match="exchanged in the backward pass"):
        jaxcomm.mean("data").update(at, jaxcomm.mean("data").init(jaxcomm.replicate(whole)))
    for use in (jnp.sum, lambda w: w[0], abs, lambda w: 1 > w, lambda w: np.ones(8) @ w):
        with pytest.raises(TypeError, match="parameter w is a shard; compute with what jaxcomm.ga"):
            use(at["w"])
    x = jaxcomm.global_batch(np.ones((WORLD, 8), np.float32), "data")
    f = lambda params, x: jnp.mean(x @ jaxcomm.gather(params)["w"])  # noqa: E731
    _, grads = jaxcomm.value_and_grad(f, "data")(params, x)
    with pytest.raises(ValueError, match="were not exchanged as shards"):
        tx.update(grads, state)
    with pytest.raises(ValueError, match="state of parameter w was changed together with it"):
        f = lambda p, x: jnp.mean(jaxcomm.gather(as_bfloat16(p))["w"] @ x.T)  # noqa: E731
        jaxcomm.value_and_grad(f, "data")(at, x)
    both = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(both), pytest.raises(ValueError, match="axes 'data' alone"):
        tx.init(jaxcomm.shard(whole, "data"))
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:3])):
        three = jaxcomm.shard({"w": jnp.zeros((6, 4))}, "data")
        halving = jaxcomm.sharded(jaxcomm.mean("data", "int8", "halving_doubling"))
        with pytest.raises(ValueError, match="HalvingDoubling.*leaves 3 devices 2 blocks"):
            halving.init(three)


CENTRES = normal((WORLD, 16), 5)
METHODS: dict[str, Callable[[], Any]] = {
    "bfloat16": lambda: optax.chain(
        jaxcomm.sharded(jaxcomm.mean("data", "bfloat16"), "bfloat16"), optax.adamw(1e-2)
    ),
    "int4, errors fed back": lambda: optax.chain(
        jaxcomm.sharded(jaxcomm.mean("data", "int4", error_feedback=True), "int8"), optax.adam(1e-2)
    ),
    "scaled_sign, errors fed back": lambda: optax.chain(
        jaxcomm.sharded(jaxcomm.mean("data", "scaled_sign", error_feedback=True)),
        optax.sgd(0.1, momentum=0.9),
    ),
    "no exchange": lambda: optax.chain(
        jaxcomm.sharded(jaxcomm.no_exchange("data")), optax.adam(1e-2)
    ),
}


def dealt_by_label(seed: int, examples: int) -> tuple[np.ndarray, np.ndarray]:
    """Every device has examples of one class alone."""
    labels = np.repeat(np.arange(WORLD), examples)
    return CENTRES[labels] + normal((len(labels), 16), seed), labels


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", METHODS)
def test_training_on_data_dealt_by_label(name: str) -> None:
    """Without the exchange, a device's shard learns its own class alone."""
    jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:WORLD]))
    tx = METHODS[name]()
    params = {"first": normal((16, 32), 1) / 4, "last": normal((32, WORLD), 2) / 6}
    params = jaxcomm.shard(params, "data")
    state = tx.init(params)

    def logits_of(params: Tree, x: jax.Array) -> jax.Array:
        own = jaxcomm.gather(params)
        return jnp.tanh(x @ own["first"]) @ own["last"]

    def loss_fn(params: Tree, batch: Any) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels
        return losses(logits_of(params, batch[0]), batch[1]).mean()

    @jax.jit
    def step(params: Tree, state: Any, batch: Any) -> Any:
        at = jaxcomm.sharded_params(params, state)
        loss, grads = jaxcomm.value_and_grad(loss_fn, "data")(at, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for i in range(60):
        batch = jaxcomm.global_batch(dealt_by_label(i, 16), "data")
        params, state, loss = step(params, state, batch)
        float(loss)
    x, labels = dealt_by_label(1000, 64)
    # Outside of the loss, arrays are whole.
    accuracy = (np.asarray(jax.jit(logits_of)(params, x)).argmax(1) == labels).mean()
    print(name, accuracy)
    assert (accuracy > 0.9) == (name != "no exchange"), accuracy


@pytest.mark.newest
@pytest.mark.standard_promotion
def test_explicit_axes() -> None:
    """As `jax.make_mesh` makes them: nothing compiles twice, and models can be evaluated."""
    mesh = jax.make_mesh((WORLD,), ("data",), (AxisType.Explicit,), devices=jax.devices()[:WORLD])
    jax.set_mesh(mesh)
    exchange = jaxcomm.sharded(jaxcomm.mean("data", "int4", error_feedback=True), "int8")
    tx = optax.chain(exchange, optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    params = jaxcomm.shard(weights(), "data", layers=["layers/*", "unused/*"])
    after, _, losses, _ = trained(params, tx, net)  # which counts its programs
    assert losses[-1] < losses[0]
    x, y = net_batches()[0]
    assert np.isfinite(jax.jit(net)(after, (jnp.asarray(x), jnp.asarray(y))))


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_what_updates_lack_is_in_the_residual(make_mesh: Any, microbatches: int) -> None:
    """Also in several microbatches, of which each is exchanged: the residual is that of a step."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((32, 8, 8), np.float32)
    start = {"w": rng.standard_normal((8, 8), np.float32)}

    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.sum(jaxcomm.gather(params)["w"] * batch.mean(0))  # its gradient is the mean

    exchange = jaxcomm.mean("data", "scaled_sign", error_feedback=True)
    tx = optax.chain(jaxcomm.sharded(exchange, gather="float32"), optax.sgd(1.0))
    f = jaxcomm.accumulate(jaxcomm.value_and_grad(loss, "data"), microbatches)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        _, grads = f(jaxcomm.sharded_params(params, state), batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(make_mesh(4)):
        params = jaxcomm.shard(start, "data")
        state = tx.init(params)
        for _ in range(5):
            params, state = step(params, state, jaxcomm.global_batch(x, "data"))
    lacks = np.asarray(params["w"]) - (start["w"] - 5 * x.mean(0))
    (residual,) = (np.asarray(a) for a in jax.tree.leaves(state) if a.shape == (4, 8, 8))
    np.testing.assert_allclose(residual.mean(0), lacks, atol=1e-5)
    assert np.abs(lacks).max() > 0.1
