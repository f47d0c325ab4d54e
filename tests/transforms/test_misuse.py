"""Programs that would go wrong in silence, or with a message that says nothing."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm.transforms import _chains

PARAMS = {"w": jnp.ones((8, 8)), "v": jnp.ones((8, 8))}
LABELS = {"w": "trained", "v": "frozen"}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch @ params["w"] @ params["v"]) ** 2)


def local_steps(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    return jaxcomm.local_steps(inner, 2, optax.sgd(1.0), jaxcomm.mean("data"))


@pytest.mark.parametrize(
    ("behind", "before"),
    [
        (optax.adam(0.1), optax.clip(1.0)),
        (optax.sgd(0.1), optax.clip(1.0)),
        (optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
        (optax.scale(0.5), optax.sgd(0.1)),
    ],
)
def test_nothing_follows_local_steps(mesh8: Any, behind: Any, before: Any) -> None:
    """The devices' own parameters would be trained, and the ones that are saved be others."""
    tx = local_steps(optax.sgd(0.1))
    with jax.set_mesh(mesh8):
        params = jaxcomm.replicate(PARAMS)
        for chain in (optax.chain(tx, behind), optax.named_chain(("a", tx), ("b", behind))):
            with pytest.raises(ValueError, match="follows local_steps in the chain.*inner optim"):
                chain.init(params)
        local_steps(optax.chain(before, behind)).init(params)


@pytest.mark.parametrize(
    "mover",
    [lambda tx: optax.lookahead(tx, 2, 0.5), lambda tx: optax.contrib.schedule_free(tx, 0.1)],
)
def test_nothing_around_local_steps_moves_the_shared_parameters(mesh8: Any, mover: Any) -> None:
    """The next exchange would take it back; around multi_steps they would count idle steps."""
    with jax.set_mesh(mesh8):
        params = jaxcomm.replicate(PARAMS)
        pair = optax.LookaheadParams(params, params)
        tx = mover(local_steps(optax.sgd(0.1)))
        said = "around local_steps(: it moves the shared|, which is lookahead already)"
        with pytest.raises(ValueError, match=said):
            tx.init(pair if "lookahead" in tx.init.__qualname__ else params)
        local_steps(optax.contrib.schedule_free(optax.sgd(0.1), 0.1)).init(params)
        tx = mover(jaxcomm.multi_steps(optax.chain(jaxcomm.mean("data"), optax.sgd(0.1)), 2))
        said = "around multi_steps(: it would count|, which .* use jaxcomm.accumulate)"
        with pytest.raises(ValueError, match=said):
            tx.init(pair if "lookahead" in tx.init.__qualname__ else params)


def test_a_state_is_not_replicated(mesh8: Any) -> None:
    """Its residuals would be on all devices, and be gathered in every step."""
    with jax.set_mesh(mesh8):
        params = jaxcomm.replicate(PARAMS)
        for codec, feedback in (("bfloat16", False), ("int8", True)):
            tx = optax.chain(jaxcomm.mean("data", codec, error_feedback=feedback), optax.sgd(0.1))
            state = {"params": params, "opt_state": tx.init(params)}
            if not feedback:
                jaxcomm.replicate(state)
                continue
            with pytest.raises(ValueError, match="replicate takes parameters, got a state with"):
                jaxcomm.replicate(state)


def test_zero_nans_in_front_would_see_nothing(mesh8: Any) -> None:
    with jax.set_mesh(mesh8):
        params, mean = jaxcomm.replicate(PARAMS), jaxcomm.mean("data")
        with pytest.raises(ValueError, match=r'jaxcomm.local\("data", optax.zero_nans\(\)\)'):
            optax.chain(optax.zero_nans(), mean, optax.sgd(0.1)).init(params)
        optax.chain(jaxcomm.local("data", optax.zero_nans()), mean, optax.zero_nans()).init(params)


