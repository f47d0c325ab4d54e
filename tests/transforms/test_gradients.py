"""Local gradients, microbatches and the order of the backward pass, in both views."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxcomm
from pairs import pairwise

P = PartitionSpec
Params = dict[str, jax.Array]


def loss_fn(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
    hidden = jnp.tanh(batch["x"] @ params["w"])
    return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)


def with_aux(params: Params, batch: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
    loss = loss_fn(params, batch)
    return loss, {"loss": loss, "rows": len(batch["x"]), "x": batch["x"].mean(0)}


def problem(rows: int = 16, seed: int = 0) -> tuple[Params, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return {"w": normal(3, 8), "v": normal(8, 2)}, {"x": normal(rows, 3), "y": normal(rows, 2)}


def one_by_one(params: Params, batch: Any, world: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The loss and the gradient of every device's share, by jax on one device."""
    shares = jax.tree.map(lambda x: x.reshape(world, -1, *x.shape[1:]), batch)
    one = jax.jit(jax.value_and_grad(loss_fn))
    out = [one(params, jax.tree.map(lambda s, r=r: s[r], shares)) for r in range(world)]
    losses = np.array([loss for loss, _ in out])
    return losses, {name: np.stack([g[name] for _, g in out]) for name in params}


def in_manual_view(f: Any, mesh: Any, checks: bool) -> Any:
    """`f` inside the user's own shard_map; gradients get a leading axis, to look at them."""

    def local(params: Any, batch: Any) -> Any:
        value, grads = f(params, batch)
        return value, jax.tree.map(lambda g: g[None], grads)

    return jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=(P(), P("data")),
            check_vma=checks,
        )
    )


