"""What a pytree would lose of a Flax NNX model is refused, by the model and as an argument."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxcomm

pytestmark = pytest.mark.newest


def test_statistics_of_a_module_are_not_lost(mesh8: Any) -> None:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norm = nnx.BatchNorm(8, rngs=rngs)

    model = Net(nnx.Rngs(0))
    gradient = jaxcomm.value_and_grad(lambda model, x: model.norm(x).mean(), "data")
    with jax.set_mesh(mesh8), pytest.raises(ValueError, match="hold a BatchStat, .* nnx.split"):
        gradient(model, jnp.ones((8, 8)))


class Count(nnx.Variable[Any]):
    pass


class Counting(nnx.Module):
    def __init__(self) -> None:
        self.dense, self.calls = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), Count(jnp.zeros(()))

    def __call__(self, x: jax.Array, counts: bool = True) -> jax.Array:
        if counts:
            self.calls[...] += 1.0
        self.seen = nnx.Intermediate(x)
        return self.dense(x)


def test_what_a_module_counts_is_not_lost(mesh8: Any) -> None:
    def loss(model: Counting, batch: Any, counts: bool) -> jax.Array:
        return jnp.mean(model(batch, counts) ** 2)

    with jax.set_mesh(mesh8):
        model, batch = jaxcomm.replicate(Counting()), np.ones((8, 8), np.float32)
        gradient = jaxcomm.value_and_grad(loss, "data")
        with pytest.raises(ValueError, match="changes calls of type Count.* its new value"):
            gradient(model, batch, True)
        assert float(gradient(model, batch, False)[0]) > 0


def test_keys_of_a_module_are_drawn_anew(mesh8: Any) -> None:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def loss(params: Any, x: jax.Array, rest: Any) -> Any:
        model = nnx.merge(graph, rest, copy=True)
        return model.dropout(x).mean(), nnx.state(model)

    graph, rest = nnx.split(Net(nnx.Rngs(0)), ...)
    with jax.set_mesh(mesh8):
        gradient = jaxcomm.value_and_grad(lambda model, x: model.dropout(x).mean(), "data")
        with pytest.raises(ValueError, match="hold a Rng.*a key of the step too, for nnx.reseed"):
            gradient(Net(nnx.Rngs(0)), jnp.ones((8, 8)))
        with pytest.raises(TypeError, match="is a random key.*another key in every step"):
            jaxcomm.value_and_grad(loss, "data", has_aux=True)(jnp.ones(1), jnp.ones((8, 8)), rest)


class Tied(nnx.Module):
    def __init__(self) -> None:
        self.first = self.last = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.tanh(self.first(x)))


def test_shared_parameters_stay_one(mesh8: Any) -> None:
    """Split, they are trained as by NNX alone; unsplit, they would be two."""
    x = np.random.default_rng(0).standard_normal((16, 8), np.float32)
    loss = lambda model, x: jnp.mean((model(x) - x) ** 2)  # noqa: E731
    both = r"first/.* and last/.* are one Param, .* nnx.split"
    graph, params = nnx.split(Tied(), nnx.Param)
    of_state = lambda params, x: loss(nnx.merge(graph, params), x)  # noqa: E731
    wanted = params
    for _ in range(3):
        grads = jax.grad(of_state)(wanted, x)
        wanted = jax.tree.map(lambda p, g: p - 0.1 * g, wanted, grads)
    tx = optax.chain(jaxcomm.mean("data"), optax.sgd(0.1))
    with jax.set_mesh(mesh8):
        with pytest.raises(ValueError, match=both):
            jaxcomm.replicate(Tied())
        with pytest.raises(ValueError, match=both):
            nnx.jit(jaxcomm.value_and_grad(loss, "data"))(Tied(), x)
        with pytest.raises(ValueError, match=both):
            tx.init(Tied())
        params = jaxcomm.replicate(params)
        state = tx.init(params)
        for _ in range(3):
            _, grads = jaxcomm.value_and_grad(of_state, "data")(params, x)
            updates, state = jax.jit(tx.update)(grads, state)
            params = optax.apply_updates(params, updates)
    assert len(jax.tree.leaves(params)) == 2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, wanted)


class Noisy(nnx.Module):
    def __init__(self) -> None:
        self.dense, self.dropout = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Dropout(0.5)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs) -> jax.Array:
        return self.dense(self.dropout(x, rngs=rngs))


def test_what_a_further_argument_counts_is_not_lost(mesh8: Any) -> None:
    x = np.ones((8, 8), np.float32)

    def noisy(model: Noisy, x: jax.Array, rngs: nnx.Rngs) -> jax.Array:
        return jnp.mean(model(x, rngs) ** 2)

    def with_key(model: Noisy, x: jax.Array, key: jax.Array) -> jax.Array:
        return noisy(model, x, nnx.Rngs(jax.random.fold_in(key, jax.lax.axis_index("data"))))

    def measured(model: Noisy, x: jax.Array, metric: nnx.metrics.Average) -> jax.Array:
        metric.update(values=model.dense(x))
        return jnp.mean(model.dense(x) ** 2)

    def taught(model: Noisy, x: jax.Array, teacher: Any, returned: bool) -> Any:
        loss = jnp.mean((model.dense(x) - teacher.norm(x)) ** 2)
        return loss, nnx.state(teacher, nnx.BatchStat) if returned else 0.0

    class Teacher(nnx.Module):
        def __init__(self) -> None:
            self.norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))

    with jax.set_mesh(mesh8):
        model = jaxcomm.replicate(Noisy())
        gradient = jaxcomm.value_and_grad(noisy, "data")
        with pytest.raises(ValueError, match="argument .*count of type RngCount.*the same numbers"):
            nnx.jit(gradient)(model, x, nnx.Rngs(dropout=0))
        losses = {
            float(jaxcomm.value_and_grad(with_key, "data")(model, x, jax.random.key(i))[0])
            for i in range(3)
        }
        assert len(losses) == 3
        with pytest.raises(ValueError, match="argument .*/count of type MetricState.* as aux"):
            jaxcomm.value_and_grad(measured, "data")(model, x, nnx.metrics.Average())
        taught_gradient = jaxcomm.value_and_grad(taught, "data", has_aux=True)
        with pytest.raises(ValueError, match="argument .*norm/.* of type BatchStat.* as aux"):
            taught_gradient(model, x, Teacher(), returned=False)
        (_, statistics), _ = taught_gradient(model, x, Teacher(), returned=True)
    assert np.abs(statistics["norm"]["mean"][...]).min() > 0


def test_a_variable_without_a_module_is_not_lost(mesh8: Any) -> None:
    """Neither as an argument nor in a dictionary; one in a state is who split the model's own."""

    def counting(w: jax.Array, x: jax.Array, given: Any) -> Any:
        count = given if isinstance(given, Count) else given["count"]
        count[...] += 1.0
        return jnp.mean(x @ w), count[...]

    w, x = jnp.ones((8, 8)), jnp.ones((8, 8))
    with jax.set_mesh(mesh8):
        for given, where in (
            (Count(jnp.zeros(())), "0/0"),
            ({"count": Count(jnp.zeros(()))}, "0/0/count"),
        ):
            alone = jaxcomm.value_and_grad(lambda *args: counting(*args)[0], "data")
            with pytest.raises(ValueError, match=f"argument {where} of type Count.* would be lost"):
                alone(w, x, given)
            (_, count), _ = jaxcomm.value_and_grad(counting, "data", has_aux=True)(w, x, given)
            assert float(count) == 1.0
        state = nnx.State({"count": Count(jnp.zeros(()))})
        assert float(alone(w, x, state)[0]) == 8.0
        of_flat = lambda w, x, flat: counting(w, x, dict(nnx.from_flat_state(flat)))[0]  # noqa: E731
        flat = nnx.to_flat_state(state)
        assert float(jaxcomm.value_and_grad(of_flat, "data")(w, x, flat)[0]) == 8.0


