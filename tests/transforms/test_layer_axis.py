"""Which leaves are exempt where layers are stacked for a scan."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxcomm

pytestmark = pytest.mark.standard_promotion
WORLD, LAYERS = 2, 3
METHODS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "mean": lambda: jaxcomm.mean("data", "bfloat16"),
    "vote": lambda: jaxcomm.majority_vote("data"),
    "sparse": lambda: jaxcomm.sparse_mean("data", 0.1),
    "low rank": lambda: jaxcomm.low_rank_mean("data", 1),
    "1-bit Adam": lambda: jaxcomm.one_bit_adam("data", 0.1, dense_steps=1),
}


class Block(nnx.Module):
    """Attention, a norm and a layer, as a scan over layers stacks them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, rngs=rngs, decode=False)
        self.dense = nnx.Linear(8, 8, rngs=rngs)


@nnx.split_rngs(splits=LAYERS)
@nnx.vmap(in_axes=0, out_axes=0)
def stacked_blocks(rngs: nnx.Rngs) -> Block:
    return Block(rngs)


def exempt(tx: optax.GradientTransformation, params: Any, make_mesh: Any) -> set[str]:
    with jax.set_mesh(make_mesh(WORLD)):
        state = tx.init(params)
    return {leaf.path for leaf in state.layout.leaves if leaf.exempt}


@pytest.mark.parametrize("method", METHODS)
def test_names_of_flax(method: str, make_mesh: Any) -> None:
    params = nnx.state(stacked_blocks(nnx.Rngs(0)), nnx.Param)
    paths = {"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(params)}
    assert all(leaf.shape[0] == LAYERS for leaf in paths.values())
    small = {path for path in paths if not path.endswith("kernel")}
    assert {"norm/scale", "norm/bias", "dense/bias", "attention/query/bias"} <= small
    assert exempt(METHODS[method](), params, make_mesh) == small


EQUINOX = {
    "blocks": {
        "norm1": {"weight": jnp.zeros((LAYERS, 8))},
        "ln_2": {"weight": jnp.zeros((LAYERS, 8))},
        "mlp": {"weight": jnp.zeros((LAYERS, 8, 8))},
        "gain": jnp.zeros((LAYERS, 8)),
    },
    "head": {"weight": jnp.zeros((8, 8))},
}


def test_other_names_need_the_axis(make_mesh: Any) -> None:
    by_name = {"blocks/norm1/weight", "blocks/ln_2/weight"}
    assert exempt(jaxcomm.mean("data"), EQUINOX, make_mesh) == by_name
    told = jaxcomm.with_layer_axis(jaxcomm.mean("data"), ["blocks/*"])
    assert exempt(told, EQUINOX, make_mesh) == {*by_name, "blocks/gain"}
    # Only what is named, only around this transformation.
    assert exempt(jaxcomm.mean("data"), EQUINOX, make_mesh) == by_name


def test_names_that_only_look_like_a_norms_are_compressed(make_mesh: Any) -> None:
    norms = ["LayerNorm", "input_layernorm", "norm", "q_norm", "norm_2", "bn/norm1", "ln", "ln_f"]
    others = ["prenorm_block/attn", "normal_head", "lnet/0", "ln_stack/mlp", "norm_head", "linear"]
    params = {f"{name}/weight": jnp.zeros((8, 8)) for name in [*norms, *others]}
    params = {name.replace("/", "."): x for name, x in params.items()}  # one level each
    params = jax.tree.map(jnp.asarray, _nested(params))
    found = exempt(jaxcomm.mean("data"), params, make_mesh)
    assert found == {f"{name}/weight" for name in norms}


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, leaf in flat.items():
        *above, last = name.split(".")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree


def test_a_function_decides_about_all(make_mesh: Any) -> None:
    tx = jaxcomm.mean("data", exempt=lambda path, shape: path.startswith("head"))
    assert exempt(jaxcomm.with_layer_axis(tx, ["blocks/*"]), EQUINOX, make_mesh) == {"head/weight"}
    vectors = jaxcomm.mean("data", exempt=lambda path, shape: len(shape) < 2)  # of a layer
    told = jaxcomm.with_layer_axis(vectors, ["blocks/*"])
    named = {"blocks/norm1/weight", "blocks/ln_2/weight", "blocks/gain"}
    assert exempt(told, EQUINOX, make_mesh) == named


def test_a_stacked_bias_arrives_exactly_and_a_kernel_rounded(make_mesh: Any) -> None:
    rng = np.random.default_rng(0)
    grads = {
        "bias": rng.standard_normal((WORLD, LAYERS, 8)).astype(np.float32),
        "kernel": rng.standard_normal((WORLD, LAYERS, 8, 8)).astype(np.float32),
    }
    tx = jaxcomm.mean("data", "int4")
    with jax.set_mesh(make_mesh(WORLD)):
        state = tx.init({name: jnp.zeros(g.shape[1:]) for name, g in grads.items()})
        updates, _ = jax.jit(tx.update)(grads, state)
    np.testing.assert_allclose(updates["bias"], grads["bias"].mean(0), atol=1e-7)
    assert np.abs(updates["kernel"] - grads["kernel"].mean(0)).max() > 1e-3


def test_a_pattern_of_another_part_is_named(make_mesh: Any) -> None:
    parts = {"a": jaxcomm.mean("data", exempt=["x"]), "b": jaxcomm.mean("data")}
    tx = optax.partition(parts, {"w": "a", "x": "b"})
    with jax.set_mesh(make_mesh(2)), pytest.raises(ValueError, match="of this part of the tree"):
        tx.init({"w": jnp.zeros((8, 8)), "x": jnp.zeros((8, 8))})


def test_a_partition_may_have_a_part_of_the_layers(make_mesh: Any) -> None:
    labels = {"blocks": jax.tree.map(lambda _: "a", EQUINOX["blocks"]), "head": {"weight": "b"}}
    parts = {"a": jaxcomm.mean("data"), "b": jaxcomm.mean("data", "int8")}
    tx = jaxcomm.with_layer_axis(optax.partition(parts, labels), ["blocks/*"])
    with jax.set_mesh(make_mesh(WORLD)):
        state = tx.init(EQUINOX)
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, jaxcomm.MeanState))
    parts = [node.layout.leaves for node in nodes if isinstance(node, jaxcomm.MeanState)]
    found = [{leaf.path: (leaf.stacked, leaf.exempt) for leaf in leaves} for leaves in parts]
    small = dict.fromkeys(["gain", "ln_2/weight", "norm1/weight"], (True, True))
    blocks = {
        f"blocks/{name}": kind for name, kind in (small | {"mlp/weight": (True, False)}).items()
    }
    assert found == [blocks, {"head/weight": (False, False)}]


