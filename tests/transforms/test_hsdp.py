"""HSDP: parameters split over `fsdp` within a group, gradients exchanged over `data` in shards."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxcomm
from transforms.scanned_layers import assert_equal

pytestmark = pytest.mark.standard_promotion  # optax promotes
GROUPS, WITHIN, LAYERS, WIDTH, INPUTS = 2, 2, 3, 8, 6
BOTH = ("data", "fsdp")
Params = dict[str, Any]


def mesh_of(within: int) -> jax.sharding.Mesh:
    shape, devices = (GROUPS, within), jax.devices()[: GROUPS * within]
    return jax.make_mesh(shape, BOTH, (AxisType.Auto,) * 2, devices=devices)


def weights() -> Params:
    rng = np.random.default_rng(0)
    shapes = {"b": (LAYERS, WIDTH), "w": (LAYERS, WIDTH, WIDTH)}
    blocks = {name: 0.4 * rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}
    return {"blocks": blocks, "embed": rng.standard_normal((INPUTS, WIDTH)).astype(np.float32)}


def split(params: Params) -> Params:
    return jaxcomm.shard(params, "fsdp", layers=["blocks/*"], exempt=["blocks/b"])


def loss_fn(params: Params, batch: Any) -> jax.Array:
    def block(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        own = jaxcomm.gather(jaxcomm.exchanged(layer), within="fsdp")
        return jnp.tanh(x @ own["w"] + own["b"]) + x, None

    rest = jaxcomm.gather({"embed": params["embed"]}, within="fsdp")
    x, _ = jax.lax.scan(jax.checkpoint(block), batch[0] @ rest["embed"], params["blocks"])
    return jnp.mean((x - batch[1]) ** 2)


def batches(steps: int) -> list[Any]:
    """Every device has rows of its own."""
    rng = np.random.default_rng(1)
    return [
        [rng.standard_normal((8, n)).astype(np.float32) for n in (INPUTS, WIDTH)]
        for _ in range(steps)
    ]


def step_of(tx: Any, attach: Callable[..., Any] = lambda params, state: params) -> Any:
    @jax.jit
    def step(params: Params, state: Any, batch: Any) -> Any:
        _, grads = jaxcomm.value_and_grad(loss_fn, "data")(attach(params, state), batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def trained(within: int, exchange: Any, steps: int = 3) -> tuple[Params, Any]:
    """Parameters after some steps of Adam, and what a step sends along each axis of the mesh."""
    mesh = mesh_of(within)
    attach = getattr(exchange, "attach", lambda params, state: params)
    with jax.set_mesh(mesh):
        tx = optax.chain(exchange, optax.adam(1e-2))
        params, data = split(weights()), [jaxcomm.global_batch(b, BOTH) for b in batches(steps)]
        state = tx.init(params)
        step = step_of(tx, attach).lower(params, state, data[0]).compile()
        for batch in data:
            params, state = step(params, state, batch)
        report = jaxcomm.wire_report(step).by_axes(mesh)
        return params, {axes: own for axes, own in report.items() if axes}


def test_in_float32_it_is_data_parallel_training_in_shards() -> None:
    """Behind the backward pass and inside of it, as on two devices that hold everything."""
    expected, whole = trained(1, jaxcomm.mean("data"))
    for exchange in (
        jaxcomm.mean("data"),
        jaxcomm.in_backward(jaxcomm.mean("data"), ["blocks"]),
    ):
        found, sent = trained(WITHIN, exchange)
        assert_equal(found, expected, 1e-5)
        kernel = found["blocks"]["w"]
        assert kernel.sharding.spec == PartitionSpec(None, None, "fsdp")
        assert kernel.addressable_shards[0].data.size == kernel.size / WITHIN
        # Of two devices each sends a bucket of n numbers once: n / 2 there, n / 2 back.
        kernels, biases = LAYERS * WIDTH * WIDTH + INPUTS * WIDTH, LAYERS * WIDTH
        assert 0 <= whole["data",].bytes_max - 4 * (kernels + biases) <= 8
        # Beside them the loss and the flags: of each layer and of the rest.
        flags = 4 * (2 + LAYERS)
        assert 0 <= sent["data",].bytes_max - 4 * (kernels / WITHIN + biases) <= flags
        # Within a group the weights of a layer are gathered twice and its gradient is summed; none
        # of it is as long as the stack.
        inside = [c for c in sent["fsdp",].collectives if c.times == LAYERS]
        assert [c.op for c in inside].count("all-gather") == 2
        assert max(sum(map(np.prod, c.shapes)) for c in inside) <= WIDTH * WIDTH + WIDTH


def test_gradients_leave_in_shards() -> None:
    """Else each device would hold the gradient of the whole stack."""
    with jax.set_mesh(mesh_of(WITHIN)):
        params, batch = split(weights()), jaxcomm.global_batch(batches(1)[0], BOTH)
        _, grads = jax.jit(jaxcomm.value_and_grad(loss_fn, "data"))(params, batch)
        found = jax.tree.map(lambda x: x.sharding.spec, jaxcomm.unmark_local(grads))
    assert found["blocks"]["w"] == PartitionSpec("data", None, None, "fsdp")
    assert found["embed"] == PartitionSpec("data", None, "fsdp")


def test_a_codec_rounds_shards_and_its_state_is_made_where_it_lies() -> None:
    """Half of the bytes between groups; the same state by `init`, in `jax.jit`, and of shapes."""
    mesh = mesh_of(WITHIN)
    tx = optax.chain(
        jaxcomm.mean("data", "bfloat16", error_feedback=True, exempt=["blocks/b"]), optax.adam(1e-2)
    )
    with jax.set_mesh(mesh):
        params = split(weights())
        structs = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
        )
        of_shapes = jaxcomm.with_param_specs(tx, structs)
        specs = jaxcomm.state_spec(of_shapes, structs, mesh)
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        state = jax.jit(of_shapes.init, out_shardings=shardings)(params)
        expected = tx.init(params)
        for made in (state, jax.eval_shape(of_shapes.init, structs)):
            assert jax.tree.structure(made) == jax.tree.structure(expected)
        for new, old in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
            assert new.sharding.is_equivalent_to(old.sharding, old.ndim) or not old.committed
        residuals = [x.sharding.spec for x in state[0].residual.values]
        assert PartitionSpec("data", None, None, "fsdp") in residuals
        batch = jaxcomm.global_batch(batches(1)[0], BOTH)
        step = step_of(tx).lower(params, state, batch).compile()
    between = jaxcomm.wire_report(step).by_axes(mesh)["data",]
    rounded = sum(c.sent[0] * c.times for c in between.collectives if set(c.dtypes) == {"u16"})
    # Each of two devices sends half of its half, of 2 bytes, and that half again, finished.
    assert rounded == 2 * (LAYERS * WIDTH * WIDTH + INPUTS * WIDTH) / WITHIN
    exact = sum(c.sent[0] * c.times for c in between.collectives if set(c.dtypes) == {"f32"})
    assert 0 <= exact - 4 * LAYERS * WIDTH <= 8 and rounded + exact == between.bytes_max


def test_parameters_that_are_not_split_within_groups() -> None:
    """Without the axis nothing changes; along a manual axis, or of FSDP, it is an error."""
    x = np.ones((4, 4), np.float32)
    with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
        own = {"w": jnp.asarray(x)}
        assert jaxcomm.gather(own, within="fsdp")["w"] is own["w"]
        tx = jaxcomm.sharded(jaxcomm.mean("data"))
        params = jaxcomm.shard({"w": x}, "data")
        at = jaxcomm.sharded_params(params, tx.init(params))
        with pytest.raises(ValueError, match="parameter w is split over 'data' and comes from"):
            jaxcomm.gather(at, within="data")
        manual = jax.shard_map(
            lambda p: jaxcomm.gather(p, within="data"), in_specs=jax.P(), out_specs=jax.P()
        )
        with pytest.raises(ValueError, match="within='data'.* leaves the gathering to XLA"):
            jax.eval_shape(manual, own)
    with jax.set_mesh(mesh_of(WITHIN)), pytest.raises(ValueError, match=r"parameter odd of shape"):
        split({"blocks": {"b": x}, "odd": np.ones((3, 5), np.float32)})


def test_explicit_axes_are_refused() -> None:
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "fsdp"), kinds, devices=jax.devices()[:4])
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="Explicit axes; make the mesh with"):
        jaxcomm.gather({"w": jnp.ones((4, 4))}, within="fsdp")


def test_a_further_axis_over_which_tensors_may_be_split_is_refused() -> None:
    """They would become whole over it too."""
    mesh = jax.sharding.Mesh(np.reshape(jax.devices(), (2, 2, 2)), ("data", "fsdp", "tensor"))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="'tensor' may split them too"):
        jax.eval_shape(
            jaxcomm.value_and_grad(loss_fn, "data"),
            split(weights()),
            jaxcomm.global_batch(batches(1)[0], BOTH),
        )


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_microbatches_lie_on_all_devices_of_a_group(kind: AxisType) -> None:
    """Rows of a microbatch on a few of them would move every activation."""
    mesh = jax.sharding.Mesh(
        np.reshape(jax.devices()[:4], (2, 2)), BOTH, axis_types=(AxisType.Auto, kind)
    )

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    with jax.set_mesh(mesh):
        rows = jaxcomm.global_batch(np.ones((64, WIDTH), np.float32), BOTH)
        w = jaxcomm.replicate(np.ones((WIDTH, WIDTH), np.float32))
        gradient = jax.jit(jaxcomm.accumulate(jaxcomm.value_and_grad(loss, "data"), 4))
        program = gradient.lower(w, rows).compile()
    sent = jaxcomm.wire_report(program).by_axes(mesh)
    inside = sent["fsdp",].collectives
    # The sums of a gradient and of a loss in each microbatch; along an Explicit axis, where this
    # was refused, a copy of the rows of a device beside them.
    assert [c.times for c in inside if c.op == "all-reduce"] == [4]
    assert all(c.op == "all-reduce" for c in inside) or kind == AxisType.Explicit


def test_a_further_axis_of_one_device_splits_nothing() -> None:
    mesh = jax.sharding.Mesh(np.reshape(jax.devices()[:4], (2, 2, 1)), ("data", "fsdp", "tensor"))
    with jax.set_mesh(mesh):
        batch = jaxcomm.global_batch(batches(1)[0], ("data", "fsdp"))
        jax.eval_shape(jaxcomm.value_and_grad(loss_fn, "data"), split(weights()), batch)
