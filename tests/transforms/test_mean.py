"""The table of properties of the mean of gradients: every view, mesh, codec and algorithm."""

from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxcomm
import oracles
from transforms.both_views import (
    SHAPES,
    VIEWS,
    View,
    gradients,
    jit_update,
    one_update,
    place,
    same_on_all_devices,
)

LARGE = ["kernel", "head"]  # the bucket: compressed leaves in the tree's order reversed
OPTIONS = [
    {"codec": codec, "algorithm": algorithm}
    for codec in oracles.ROUNDING
    for algorithm in oracles.ALGORITHMS
] + [{"codec": "float32"}, {"codec": "bfloat16"}, {"codec": "bfloat16", "algorithm": "native"}]

each_view = pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
each_option = pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o.values()))
GLOBAL, MANUAL, CHECKED = VIEWS[:3]


def is_exact(options: dict[str, str]) -> bool:
    """Whether the oracle knows the order of the additions; XLA's own is its own."""
    return options.get("algorithm") in oracles.ALGORITHMS or options == {"codec": "bfloat16"}


def expected_means(grads: dict[str, np.ndarray], view: View, options: dict[str, str]) -> Any:
    """Exempt leaves: the mean. The rest: the oracle's, on the bucket that each column holds."""
    means = {name: g.mean(0) for name, g in grads.items()}
    if not is_exact(options):
        return means

    def bucket(*parts: np.ndarray) -> list[np.ndarray]:
        flat = np.concatenate([p.reshape(len(p), -1) for p in parts], axis=1)
        mean = oracles.mean(flat, options["codec"], options.get("algorithm", "direct"))
        pieces = np.split(mean, np.cumsum([p[0].size for p in parts])[:-1])
        return [piece.reshape(p.shape[1:]) for piece, p in zip(pieces, parts, strict=True)]

    if view.model == 1:
        means["kernel"], means["head"] = bucket(grads["kernel"], grads["head"])
        return means
    (means["kernel"],) = bucket(grads["kernel"])
    halves = [bucket(half)[0] for half in np.split(grads["head"], view.model, axis=2)]
    return means | {"head": np.concatenate(halves, axis=1)}


@each_view
@each_option
def test_every_view_gives_the_oracle(view: View, options: dict[str, str]) -> None:
    exact = is_exact(options)
    grads = gradients(4)
    with jax.set_mesh(view.mesh(4)):
        updates, _ = one_update(view, jaxcomm.mean("data", **options), grads)
    expected = expected_means(grads, view, options)
    for name, update in updates.items():
        assert update.shape == SHAPES[name]
        tolerance = 0.0 if exact and name in LARGE else 2e-2 if name in LARGE else 1e-6
        np.testing.assert_allclose(update, expected[name], rtol=0, atol=tolerance, err_msg=name)


@each_view
@each_option
def test_updates_are_equal_on_all_devices(view: View, options: dict[str, str]) -> None:
    with jax.set_mesh(view.mesh(4)):
        updates, _ = one_update(view, jaxcomm.mean("data", **options), gradients(4))
    assert all(same_on_all_devices(u) for u in updates.values())


@pytest.mark.newest
@pytest.mark.parametrize("model", [1, 2])
@pytest.mark.parametrize("codec", ["float32", "bfloat16", "float16"])
def test_both_views_compile_to_the_same_collectives(codec: str, model: int) -> None:
    tx = jaxcomm.mean("data", codec)
    found = []
    for view in [v for v in VIEWS if v.model == model]:
        with jax.set_mesh(view.mesh(4)):
            grads = place(view, gradients(4), "data")
            params = place(view, {name: jnp.zeros(shape) for name, shape in SHAPES.items()})
            step = jit_update(view, tx, params)
            report = jaxcomm.wire_report(step.lower(grads, tx.init(params)).compile())
        found.append(sorted((c.op, str(c.dtypes), c.sent) for c in report.collectives))
    assert all(other == found[0] for other in found[1:])
    # One for the exempt leaves and the flag, and a bucket's: one in float32, or two of 16 bits and
    # one that agrees on float16's scale. With a further axis there are two buckets, as leaves
    # sharded over it travel apart, and the flag goes along it too. XLA before jax 0.12 joins
    # all-reduces of one type though they take turns.
    buckets, of_a_bucket = model, {"float32": 1, "bfloat16": 2, "float16": 3}[codec]
    exchanges = 1 + buckets * of_a_bucket + (model > 1)
    joined = {"float32": buckets, "bfloat16": 0, "float16": model - 1}[codec]
    assert exchanges - joined <= len(found[0]) <= exchanges


