"""Muon's step of matrices that are split, against their singular values."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers

import jaxcomm

P = PartitionSpec
KINDS = [AxisType.Auto, AxisType.Explicit]
Axes = tuple[list[int], list[int]]
# Shape, how it is split, inputs and outputs: on (hosts, devices) of 2 x 4.
CASES: dict[str, tuple[tuple[int, ...], PartitionSpec, Axes]] = {
    "rows": ((8, 12), P("devices"), ([0], [1])),
    "columns": ((12, 8), P(None, "devices"), ([0], [1])),
    "rows, both axes": ((16, 5), P(("hosts", "devices")), ([0], [1])),
    "columns, in the other order": ((5, 16), P(None, ("devices", "hosts")), ([0], [1])),
    "alike": ((8, 12), P("devices"), ([0], [1])),
    "a stack": ((3, 8, 6), P(None, "devices"), ([1], [2])),
    "a stack, by layer": ((8, 6, 10), P("devices"), ([1], [2])),
    "by layer and by column": ((4, 6, 8), P("hosts", None, "devices"), ([1], [2])),
    "heads": ((2, 12, 4, 3), P(None, None, "devices"), ([1], [2, 3])),
    "widths of heads": ((2, 12, 3, 4), P(None, None, None, "devices"), ([1], [2, 3])),
    "out of heads": ((2, 4, 2, 8), P(None, None, "hosts"), ([1, 2], [3])),
    "outputs first": ((8, 12), P("devices"), ([1], [0])),
    "layers last": ((8, 6, 3), P("devices"), ([0], [1])),
    "whole": ((6, 7), P(), ([0], [1])),
    "one row": ((1, 8), P(None, "devices"), ([0], [1])),
}


def numbers(axes: Axes) -> MuonDimensionNumbers:
    return MuonDimensionNumbers(*map(tuple, axes))


def orthogonal(x: np.ndarray, axes: Axes, rms: float | None = None) -> np.ndarray:
    """Five steps of the polynomial of Muon on the singular values of each matrix."""
    inputs, outputs = axes
    order = [i for i in range(x.ndim) if i not in inputs + outputs] + inputs + outputs
    ordered = x.astype(np.float64).transpose(order)
    rows = np.prod([x.shape[i] for i in inputs])
    matrices = ordered.reshape(-1, rows, np.prod([x.shape[i] for i in outputs]))
    u, s, v = np.linalg.svd(matrices, full_matrices=False)
    s = s / np.linalg.norm(s, axis=-1, keepdims=True)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    _, m, n = matrices.shape
    factor = max(1, n / m) ** 0.5 if rms is None else rms * max(m, n) ** 0.5
    found = factor * (u * s[:, None]) @ v
    return found.reshape(ordered.shape).transpose(np.argsort(order))


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("hosts", "devices"), (kind,) * 2)


def placed(kind: AxisType) -> dict[str, jax.Array]:
    rng, mesh = np.random.default_rng(0), mesh_of(kind)
    return {
        name: jax.device_put(rng.standard_normal(shape, np.float32), NamedSharding(mesh, spec))
        for name, (shape, spec, _) in CASES.items()
    }


DIMENSIONS = {name: numbers(axes) for name, (_, _, axes) in CASES.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rms", [None, 0.2])
def test_each_matrix_is_orthogonal_and_where_it_was(kind: AxisType, rms: float | None) -> None:
    params = placed(kind)
    with jax.set_mesh(mesh_of(kind)):
        tx = jaxcomm.orthogonalize(DIMENSIONS, consistent_rms=rms)
        state = tx.init(params)
        assert not jax.tree.leaves(state)
        found, after = jax.jit(tx.update)(params, state)
        assert after == state
    for name, (_, spec, axes) in CASES.items():
        assert found[name].sharding.is_equivalent_to(params[name].sharding, params[name].ndim)
        expected = orthogonal(np.asarray(params[name]), axes, rms)
        np.testing.assert_allclose(found[name], expected, atol=2e-5, err_msg=f"{name}, {spec}")


def test_an_axis_of_one_device_splits_nothing() -> None:
    """Though on Explicit axes it is part of the types."""
    x = np.random.default_rng(5).standard_normal((4, 8), np.float32)
    for kind in KINDS:
        mesh = jax.make_mesh((1, 4), ("one", "data"), (kind,) * 2, devices=jax.devices()[:4])
        with jax.set_mesh(mesh):
            w = jax.device_put(x, NamedSharding(mesh, P("one", "data")))
            tx = jaxcomm.orthogonalize()
            found, _ = jax.jit(tx.update)(w, tx.init(w))
        np.testing.assert_allclose(found, orthogonal(x, ([0], [1])), atol=2e-5)
        assert found.sharding.is_equivalent_to(w.sharding, 2)


@pytest.mark.parametrize(("codec", "width", "error"), [("float32", 4, 0), ("bfloat16", 2, 0.02)])
def test_parts_are_sent_once_each_way(codec: str, width: int, error: float) -> None:
    """Of 8 layers and of 3 further matrices of their shape, in 12 places, and of one alone."""
    rng = np.random.default_rng(1)
    shapes = {"stack": (8, 6, 10), "a": (6, 10), "b": (6, 10), "c": (6, 10), "alone": (12, 5)}
    host = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        params = jaxcomm.shard(host, "data", layers=["stack"])
        tx = jaxcomm.with_layer_axis(jaxcomm.orthogonalize(codec=codec), ["stack"])
        state = tx.init(params)
        report = jaxcomm.wire_report(jax.jit(tx.update).lower(params, state).compile())
        found, _ = jax.jit(tx.update)(params, state)
    values = (12 * 60 + 2 * 60) // 2  # in two rows, one of which stays
    assert report.rounds == 2 and report.bytes_max == 2 * width * values // 2
    for name, x in host.items():
        axes = ([x.ndim - 2], [x.ndim - 1])
        np.testing.assert_allclose(found[name], orthogonal(x, axes), atol=2e-5 + error)
    if error:
        assert np.abs(found["a"] - orthogonal(host["a"], ([0], [1]))).max() > 1e-4


def test_what_is_whole_is_not_sent() -> None:
    """Nor are layers that are split between devices; each is orthogonal where it is."""
    with jax.set_mesh(jaxcomm.data_mesh()):
        mesh = jax.sharding.get_mesh()
        params = {
            "whole": jaxcomm.replicate(jnp.eye(8)),
            "layers": jax.device_put(jnp.ones((8, 2, 2)), NamedSharding(mesh, P("data"))),
        }
        dimensions = {"whole": MuonDimensionNumbers(), "layers": MuonDimensionNumbers(1, 2)}
        tx = jaxcomm.orthogonalize(dimensions)
        program = jax.jit(tx.update).lower(params, tx.init(params)).compile()
    assert not jaxcomm.wire_report(program).collectives


def test_other_leaves_are_passed_on() -> None:
    params = {"w": jnp.eye(2), "b": jnp.arange(3.0), "empty": jnp.zeros((0, 4))}

    def of(params: Any) -> Any:
        return {**dict.fromkeys(params), "w": MuonDimensionNumbers()}

    for dimensions in (of, of(params), {"w": MuonDimensionNumbers(), "b": None, "empty": None}):
        tx = jaxcomm.orthogonalize(dimensions)
        found, _ = tx.update(params, tx.init(params))
        np.testing.assert_array_equal(found["b"], params["b"])
        assert found["empty"].shape == (0, 4)
        np.testing.assert_allclose(found["w"], orthogonal(np.eye(2), ([0], [1])), rtol=1e-5)
    masked = optax.masked(
        jaxcomm.orthogonalize(of(params)), {"w": True, "b": False, "empty": False}
    )
    found, _ = masked.update(params, masked.init(params))
    np.testing.assert_allclose(found["w"], orthogonal(np.eye(2), ([0], [1])), rtol=1e-5)


def test_the_steps_are_those_that_were_asked_for() -> None:
    x = jnp.asarray(np.random.default_rng(2).standard_normal((4, 4), np.float32))
    options = {"ns_steps": 2, "ns_coeffs": (2.0, -1.5, 0.5), "eps": 0.5}
    tx = jaxcomm.orthogonalize(**options)
    found, _ = tx.update(x, tx.init(x))
    u, s, v = np.linalg.svd(np.asarray(x, np.float64))
    s = s / (np.linalg.norm(s) + 0.5)
    for _ in range(2):
        s = 2 * s - 1.5 * s**3 + 0.5 * s**5
    np.testing.assert_allclose(found, (u * s) @ v, atol=1e-5)


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_a_nan_stays_in_its_matrix(codec: str) -> None:
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        params = jaxcomm.shard({"a": jnp.eye(4), "b": jnp.eye(4)}, "data")
        tx = jaxcomm.orthogonalize(codec=codec)
        broken = params | {"a": params["a"].at[0, 0].set(jnp.nan)}
        found, _ = jax.jit(tx.update)(broken, tx.init(params))
    assert np.isnan(found["a"]).all() and np.isfinite(found["b"]).all()


def program(
    muon: optax.GradientTransformation, how: str, steps: int = 5
) -> tuple[Any, list[float]]:
    """The parameters after some steps of a network of a stack and a head, and the losses."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((16, 8), np.float32)
    y = np.tanh(x @ rng.standard_normal((8, 2), np.float32))
    host = {
        "stack": 0.3 * rng.standard_normal((3, 8, 8), np.float32),
        "head": 0.3 * rng.standard_normal((8, 2), np.float32),
    }
    adam = optax.adam(1e-2)
    optimizer = optax.partition({"m": muon, "a": adam}, {"stack": "m", "head": "a"})
    exchange = jaxcomm.mean("data")
    tx = optax.chain(jaxcomm.sharded(exchange) if how == "fsdp" else exchange, optimizer)
    place = {
        "replicated": jaxcomm.replicate,
        "fsdp": lambda host: jaxcomm.shard(host, "data", layers=["stack"]),
        "hsdp": lambda host: jaxcomm.shard(host, "fsdp", layers=["stack"]),
    }[how]
    gathered = {
        "replicated": lambda params: params,
        "fsdp": jaxcomm.gather,
        "hsdp": functools.partial(jaxcomm.gather, within="fsdp"),
    }[how]

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        params = gathered(params)
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), batch[0], params["stack"])
        return jnp.mean((x @ params["head"] - batch[1]) ** 2)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        at = jaxcomm.sharded_params(params, state) if how == "fsdp" else params
        loss, grads = jaxcomm.value_and_grad(loss_fn, "data")(at, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = place(host)
    state = tx.init(params)
    axes = ("data", "fsdp") if how == "hsdp" else "data"
    losses, batch = [], jaxcomm.global_batch((x, y), axes)
    for _ in range(steps):
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    assert step._cache_size() == 1
    return jax.tree.map(np.asarray, params), losses


@pytest.mark.parametrize("how", ["fsdp", "hsdp"])
@pytest.mark.standard_promotion
def test_training_on_shards_is_training_on_whole_parameters(how: str) -> None:
    """There optax makes them orthogonal on every device, and nothing but gradients is sent."""

    def muon(axes: Any) -> optax.GradientTransformation:
        tx = jaxcomm.orthogonalize({"stack": axes})
        trace = optax.trace(0.95, nesterov=True)
        return optax.chain(trace, tx, optax.scale_by_learning_rate(0.02))

    axes = MuonDimensionNumbers(1, 2)
    shape = (2, 2) if how == "hsdp" else (4,)
    names = ("data", "fsdp")[: len(shape)]
    with jax.set_mesh(jax.make_mesh(shape, names, (AxisType.Auto,) * len(shape))):
        params, losses = program(muon(axes), how)
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
        expected, _ = program(muon(axes), "replicated")
    assert losses[-1] < 0.9 * losses[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), params, expected)