def test_a_vote_has_no_near_codec() -> None:
    two = {"near": jaxcomm.algorithms.direct(), "far": jaxcomm.algorithms.ring()}
    algorithm = jaxcomm.algorithms.hierarchical(**two, near_codec="bfloat16")
    with pytest.raises(ValueError, match="near_codec is the format of a mean, and votes have none"):
        jaxcomm.majority_vote(("far", "near"), algorithm)


@pytest.mark.parametrize("penalty", ["squares", "norm"])
def test_arithmetic_on_unfinished_parameters_is_noticed(mesh8: Any, penalty: str) -> None:
    """The leaves of a tree of shards are also the numbers that their keys are made from."""
    tx = optax.chain(jaxcomm.sharded(jaxcomm.mean("data")), optax.sgd(0.1))

    def loss(params: Any, batch: Any) -> jax.Array:
        squares = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
        whole = jaxcomm.gather(params)
        return loss_fn(whole, batch) + (squares if penalty == "squares" else jnp.sqrt(squares))

    with jax.set_mesh(mesh8):
        params = jaxcomm.shard(PARAMS, "data")
        state, batch = tx.init(params), jaxcomm.global_batch(np.ones((8, 8), np.float32), "data")

        @jax.jit
        def step(state: Any, loss: Callable[..., Any] = loss) -> Any:
            at = jaxcomm.sharded_params(params, state)
            return tx.update(jaxcomm.value_and_grad(loss, "data")(at, batch)[1], state, params)

        _, state = step(state)  # In the first step these numbers are zeros.
        updates, _ = step(state)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(updates))


def test_rows_beside_the_batch_are_not_split(mesh8: Any) -> None:
    def loss(w: jax.Array, x: jax.Array, y: Any) -> jax.Array:
        return jnp.mean(x) * jnp.sum(w) + jnp.mean(jnp.asarray(jax.tree.leaves(y)[0]))

    gradient = jaxcomm.value_and_grad(loss, "data")
    w, x = jnp.ones(3), jnp.ones((16, 3))
    with jax.set_mesh(mesh8):
        for args, kwargs, name in (((np.ones(16),), {}, "argument 3"), ((), {"y": x}, "y")):
            with pytest.warns(UserWarning, match=f"^{name} of the loss has as many rows .*, 16,"):
                gradient(w, x, *args, **kwargs)
        for unsplit in (np.ones(3), {"state": np.ones(16)}, 2.0):
            gradient(w, x, unsplit)


@pytest.mark.parametrize("is_jitted", [False, True])
def test_rows_beside_the_batch_in_an_error(mesh8: Any, is_jitted: bool) -> None:
    gradient = jaxcomm.value_and_grad(lambda w, x, y: jnp.mean((x @ w - y) ** 2), "data")
    gradient = jax.jit(gradient) if is_jitted else gradient
    with jax.set_mesh(mesh8), pytest.warns(UserWarning, match="as many rows as the batch"):
        with pytest.raises(TypeError, match="incompatible shapes") as error:
            gradient(jnp.ones((3, 1)), jnp.ones((16, 3)), jnp.ones((16, 1)))
    assert "argument 3 of the loss has as many rows" in "".join(error.value.__notes__)
    with jax.set_mesh(jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Explicit,))):
        x, y = jaxcomm.global_batch((np.ones((16, 3)), np.ones((16, 1))), "data")
        with pytest.warns(UserWarning, match="as many rows as the batch"):
            with pytest.raises(TypeError, match="incompatible shapes") as error:
                gradient(jnp.ones((3, 1)), x, y)
        assert "argument 3 of the loss has as many rows" in "".join(error.value.__notes__)
        spread = jax.reshard(jnp.ones((8, 1)), jax.P("data"))  # of another length: no rows
        whole = jaxcomm.value_and_grad(lambda w, x, y: jnp.mean(x @ w) * jnp.sum(y), "data")
        assert (
            whole(jnp.ones((3, 1)), x, spread)[0] == whole(jnp.ones((3, 1)), x, np.ones((8, 1)))[0]
        )


