"""Numbers may be Python's or numpy's; what is no number is refused before anything is traced."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm

MEAN = jaxcomm.mean("data")
WITH_NUMPY: list[Callable[[], Any]] = [
    lambda: jaxcomm.mean("data", bucket_mib=np.float32(1), seed=np.int64(3)),
    lambda: jaxcomm.sparse_mean("data", np.float32(0.1), momentum_correction=np.float32(0.9)),
    lambda: jaxcomm.low_rank_mean("data", np.int64(2)),
    lambda: jaxcomm.multi_steps(MEAN, np.int64(2)),
    lambda: jaxcomm.dense_first(MEAN, np.int32(2)),
    lambda: jaxcomm.stages((np.int64(0), MEAN), (np.int64(2), MEAN)),
    lambda: jaxcomm.local_steps(optax.sgd(0.1), np.int64(2), optax.sgd(1.0), MEAN),
    lambda: jaxcomm.factored_adam(MEAN, np.float32(0.1), weight_decay=np.float32(0.1)),
    lambda: jaxcomm.one_bit_adam("data", np.float32(0.1), total_steps=np.int64(100)),
    lambda: jaxcomm.accumulate(lambda p, b: (p, p), np.int64(2)),
    lambda: jaxcomm.codecs.qsgd(levels=np.int64(7)),
    lambda: jaxcomm.algorithms.circulant(np.array([2, 1])),
    lambda: jaxcomm.plan.fabrics.star("star", np.int64(4), 50),
]


@pytest.mark.parametrize("make", WITH_NUMPY)
def test_numbers_of_numpy(make: Callable[[], Any]) -> None:
    make()


@pytest.mark.parametrize("seed", ["a", None, 1.5, True])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    for factory in (
        jaxcomm.mean,
        jaxcomm.majority_vote,
        functools.partial(jaxcomm.low_rank_mean, rank=2),
    ):
        with pytest.raises(TypeError, match="seed must be an integer, got"):
            factory("data", seed=seed)
        with pytest.raises(ValueError, match="seed must be an integer that int64 holds"):
            factory("data", seed=2**70)


@pytest.mark.parametrize("every", [True, 2.0, "2", 0])
def test_what_is_no_count(every: Any) -> None:
    with pytest.raises(ValueError, match="needs a positive number of steps"):
        jaxcomm.multi_steps(MEAN, every)


def test_a_schedule_is_no_count() -> None:
    with pytest.raises(ValueError, match="it takes no schedule"):
        jaxcomm.multi_steps(MEAN, lambda step: 4)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("factory", [jaxcomm.mean, jaxcomm.majority_vote])
def test_an_algorithm_of_two_axes_is_given_two(factory: Callable[..., Any]) -> None:
    ring = jaxcomm.algorithms.ring()
    algorithm = jaxcomm.algorithms.hierarchical(near=ring, far=ring)
    factory(("hosts", "devices"), algorithm=algorithm)
    with pytest.raises(ValueError, match="needs two mesh axes"):
        factory("data", algorithm=algorithm)
    with pytest.raises(ValueError, match="needs two mesh axes"):
        jaxcomm.low_rank_mean("data", 2, algorithm=algorithm)


@pytest.mark.parametrize("feedback", ["first_hop", 1.0])
def test_a_vote_has_no_first_hop_alone(feedback: Any) -> None:
    with pytest.raises(ValueError, match="error_feedback of a vote must be True or False"):
        jaxcomm.majority_vote("data", error_feedback=feedback)


@pytest.mark.parametrize("option", ["slack", "scaling", "tolerance"])
def test_options_of_a_sparse_all_reduce_are_numbers(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be (at least|more than) 1"):
        jaxcomm.sparse.oktopk(**{option: "2"})  # pyright: ignore[reportArgumentType]


def test_momentum_of_values_that_do_not_wait() -> None:
    with pytest.raises(ValueError, match=r"put jaxcomm.local\(axis, optax.trace"):
        jaxcomm.sparse_mean("data", error_feedback=False, momentum_correction=0.9)


LISTS: dict[str, Callable[..., Any]] = {
    "mean": functools.partial(jaxcomm.mean, "data"),
    "majority_vote": functools.partial(jaxcomm.majority_vote, "data"),
    "sparse_mean": functools.partial(jaxcomm.sparse_mean, "data", 0.1),
    "low_rank_mean": functools.partial(jaxcomm.low_rank_mean, "data", 2),
    "one_bit_adam": functools.partial(jaxcomm.one_bit_adam, "data", 0.1, dense_steps=9),
}


@pytest.mark.parametrize("make", LISTS.values(), ids=LISTS.keys())
def test_names_come_in_lists(make: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"exempt must be a list of patterns.*write \['head/\*'\]"):
        make(exempt="head/*")
    with pytest.raises(TypeError, match="exempt must be a list of patterns, got 3"):
        make(exempt=3)
    with pytest.raises(TypeError, match="bucket_order must be a list of paths, got 3"):
        make(bucket_order=3)
    with pytest.raises(ValueError, match="bucket_order names 'a/w' twice; it names each"):
        make(bucket_order=["a/w", "b", "a/w"])
    with pytest.raises(TypeError, match=r"exempt is called as exempt\(path, shape\), and"):
        make(exempt=lambda path: False)
    make(exempt=lambda path, shape: False, bucket_order=("w",))


def test_options_of_an_optimizer() -> None:
    fed_back = jaxcomm.mean("data", "int8", error_feedback=True)
    with pytest.raises(TypeError, match=r"learning_rate is called as learning_rate\(count\), and"):
        jaxcomm.factored_adam(fed_back, lambda: 0.1)  # pyright: ignore[reportArgumentType]

    @functools.wraps(lambda count, total: 0.1)
    def schedule(count: Any) -> float:
        return 0.1

    jaxcomm.factored_adam(fed_back, schedule)
    jaxcomm.factored_adam(fed_back, jax.jit(schedule))
    with pytest.raises(TypeError, match="nesterov must be True or False, got 'no'"):
        jaxcomm.factored_adam(fed_back, 0.1, nesterov="no")  # pyright: ignore[reportArgumentType]
    labels = {"w": "decay", "v": "no_decay"}
    tx = jaxcomm.factored_adam(fed_back, 0.1, weight_decay=0.1, mask=labels)
    params = {name: jnp.ones((2, 2)) for name in labels}
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        grads = jaxcomm.mark_local({name: jnp.ones((2, 2, 2)) for name in labels})
        with pytest.raises(TypeError, match="mask must have True or False for each leaf, got 'no"):
            jax.jit(tx.update)(grads, tx.init(params), params)


def test_what_is_no_transformation() -> None:
    none: Any = None
    with pytest.raises(TypeError, match="state_spec takes an optax transformation, got a NoneType"):
        jaxcomm.state_spec(none, {}, jaxcomm.data_mesh())
    with (
        jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])),
        pytest.raises(TypeError, match="dense_first needs an optax transformation as dense, got 0"),
    ):
        jaxcomm.dense_first(MEAN, 2, dense=0)  # pyright: ignore[reportArgumentType]


def test_what_a_device_does_alone_exchanges_nothing() -> None:
    tx = jaxcomm.local("data", optax.chain(optax.trace(0.9), MEAN))
    with (
        jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])),
        pytest.raises(ValueError, match="inner exchanges; give local what each device does alone"),
    ):
        tx.init({"w": np.zeros((2, 2), np.float32)})


def test_accumulate_takes_a_function() -> None:
    with pytest.raises(TypeError, match="accumulate takes a function, got 3"):
        jaxcomm.accumulate(3, 2)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("order", [{"w", "b"}, np.array(["w", "b"]), "w", 3])
def test_an_order_is_a_list(order: Any) -> None:
    for make in jaxcomm.mean, jaxcomm.majority_vote, jaxcomm.sparse_mean:
        with pytest.raises(TypeError, match="bucket_order must be a list of paths, got "):
            make("data", bucket_order=order)


@pytest.mark.parametrize("layers", [5, None, "blocks", [], [3]])
def test_layers_are_a_list_of_paths(layers: Any) -> None:
    with pytest.raises(TypeError, match="layers must be a list of paths of stacked layers"):
        jaxcomm.in_backward(jaxcomm.mean("data"), layers)


def test_an_axis_in_a_tuple_is_that_axis(mesh8: Any) -> None:
    params = {"blocks": jnp.ones((3, 8, 8))}

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        layers = lambda x, w: (x @ jaxcomm.exchanged(w), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(layers, x, params["blocks"])[0])

    both = optax.chain(jaxcomm.local("data", optax.trace(0.9)), jaxcomm.mean(("data",)))
    with jax.set_mesh(mesh8):
        jaxcomm.control_variates(both).init(params)
        exchange = jaxcomm.in_backward(jaxcomm.mean(("data",)), ["blocks"])
        given = exchange.attach(params, exchange.init(params))
        jax.jit(jaxcomm.value_and_grad(loss_fn, "data"))(given, jnp.ones((8, 8)))
    mesh = jax.make_mesh((4, 2), ("data", "pod"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    two = optax.chain(jaxcomm.local("pod", optax.trace(0.9)), jaxcomm.mean("data"))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="found 'data' and 'pod'; name the"):
        jaxcomm.control_variates(two).init(params)


def test_an_exchange_in_a_wrapper_is_named(mesh8: Any) -> None:
    mean, params = jaxcomm.mean("data"), {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}
    parts = optax.partition({"x": mean, "y": jaxcomm.mean("data")}, {"w": "x", "b": "y"})
    with jax.set_mesh(mesh8):
        for wrapped in parts, optax.named_chain(("m", mean)):
            with pytest.raises(ValueError, match="one inside a wrapper, such as optax.partition"):
                jaxcomm.local_steps(optax.sgd(0.1), 2, optax.sgd(1.0), wrapped).init(params)
        with pytest.raises(ValueError, match="takes an exchange alone, and this one is inside a"):
            jaxcomm.dense_first(parts, 3).init(params)
        with pytest.raises(ValueError, match="got a chain with other transformations"):
            chain = optax.chain(mean, optax.clip(1.0))
            jaxcomm.local_steps(optax.sgd(0.1), 2, optax.sgd(1.0), chain).init(params)


def test_local_steps_need_a_parameter(mesh8: Any) -> None:
    tx = jaxcomm.local_steps(optax.sgd(0.1), 2, optax.sgd(1.0), jaxcomm.mean("data"))
    with jax.set_mesh(mesh8), pytest.raises(ValueError, match="needs a parameter that has eleme"):
        tx.init({"w": jnp.zeros((0, 3))})


def test_a_rank_for_vectors_in_a_stack(mesh8: Any) -> None:
    """That each of them has a single row is why the rank compresses nothing."""
    tx = jaxcomm.low_rank_mean("data", 1, exempt=lambda path, shape: False)
    with jax.set_mesh(mesh8):
        jaxcomm.with_layer_axis(tx, ["norm"]).init({"norm": jnp.zeros((32, 32))})


def test_levels_that_leave_no_block_to_a_device_are_refused_in_init() -> None:
    mesh = jax.make_mesh((4, 2), ("far", "near"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    direct, ring = jaxcomm.algorithms.direct(aggregator=0), jaxcomm.algorithms.ring()
    for near, far in (direct, ring), (ring, direct):
        algorithm = jaxcomm.algorithms.hierarchical(near=near, far=far)
        tx = jaxcomm.sharded(jaxcomm.mean(("far", "near"), "int8", algorithm))
        with jax.set_mesh(mesh), pytest.raises(ValueError, match="parameters cannot be split over"):
            tx.init(jaxcomm.shard({"w": jnp.zeros((8, 8))}, ("far", "near")))


def squares(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch @ params) ** 2)


def test_gradients_are_no_parameters(mesh8: Any) -> None:
    f, w, x = jaxcomm.value_and_grad(squares, "data"), jnp.ones((4, 2)), jnp.ones((8, 4))
    with jax.set_mesh(mesh8):
        _, grads = jax.jit(f)(w, x)
        with pytest.raises(TypeError, match="got gradients as parameters; write"):
            jax.jit(f)(grads, x)


def test_a_loss_that_returns_nothing(mesh8: Any) -> None:
    f = jaxcomm.value_and_grad(lambda w, x: None, "data")
    with jax.set_mesh(mesh8), pytest.raises(TypeError, match="the loss function returned None"):
        jax.jit(f)(jnp.ones((4, 2)), jnp.ones((8, 4)))


def test_what_has_no_microbatches_is_named(mesh8: Any) -> None:
    def loss_fn(w: Any, batch: Any) -> jax.Array:
        return squares(w, batch["x"]) + 0 * jax.random.uniform(batch["k"][0])

    f = jaxcomm.accumulate(jaxcomm.value_and_grad(loss_fn, "data"), 2)
    batch = {"x": jnp.ones((16, 4)), "k": jax.random.split(jax.random.key(0), 8)}
    with jax.set_mesh(mesh8), pytest.raises(ValueError, match="1 examples of leaf k of the batch"):
        jax.jit(f)(jnp.ones((4, 2)), batch)

    def on_device(x: jax.Array) -> Any:
        return f(jnp.ones((4, 2)), {"x": x, "s": jnp.zeros(())})[0]

    with jax.set_mesh(mesh8), pytest.raises(ValueError, match="leaf s of the batch is a scalar"):
        jax.shard_map(on_device, in_specs=jax.P("data"), out_specs=jax.P())(jnp.ones((16, 4)))


def test_the_order_of_a_backward_pass_needs_rows_and_floats(mesh8: Any) -> None:
    f = jaxcomm.value_and_grad(squares, "data")
    with jax.set_mesh(mesh8):
        with pytest.raises(ValueError, match="the batch has no arrays, got None"):
            jaxcomm.backward_order(f, jnp.ones((4, 2)), None)
        with pytest.raises(TypeError, match="int32"):
            jaxcomm.backward_order(f, jnp.ones((4, 2), int), jnp.ones((8, 4)))


@pytest.mark.parametrize("devices", ["cpu", {"a": 1}, [0, 1], np.array([[1, 2]])])
def test_a_mesh_is_of_devices(devices: Any) -> None:
    with pytest.raises(TypeError, match="data_mesh takes a sequence of devices, got"):
        jaxcomm.data_mesh(devices=devices)
    with pytest.raises(ValueError, match="takes each device once, got .* several times"):
        jaxcomm.data_mesh(devices=[*jax.devices()[:2], jax.devices()[0]])
