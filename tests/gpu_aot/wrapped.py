"""Exchanges with much state of each device, most of them in some steps only, for a target.

`python -m gpu_aot.wrapped TARGET` prints, as one line of JSON, for each wrapper: the bytes that a
weight sends at most, in the program and as `jaxcomm.explain` says; the names of state that is
sharded in another way after a step; the temporaries, in copies of the weights; and how many arrays
of the size of a weight are copied in every step if the shardings of results are given, so that
donated arrays become those of the same name.
"""

import json
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxcomm
from benchmarks.aot.targets import mesh_of, placed, traced_for

SHAPE = (512, 512)
INT4 = {"codec": "int4", "error_feedback": True}
_COPY = re.compile(r"= f32\[(?:1,)?512,512\]\S* copy\(")


def wrappers() -> dict[str, Any]:
    fed_back = jaxcomm.mean("data", **INT4)
    local = jaxcomm.local("data", optax.trace(0.9))
    return {
        "multi_steps": jaxcomm.multi_steps(optax.chain(fed_back, optax.adam(1e-3)), 4),
        "local momentum": jaxcomm.multi_steps(optax.chain(local, fed_back), 4),
        "low rank": jaxcomm.multi_steps(jaxcomm.low_rank_mean("data", 4), 4),
        "one_bit_adam": jaxcomm.multi_steps(jaxcomm.one_bit_adam("data", 1e-3, dense_steps=2), 4),
        "control_variates": optax.chain(
            jaxcomm.control_variates(fed_back, every=4), jaxcomm.majority_vote("data")
        ),
        "local_steps": jaxcomm.local_steps(optax.adam(1e-3), 4, optax.sgd(0.7), fed_back),
        "fragments": jaxcomm.local_steps(
            optax.adam(1e-3), 4, optax.sgd(0.7), jaxcomm.mean("data", "int8"), fragments=2
        ),
        "momentum correction": jaxcomm.sparse_mean("data", 0.01, momentum_correction=0.9),
        "dense_first": jaxcomm.dense_first(fed_back, steps=3),
    }


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def report(mesh: Any, tx: Any) -> dict[str, Any]:
    params = {f"w{i}": jax.ShapeDtypeStruct(SHAPE, jnp.float32) for i in range(3)}
    params = placed(mesh, params, jax.P())
    state = jax.eval_shape(tx.init, params)
    state = placed(mesh, state, jaxcomm.state_spec(tx, params, mesh))

    def step(params: Any, state: Any, x: jax.Array) -> tuple[Any, Any]:
        is_local = isinstance(state, jaxcomm.LocalStepsState)
        at = jaxcomm.local_params(state) if is_local else params
        _, grads = jaxcomm.value_and_grad(loss_fn, "data")(at, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    x = placed(mesh, jax.ShapeDtypeStruct((8, SHAPE[0]), jnp.float32), jax.P("data"))
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, x).compile()
    shardings = jax.tree.map(lambda x: x.sharding, (params, state))
    aliased = jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings)
    text = aliased.lower(params, state, x).compile().as_text()
    size = sum(x.size for x in jax.tree.leaves(params))
    before = jax.tree_util.tree_leaves_with_path(state)
    after = jax.tree.leaves(compiled.output_shardings[1])
    return {
        "sent": float(jaxcomm.wire_report(compiled).bytes_max),
        "explained": float(jaxcomm.explain(tx, params).bytes_max),
        "moved": [
            jax.tree_util.keystr(path)
            for (path, x), sharding in zip(before, after, strict=True)
            if not x.sharding.is_equivalent_to(sharding, x.ndim)
        ],
        "temporaries": compiled.memory_analysis().temp_size_in_bytes / (4 * size),
        "copied": len(_COPY.findall(text[text.index("\nENTRY") :])),
    }


def main(target: str) -> None:
    mesh = mesh_of(target, 4)
    with traced_for(mesh):
        print(json.dumps({name: report(mesh, tx) for name, tx in wrappers().items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