class Block(nnx.Module):
    """Its transformations write all variables back, unchanged."""

    def __init__(self) -> None:
        self.calls, rngs = Count(jnp.zeros(())), nnx.Rngs(0)
        self.dense = nnx.WeightNorm(nnx.Linear(8, 8, rngs=rngs), rngs=rngs)

    @nnx.remat
    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.jit(lambda self, x: jnp.tanh(self.dense(x)) + 0 * self.calls[...])(self, x)


def mean_square(model: Any, x: jax.Array, *others: Any) -> jax.Array:
    return jnp.mean((model(x) - sum(other(x) for other in others)) ** 2)


def seeded(model: Any, x: jax.Array, other: Any) -> jax.Array:
    nnx.reseed(other, default=jax.random.fold_in(jax.random.key(0), jax.lax.axis_index("data")))
    return mean_square(model, x, other.dropout) + other.norm(x, use_running_average=True).sum()


def derived(model: Any, x: jax.Array, other: Any) -> Any:
    other.norm(x)
    means = jax.lax.pmean(nnx.state(other, nnx.BatchStat), "data")
    return mean_square(model, x), jax.lax.stop_gradient(means)


class Statistics(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.norm, self.dropout = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)


@pytest.mark.parametrize(
    ("loss", "model", "further"),
    [
        (mean_square, Block, ()),
        (mean_square, Block, (Block,)),
        (mean_square, Block, (Tied,)),
        (seeded, Block, (Statistics,)),
        (derived, Block, (Statistics,)),
    ],
)
def test_what_is_not_lost_is_not_refused(mesh8: Any, loss: Any, model: Any, further: Any) -> None:
    x = np.random.default_rng(0).standard_normal((16, 8), np.float32)
    gradient = jaxcomm.value_and_grad(loss, "data", has_aux=loss is derived)
    with jax.set_mesh(mesh8):
        graph, params, rest = nnx.split(model(), nnx.Param, ...)
        of_state = lambda p, x, *rest_: loss(nnx.merge(graph, p, rest, copy=True), x, *rest_)  # noqa: E731
        split = jaxcomm.value_and_grad(of_state, "data", has_aux=loss is derived)
        others = [make() for make in further]
        (found, _), (wanted, _) = gradient(model(), x, *others), split(params, x, *others)
    same = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    assert all(np.isfinite(a).all() and np.allclose(a, b) for a, b in same)


def test_copies_that_start_alike_are_two(mesh8: Any) -> None:
    params = nnx.split(Noisy(), nnx.Param)[1]
    with jax.set_mesh(mesh8):
        first, second = jaxcomm.replicate((params, params))
        assert first["dense"]["kernel"][...] is not second["dense"]["kernel"][...]
        assert isinstance(jaxcomm.replicate(nnx.Rngs(0)), nnx.Rngs)