@pytest.mark.newest
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_bytes_are_those_of_the_formula(world: int) -> None:
    with jax.set_mesh(GLOBAL.mesh(world)):
        grads = place(GLOBAL, gradients(world), "data")
        params = place(GLOBAL, {name: jnp.zeros(shape) for name, shape in SHAPES.items()})
        tx = jaxcomm.mean("data", "bfloat16")
        report = jaxcomm.wire_report(jax.jit(tx.update).lower(grads, tx.init(params)).compile())
    bucket, exempt_and_flag = 21 + 40, 6 + 1 + 1
    exact = Fraction(2 * (world - 1), world) * 4 * exempt_and_flag
    assert report.bytes_max == oracles.bytes_sent(bucket, 2, world) + exact


@each_view
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["kernel", "head", "bias"])
def test_one_bad_element_makes_every_update_nan_everywhere(
    view: View, where: str, bad: float
) -> None:
    grads = gradients(4)
    grads[where][2].flat[3] = bad
    with jax.set_mesh(view.mesh(4)):
        updates, _ = one_update(view, jaxcomm.mean("data", "bfloat16"), grads)
    for name, update in updates.items():
        for shard in update.addressable_shards:
            assert np.isnan(shard.data).all(), name


def test_apply_if_finite_around_the_optimizer_skips_the_step_everywhere() -> None:
    tx = optax.chain(jaxcomm.mean("data"), optax.apply_if_finite(optax.sgd(1.0), 3))
    grads = gradients(4)
    grads["kernel"][1, 0, 0] = np.nan
    with jax.set_mesh(GLOBAL.mesh(4)):
        updates, _ = one_update(GLOBAL, tx, grads)
    for name, update in updates.items():
        np.testing.assert_array_equal(update, 0, err_msg=name)


@pytest.mark.parametrize("view", [GLOBAL, MANUAL, CHECKED], ids=lambda v: v.name)
def test_state_is_a_fixed_point_and_the_second_step_does_not_compile(view: View) -> None:
    tx = jaxcomm.mean("data", "bfloat16")
    with jax.set_mesh(view.mesh(8)):
        grads = place(view, gradients(8), "data")
        params = place(view, {name: jnp.zeros(shape) for name, shape in SHAPES.items()})
        before = tx.init(params)
        step = jit_update(view, tx, params)
        _, after = step(grads, before)
        step(grads, after)
        assert step._cache_size() == 1
    assert jax.tree.structure(before) == jax.tree.structure(after)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("view", VIEWS, ids=lambda v: v.name)
def test_gradients_of_16_bits_are_added_in_32(view: View, dtype: Any) -> None:
    values = np.float32([256, 1, 1, 1])  # in bfloat16, 256 + 1 is 256
    grads = {"head": jnp.asarray(np.broadcast_to(values[:, None, None], (4, 4, 10)), dtype)}
    rounded = oracles.round_bfloat16(np.float32(259 / 4))
    with jax.set_mesh(view.mesh(4)):
        updates, _ = one_update(view, jaxcomm.mean("data", "bfloat16"), grads)
    assert updates["head"].dtype == dtype
    np.testing.assert_array_equal(updates["head"], np.full((4, 10), rounded))