def test_bad_patterns(make_mesh: Any) -> None:
    with pytest.raises(TypeError, match=r"write \['blocks/\*'\]"):
        jaxcomm.with_layer_axis(jaxcomm.mean("data"), "blocks/*")
    with jax.set_mesh(make_mesh(WORLD)):
        with pytest.raises(
            ValueError, match="names 'layers/.*', which fits no parameter; the paths"
        ):
            jaxcomm.with_layer_axis(jaxcomm.mean("data"), ["layers/*"]).init(EQUINOX)
        with pytest.raises(ValueError, match="parameter t has no axis that could count layers"):
            jaxcomm.with_layer_axis(jaxcomm.mean("data"), ["*"]).init({"t": jnp.zeros(())})


def test_inside_the_backward_pass_a_layer_has_no_such_axis(make_mesh: Any) -> None:
    inner = jaxcomm.with_layer_axis(jaxcomm.mean("data", "int8"), ["blocks/*"])
    found = []
    with jax.set_mesh(make_mesh(WORLD)):
        for exchange in (inner, jaxcomm.mean("data", "int8")):
            state = jaxcomm.in_backward(exchange, ["blocks"]).init(EQUINOX)
            (layers,) = state.layers
            found.append({leaf.path for leaf in layers.layout.leaves if leaf.exempt})
    assert found[0] == found[1] and "blocks/mlp/weight" not in found[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Attention:
    """Whose field `value` is no Flax variable."""

    query: Any
    value: Any


def test_a_field_named_value_fits_patterns(make_mesh: Any) -> None:
    params = {"attn": Attention(jnp.zeros((8, 8)), jnp.zeros((8, 8))), "out": jnp.zeros((8, 8))}
    with jax.set_mesh(make_mesh(WORLD)):
        for pattern, number in (("attn/*", 2), ("attn/value", 1), ("attn/query", 1)):
            state = jaxcomm.mean("data", "int8", exempt=[pattern]).init(params)
            assert sum(leaf.exempt for leaf in state.layout.leaves) == number, pattern


def test_beside_the_backward_pass_stacks_have_it_as_outside(make_mesh: Any) -> None:
    params = {
        "blocks": {"w": jnp.zeros((12, 8, 8))},
        "enc": {"w": jnp.zeros((12, 8, 8)), "shift": jnp.zeros((12, 8))},
    }
    int8, names = jaxcomm.mean("data", "int8"), ["enc/*", "blocks/*"]
    with jax.set_mesh(make_mesh(WORLD)):
        inside = jaxcomm.in_backward(jaxcomm.with_layer_axis(int8, names), ["blocks"])
        outside = jaxcomm.with_layer_axis(jaxcomm.in_backward(int8, ["blocks"]), names)
        found = [tx.init(params) for tx in (inside, outside)]
        assert found[0].rest.layout.leaves == found[1].rest.layout.leaves
        assert {leaf.path for leaf in found[0].rest.layout.leaves if leaf.exempt} == {"enc/shift"}
        assert found[0].layers[0].layout.leaves == found[1].layers[0].layout.leaves
        for layers in ["blocks"], ["blocks", "enc"]:
            misspelt = jaxcomm.with_layer_axis(int8, ["nonsense/*"])
            with pytest.raises(ValueError, match="names 'nonsense/.*', which fits no parameter"):
                jaxcomm.in_backward(misspelt, layers).init(params)
