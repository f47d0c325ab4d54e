"""Values and gradients of a batch in microbatches: their mean, in the memory of one."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm import _axes, _shards
from jaxcomm._attached import attached_in, detached, finished, last_of, map_leaves, nan_if_skipped
from jaxcomm._aux import Same, is_same, mean_dtype
from jaxcomm._batches import name_in_batch
from jaxcomm._marks import GRADIENT, OWN_GRADIENT, kind_of


def accumulated(value_and_grad_fn: Callable[..., Any], microbatches: int) -> Callable[..., Any]:
    """Applies `value_and_grad_fn` to equal parts of a batch, one after the other."""

    def on_batch(params: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        of_part = functools.partial(value_and_grad_fn, **kwargs)
        batches = jax.tree_util.tree_map_with_path(
            lambda path, x: _split(name_in_batch(path), x, microbatches), batch
        )
        # Residuals are of a step; added to the gradient of a microbatch, they are weighted by
        # 1 / microbatches.
        params = _shards.with_weights(params, microbatches)
        if attached_in(params):
            return _exchanged_last(of_part, microbatches, params, batches, *args)
        total, start, state = _sums(of_part, params, batches, *args)

        def mean(t: Any, o: Any) -> Any:
            return t if is_same(t) else (t / microbatches).astype(mean_dtype(o))

        means = jax.tree.map(mean, total, start, is_leaf=is_same)
        return _shards.without_weights(_shards.with_residuals(means, state), microbatches)

    return on_batch


def _exchanged_last(
    value_and_grad_fn: Callable[..., Any], microbatches: int, params: Any, batches: Any, *args: Any
) -> Any:
    """Gradients that are local in all microbatches but the last, which exchanges their mean."""
    before, last = (jax.tree.map(lambda x, i=i: x[i], batches) for i in (slice(-1), -1))
    (value, grads), _, state = _sums(value_and_grad_fn, detached(params), before, *args)
    last_params = last_of(_shards.with_state(params, state), grads, microbatches)
    last_value, last_grads = value_and_grad_fn(last_params, last, *args)
    state = _shards.next_state(state, last_grads)
    last_grads = _shards.without_residuals(last_grads)

    def mean(out: Any, total: Any, _: Any = None) -> Any:
        if is_same(out):
            return out
        return ((total + _in_float32(out)) / microbatches).astype(mean_dtype(out))

    last_grads = nan_if_skipped(last_grads, grads)
    of_each = last_grads, grads, _shards.without_residuals(params)
    grads = map_leaves(mean, lambda node, _, of: finished(node, of), *of_each)
    grads = _shards.without_weights(_shards.with_residuals(grads, state), microbatches)
    return jax.tree.map(mean, last_value, value, is_leaf=is_same), grads


def _sums(
    value_and_grad_fn: Callable[..., Any], params: Any, batches: Any, *args: Any
) -> tuple[Any, Any, Any]:
    """The float32 sums over microbatches, the types of what one returns, and the state after them.

    What an exchange of shards keeps in the backward pass goes from one microbatch to the next. All
    microbatches go through the loop: one before it would be compiled a second time.
    """

    def of_one() -> Any:
        return value_and_grad_fn(params, jax.tree.map(lambda x: x[0], batches), *args)

    start = jax.eval_shape(of_one)
    if not (isinstance(start, tuple) and len(start) == 2):
        raise TypeError(
            "accumulate takes what jaxcomm.value_and_grad(loss_fn, ...) returned, got a function "
            "that returns not loss and gradients, but "
            f"{f'{len(start)} values' if isinstance(start, tuple) else type(start).__name__}."
        )

    if {GRADIENT, OWN_GRADIENT} & {kind_of(leaf) for leaf in jax.tree.leaves(start)}:
        raise TypeError(
            "accumulate takes what jaxcomm.value_and_grad returned, not jax.jit of it; put jax.jit "
            "around the step that calls accumulate(...)."
        )

    def add(carry: Any, batch: Any) -> tuple[Any, None]:
        total, state = carry
        out = value_and_grad_fn(_shards.with_state(params, state), batch, *args)
        state, out = _shards.next_state(state, out[1]), _shards.without_residuals(out)
        return (jax.tree.map(_plus, total, out, is_leaf=is_same), state), None

    start = _shards.without_residuals(start)
    zeros = jax.tree.map(_zeros_like, start, is_leaf=is_same)
    (total, state), _ = jax.lax.scan(add, (zeros, _shards.state_of(params)), batches)
    return total, start, state


def _plus(total: Any, x: Any) -> Any:
    """The sum with one more value; of what is the same for all microbatches, one of them."""
    return x if is_same(x) else total + _in_float32(x)


def _zeros_like(x: Any) -> Any:
    """Float32 zeros, sharded and typed as a result of this type; others for what has no sum."""
    if is_same(x):
        return Same(jnp.zeros_like(x.value, x.value.dtype))
    return _axes.as_varying(jnp.zeros_like(x, jnp.float32), _axes.varying_axes(x))


def _split(name: str, x: Any, microbatches: int) -> jax.Array:
    if not jnp.ndim(x):
        raise ValueError(
            f"{name} is a scalar and has no microbatches; pass what every device shares as a "
            "further argument after the batch."
        )
    if x.shape[0] % microbatches:
        raise ValueError(
            f"the {x.shape[0]} examples of {name} on a device do not divide evenly into "
            f"{microbatches} microbatches; change the batch size or the number of microbatches."
        )
    explicit = _devices_of_rows(x)
    if x.shape[0] // microbatches % explicit:
        raise ValueError(
            f"the {x.shape[0] // microbatches} rows of a microbatch do not divide evenly over the "
            f"{explicit} devices of the Explicit axes that they are spread over; change the batch "
            "size or the number of microbatches."
        )
    # Every microbatch has rows from all over the batch. Where an automatic axis also spreads rows,
    # as in HSDP, each microbatch then lies on all of its devices, and nothing moves.
    return x.reshape(x.shape[0] // microbatches, microbatches, *x.shape[1:]).swapaxes(0, 1)


def _devices_of_rows(x: jax.Array) -> int:
    """The number of devices over which an array's type spreads its rows, along Explicit axes."""
    sharding = jax.typeof(x).sharding
    names = _axes.names_in_entry(sharding.spec[0] if len(sharding.spec) else None)
    return math.prod(sharding.mesh.shape[name] for name in names)


def _in_float32(x: Any) -> jax.Array:
    return jnp.asarray(x).astype(jnp.float32)