def test_buckets_change_nothing_but_the_number_of_exchanges() -> None:
    grads = {f"w{i}": np.random.default_rng(i).standard_normal((4, 64, 64)) for i in range(5)}
    grads = {name: g.astype(np.float32) for name, g in grads.items()}

    def run(**options: Any) -> tuple[Any, int]:
        tx = jaxcomm.mean("data", "bfloat16", **options)
        with jax.set_mesh(GLOBAL.mesh(4)):
            state = tx.init({name: jnp.zeros((64, 64)) for name in grads})
            step = jax.jit(tx.update).lower(grads, state).compile()
            report = jaxcomm.wire_report(step)
            return step(grads, state)[0], len(report.only("all-to-all").collectives)

    one, exchanges = run()
    assert exchanges == 1
    for options, expected in [
        ({"bucket_mib": 2 * 64 * 64 * 4 / 2**20}, 3),
        ({"bucket_mib": 0.001}, 5),
        ({"bucket_mib": 3 * 64 * 64 * 4 / 2**20, "bucket_order": ("w2", "w4")}, 2),
    ]:
        several, exchanges = run(**options)
        assert exchanges == expected
        for name in grads:
            np.testing.assert_array_equal(one[name], several[name])


def test_no_exchange_sends_nothing_and_leaves_devices_apart() -> None:
    grads = gradients(4)
    with jax.set_mesh(GLOBAL.mesh(4)):
        tx = jaxcomm.no_exchange("data")
        updates, state = one_update(GLOBAL, tx, grads)
        placed = place(GLOBAL, grads, "data")
        report = jaxcomm.wire_report(jax.jit(tx.update).lower(placed, state).compile())
    assert report.bytes_max == 0
    for shard in updates["kernel"].addressable_shards:
        np.testing.assert_array_equal(shard.data, grads["kernel"][shard.device.id])


@pytest.mark.parametrize("view", [GLOBAL, MANUAL], ids=lambda v: v.name)
def test_partition_gives_each_leaf_its_own_method(view: View) -> None:
    labels = {name: "exact" if name == "head" else "half" for name in SHAPES}
    tx = optax.partition(
        {"exact": jaxcomm.mean("data"), "half": jaxcomm.mean("data", "bfloat16")}, labels
    )
    grads = gradients(4)
    with jax.set_mesh(view.mesh(4)):
        updates, _ = one_update(view, tx, grads)
    np.testing.assert_allclose(updates["head"], grads["head"].mean(0), atol=1e-6)
    flat = grads["kernel"].reshape(4, -1)
    half = oracles.mean(flat, "bfloat16", "direct").reshape(3, 7)
    np.testing.assert_array_equal(updates["kernel"], half)


def test_inject_hyperparams() -> None:
    make = optax.inject_hyperparams(jaxcomm.mean, static_args=("bucket_mib",))
    with jax.set_mesh(GLOBAL.mesh(4)):
        grads = gradients(4)
        updates, _ = one_update(GLOBAL, make("data", codec="bfloat16"), grads)
        np.testing.assert_allclose(updates["kernel"], grads["kernel"].mean(0), atol=2e-2)
        with pytest.raises(TypeError, match='static_args=\\("bucket_mib",\\)'):
            one_update(GLOBAL, optax.inject_hyperparams(jaxcomm.mean)("data"), grads)


def test_gradients_may_be_donated() -> None:
    grads = gradients(4)
    with jax.set_mesh(GLOBAL.mesh(4)):
        tx = jaxcomm.mean("data", "bfloat16")
        params = place(GLOBAL, {name: jnp.zeros(shape) for name, shape in SHAPES.items()})
        state = tx.init(params)

        def step(params: Any, state: Any, grads: Any) -> Any:
            updates, state = tx.update(grads, state)
            return optax.apply_updates(params, updates), state

        step = jax.jit(step, donate_argnums=(0, 1))
        new, state = step(params, state, place(GLOBAL, grads, "data"))
        assert params["kernel"].is_deleted()
        new, state = step(new, state, place(GLOBAL, grads, "data"))
    np.testing.assert_allclose(new["kernel"], 2 * grads["kernel"].mean(0), atol=4e-2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"axis_name": 0},
            TypeError,
            "axis_name must be the name of a mesh axis or a tuple of names, got 0",
        ),
        ({"axis_name": ("data", "data")}, ValueError, "names an axis twice"),
        ({"axis_name": "data", "codec": "bf16"}, ValueError, "unknown codec 'bf16'"),
        ({"axis_name": "data", "algorithm": "tree"}, ValueError, "unknown algorithm 'tree'"),
        ({"axis_name": "data", "bucket_mib": 0}, ValueError, "positive number, got 0"),
        ({"axis_name": "data", "bucket_mib": "32"}, ValueError, "positive number, got '32'"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        jaxcomm.mean(**arguments)


def test_init_without_a_mesh_says_what_to_type() -> None:
    with pytest.raises(ValueError, match="call jax.set_mesh\\(jaxcomm.data_mesh\\(\\)\\) first"):
        jaxcomm.mean("data").init({"w": jnp.zeros(3)})


def test_init_names_the_axes_that_there_are() -> None:
    with jax.set_mesh(GLOBAL.mesh(4)), pytest.raises(ValueError, match="axes are 'data'"):
        jaxcomm.mean("batch").init({"w": jnp.zeros(3)})


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64])
def test_leaves_that_are_not_float_are_refused(dtype: Any) -> None:
    with jax.set_mesh(GLOBAL.mesh(4)), pytest.raises(TypeError, match="parameter n is"):
        jaxcomm.mean("data").init({"n": jnp.zeros(3, dtype)})


