"""Training steps for GPUs that need not be there: ResNet-50's, and a scanned transformer's."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

import jaxcomm
from benchmarks.aot import resnet, transformer
from benchmarks.aot.targets import placed
from train.state import TrainState
from train.step import compile_step, make_forward, make_gradient, make_train_step

Exchange = Callable[..., optax.GradientTransformation]
Gradient = Callable[..., Any]
LAYERS = ["blocks/*"]

MOMENTUM = optax.sgd(0.1, momentum=0.9)


def in_some_steps(inner: Exchange, **said: bool) -> Exchange:
    """A method of several kinds of steps: by its count, or the kind that the host says."""

    def make(**options: Any) -> optax.GradientTransformation:
        tx = optax.with_extra_args_support(inner(**options))
        return optax.GradientTransformationExtraArgs(tx.init, functools.partial(tx.update, **said))

    return make


def accumulated(**options: Any) -> optax.GradientTransformation:
    """int8 in every fourth step."""
    return jaxcomm.multi_steps(optax.chain(METHODS["int8"](**options), MOMENTUM), 4)


def local_steps(**options: Any) -> optax.GradientTransformation:
    """int4 in every 32nd step, of what the devices moved until the step before."""
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    return jaxcomm.local_steps(MOMENTUM, 32, outer, METHODS["int4"](**options), delay=1)


def one_bit_adam(**options: Any) -> optax.GradientTransformation:
    """Its dense steps have passed."""
    return jaxcomm.one_bit_adam("data", 1e-3, dense_steps=100, **options)


def dense_first(**options: Any) -> optax.GradientTransformation:
    """int4 after float32."""
    return jaxcomm.dense_first(METHODS["int4"](**options), 100)


DIRECT = jaxcomm.algorithms.direct()
BY_HOSTS = jaxcomm.algorithms.hierarchical(
    near=DIRECT, far=DIRECT, near_codec="float32", devices_per_host=4
)
METHODS: dict[str, Exchange] = {
    "float32": lambda **kw: jaxcomm.mean("data", **kw),
    "bfloat16": lambda **kw: jaxcomm.mean("data", "bfloat16", **kw),
    "cnat": lambda **kw: jaxcomm.mean("data", "cnat", **kw),
    "int8": lambda **kw: jaxcomm.mean("data", "int8", **kw),
    # As on two hosts of four devices each.
    "bfloat16_by_hosts": lambda **kw: jaxcomm.mean("data", "bfloat16", BY_HOSTS, **kw),
    "int8_by_hosts": lambda **kw: jaxcomm.mean("data", "int8", BY_HOSTS, **kw),
    "int4": lambda **kw: jaxcomm.mean("data", "int4", error_feedback=True, **kw),
    "scaled_sign": lambda **kw: jaxcomm.mean("data", "scaled_sign", error_feedback=True, **kw),
    "vote": lambda **kw: jaxcomm.majority_vote("data", **kw),
    "low_rank": lambda **kw: jaxcomm.low_rank_mean("data", 4, **kw),
    "one_bit_adam": one_bit_adam,
    "oktopk": lambda **kw: jaxcomm.sparse_mean("data", 0.01, "oktopk", **kw),
    "topk_allgather": lambda **kw: jaxcomm.sparse_mean("data", 0.01, "topk_allgather", **kw),
    "topk_dsa": lambda **kw: jaxcomm.sparse_mean("data", 0.01, "topk_dsa", **kw),
    "gtopk": lambda **kw: jaxcomm.sparse_mean("data", 0.01, "gtopk", **kw),
    "gaussiank": lambda **kw: jaxcomm.sparse_mean("data", 0.01, "gaussiank", **kw),
    "multi_steps": accumulated,
    "multi_steps_due": in_some_steps(accumulated, due=True),
    "local_steps": local_steps,
    "local_steps_due": in_some_steps(local_steps, due=True),
    "one_bit_adam_bits": in_some_steps(one_bit_adam, dense=False),
    "dense_first": dense_first,
    "dense_first_int4": in_some_steps(dense_first, dense=False),
}
OPTIMIZERS = ("one_bit_adam", "one_bit_adam_bits")
OPTIMIZERS += ("multi_steps", "multi_steps_due", "local_steps", "local_steps_due")
# In a scan: those that `in_backward` can exchange layer by layer, and that the page compares.
SCANNED = ("float32", "bfloat16", "cnat", "int8", "scaled_sign", "vote", "oktopk")


def in_front_of(method: str, optimizer: optax.GradientTransformation, **options: Any) -> Any:
    """A method and the optimizer after it, unless it is one itself."""
    exchange = METHODS[method](**options)
    return exchange if method in OPTIMIZERS else optax.chain(exchange, optimizer)


def resnet50(mesh: Mesh, method: str, images: int = 64) -> Any:
    """ResNet-50's step with momentum, as `train` compiles it.

    Args:
      mesh: along "data".
      method: of METHODS.
      images: a device's, of 224 x 224.
    """
    everywhere = jax.P()
    graph, params = nnx.split(nnx.eval_shape(resnet.resnet50))
    params = placed(mesh, nnx.to_pure_dict(params), everywhere)
    shape = (images * mesh.size, 224, 224, 3)
    batch = {
        "image": jax.ShapeDtypeStruct(shape, jnp.uint8),
        "label": jax.ShapeDtypeStruct(shape[:1], jnp.int32),
    }
    batch = placed(mesh, batch, jax.P("data"))
    gradient = make_gradient(make_forward(graph, 127.0, 64.0), 0.1, 1)
    order = jaxcomm.backward_order(gradient, params, batch)
    tx = in_front_of(method, MOMENTUM, bucket_order=order)
    state = placed(mesh, jax.eval_shape(tx.init, params), jaxcomm.state_spec(tx, params, mesh))
    count = placed(mesh, jax.ShapeDtypeStruct((), jnp.int32), everywhere)
    step = make_train_step(gradient, tx)
    return compile_step(step, TrainState(count, params, state), batch)


def scanned(mesh: Mesh, method: str, *, in_backward: bool, rows: int = 8) -> Any:
    """A step of the transformer with Adam.

    Args:
      mesh: along "data", or "data" and "fsdp".
      method: of SCANNED, or "psum": that of a user of plain jax.
      in_backward: whether each layer is exchanged in the loop, or all after it.
      rows: a device's, of 1024 tokens.
    """
    shapes = transformer.shapes(layers=12, width=768, heads=12, vocabulary=256, context=1024)
    tokens = jax.ShapeDtypeStruct((rows * mesh.size, 1024 + 1), jnp.int32)
    tokens = placed(mesh, tokens, jax.P(mesh.axis_names))
    params = placed(mesh, shapes, jax.P())
    if "fsdp" in mesh.axis_names:
        params = jaxcomm.shard(shapes, "fsdp", layers=LAYERS)
    adam = optax.adam(1e-3)
    if method == "psum":
        means = _means_by_psum()
        return _compiled(mesh, adam, lambda p, _, x: means(p, x), params, tokens)
    gradient = jaxcomm.value_and_grad(transformer.loss_fn, "data")
    order = jaxcomm.backward_order(gradient, params, tokens)
    # A layer has three buckets, or two where many kernels lie between the hops.
    mib = 20.0 if method in ("scaled_sign", "oktopk") else 16.0
    exchange = METHODS[method](bucket_order=order, bucket_mib=mib)
    if not in_backward:
        tx = optax.chain(exchange, adam)
        return _compiled(mesh, tx, lambda p, _, x: gradient(p, x), params, tokens)
    inside = jaxcomm.in_backward(exchange, ["blocks"])
    tx = optax.chain(inside, adam)
    return _compiled(mesh, tx, lambda p, s, x: gradient(inside.attach(p, s), x), params, tokens)


def _means_by_psum() -> Gradient:
    def local(params: Any, tokens: jax.Array) -> Any:
        return jax.lax.pmean(jax.value_and_grad(transformer.loss_fn)(params, tokens), "data")

    return jax.shard_map(
        local,
        in_specs=(jax.P(), jax.P("data")),
        out_specs=jax.P(),
        axis_names={"data"},
        check_vma=False,
    )


def _compiled(
    mesh: Mesh, tx: optax.GradientTransformation, gradient: Gradient, params: Any, tokens: Any
) -> Any:
    """A step of `gradient(params, state, tokens)` and `tx`."""
    tx = jaxcomm.with_param_specs(tx, params)
    state = placed(mesh, jax.eval_shape(tx.init, params), jaxcomm.state_spec(tx, params, mesh))

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        loss, grads = gradient(params, state, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    options = jaxcomm.compiler_options()
    jitted = jax.jit(step, donate_argnums=(0, 1), compiler_options=options)
    return jitted.trace(params, state, tokens).lower().compile()


def known(model: str) -> Sequence[str]:
    """The methods of a model."""
    return tuple(METHODS) if model == "resnet50" else SCANNED
