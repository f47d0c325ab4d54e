"""Inside the backward pass of a loop: what waits for gradients that are computed meanwhile."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

import jaxcomm
from transforms.scanned_layers import mesh_of, program

# In the order of their gradients; vectors are exempt. All sizes differ, and say which leaf it is.
SHAPES = {"a": (7, 9), "s": (3,), "b": (5, 19), "c": (11, 13), "r": (4,)}
ORDER = [f"blocks/{name}" for name in SHAPES]
MIB = 1600 / 2**20  # b and c fill the last bucket of a layer
Params = dict[str, Any]


def loss_fn(params: Params, batch: jax.Array) -> jax.Array:
    def block(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        return x * sum(map(jnp.sum, jaxcomm.exchanged(layer).values())), None

    return jnp.mean(jax.lax.scan(block, batch, params["blocks"])[0])


def hops(jaxpr: Any) -> list[tuple[str, ...]]:
    """The collectives of a program, each with the leaves in the barrier behind it."""
    found: list[tuple[str, ...]] = []
    for line in jaxpr.eqns:
        name = line.primitive.name
        if name in ("all_to_all", "all_gather"):
            found.append((name,))
        elif name == "optimization_barrier" and found and len(found[-1]) == 1:
            shapes = [x.aval.shape for x in line.outvars]
            found[-1] += tuple(leaf for leaf, shape in SHAPES.items() if shape in shapes)
        for inner in jaxprs_in_params(line.params):
            found += hops(inner)
    return found


def test_which_gradient_a_hop_waits_for() -> None:
    exchange = jaxcomm.sparse_mean("data", 0.1, bucket_order=ORDER, bucket_mib=MIB)
    inside, batch = jaxcomm.in_backward(exchange, ["blocks"]), jnp.ones(8)
    params = {"blocks": {name: jnp.ones((1, *shape)) for name, shape in SHAPES.items()}}

    def after(params: Params, state: Any, batch: jax.Array) -> Any:
        _, grads = jaxcomm.value_and_grad(loss_fn, "data")(params, batch)
        return exchange.update(grads, state, params)

    with jax.set_mesh(mesh_of()):
        step = jax.make_jaxpr(program(inside, loss_fn))(params, inside.init(params), batch)
        found = hops(step.jaxpr)
        plain = hops(jax.make_jaxpr(after)(params, exchange.init(params), batch).jaxpr)
    # The next two gradients for the two hops of a bucket, the last exempt one for the last bucket.
    # Behind its second hop stands the all-reduce of what is exempt.
    assert found == [
        ("all_to_all", "b"),
        ("all_gather", "c"),
        ("all_to_all", "r"),
        ("all_gather", "s", "r"),
    ]
    assert {hop for hop in plain if hop[0] == "all_to_all"} == {("all_to_all",)}


def sums(jaxpr: Any) -> list[int]:
    """The values of each all-reduce of a program."""
    found = []
    for line in jaxpr.eqns:
        if line.primitive.name.startswith("psum"):
            found.append(sum(x.aval.size for x in line.invars))
        for inner in jaxprs_in_params(line.params):
            found += sums(inner)
    return found


def test_exempt_gradients_come_behind_all_others() -> None:
    """On GPUs a bucket that waited for them had no product left to travel behind."""
    exchange = jaxcomm.mean("data", bucket_order=ORDER, bucket_mib=MIB)
    inside, batch = jaxcomm.in_backward(exchange, ["blocks"]), jnp.ones(8)
    params = {"blocks": {name: jnp.ones((1, *shape)) for name, shape in SHAPES.items()}}
    with jax.set_mesh(mesh_of()):
        step = jax.make_jaxpr(program(inside, loss_fn))(params, inside.init(params), batch)
    sizes = {name: jnp.ones(shape).size for name, shape in SHAPES.items()}
    large = sizes["a"], sizes["b"] + sizes["c"]
    *buckets, exempt = [size for size in sums(step.jaxpr) if size > 1]
    assert exempt == sizes["s"] + sizes["r"] and tuple(buckets) == large