def test_a_state_that_a_program_returns_replicated_is_warned_of(mesh8: Any) -> None:
    everywhere = jax.NamedSharding(mesh8, jax.P())
    for feedback in (False, True):
        tx = optax.chain(jaxcomm.mean("data", "int8", error_feedback=feedback), optax.sgd(0.1))

        def step(params: Any, state: Any, batch: Any, tx: Any = tx) -> Any:
            _, grads = jaxcomm.value_and_grad(loss_fn, "data")(params, batch)
            return tx.update(grads, state, params)

        with jax.set_mesh(mesh8):
            params = jaxcomm.replicate(PARAMS)
            args = params, tx.init(params), jaxcomm.global_batch(np.ones((8, 8)), "data")
            usual = jaxcomm.wire_report(jax.jit(step).lower(*args).compile())
            gathered = jax.jit(step, out_shardings=everywhere).lower(*args).compile()
            if not feedback:
                assert jaxcomm.wire_report(gathered).bytes_max == usual.bytes_max
                continue
            with pytest.warns(UserWarning, match="gathered in float32. For a step, leave out_sh"):
                found = jaxcomm.wire_report(gathered)
            norms = jax.jit(functools.partial(jax.tree.map, jnp.linalg.norm)).lower(args[1])
            jaxcomm.wire_report(norms.compile())  # has the tree of a state, and is none
            assert found.bytes_max == usual.bytes_max + 7 * 4 * sum(x.size for x in PARAMS.values())


def test_rows_that_a_loss_closes_over_are_not_split(mesh8: Any) -> None:
    def of(weights: Any) -> Any:
        return lambda w, x: jnp.mean(x) * jnp.sum(w) * jnp.mean(jnp.asarray(weights["of"]))

    def closed(weights: Any) -> Any:
        return lambda w, x: jnp.mean(x) * jnp.sum(w) * jnp.mean(weights)

    def keyword(w: jax.Array, x: jax.Array, weights: Any) -> jax.Array:
        return jnp.mean(x) * jnp.sum(w) * jnp.mean(weights)

    w, x, rows = jnp.ones(3), jnp.ones((16, 3)), np.ones(16)
    with jax.set_mesh(mesh8):
        for loss in (closed(rows), functools.partial(keyword, weights=rows)):
            with pytest.warns(UserWarning, match="^weights, which the loss closes over, has as"):
                jaxcomm.value_and_grad(loss, "data")(w, x)
        for loss in (closed(np.ones(3)), of({"of": rows}), functools.partial(closed(2.0))):
            jaxcomm.value_and_grad(loss, "data")(w, x)


def test_a_loss_that_closes_over_its_batch_hears_of_it(mesh8: Any) -> None:
    x = jnp.ones((16, 3))
    with jax.set_mesh(mesh8), pytest.raises(TypeError, match=r"\(params, batch\), with loss_fn\("):
        jaxcomm.value_and_grad(lambda w: jnp.mean(x @ w), "data")(jnp.ones(3))


def test_a_model_that_names_the_axis_of_the_batch_hears_of_it(mesh8: Any) -> None:
    def loss_fn(w: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.with_sharding_constraint(x @ w, jax.P("data")))

    with jax.set_mesh(mesh8), pytest.raises(ValueError, match="only refer to Auto axes") as raised:
        jax.jit(jaxcomm.value_and_grad(loss_fn, "data"))(jnp.ones(3), jnp.ones((16, 3)))
    assert "Leave that axis out of the model's specs" in str(raised.value.__notes__)
    explicit = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(explicit), pytest.raises(ValueError, match="axis names that are") as raised:
        loss = jaxcomm.value_and_grad(
            lambda w, x: jnp.mean(jax.reshard(x @ w, jax.P("data"))), "data"
        )
        jax.jit(loss)(
            jaxcomm.replicate(jnp.ones(3)), jaxcomm.global_batch(np.ones((16, 3)), "data")
        )
    assert "Leave that axis out of the model's specs" in str(raised.value.__notes__)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("view", ["global", "manual", "manual without checks"])