def test_it_is_part_of_each_devices_own_optimizer() -> None:
    """Whole parameters need no sharding rules, and none of it is sent."""
    own = optax.chain(optax.trace(0.9), jaxcomm.orthogonalize())
    x = np.random.default_rng(4).standard_normal((2, 4, 4), np.float32)
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        params = jaxcomm.replicate(jnp.zeros((4, 4)))
        tx = optax.chain(jaxcomm.local("data", own), jaxcomm.mean("data"))
        grads = jaxcomm.global_batch(x, "data")
        found, _ = jax.jit(tx.update)(grads, tx.init(params))
    expected = np.mean([orthogonal(g, ([0], [1])) for g in x], axis=0)
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_init_is_traced_with_specs_and_alike_on_explicit_axes() -> None:
    params = placed(AxisType.Auto)
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        tx = jaxcomm.orthogonalize(DIMENSIONS)
        with pytest.raises(ValueError, match="cannot see inside jax.jit .*with_param_specs"):
            jax.jit(tx.init)(params)
        told = jaxcomm.with_param_specs(tx, params)
        assert jax.jit(told.init)(params) == tx.init(params)
        assert jax.eval_shape(told.init, params) == tx.init(params)
    params = placed(AxisType.Explicit)
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        assert jax.jit(tx.init)(params).matrices == tx.init(params).matrices


