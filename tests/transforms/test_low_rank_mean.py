"""PowerSGD: the paper's updates, nothing lost, two messages a bucket."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm.collectives import low_rank
from jaxcomm.transforms._layout import Leaf
from jaxcomm.transforms.low_rank_mean import _matrices
from transforms import low_rank_oracle
from transforms.both_views import (
    SHAPES,
    VIEWS,
    Program,
    View,
    each_view,
    gradients,
    nan_everywhere,
    run,
    same_on_all_devices,
)

GLOBAL, WORLD, RANK = VIEWS[0], 4, 2
LARGE = ("head", "kernel")
BAD = 2  # the step with a NaN


def shards(view: View, name: str, x: np.ndarray) -> list[np.ndarray]:
    """The parts of a leaf that are matrices of their own; `head` is sharded over its last axis."""
    return np.split(x, view.model if name == "head" else 1, axis=-1)


def with_starts(view: View, state: Any) -> tuple[Any, dict[str, list[np.ndarray]]]:
    """The state with a Q for each shard that we know, equal on all devices."""
    rng, known, values = np.random.default_rng(7), {}, []
    for name, old in zip(LARGE, state.factors.values, strict=True):
        m = SHAPES[name][0]
        parts = view.model if name == "head" else 1
        known[name] = [rng.standard_normal((m, RANK)) for _ in range(parts)]
        flat = np.concatenate([q.T.reshape(-1) for q in known[name]]).astype(np.float32)
        values.append(jax.device_put(np.tile(flat, (WORLD, 1)), old.sharding))
    factors = dataclasses.replace(state.factors, values=values)
    return state._replace(factors=factors), known


@functools.cache
def steps_of(view: View) -> Any:
    """The gradients of five steps, one of them bad, what comes of them, and the first Q."""
    batches = [gradients(WORLD, seed) for seed in range(5)]
    batches[BAD]["head"][2, 0, 0] = np.nan
    program = Program(view, jaxcomm.low_rank_mean("data", RANK), batches[0])
    start, known = with_starts(view, program.start)
    return batches, program.run(*batches, state=start), known


@each_view
def test_updates_are_those_of_the_paper(view: View) -> None:
    batches, steps, starts = steps_of(view)
    residuals = {n: [np.zeros(1)] * len(starts[n]) for n in LARGE}
    for i, (grads, (updates, _)) in enumerate(zip(batches, steps, strict=True)):
        assert all(same_on_all_devices(u) for u in updates.values())
        if i == BAD:
            assert nan_everywhere(updates)
            continue
        for name in ("bias", "scale"):
            np.testing.assert_allclose(updates[name], grads[name].mean(0), atol=1e-6)
        for name in LARGE:
            found = shards(view, name, np.asarray(updates[name]))
            for k, part in enumerate(shards(view, name, grads[name].astype(np.float64))):
                wanted, starts[name][k], residuals[name][k] = low_rank_oracle.step(
                    part.swapaxes(1, 2), starts[name][k], residuals[name][k]
                )
                np.testing.assert_allclose(found[k].T, wanted, atol=2e-5, err_msg=name)


@each_view
def test_updates_and_residuals_add_up_and_a_bad_step_changes_nothing(view: View) -> None:
    batches, steps, _ = steps_of(view)
    owed = {name: np.zeros(SHAPES[name]) for name in LARGE}
    for i, (grads, (updates, state)) in enumerate(zip(batches, steps, strict=True)):
        if i == BAD:
            for part in ("residual", "factors"):
                old = getattr(steps[BAD - 1][1], part).values
                jax.tree.map(np.testing.assert_array_equal, getattr(state, part).values, old)
            continue
        for name, residual in zip(LARGE, state.residual.values, strict=True):
            owed[name] += grads[name].mean(0) - np.asarray(updates[name])
            np.testing.assert_allclose(np.mean(residual, 0), owed[name], atol=1e-5)


def test_a_residual_that_overflows_on_one_device_stops_all(make_mesh: Any) -> None:
    """The mean's basis is (1, 1, 1): both devices' products, their sums and the mean are finite."""
    rows = np.float32([[-0.9, 0.9, 0.9], [0.95, -0.85, -0.85]]) * np.finfo(np.float32).max
    grads = jnp.stack([rows, np.zeros((2, 3), np.float32)], axis=1)  # matrices of 2 x 3
    tx = jaxcomm.low_rank_mean("data", 1)
    with jax.set_mesh(make_mesh(2)):
        step, state = jax.jit(tx.update), tx.init(jnp.zeros((2, 3)))
        _, state = step(grads * 1e-30, state)  # A first start may be large.
        update, bad = step(grads, state)
        assert np.isnan(update).all()
        np.testing.assert_array_equal(bad.residual.values[0], state.residual.values[0])
        update, _ = step(grads / 4, bad)
    np.testing.assert_allclose(update[0], rows.mean(0) / 4, rtol=1e-3)


@pytest.mark.parametrize(
    ("codec", "algorithm"), [("bfloat16", "ring"), ("int8", None), ("int4", "circulant")]
)
def test_nothing_is_lost_in_any_codec(codec: str, algorithm: str | None) -> None:
    batches = [gradients(WORLD, seed) for seed in range(4)]
    tx = jaxcomm.low_rank_mean("data", RANK, codec, algorithm)
    steps = run(VIEWS[5], tx, batches)
    for name, residual in zip(LARGE, steps[-1][1].residual.values, strict=True):
        applied = sum(np.asarray(updates[name], np.float64) for updates, _ in steps)
        wanted = sum(g[name].astype(np.float64).mean(0) for g in batches)
        np.testing.assert_allclose(applied + np.mean(residual, 0), wanted, atol=1e-5)
        assert np.abs(applied).max() > 0.1
        assert same_on_all_devices(steps[-1][0][name])


def test_a_mean_of_that_rank_arrives_in_one_step_and_at_any_scale() -> None:
    rng = np.random.default_rng(3)
    grads = gradients(WORLD)
    noise = grads["head"] - grads["head"].mean(0)
    mean = rng.standard_normal((4, RANK)) @ rng.standard_normal((RANK, 10))
    grads["head"] = (mean + noise).astype(np.float32)
    program = Program(GLOBAL, jaxcomm.low_rank_mean("data", RANK), grads)
    for scale in (1.0, 1e-30, 1e25):
        scaled = {name: g * np.float32(scale) for name, g in grads.items()}
        ((updates, _),) = program.run(scaled)
        found = np.asarray(updates["head"], np.float64) / scale
        np.testing.assert_allclose(found, mean, atol=1e-4, err_msg=str(scale))


def test_steps_turn_to_the_largest_directions() -> None:
    """Without noise or feedback it is a power iteration: the nearest matrix of the rank."""
    rng = np.random.default_rng(4)
    x = np.asarray(rng.standard_normal((1, 12, 9)) * 4.0 ** -np.arange(9), np.float32)
    mean, _ = jaxcomm.collectives.mean_of("float32", None)
    native = jaxcomm.algorithms.native()

    def iterate(x: jax.Array) -> jax.Array:
        q, means = [jnp.zeros((1, 2, 12))], x
        for _ in range(12):
            q = low_rank.with_new_columns(q, jax.random.key(0))
            (means,), q, *_ = low_rank.projected_mean([x], q, "data", mean, mean, native)
        return means

    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:1])):
        f = jax.shard_map(iterate, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
        found = jax.jit(f)(x)
    np.testing.assert_allclose(found[0], low_rank_oracle.best(x[0], 2), atol=1e-3)


def test_what_had_no_gradient_has_one_later() -> None:
    nothing = {name: np.zeros_like(g) for name, g in gradients(WORLD).items()}
    steps = run(GLOBAL, jaxcomm.low_rank_mean("data", 1), [nothing, nothing, gradients(WORLD)])
    for name in LARGE:
        assert (np.asarray(steps[1][0][name]) == 0).all()
        assert np.abs(steps[2][0][name]).max() > 0.01


def as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **_: default(*args))


def test_gpus_find_the_same_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without loops and branches; new columns are others, so the first step needs a start."""
    batches, steps, _ = steps_of(GLOBAL)
    as_on_gpus(monkeypatch)
    program = Program(GLOBAL, jaxcomm.low_rank_mean("data", RANK), batches[0])
    start, _ = with_starts(GLOBAL, program.start)
    for (found, _), (wanted, _) in zip(program.run(*batches, state=start), steps, strict=True):
        for name in SHAPES:
            np.testing.assert_allclose(found[name], wanted[name], atol=2e-5)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_new_columns(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    """Zeros are drawn, apart for each matrix; the others keep their directions."""
    if platform == "gpu":
        as_on_gpus(monkeypatch)
        monkeypatch.setattr(low_rank, "_of_little_padding", low_rank._of_one_length)
    rng = np.random.default_rng(8)
    factors = [rng.standard_normal((2, 3, m)).astype(np.float32) for m in (500, 40, 500)]
    for q in factors:
        q[:, 1] = 0
        q[:, 2] *= 1e-30
    found = jax.jit(lambda *args: low_rank.with_new_columns(*args))(factors, jax.random.key(0))
    for q, new in zip(factors, map(np.asarray, found), strict=True):
        for j in (0, 2):
            scale = np.abs(new[:, j]).max(-1, keepdims=True)
            assert (scale > 1 - 1e-6).all() and (scale <= 4).all()
            largest = np.abs(q[:, j]).max(-1, keepdims=True)
            np.testing.assert_allclose(new[:, j] / scale, q[:, j] / largest, rtol=1e-6)
    drawn = np.concatenate([np.asarray(found[i])[:, 1] for i in (0, 2)])
    assert abs(drawn.mean()) < 5 / drawn.size**0.5
    assert abs(drawn.std() - 1) < 5 / drawn.size**0.5
    assert np.abs(np.corrcoef(drawn) - np.eye(4)).max() < 5 / 500**0.5
    short = np.asarray(found[1])[:, 1]  # of another group
    assert np.abs(drawn[:, :40] @ short.T).max() < 5 * 40**0.5


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_columns_are_orthonormal_also_where_they_are_nearly_the_same(
    monkeypatch: pytest.MonkeyPatch, platform: str
) -> None:
    if platform == "gpu":
        as_on_gpus(monkeypatch)
    rng = np.random.default_rng(5)
    u, _ = np.linalg.qr(rng.standard_normal((200, 6)))
    v, _ = np.linalg.qr(rng.standard_normal((6, 6)))
    hard = (u * 10.0 ** -np.arange(6) @ v).T[None].astype(np.float32)  # condition 1e5
    twins = np.stack([hard[0, :1].repeat(2, 0)[:, :50]]).astype(np.float32)
    short = np.concatenate([twins, np.zeros((1, 4, 50), np.float32)[:, :4]], axis=1)
    both = [jnp.asarray(hard), jnp.asarray(short)]
    first, second = jax.jit(lambda bases: low_rank.orthonormal(bases))(both)
    np.testing.assert_allclose(first[0] @ first[0].T, np.eye(6), atol=1e-5)
    projected = np.asarray(first[0]).T @ (np.asarray(first[0]) @ hard[0].T)
    np.testing.assert_allclose(projected, hard[0].T, atol=1e-6)
    assert np.linalg.norm(second[0][0]) == pytest.approx(1, abs=1e-5)
    assert (np.asarray(second[0][1:]) == 0).all()


def test_a_long_basis_does_not_lengthen_the_others() -> None:
    """Temporaries of many short ones beside it are those of the short ones, and of it."""

    def temporaries(lengths: list[int]) -> int:
        bases = [jax.ShapeDtypeStruct((1, 4, n), jnp.float32) for n in lengths]
        compiled = jax.jit(low_rank.orthonormal).lower(bases).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    apart = temporaries([64] * 50) + temporaries([20_000])
    assert temporaries([*[64] * 25, 20_000, *[64] * 25]) < 2 * apart
    rng = np.random.default_rng(0)
    bases = [jnp.asarray(rng.standard_normal((1, 3, n)), jnp.float32) for n in (9, 200, 12)]
    for p in low_rank.orthonormal(bases):
        np.testing.assert_allclose(p[0] @ p[0].T, np.eye(3), atol=1e-5)


@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
def test_two_messages_a_bucket(codec: str) -> None:
    tx = jaxcomm.low_rank_mean("data", RANK, codec, bucket_mib=1e-5)  # a leaf a bucket
    report = Program(GLOBAL, tx, gradients(WORLD)).report()
    vectors = [RANK * side for name in LARGE for side in SHAPES[name]]
    flag = codec != "float32"  # what is not finite shows in a float32 mean
    means = 2 * (WORLD - 1) / WORLD * 4 * (6 + 1 + flag)  # bias, scale
    for n in vectors:
        block = jaxcomm.codecs.bfloat16().message_bytes(-(-n // WORLD))
        means += 2 * (WORLD - 1) * (block if codec == "bfloat16" else n)
    assert report.bytes_max == means
    together = Program(GLOBAL, jaxcomm.low_rank_mean("data", RANK, codec), gradients(WORLD))
    if codec == "bfloat16":
        assert report.rounds == 2 * len(vectors) + 1
        assert together.report().rounds == 2 * 2 + 1
    else:  # XLA may join float32 all-reduces that do not wait for each other, as that of biases
        assert together.report().rounds in (2, 3)


@pytest.mark.parametrize(
    ("shape", "stacked", "matrix"),
    [
        ((30, 40), False, (1, 30, 40)),
        ((3, 3, 64, 128), False, (1, 576, 128)),
        ((512, 8, 64), False, (1, 512, 512)),  # to attention heads
        ((8, 64, 512), False, (1, 512, 512)),  # and back
        ((2, 3, 2), False, (1, 6, 2)),  # as few as (2, 6): the last cut
        ((12, 30, 40), True, (12, 30, 40)),
        ((12, 512, 8, 64), True, (12, 512, 512)),
    ],
)
def test_leaves_as_matrices(shape: Any, stacked: bool, matrix: Any) -> None:
    leaf = Leaf("w", shape, jnp.float32, jax.P(), stacked=stacked)
    assert _matrices(leaf) == matrix


def test_stacked_layers_are_a_matrix_each() -> None:
    rng = np.random.default_rng(6)
    layers = [rng.standard_normal((WORLD, 8, 10)).astype(np.float32) for _ in range(3)]
    apart = {f"w{i}": x for i, x in enumerate(layers)}
    tx = jaxcomm.with_layer_axis(jaxcomm.low_rank_mean("data", RANK), ["w"])
    stacked = Program(GLOBAL, tx, {"w": np.stack(layers, 1)})
    each = Program(GLOBAL, jaxcomm.low_rank_mean("data", RANK), apart)
    q = np.asarray(rng.standard_normal((3, RANK * 8)), np.float32)
    starts = [np.tile(q.reshape(-1), (WORLD, 1))], [np.tile(x, (WORLD, 1)) for x in q]
    found = []
    for program, values in zip((stacked, each), starts, strict=True):
        factors = program.start.factors
        placed = [
            jax.device_put(x, o.sharding) for x, o in zip(values, factors.values, strict=True)
        ]
        state = program.start._replace(factors=dataclasses.replace(factors, values=placed))
        found.append(program.run(program.like, state=state)[0][0])
    np.testing.assert_allclose(found[0]["w"], np.stack(list(found[1].values())), atol=1e-5)


def test_an_empty_matrix_travels_as_nothing(make_mesh: Any) -> None:
    with jax.set_mesh(make_mesh(2)):
        tx = jaxcomm.low_rank_mean("data", 1)
        state = tx.init({"e": jnp.zeros((0, 8))})
        updates, _ = jax.jit(tx.update)({"e": jnp.zeros((2, 0, 8))}, state)
    assert updates["e"].shape == (0, 8)


def test_only_leaves_that_become_smaller_are_compressed(make_mesh: Any) -> None:
    params = {"even": jnp.zeros((4, 4)), "long": jnp.zeros((4, 5)), "row": jnp.zeros((1, 9))}
    with jax.set_mesh(make_mesh(2)):
        state = jaxcomm.low_rank_mean("data", 2).init(params)
        assert [leaf.path for leaf in state.layout.leaves if not leaf.exempt] == ["long"]
        with pytest.raises(ValueError, match=r"rank 3 compresses no parameter: the largest, long"):
            jaxcomm.low_rank_mean("data", 3).init(params)
        jaxcomm.low_rank_mean("data", 3, exempt=["long"]).init({"long": params["long"]})
        stacked = {"blocks": jnp.zeros((2, 64, 64)), "head": jnp.zeros((64, 2))}
        inside = jaxcomm.in_backward(jaxcomm.low_rank_mean("data", 3), ["blocks"])
        inside.init(stacked)  # of the head nothing is compressed, of the blocks much
        low = r"Choose a lower rank, or send them in float32: exempt=\['even', 'long', 'row'\]"
        with pytest.raises(ValueError, match=low):
            jaxcomm.low_rank_mean("data", 3).init(params)
        with pytest.raises(ValueError, match=r"Use jaxcomm.mean, or .*: exempt=\['row'\]"):
            jaxcomm.low_rank_mean("data", 3).init({"row": params["row"]})
        jaxcomm.low_rank_mean("data", 3, exempt=["even", "long", "row"]).init(params)
        with pytest.raises(ValueError, match=r"or send them in float32: exempt=\['blocks'\]"):
            inside.init({**stacked, "blocks": jnp.zeros((2, 64, 2))})


def test_dense_steps_first() -> None:
    tx = jaxcomm.low_rank_mean("data", 1, dense_steps=1)
    (first, _), (second, _) = run(GLOBAL, tx, [gradients(WORLD)] * 2)
    np.testing.assert_allclose(first["head"], gradients(WORLD)["head"].mean(0), atol=1e-6)
    assert np.linalg.matrix_rank(second["head"]) == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rank": 0}, ValueError, "a rank of at least 1, got 0"),
        ({"rank": True}, ValueError, "got True"),
        ({"rank": 2.0}, ValueError, "got 2.0"),
        ({"rank": 2, "codec": "scaled_sign"}, ValueError, "scaled_sign is too coarse for a"),
        ({"rank": 2, "codec": "random_k"}, ValueError, "random_k is too coarse for a basis"),
        ({"rank": 2, "codec": "int3"}, ValueError, "unknown codec 'int3'"),
        ({"rank": 2, "dense_steps": -1}, ValueError, "at least 0, got -1"),
        ({"rank": 2, "bucket_mib": 0}, ValueError, "bucket_mib must be a positive number"),
    ],
)
def test_bad_arguments_are_refused(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        jaxcomm.low_rank_mean("data", **options)