def test_parameters_sharded_over_the_data_axis_are_refused() -> None:
    mesh = GLOBAL.mesh(4)
    w = jax.device_put(jnp.zeros((8, 2)), NamedSharding(mesh, PartitionSpec("data")))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="is sharded over 'data'"):
        jaxcomm.mean("data").init({"w": w})


def test_init_inside_jit_cannot_see_a_further_axis() -> None:
    with jax.set_mesh(VIEWS[3].mesh(4)), pytest.raises(ValueError, match="outside of jax.jit"):
        jax.jit(jaxcomm.mean("data").init)({"w": jnp.zeros((8, 2))})


def test_gradients_by_jax_grad_are_refused_in_the_global_view() -> None:
    tx = jaxcomm.mean("data")
    with jax.set_mesh(GLOBAL.mesh(4)):
        state = tx.init({"w": jnp.zeros((4, 2))})
        with pytest.raises(ValueError, match="a gradient by jax.grad is already averaged"):
            tx.update({"w": jnp.zeros((4, 2))}, state)


def test_gradients_that_are_already_summed_are_refused_in_the_manual_view() -> None:
    tx = jaxcomm.mean("data")
    mesh = GLOBAL.mesh(4)
    replicated = PartitionSpec()
    with jax.set_mesh(mesh):
        state = tx.init({"w": jnp.zeros(3)})

        def step(w: jax.Array, x: jax.Array) -> Any:
            grads = jax.grad(lambda p: (p["w"] * x[0]).sum())({"w": w})
            return tx.update(grads, state)[0]

        step = jax.shard_map(
            step, in_specs=(replicated, PartitionSpec("data")), out_specs=replicated
        )
        with pytest.raises(ValueError, match='it is already summed.*to="varying"'):
            jax.jit(step)(jnp.zeros(3), jnp.ones((4, 3)))


def test_a_state_of_other_parameters_or_another_mesh_is_refused() -> None:
    tx = jaxcomm.mean("data")
    with jax.set_mesh(GLOBAL.mesh(4)):
        state = tx.init({"w": jnp.zeros(3)})
        with pytest.raises(ValueError, match="made for 1 parameters and got 2 gradients"):
            tx.update({"v": jnp.zeros((4, 3)), "w": jnp.zeros((4, 3))}, state)
    with jax.set_mesh(GLOBAL.mesh(2)):
        with pytest.raises(ValueError, match="made for 4 devices along 'data', and the mesh now"):
            tx.update({"w": jnp.zeros((2, 3))}, state)


@pytest.mark.parametrize(
    ("wrap", "cure"),
    [
        (lambda tx: optax.masked(tx, {"w": True, "b": False}), "Use optax.partition"),
        (lambda tx: optax.apply_if_finite(tx, 3), "around the optimizer only"),
        (lambda tx: optax.MultiSteps(tx, 2), "Use jaxcomm.multi_steps"),
    ],
)
def test_wrappers_that_cannot_work_are_refused(wrap: Any, cure: str) -> None:
    tx = wrap(optax.chain(jaxcomm.mean("data"), optax.sgd(0.1)))
    with jax.set_mesh(GLOBAL.mesh(4)), pytest.raises(ValueError, match=cure):
        tx.init({"w": jnp.zeros((4, 2)), "b": jnp.zeros(3)})
