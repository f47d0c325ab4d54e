"""State is made inside of `jax.jit`, as that of large models has to be."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding

import jaxcomm
from transforms.both_views import SHAPES, SPECS, VIEWS, place
from transforms.test_every_method import METHODS

pytestmark = pytest.mark.standard_promotion  # optax promotes
WORLD, VIEW = 4, VIEWS[3]


# Those whose states are of different kinds.
KINDS = [
    "int8, errors fed back",
    "Signum",
    "votes on corrected gradients",
    "TopkA with momentum correction",
    "1-bit Adam",
    "warm-up, then qsgd",
    "multi_steps",
]


@pytest.mark.parametrize("method", KINDS)
def test_the_state_is_that_of_init_on_placed_parameters(method: str) -> None:
    tx = METHODS[method]()
    mesh = VIEW.mesh(WORLD)
    with jax.set_mesh(mesh):
        params = place(VIEW, {name: jnp.ones(shape) for name, shape in SHAPES.items()})
        expected = tx.init(params)
        with_specs = jaxcomm.with_param_specs(tx, params)
        shapes = jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding), params
        )
        specs = jaxcomm.state_spec(with_specs, shapes, mesh)
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        abstract = jax.eval_shape(with_specs.init, params)
        found = jax.jit(with_specs.init, out_shardings=shardings)(params)

        assert jax.tree.structure(found) == jax.tree.structure(expected)
        assert jax.tree.structure(abstract) == jax.tree.structure(expected)
        for new, old in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert new.sharding.is_equivalent_to(old.sharding, old.ndim) or not old.committed
            np.testing.assert_array_equal(new, old)


def test_without_specs_the_error_names_them() -> None:
    with jax.set_mesh(VIEW.mesh(WORLD)):
        params = place(VIEW, {name: jnp.ones(shape) for name, shape in SHAPES.items()})
        for trace in (jax.eval_shape, lambda f, p: jax.jit(f)(p)):
            with pytest.raises(ValueError, match=r"jaxcomm.with_param_specs\(tx, specs\)"):
                trace(jaxcomm.mean("data").init, params)


def test_explicit_axes_need_no_specs() -> None:
    kinds = (AxisType.Explicit, AxisType.Explicit)
    mesh = jax.make_mesh((WORLD, 2), ("data", "model"), kinds, devices=jax.devices())
    tx = jaxcomm.mean("data", "int8", error_feedback=True)
    with jax.set_mesh(mesh):
        params = place(VIEW, {name: jnp.ones(shape) for name, shape in SHAPES.items()})
        eager, jitted = tx.init(params), jax.jit(tx.init)(params)
        for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(jitted), strict=True):
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


def test_partitions_and_wrong_specs() -> None:
    labels = {name: "sent" if name == "head" else "frozen" for name in SHAPES}
    both = {
        "sent": jaxcomm.mean("data", "int8", error_feedback=True),
        "frozen": jaxcomm.set_to_zero("data"),
    }
    tx = optax.partition(both, labels)
    with jax.set_mesh(VIEW.mesh(WORLD)):
        params = place(VIEW, {name: jnp.ones(shape) for name, shape in SHAPES.items()})
        state = jax.jit(jaxcomm.with_param_specs(tx, SPECS).init)(params)
        residual = state.inner_states["sent"].inner_state.residual
        assert residual.values[0].sharding.spec == jax.P("data", None, "model")

        other = SPECS | {"head": jax.P("model")}
        with pytest.raises(
            ValueError, match=r"head is sharded by .*, but jaxcomm.with_param_specs"
        ):
            jaxcomm.with_param_specs(tx, other).init(params)
        few = {"head": SPECS["head"]}
        with pytest.raises(ValueError, match="no spec for parameter bias; it has those of head"):
            jaxcomm.with_param_specs(tx, few).init(params)
    with pytest.raises(TypeError, match="a PartitionSpec for parameter head, got 'model'"):
        jaxcomm.with_param_specs(tx, {"head": "model"})


def test_it_goes_around_the_backward_pass(make_mesh: Any) -> None:
    specs = {"blocks": {"w": jax.P(None, "model")}}
    inside = jaxcomm.with_param_specs(jaxcomm.mean("data", "int8"), specs)
    with jax.set_mesh(make_mesh(4)):
        with pytest.raises(
            ValueError, match=r"put it around: jaxcomm.with_param_specs\(jaxcomm.in"
        ):
            jaxcomm.in_backward(inside, ["blocks"]).init({"blocks": {"w": jnp.zeros((3, 8, 8))}})


def test_state_that_is_smaller_than_its_parameter_is_not_sharded_like_it(mesh4x2: Any) -> None:
    rms = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
    with jax.set_mesh(mesh4x2):
        w = jax.device_put(np.ones((4, 6)), NamedSharding(mesh4x2, jax.P(None, "model")))
        spec = jaxcomm.state_spec(optax.chain(jaxcomm.mean("data"), rms), {"w": w}, mesh4x2)
    assert spec[1].v_row["w"] == spec[1].v_col["w"] == jax.P()