@pytest.mark.newest
@pytest.mark.parametrize(
    ("view", "steps", "world"),
    pairwise(["global", "manual", "manual with checks"], [4, 1, 2], [4, 1]),
)
def test_each_device_has_the_gradient_of_its_own_share(
    make_mesh: Any, world: int, steps: int, view: str
) -> None:
    params, batch = problem()
    losses, expected = one_by_one(params, batch, world)
    with jax.set_mesh(mesh := make_mesh(world)):
        f = jaxcomm.accumulate(jaxcomm.value_and_grad(loss_fn, "data"), steps)
        run = jax.jit(f) if view == "global" else in_manual_view(f, mesh, "checks" in view)
        loss, grads = run(params, batch)
        grads = jaxcomm.unmark_local(grads)
    np.testing.assert_allclose(loss, losses.mean(), rtol=1e-6)
    for name in params:
        np.testing.assert_allclose(grads[name], expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("view", "steps"), [("global", 1), ("global", 2), ("manual", 1), ("manual with checks", 2)]
)
def test_aux_is_averaged_with_the_loss_in_one_all_reduce(
    make_mesh: Any, steps: int, view: str
) -> None:
    params, batch = problem()
    with jax.set_mesh(mesh := make_mesh(4)):
        f = jaxcomm.value_and_grad(with_aux, "data", has_aux=True)
        f = jaxcomm.accumulate(f, steps)
        run = jax.jit(f) if view == "global" else in_manual_view(f, mesh, "checks" in view)
        (loss, aux), _ = run(params, batch)
        report = jaxcomm.wire_report(run.lower(params, batch).compile())
    np.testing.assert_allclose(aux["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(aux["x"], batch["x"].mean(0), rtol=1e-5)
    assert aux["rows"] == 16 // 4 // steps
    assert [c.op for c in report.collectives] == ["all-reduce"]
    assert report.rounds == 1


def test_gradients_are_sharded_over_the_axis_and_cost_one_copy(mesh8: Any) -> None:
    params, batch = problem()
    with jax.set_mesh(mesh8):
        _, grads = jax.jit(jaxcomm.value_and_grad(loss_fn, "data"))(params, batch)
    for name, g in grads.items():
        assert g.shape == (8, *params[name].shape)
        assert all(shard.data.shape[0] == 1 for shard in g.addressable_shards)


def test_a_further_axis_stays_automatic(mesh4x2: Any) -> None:
    params, batch = problem()
    losses, expected = one_by_one(params, batch, 4)
    with jax.set_mesh(mesh4x2):
        params["w"] = jax.device_put(params["w"], NamedSharding(mesh4x2, P(None, "model")))
        params["v"] = jax.device_put(params["v"], NamedSharding(mesh4x2, P("model")))
        loss, grads = jax.jit(jaxcomm.value_and_grad(loss_fn, "data"))(params, batch)
        grads = jaxcomm.unmark_local(grads)
    np.testing.assert_allclose(loss, losses.mean(), rtol=1e-6)
    np.testing.assert_allclose(grads["w"], expected["w"], rtol=1e-4, atol=1e-6)


def test_explicit_axes_work_too() -> None:
    params, batch = problem()
    _, expected = one_by_one(params, batch, 8)
    with jax.set_mesh(jax.make_mesh((8,), ("data",), (AxisType.Explicit,))):
        batch = jaxcomm.global_batch(batch, "data")
        tx = jaxcomm.mean("data")
        params = jaxcomm.replicate(params)
        state = tx.init(params)

        @jax.jit
        def step(params: Params, state: Any, batch: Any) -> Any:
            loss, grads = jaxcomm.value_and_grad(loss_fn, "data")(params, batch)
            return tx.update(grads, state)[0]

        updates = step(params, state, batch)
    np.testing.assert_allclose(updates["w"], expected["w"].mean(0), rtol=1e-4, atol=1e-6)


def test_the_axis_is_bound_in_the_loss(mesh8: Any) -> None:
    """Synchronised batch norm: the mean over all devices' rows, and its exact gradient."""

    def normalised(w: jax.Array, x: jax.Array) -> jax.Array:
        mean = jax.lax.pmean((x * w).mean(0), "data")
        return jnp.mean((x * w - mean) ** 2)

    x = problem(16)[1]["x"]
    w = jnp.float32(1.5)

    def whole(w: jax.Array) -> jax.Array:
        return jnp.mean((x * w - (x * w).mean(0, keepdims=True)) ** 2)

    with jax.set_mesh(mesh8), jax.numpy_rank_promotion("allow"):
        loss, grads = jax.jit(jaxcomm.value_and_grad(normalised, "data"))(w, x)
        expected = jax.value_and_grad(whole)(w)
    np.testing.assert_allclose((loss, jaxcomm.unmark_local(grads).mean()), expected, rtol=1e-5)


def test_models_that_scan_from_zeros_need_no_casts(mesh8: Any) -> None:
    """The checks of shard_map would refuse this loss; the global view does not need them."""

    def scanned(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, row: (c + (row @ w).sum(), None), 0.0, x)[0] / len(x)

    params, batch = problem()
    with jax.set_mesh(mesh8):
        loss, _ = jax.jit(jaxcomm.value_and_grad(scanned, "data"))(params["w"], batch["x"])
    np.testing.assert_allclose(loss, (batch["x"] @ params["w"]).sum(1).mean(), rtol=1e-4)


def test_further_arguments_go_to_every_device_as_they_are(mesh8: Any) -> None:
    def scaled(w: jax.Array, x: jax.Array, key: jax.Array, scale: jax.Array) -> jax.Array:
        key = jax.random.fold_in(key, jax.lax.axis_index("data"))
        return scale * (w * x).mean() + 0 * jax.random.uniform(key)

    f = jax.jit(jaxcomm.value_and_grad(scaled, "data"))
    with jax.set_mesh(mesh8):
        _, grads = f(jnp.float32(1), jnp.arange(8.0), jax.random.key(0), jnp.float32(3))
    np.testing.assert_allclose(jaxcomm.unmark_local(grads), 3 * np.arange(8))


@pytest.mark.newest
@pytest.mark.parametrize("view", ["global", "manual", "manual with checks"])
@pytest.mark.parametrize("reduce", [jax.lax.pmean, jax.lax.psum])
def test_a_loss_that_was_already_averaged_is_refused(mesh8: Any, reduce: Any, view: str) -> None:
    params, batch = problem()
    f = jaxcomm.value_and_grad(lambda p, b: reduce(loss_fn(p, b), "data"), "data")
    with jax.set_mesh(mesh8), pytest.raises(ValueError, match="already reduced over 'data'"):
        run = jax.jit(f) if view == "global" else in_manual_view(f, mesh8, "checks" in view)
        run(params, batch)


def test_accumulate_takes_plain_value_and_grad_in_the_manual_view(mesh8: Any) -> None:
    params, batch = problem(32)
    _, expected = one_by_one(params, batch, 8)
    f = jaxcomm.accumulate(jax.value_and_grad(loss_fn), 2)

    def local(params: Params, batch: Any) -> Any:
        return jax.tree.map(lambda g: g[None], f(params, batch)[1])

    run = jax.shard_map(
        local, mesh=mesh8, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False
    )
    grads = jax.jit(run)(params, batch)
    np.testing.assert_allclose(grads["w"], expected["w"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("of", [jax.value_and_grad, lambda f: jaxcomm.value_and_grad(f, "data")])
def test_microbatches_take_keyword_arguments(mesh8: Any, of: Any) -> None:
    f = of(lambda w, x, scale: (scale * w * x).mean())

    def value(microbatches: int) -> Any:
        run = jaxcomm.accumulate(f, microbatches)
        manual = jax.shard_map(
            lambda x: run(jnp.float32(1), x, scale=2.0)[0][None],
            mesh=mesh8,
            in_specs=P("data"),
            out_specs=P("data"),
            check_vma=False,
        )
        return jax.jit(manual)(jnp.arange(16.0))

    np.testing.assert_allclose(value(2), value(1))


def test_accumulate_holds_the_activations_of_one_microbatch(mesh8: Any) -> None:
    def wide(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(8):
            x = jnp.tanh(x @ w)
        return x.mean()

    w, x = jnp.ones((64, 64)), jnp.ones((8 * 1024, 64))

    def temporary_bytes(steps: int) -> int:
        f = jaxcomm.accumulate(jaxcomm.value_and_grad(wide, "data"), steps)
        with jax.set_mesh(mesh8):
            sharded = jax.device_put(x, NamedSharding(mesh8, P("data")))
            analysis = jax.jit(f).lower(w, sharded).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temporary_bytes(8) < temporary_bytes(1) / 3


def test_sums_of_16_bit_gradients_are_accumulated_in_32(make_mesh: Any) -> None:
    w = jnp.ones((), jnp.bfloat16)
    x = jnp.asarray([256.0, 1, 1, 1], jnp.bfloat16)
    f = jaxcomm.accumulate(jaxcomm.value_and_grad(lambda w, x: (w * x).sum(), "data"), 4)
    with jax.set_mesh(make_mesh(1)):
        grads = jaxcomm.unmark_local(jax.jit(f)(w, x)[1])
    assert grads.dtype == jnp.bfloat16
    assert grads[0] == jnp.bfloat16(259 / 4)


@pytest.mark.parametrize("jitted", [False, True])
def test_backward_order_is_that_of_the_layers_from_the_last(mesh8: Any, jitted: bool) -> None:
    layers = ["z_first", "m_second", "a_third", "k_last"]
    params = {name: jnp.ones((4, 4)) for name in layers}

    def loss(params: Params, x: jax.Array) -> jax.Array:
        cast = {name: w.astype(jnp.bfloat16) for name, w in params.items()}
        x = x.astype(jnp.bfloat16)
        for name in layers:
            x = jnp.tanh(x @ cast[name])
        return x.astype(jnp.float32).mean()

    f = jaxcomm.value_and_grad(jax.jit(loss) if jitted else loss, "data")
    with jax.set_mesh(mesh8):
        order = jaxcomm.backward_order(f, params, jnp.ones((8, 4)))
        f = jaxcomm.value_and_grad(lambda p, x, y, scale: loss(p, x + y[None] * scale), "data")
        further = {"scale": jax.ShapeDtypeStruct((), jnp.float32)}
        again = jaxcomm.backward_order(f, params, jnp.ones((8, 4)), jnp.ones(4), **further)
    assert order == again == tuple(reversed(layers))


@pytest.mark.parametrize(
    ("rows", "world", "message"),
    [
        (3, 8, r"leaf x of the batch has 3 examples.*over the 8 devices.*jaxcomm.global_batch"),
        (12, 8, r"leaf x of the batch has 12 examples.*over the 8 devices"),
        (0, 8, r"leaf x of the batch has 0 examples"),
    ],
)
def test_a_batch_that_does_not_divide_is_refused(
    make_mesh: Any, rows: int, world: int, message: str
) -> None:
    params, batch = problem(rows)
    with jax.set_mesh(make_mesh(world)), pytest.raises(ValueError, match=message):
        jax.jit(jaxcomm.value_and_grad(loss_fn, "data"))(params, batch)


def test_a_scalar_in_the_batch_is_refused(mesh8: Any) -> None:
    f = jaxcomm.value_and_grad(lambda w, b: w, "data")
    with jax.set_mesh(mesh8), pytest.raises(ValueError, match="as a further argument"):
        f(jnp.float32(1), {"step": jnp.int32(1)})


def test_microbatches_that_do_not_divide_are_refused_with_both_numbers(mesh8: Any) -> None:
    params, batch = problem(24)
    f = jaxcomm.accumulate(jaxcomm.value_and_grad(loss_fn, "data"), 2)
    with jax.set_mesh(mesh8), pytest.raises(ValueError, match="3 examples .* into 2 microbatches"):
        jax.jit(f)(params, batch)


@pytest.mark.parametrize("steps", [0, -1, 1.5])
def test_accumulate_needs_a_positive_integer(steps: Any) -> None:
    with pytest.raises(ValueError, match="positive number of microbatches"):
        jaxcomm.accumulate(jaxcomm.value_and_grad(loss_fn, "data"), steps)


def test_without_a_mesh_or_axis_the_cure_is_named(mesh8: Any) -> None:
    params, batch = problem()
    f = jaxcomm.value_and_grad(loss_fn, "batch")
    with pytest.raises(ValueError, match="call jax.set_mesh"):
        f(params, batch)
    with jax.set_mesh(mesh8), pytest.raises(ValueError, match="axes are 'data'"):
        f(params, batch)


@pytest.mark.parametrize("checks", [None, False, True])
@pytest.mark.parametrize("loss", [lambda p, b: jnp.sum(p["w"] ** 2), lambda p, b: jnp.float32(1)])
def test_a_loss_that_does_not_depend_on_its_batch(
    make_mesh: Any, loss: Any, checks: bool | None
) -> None:
    params, batch = problem()
    f = jaxcomm.value_and_grad(loss, "data")
    with jax.set_mesh(mesh := make_mesh(4)):
        run = jax.jit(f) if checks is None else in_manual_view(f, mesh, checks)
        with pytest.raises(ValueError, match="the loss does not depend on the batch"):
            run(params, batch)
        if checks is None:
            with pytest.raises(ValueError, match="the batch has no arrays, got None"):
                run(params, None)


def test_aux_that_is_no_number(mesh8: Any) -> None:
    params, batch = problem()

    def loss(params: Params, batch: Any) -> tuple[jax.Array, Any]:
        return loss_fn(params, batch), {"wave": jnp.complex64(1j)}

    f = jaxcomm.value_and_grad(loss, "data", has_aux=True)
    with (
        jax.set_mesh(mesh8),
        pytest.raises(TypeError, match=r"aux\['wave'\] is complex64, .*leave it"),
    ):
        jax.jit(f)(params, batch)


def test_a_leaf_of_a_tuple_is_named(mesh8: Any) -> None:
    batch = (np.zeros((63, 3), np.float32), np.zeros(63, np.float32))
    f = jaxcomm.value_and_grad(lambda w, b: jnp.mean(b[0] @ w), "data")
    with (
        jax.set_mesh(mesh8),
        pytest.raises(ValueError, match="^leaf 0 of the batch has 63 examples"),
    ):
        jax.jit(f)(jnp.zeros(3), batch)


def test_other_shardings_of_an_explicit_batch_stay() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "seq"), (AxisType.Explicit,) * 2)
    seen = []

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        seen.append(jax.typeof(x).sharding.spec)
        return jnp.mean(jnp.square(x * w))

    with jax.set_mesh(mesh):
        w, f = jaxcomm.replicate(jnp.float32(1)), jax.jit(jaxcomm.value_and_grad(loss, "data"))
        for spec in (P("data", "seq"), P(None, "seq"), P(("data", "seq"), None)):
            f(w, jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, spec)))
    assert P(None, "seq") in seen and P("seq", None) in seen


@pytest.mark.parametrize(
    ("out", "has_aux", "message"),
    [
        (lambda x: (x, 1j), True, "aux is .*complex.*, .*leave it"),
        (lambda x: (x, {"name": "mlp"}), True, r"aux\['name'\] is .*str.*, .*leave it"),
        (lambda x: (x, x), False, "pass has_aux=True"),
        (lambda x: x, True, r"returns \(loss, aux\), got"),
    ],
)
def test_what_the_loss_function_must_return(
    mesh8: Any, out: Any, has_aux: bool, message: str
) -> None:
    f = jaxcomm.value_and_grad(lambda w, b: out(jnp.mean(w * b)), "data", has_aux=has_aux)
    with jax.set_mesh(mesh8), pytest.raises(TypeError, match=message):
        f(jnp.ones(()), jnp.ones(8))


def test_microbatches_of_microbatches_are_multiplied() -> None:
    of_one = jaxcomm.value_and_grad(lambda w, x: jnp.mean(w * x), "data")
    assert jaxcomm.accumulate(jaxcomm.accumulate(of_one, 2), 3) == jaxcomm.accumulate(of_one, 6)