def test_a_chain_says_what_it_sends_and_warns_of_few_bits() -> None:
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        params = jaxcomm.shard({"w": jnp.eye(4)}, "data")
        muon = jaxcomm.orthogonalize(codec="bfloat16")
        tx = optax.chain(jaxcomm.sharded(jaxcomm.mean("data", "int8"), "int8"), muon)
        found = jaxcomm.explain(tx, params)
        (message,) = [m for m in found.messages if m.name == "matrices 1"]
        assert message.leaves == ("w",) and message.form == "bfloat16, whole matrices"
        # One matrix: it is made orthogonal by the first, and half of it comes from the second.
        assert message.hops == (("all-to-all", 2, 2 * 2 * 8),)
        coarse = jaxcomm.mean("data", "int4", error_feedback=True)
        with pytest.warns(UserWarning, match="before Muon"):
            optax.chain(coarse, muon).init(jaxcomm.replicate({"w": jnp.eye(4)}))


def test_it_is_refused_in_a_conditional_of_a_cached_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        params = jaxcomm.shard({"w": jnp.eye(4)}, "data")
        tx = optax.apply_if_finite(jaxcomm.orthogonalize(), 3)
        state = tx.init(params)
        found, _ = jax.jit(tx.update)(params, state)
        np.testing.assert_allclose(found["w"], orthogonal(np.eye(4), ([0], [1])), atol=2e-5)
        monkeypatch.setattr("jaxcomm._cached_programs.are_several", lambda: True)
        with pytest.raises(ValueError, match="orthogonalize exchanges in a conditional of optax"):
            jax.jit(lambda *args: tx.update(*args))(params, state)
        alone = jaxcomm.orthogonalize()
        jax.jit(alone.update)(params, alone.init(params))


def test_numbers_are_injected() -> None:
    static = ("ns_steps", "ns_coeffs", "codec", "preconditioning")
    make = optax.inject_hyperparams(jaxcomm.orthogonalize, static_args=static)
    x = np.random.default_rng(8).standard_normal((4, 4), np.float32)
    tx = make(consistent_rms=0.2, ns_steps=5)
    found, _ = jax.jit(tx.update)(jnp.asarray(x), tx.init(jnp.asarray(x)))
    np.testing.assert_allclose(found, orthogonal(x, ([0], [1]), 0.2), atol=2e-5)


def test_few_bits_of_shards_are_warned_of() -> None:
    coarse = jaxcomm.mean("data", "int4", error_feedback=True)
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        params = jaxcomm.shard({"w": jnp.eye(4)}, "data")
        for optimizer in (jaxcomm.orthogonalize(), optax.contrib.scale_by_muon()):
            with pytest.warns(UserWarning, match="a mean in int4 .* before Muon"):
                optax.chain(jaxcomm.sharded(coarse), optimizer).init(params)
        fine = jaxcomm.mean("data", "int8", error_feedback=True)
        optax.chain(jaxcomm.sharded(fine), jaxcomm.orthogonalize()).init(params)