def test_rows_are_no_aux(mesh8: Any, view: str, microbatches: int) -> None:
    def gradient(aux: Any) -> Any:
        loss = lambda w, x: (jnp.mean(x @ w), {"found": aux(x, w)})  # noqa: E731
        f = jaxcomm.value_and_grad(loss, "data", has_aux=True)
        f = jaxcomm.accumulate(f, microbatches)
        local = lambda *args: f(*args)[0]  # noqa: E731
        if view != "global":
            checks = view == "manual"
            specs = jax.P(), jax.P("data")
            local = jax.shard_map(local, in_specs=specs, out_specs=jax.P(), check_vma=checks)
        return jax.jit(local)(w, x)

    # Each device has 4 rows, and each microbatch 4 or 2; there are as many features.
    w, x = jnp.ones((4 // microbatches, 3)), jnp.ones((32, 4 // microbatches))
    with jax.set_mesh(mesh8):
        for rows in (lambda x, w: x @ w, lambda x, w: (x @ w).argmax(1)):
            with pytest.raises(ValueError, match=r"aux\['found'\] has a row for each example, \d"):
                gradient(rows)
        for sound in (lambda x, w: w + x.mean(), lambda x, w: (x @ w).mean()):
            gradient(sound)
        with pytest.warns(UserWarning, match="if aux.* has a row for each example"):
            gradient(lambda x, w: x @ w + jnp.ones((4 // microbatches, 1)))  # as a state would be
        if microbatches == 1 and view == "global":
            every = lambda x, w: jax.lax.all_gather(x @ w, "data", tiled=True)  # noqa: E731
            assert gradient(every)[1]["found"].shape == (32, 3)


def test_labels_are_a_tree(mesh8: Any) -> None:
    """Optax calls a function of labels on gradients too, whose shapes have a device axis."""
    parts = {"trained": jaxcomm.mean("data"), "frozen": jaxcomm.set_to_zero("data")}
    with jax.set_mesh(mesh8):
        params = jaxcomm.replicate(PARAMS)
        by_shape = lambda x: "trained" if x.ndim == 2 else "frozen"  # noqa: E731
        tx = optax.partition(parts, lambda tree: jax.tree.map(by_shape, tree))
        grads = jaxcomm.mark_local(jax.tree.map(lambda x: jnp.stack([x] * 8), params))
        with pytest.raises(ValueError, match=r"give their results, label_fn\(params\)"):
            jax.jit(tx.update)(grads, tx.init(params), params)


def test_local_steps_of_a_part_name_the_way(mesh8: Any) -> None:
    parts = {"trained": local_steps(optax.sgd(0.1)), "frozen": jaxcomm.set_to_zero("data")}
    with jax.set_mesh(mesh8):
        state = optax.partition(parts, LABELS).init(jaxcomm.replicate(PARAMS))
        with pytest.raises(ValueError, match="Freeze the others inside it"):
            jaxcomm.local_params(state)
        inner = optax.partition({"trained": optax.sgd(0.1), "frozen": optax.set_to_zero()}, LABELS)
        jaxcomm.local_params(local_steps(inner).init(jaxcomm.replicate(PARAMS)))


def test_another_mesh_names_resize_state(mesh8: Any) -> None:
    tx = jaxcomm.mean("data", "int8", error_feedback=True)
    with jax.set_mesh(mesh8):
        state = tx.init(jaxcomm.replicate(PARAMS))
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        grads = jaxcomm.mark_local(jax.tree.map(lambda x: jnp.stack([x] * 2), PARAMS))
        with pytest.raises(ValueError, match="jaxcomm.resize_state"):
            tx.update(grads, jax.tree.map(np.asarray, state))


def test_arguments_of_other_kinds() -> None:
    with pytest.raises(TypeError, match="accumulate takes what jaxcomm.value_and_grad"):
        jaxcomm.accumulate(loss_fn, 2)(PARAMS, jnp.ones((8, 8)))
    with pytest.raises(TypeError, match="factored_adam takes an exchange of means, .* got 'data'"):
        jaxcomm.factored_adam("data", 2e-2)  # pyright: ignore
    with pytest.raises(ValueError, match="data_mesh needs at least one device"):
        jaxcomm.data_mesh(devices=[])


def test_a_table_is_no_part_of_a_batch(mesh8: Any) -> None:
    """Its rows would be dealt to devices, each of which then looks into its own part."""

    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(batch["x"] @ params["w"] * batch["weight"][batch["label"]][:, None])

    batch = {"x": np.ones((32, 8)), "label": np.zeros(32, int), "weight": np.ones(16)}
    with jax.set_mesh(mesh8):
        f, params = jaxcomm.value_and_grad(loss, "data"), jaxcomm.replicate(PARAMS)
        message = "leaf weight of the batch has 16 rows, and leaf x .* has 32: .*further argument"
        with pytest.raises(ValueError, match=message):
            jaxcomm.global_batch(batch, "data")
        with pytest.raises(ValueError, match=message):
            f(params, jax.tree.map(jnp.asarray, batch))
        keys = {"x": jnp.ones((32, 8)), "key": jax.random.split(jax.random.key(0), 8)}
        jaxcomm.value_and_grad(
            lambda p, b: jnp.mean(b["x"] @ p["w"]) + jax.random.normal(b["key"][0]), "data"
        )(params, keys)  # a key for each device


def test_further_arguments_need_be_no_arrays(mesh8: Any) -> None:
    def loss(params: Any, batch: Any, apply: Any, train: bool, *, scale: float, name: str) -> Any:
        assert train is True and name == "mse" and isinstance(scale, jax.Array)
        return scale * jnp.mean(apply(batch, params["w"]) ** 2)

    x = np.random.default_rng(0).standard_normal((16, 8), np.float32)
    arguments = (jnp.matmul, True), {"scale": jnp.float32(2), "name": "mse"}
    wanted, grads = jax.value_and_grad(loss)(PARAMS, x, *arguments[0], **arguments[1])
    with jax.set_mesh(mesh8):
        f, params = jaxcomm.value_and_grad(loss, "data"), jaxcomm.replicate(PARAMS)
        for g in (f, jaxcomm.accumulate(f, 2)):
            value, own = g(params, jaxcomm.global_batch(x, "data"), *arguments[0], **arguments[1])
            np.testing.assert_allclose(value, wanted, rtol=1e-6)
            mean = jaxcomm.unmark_local(own)["w"].mean(0)
            np.testing.assert_allclose(mean, grads["w"], rtol=1e-5, atol=1e-6)


def test_unclear_uses_have_a_line(mesh8: Any) -> None:
    with jax.set_mesh(mesh8):
        params, batch = jaxcomm.replicate(PARAMS), jaxcomm.global_batch(np.ones((16, 8)), "data")
        f = jaxcomm.value_and_grad(loss_fn, "data")
        with pytest.raises(TypeError, match="not jax.jit of it; put jax.jit around the step"):
            jaxcomm.accumulate(jax.jit(f), 2)(params, batch)
        with pytest.raises(TypeError, match="backward_order takes what jaxcomm.value_and_grad"):
            jaxcomm.backward_order(loss_fn, params, batch)  # pyright: ignore[reportArgumentType]
        for call in (
            lambda: jaxcomm.value_and_grad(loss_fn, ["data"]),  # pyright: ignore[reportArgumentType]
            lambda: jaxcomm.global_batch(np.ones((16, 8)), ["data"]),  # pyright: ignore[reportArgumentType]
        ):
            with pytest.raises(TypeError, match=r"axis_name must be the name .*got \['data'\]"):
                call()
        with pytest.raises(TypeError, match="value_and_grad takes a function, got 'data'"):
            jaxcomm.value_and_grad("data", "data")  # pyright: ignore[reportArgumentType]
        with pytest.raises(TypeError, match="params is a pytree of arrays or of their shapes"):
            jaxcomm.explain(jaxcomm.mean("data"), loss_fn)
        tx = optax.chain(jaxcomm.mean("data"), optax.adam(0.1))
        with pytest.raises(ValueError, match=r"optax.tree.map_params\(optimizer, f, state\[1\]\)"):
            optax.tree.map_params(tx, lambda x: x, tx.init(params))


def test_names_that_are_spelled_like_paths(mesh8: Any) -> None:
    alike = {"a/b": jnp.ones((4, 4)), "a": {"b": jnp.ones((4, 2))}}
    brackets = {"a[0]": jnp.ones((4, 4)), "b*": jnp.ones((3, 4, 4)), "c": jnp.ones((4, 4))}
    specs = {"a/b": jax.P(), "a": {"b": jax.P(None)}}
    with jax.set_mesh(mesh8):
        for tx in (jaxcomm.mean("data"), jaxcomm.with_param_specs(jaxcomm.mean("data"), specs)):
            with pytest.raises(ValueError, match="two parameters are called a/b"):
                tx.init(alike)
        tx = jaxcomm.with_layer_axis(jaxcomm.mean("data", "int8", exempt=["a[0]"]), ["b*"])
        layout = tx.init(jaxcomm.replicate(brackets)).layout
    assert [leaf.exempt for leaf in layout.leaves] == [True, False, False]


def test_lookahead_goes_around_the_chain(mesh8: Any) -> None:
    inside = optax.chain(jaxcomm.mean("data"), optax.sgd(0.1))
    with jax.set_mesh(mesh8):
        params = optax.LookaheadParams.init_synced(jaxcomm.replicate(PARAMS))
        optax.lookahead(inside, 3, 0.5).init(params)
        behind = optax.chain(jaxcomm.mean("data"), optax.lookahead(optax.sgd(0.1), 3, 0.5))
        with pytest.raises(ValueError, match=r"optax.lookahead\(optax.chain\(jaxcomm.mean"):
            behind.init(params)


def test_a_further_argument_is_no_leak(mesh8: Any) -> None:
    """The loss is traced in ways that fail, and jax counts what such a trace has closed over."""
    loss = lambda w, x, scale: jnp.mean(x @ w) * scale  # noqa: E731
    with jax.set_mesh(mesh8), jax.checking_leaks():
        step = jax.jit(lambda w, x, s: jaxcomm.value_and_grad(loss, "data")(w, x, 2 * s)[0])
        assert step(jnp.ones(3), jnp.ones((16, 3)), jnp.float32(1)) == 6


def test_an_optax_that_makes_chains_otherwise_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nothing would warn of a wrong order any more, and nobody would know."""
    _chains.warn_unless_chains_are_seen.__wrapped__()  # this one is known
    monkeypatch.setattr(_chains, "_CHAIN_INIT", "chain.<locals>.start")
    with pytest.warns(UserWarning, match="optax .* builds chains in a way"):
        _chains.warn_unless_chains_are_seen.__wrapped__()


def test_a_mutable_array_among_the_arguments(mesh8: Any) -> None:
    def loss(w: jax.Array, x: jax.Array, count: Any) -> jax.Array:
        count[...] += 1
        return jnp.mean(w * x.mean(0))

    with jax.set_mesh(mesh8), pytest.raises(TypeError, match="is a Ref .* return what changes"):
        gradient = jax.jit(jaxcomm.value_and_grad(loss, "data"))
        gradient(jnp.ones(8), jnp.ones((8, 8)), jax.new_ref(0))
