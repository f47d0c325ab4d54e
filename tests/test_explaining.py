"""What `jaxcomm.explain` says equals what compiled programs do."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxcomm
from jaxcomm import plan
from jaxcomm.explaining._program import collectives_in

SHAPES = {
    "blocks": {"w": (3, 64, 32), "bias": (3, 32)},
    "emb": (100, 32),
    "head": {"kernel": (32, 10), "bias": (10,)},
}


def shapes() -> dict:
    """Parameters that only have shapes."""
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, "float32"), SHAPES, is_leaf=is_shape)


def loss_fn(params: dict, batch: jax.Array) -> jax.Array:
    params = jaxcomm.gather(params)

    def block(x: jax.Array, layer: dict) -> tuple[jax.Array, None]:
        layer = jaxcomm.exchanged(layer)
        return x + jnp.tanh(x @ layer["w"].T) @ layer["w"] + layer["bias"], None

    x = batch @ params["emb"]
    x, _ = jax.lax.scan(block, x, params["blocks"])
    return jnp.mean(x @ params["head"]["kernel"] + params["head"]["bias"])


def compiled_report(
    tx: optax.GradientTransformation, params: dict, at: Any, batch: jax.Array | None = None
) -> jaxcomm.WireReport:
    """What the compiled program of a step sends; `at` makes parameters those of the loss."""

    @jax.jit
    def step(params: dict, state: object, batch: jax.Array) -> object:
        loss, grads = jaxcomm.value_and_grad(loss_fn, "data")(at(params, state), batch)
        return loss, tx.update(grads, state, params)

    batch = jnp.ones((8, 100)) if batch is None else batch
    lowered = step.lower(params, tx.init(params), batch)
    return jaxcomm.wire_report(lowered.compile())


def same(params: dict, state: object) -> dict:
    del state
    return params


vote = jaxcomm.majority_vote("data")
stacked = jaxcomm.in_backward(jaxcomm.mean("data", "cnat", "ring", bucket_mib=0.005), ["blocks"])
CHAINS = {
    "branches": (
        jaxcomm.multi_steps(
            optax.chain(jaxcomm.control_variates(jaxcomm.mean("data", "int8"), 3), vote), 2
        ),
        same,
    ),
    "dense first": (jaxcomm.dense_first(jaxcomm.mean("data", "int8"), 3), same),
    "in the backward pass": (optax.chain(stacked, optax.sgd(0.1)), stacked.attach),
    "sharded": (
        jaxcomm.sharded(jaxcomm.mean("data", "int4", error_feedback=True), "bfloat16"),
        jaxcomm.sharded_params,
    ),
}


@pytest.mark.standard_promotion  # optax promotes
@pytest.mark.parametrize("name", CHAINS)
def test_bytes_are_those_of_the_compiled_program(name: str) -> None:
    tx, at = CHAINS[name]
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), shapes())
    with jax.set_mesh(jaxcomm.data_mesh()):
        if name == "sharded":
            tx = jaxcomm.with_layer_axis(tx, ["blocks/*"])
            params = jaxcomm.shard(params, "data", layers=["blocks/*"], exempt=["emb", "head/*"])
            exempt = ["emb", "head/*"]
            mean = jaxcomm.mean("data", "int4", error_feedback=True, exempt=exempt)
            tx = jaxcomm.with_layer_axis(jaxcomm.sharded(mean, "bfloat16"), ["blocks/*"])
        found = jaxcomm.explain(tx, params)
        compiled = compiled_report(tx, params, at)
        assert set(found.wire.by_axes(jax.sharding.get_mesh())) == {("data",)}
        seconds = plan.seconds_of(found.wire, plan.defaults("cpu"))
        assert seconds > 0 and all(c.shapes and c.group_size > 1 for c in found.wire.collectives)
        assert found.bytes_max == compiled.bytes_max, str(found)
        shares = {"from step 0": 0.25} if name == "dense first" else {}
        assert found.wire.per_step(shares) == pytest.approx(compiled.per_step(shares))


def test_the_average_is_shown_where_the_program_says_how_often() -> None:
    dense = jaxcomm.dense_first(jaxcomm.mean("data", "int8"), 3)
    for tx, share in ((jaxcomm.multi_steps(vote, 4), 1 / 4), (vote, 1), (dense, None)):
        with jax.set_mesh(jaxcomm.data_mesh()):
            found = jaxcomm.explain(tx, shapes())
        (always,) = [m.sent for m in found.messages if m.name == "flags, loss" and not m.when]
        shown = "On average" in str(found)
        assert shown == (share == 1 / 4)
        if shown:
            mean = float(always + (found.bytes_max - always) * share)
            assert f"On average {mean:,.1f}".removesuffix(".0") in str(found)


def test_no_average_is_shown_of_steps_that_send_the_same(make_mesh: Any) -> None:
    with jax.set_mesh(make_mesh(3)):  # bytes are thirds
        found = jaxcomm.explain(optax.chain(jaxcomm.mean("data"), optax.sgd(0.1)), shapes())
    assert "On average" not in str(found)


def test_a_float32_mean_counts_all_layers_and_whole_leaves() -> None:
    """Of layers exchanged in the backward pass, and of parameters that are split along the axis."""
    world = jax.device_count()
    exchange = jaxcomm.in_backward(jaxcomm.mean("data"), ["blocks"])
    with jax.set_mesh(jaxcomm.data_mesh()):
        in_backward = jaxcomm.explain(exchange, shapes())
        params = jaxcomm.shard({"w": jnp.zeros((12, 64, 64))}, "data", layers=["w"])
        sharded = jaxcomm.explain(
            jaxcomm.sharded(jaxcomm.mean("data", "bfloat16"), gather="bfloat16"), params
        )
    n = sum(x.size for x in jax.tree.leaves(shapes()))
    assert in_backward.dense_bytes == pytest.approx(8 * (world - 1) / world * n)
    assert sharded.dense_bytes == pytest.approx(8 * (world - 1) / world * 12 * 64 * 64)


def test_buckets_that_are_no_neighbours_are_no_range() -> None:
    sizes = {"0": {"a": 256}, "1": {"z": 300}, "2": {"a": 256}}
    params = jax.tree.map(lambda n: jax.ShapeDtypeStruct((512, n), jnp.float32), sizes)
    with jax.set_mesh(jaxcomm.data_mesh()):
        rows = str(jaxcomm.explain(jaxcomm.mean("data", "int8", bucket_mib=0.5), params))
    (both,) = (row for row in rows.splitlines() if row.startswith("*/a (2)"))
    assert both.endswith("bucket 1, 3")


def test_leaves_buckets_and_state() -> None:
    trained = optax.chain(
        jaxcomm.mean("data", "int8", error_feedback=True, bucket_mib=0.01, exempt=["head/kernel"]),
        optax.sgd(0.1, momentum=0.9),
    )
    labels = {"blocks": "trained", "emb": "frozen", "head": "trained"}
    tx = optax.partition({"trained": trained, "frozen": jaxcomm.set_to_zero("data")}, labels)
    with jax.set_mesh(jaxcomm.data_mesh()):
        found = jaxcomm.explain(tx, shapes())
    travels = {leaf.path: (leaf.travels, leaf.messages) for leaf in found.leaves}
    assert travels == {
        "blocks/bias": ("float32, native", ("exempt",)),
        "blocks/w": ("int8, direct", ("bucket 1",)),
        "emb": ("not sent", ()),
        "head/bias": ("float32, native", ("exempt",)),
        "head/kernel": ("float32, native", ("exempt",)),
    }
    residual, momentum = 4 * 3 * 64 * 32, 4 * (3 * 64 * 32 + 3 * 32 + 32 * 10 + 10)
    assert found.own_bytes == residual
    assert found.shared_bytes == momentum + 4  # and a counter
    assert found.needs[0][0] == "mean" and "factored_adam" in found.needs[0][1]
    assert max(map(len, str(found).splitlines())) <= 120


@pytest.mark.standard_promotion  # optax promotes
def test_a_moment_of_16_bits_takes_two_bytes_a_value() -> None:
    tx = optax.chain(jaxcomm.mean("data"), optax.adam(0.1, mu_dtype=jnp.bfloat16))
    with jax.set_mesh(jaxcomm.data_mesh()):
        found = jaxcomm.explain(tx, jax.ShapeDtypeStruct((64, 32), "float32"))
    assert found.shared_bytes == (2 + 4) * 64 * 32 + 2 * 4  # and two counters


def test_every_method_is_explained_from_shapes() -> None:
    feedback = jaxcomm.mean("data", "scaled_sign", error_feedback=True)
    methods = {
        "1 bit, direct": jaxcomm.one_bit_adam("data", 1e-3, dense_steps=10),
        "bfloat16, ring": jaxcomm.mean("data", "bfloat16", "ring"),
        "float32, native; rank 2, bfloat16": jaxcomm.low_rank_mean(
            "data", 2, codec="bfloat16", dense_steps=5
        ),
        "int4, direct": jaxcomm.local_steps(
            optax.sgd(0.1), 8, optax.sgd(0.7), jaxcomm.mean("data", "int4", error_feedback=True)
        ),
        "oktopk, density 0.01": jaxcomm.sparse_mean("data", 0.01),
        "scaled_sign, direct": jaxcomm.factored_adam(feedback, 1e-3),
        "votes, direct": optax.chain(jaxcomm.local("data", optax.trace(0.9)), vote),
    }
    with jax.set_mesh(jaxcomm.data_mesh()):
        for form, tx in methods.items():
            found = jaxcomm.explain(tx, shapes())
            (matrix,) = [leaf for leaf in found.leaves if leaf.path == "blocks/w"]
            assert form in matrix.travels, (form, matrix)
            assert found.needs and form.split("; ")[-1] in str(found)
            sometimes = " ".join(str(found).split()).partition("Not in every step: ")[2]
            assert bool(sometimes) == any(message.when for message in found.messages)
            if form == "int4, direct":
                assert "a value (local_steps: fragment 1, 1 step in 8)." in sometimes


@pytest.mark.standard_promotion  # of optax
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
        optax.contrib.schedule_free_adamw(0.1),
        optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()),
        optax.contrib.dowg(),
    ],
)
def test_an_optimizer_that_makes_arrays_of_the_parameters(optimizer: Any) -> None:
    """From shapes, the state is explained, and sharded, as from arrays."""
    tx = optax.chain(jaxcomm.mean("data", "int8"), optimizer)
    arrays = {"w": jnp.zeros((64, 32)), "b": jnp.zeros(32)}
    known, mesh = jax.eval_shape(lambda: arrays), jaxcomm.data_mesh()
    with jax.set_mesh(mesh):
        given = {"value": 1.0} if "plateau" in str(tx.init(arrays)).lower() else {}
        found, wanted = (jaxcomm.explain(tx, x, **given) for x in (known, arrays))
        assert str(found) == str(wanted)
    assert jaxcomm.state_spec(tx, known, mesh) == jaxcomm.state_spec(tx, arrays, mesh)


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    ("form", "tx"),
    [
        ("bfloat16, halving_doubling", jaxcomm.mean("data", "bfloat16", "halving_doubling")),
        ("float16, direct", jaxcomm.mean("data", "float16", bucket_mib=0.01)),
        ("random_k of float32, native", jaxcomm.mean("data", "random_k")),
        ("gtopk, density 0.05", jaxcomm.sparse_mean("data", 0.05, "gtopk")),
    ],
)
def test_on_six_devices_not_all_send_as_much(
    form: str, tx: optax.GradientTransformation, make_mesh: Any
) -> None:
    """What all buckets have is their form, and bytes are those of the device that sends most."""
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), shapes())
    with jax.set_mesh(make_mesh(6)):
        found = jaxcomm.explain(tx, params)
        sent = compiled_report(tx, params, same, jnp.ones((12, 100))).bytes_max
    assert found.bytes_max == sent, str(found)
    buckets = [message for message in found.messages if message.name.startswith("bucket")]
    assert buckets and {message.form for message in buckets} == {form}


def test_the_mean_beside_it_is_over_the_same_axis(mesh4x2: jax.sharding.Mesh) -> None:
    with jax.set_mesh(mesh4x2):
        found = jaxcomm.explain(jaxcomm.mean("data"), shapes())
    values = sum(x.size for x in jax.tree.leaves(shapes()))
    assert found.dense_bytes == 1.5 * 4 * values
    assert str(found).count("6.00") == 2


def test_split_over_a_further_axis(mesh4x2: jax.sharding.Mesh) -> None:
    with jax.set_mesh(mesh4x2):
        sharding = jax.NamedSharding(mesh4x2, jax.P(None, "model"))
        params = {"w": jax.ShapeDtypeStruct((64, 32), "float32", sharding=sharding)}
        tx = jaxcomm.mean("data", "int8", error_feedback=True)
        found = jaxcomm.explain(tx, params)
    (bucket,) = [message for message in found.messages if message.leaves]
    codec = jaxcomm.codecs.int8()
    assert bucket.sent == 2 * 3 * codec.message_bytes(64 * 16 // 4)
    assert found.own_bytes == 4 * 64 * 16


def test_a_mean_beside_a_factored_adam_needs_what_it_needs() -> None:
    signs = lambda: jaxcomm.mean("data", "scaled_sign", error_feedback=True)  # noqa: E731
    parts = {"a": jaxcomm.factored_adam(signs(), 0.1), "b": signs()}
    tx = optax.partition(parts, {"w": "a", "x": "b"})
    with jax.set_mesh(jaxcomm.data_mesh()):
        params = {"w": jnp.zeros((8, 8)), "x": jnp.zeros((8, 8))}
        assert [name for name, _ in jaxcomm.explain(tx, params).needs] == ["factored_adam", "mean"]
        assert len(jaxcomm.explain(parts["a"], params).needs) == 1


def test_what_a_vote_needs() -> None:
    vote = lambda **options: jaxcomm.majority_vote("data", **options)  # noqa: E731
    corrected = optax.chain(jaxcomm.control_variates(jaxcomm.mean("data")), vote())
    with jax.set_mesh(jaxcomm.data_mesh()):
        plain, fed_back, both = (
            str(jaxcomm.explain(tx, shapes()))
            for tx in (vote(), vote(error_feedback=True), corrected)
        )
    assert "majority_vote: SGD with a rate for signs; data that are alike" in plain
    assert "majority_vote: SGD with a rate for gradients; data that are alike" in fed_back
    assert "only jaxcomm.local may come before" in plain
    assert "only control_variates and local may come before" in both


def test_an_axis_of_one_device(make_mesh: Any) -> None:
    for devices, is_said in ((1, True), (2, False)):
        with jax.set_mesh(make_mesh(devices)):
            text = str(jaxcomm.explain(jaxcomm.mean("data", "int8"), shapes()))
        assert ("one device: no gradient is sent, but codecs still round" in text) == is_said
    with jax.set_mesh(make_mesh(2)):
        frozen = optax.partition(
            {"a": jaxcomm.set_to_zero("data"), "b": jaxcomm.mean("data")}, {"w": "a"}
        )
        for tx in (jaxcomm.no_exchange("data"), frozen):
            found = jaxcomm.explain(tx, {"w": jnp.zeros((8, 8))})
            assert "one device" not in str(found) and found.dense_bytes == 4 * 64


def test_errors_say_what_to_write() -> None:
    with pytest.raises(ValueError, match=r"jax\.set_mesh\(jaxcomm\.data_mesh"):
        jaxcomm.explain(jaxcomm.mean("data"), shapes())
    with jax.set_mesh(jaxcomm.data_mesh()):
        with pytest.raises(ValueError, match="put jaxcomm.mean"):
            jaxcomm.explain(optax.adam(1e-3), shapes())
        with pytest.raises(TypeError, match="optax transformation"):
            jaxcomm.explain("adam", shapes())
        with pytest.raises(ValueError, match="no parameters"):
            jaxcomm.explain(jaxcomm.mean("data"), {})
        inner = jaxcomm.mean("data", "int8")
        compiled = optax.GradientTransformation(inner.init, jax.jit(inner.update))
        assert jaxcomm.explain(compiled, shapes()).bytes_max
        jaxcomm.explain(inner, shapes())  # has notes of its own
        with pytest.raises(ValueError, match="explain the transformation without that"):
            jaxcomm.explain(compiled, shapes())


@pytest.mark.standard_promotion  # of optax
def test_what_update_is_given_by_name() -> None:
    plateau = optax.contrib.reduce_on_plateau()
    tx = optax.chain(jaxcomm.mean("data", "int8"), optax.adam(1e-3), plateau)
    with jax.set_mesh(jaxcomm.data_mesh()):
        params = {"w": jnp.ones((64, 64))}
        found = jaxcomm.explain(tx, params, value=jnp.float32(1))
        assert found.bytes_max == jaxcomm.explain(jaxcomm.mean("data", "int8"), params).bytes_max


def test_a_stack_that_is_one_array() -> None:
    exchange = jaxcomm.in_backward(jaxcomm.mean("data", "int8"), ["w"])
    with jax.set_mesh(jaxcomm.data_mesh()):
        found = jaxcomm.explain(exchange, {"w": jnp.zeros((3, 64, 64)), "x": jnp.zeros((8, 8))})
    assert [leaf.path for leaf in found.leaves] == ["w", "x"]
    assert all("int8" in leaf.travels for leaf in found.leaves)


def test_collectives_count_by_all_loops_around_them_and_nothing_goes_to_itself() -> None:
    pairs = [(0, 1), (1, 0), (2, 2)]

    def inner(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jax.lax.ppermute(x, "data", pairs), None

    def outer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jax.lax.scan(inner, x, length=3)[0], None

    def step(x: jax.Array) -> jax.Array:
        return jax.lax.scan(outer, x, length=5)[0]

    mesh, spec = jaxcomm.data_mesh(devices=jax.devices()[:4]), jax.P("data")
    f = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    (found,) = collectives_in(jax.make_jaxpr(f)(jnp.zeros((4, 8))).jaxpr, dict(mesh.shape))
    assert (found.times, found.sent) == (3 * 5, (32, 32, 0, 0))


def test_a_loop_of_unknown_length_is_not_added_up(mesh8: Any) -> None:
    def looped(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        step = lambda x: (x[0] + 1, jax.lax.psum(x[1], "data"))  # noqa: E731
        inside = lambda x: jax.lax.while_loop(lambda x: x[1] < 9, step, (0, x))[1]  # noqa: E731
        loop = jax.shard_map(inside, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
        return updates, loop(state)

    tx = optax.GradientTransformation(lambda params: jnp.zeros(()), looped)
    with jax.set_mesh(mesh8), pytest.raises(ValueError, match="cannot add up what is sent in a"):
        jaxcomm.explain(optax.chain(jaxcomm.mean("data"), tx), {"w": jnp.ones((8, 8))})


def test_votes_behind_control_variates_need_no_similar_data(mesh8: Any) -> None:
    correct = jaxcomm.control_variates(jaxcomm.mean("data"), 4)
    with jax.set_mesh(mesh8):
        needs = dict(
            jaxcomm.explain(
                optax.chain(correct, jaxcomm.majority_vote("data")), {"w": jnp.ones((8, 8))}
            ).needs
        )
    assert needs["majority_vote"] == "SGD with a rate for signs" and "mean" not in needs


def test_a_leaf_that_is_masked_is_not_explained(mesh8: Any) -> None:
    params = {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}
    tx = optax.masked(jaxcomm.mean("data"), {"w": True, "b": False})
    with jax.set_mesh(mesh8):
        with pytest.raises(ValueError, match="the gradient of b is not exchanged, as with optax.m"):
            jaxcomm.explain(tx, params)
        frozen = {"x": jaxcomm.mean("data"), "y": jaxcomm.set_to_zero("data")}
        found = jaxcomm.explain(optax.partition(frozen, {"w": "x", "b": "y"}), params)
        assert {leaf.path: leaf.travels for leaf in found.leaves}["b"] == "not sent"
