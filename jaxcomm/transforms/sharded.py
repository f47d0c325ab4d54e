"""Parameters and optimizer state split over the axis of the exchange: FSDP, ZeRO-3."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxcomm import _axes, _shards, codecs, collectives
from jaxcomm._marks import unmark_local
from jaxcomm._notes import Message, noted
from jaxcomm._shards import ShardedParam, is_sharded
from jaxcomm.codecs.random_k import RandomK
from jaxcomm.collectives.algorithms._default import Default
from jaxcomm.collectives.reductions import CodedMean, RandomKMean
from jaxcomm.kernels.reductions import all_finite
from jaxcomm.transforms import _shard_layout
from jaxcomm.transforms._buckets import joined, split
from jaxcomm.transforms._exchange import FLAG
from jaxcomm.transforms._layout import Layout
from jaxcomm.transforms._scheme import Exchange, Scheme
from jaxcomm.transforms._states import require_dtype, require_kind
from jaxcomm.transforms._wrappers import refuse_states_before, refuse_wrappers, warn_of_few_bits
from jaxcomm.transforms.per_device import PerDevice, require_own
from jaxcomm.transforms.sharded_params import ShardedState

Arrays = list[jax.Array]


def sharded(
    exchange: optax.GradientTransformation, gather: str | codecs.Codec = "float32"
) -> optax.GradientTransformation:
    """Applies an exchange to parameters that are split over its axis (FSDP, ZeRO-3).

    Each device keeps 1/N of the parameters and 1/N of the state of the optimizer after this in the
    chain. In the loss, `jaxcomm.gather` makes parameters whole for as long as they are needed. Its
    backward pass reduce-scatters their gradients in the format of `exchange`, so that each device
    ends with its own shard of the mean. The `update` of this transformation then only finishes the
    step: it averages what is not split, and makes all devices agree on whether everything was
    finite.

    Four lines differ from training on replicated parameters: this one, and three that place the
    parameters with `jaxcomm.shard`, pass `jaxcomm.sharded_params(params, state)` to the loss, and
    gather in the loss. If layers are scanned, `jaxcomm.gather` each layer in the body of the scan,
    inside `jax.checkpoint`: then only one layer at a time is whole, in the forward and in the
    backward pass.

    Under plain `jax.jit` arrays are global, so transformations after it see the whole gradient:
    `optax.clip_by_global_norm` clips by the norm of all shards. Inside your own `jax.shard_map`,
    they see shards, and must be elementwise.

    With error feedback, every device keeps the errors of its own messages for the whole gradient:
    a value for every parameter, N times as many as its shards have, in the `residual_dtype` of the
    mean. There is no second hop, so
    `error_feedback=True` and "first_hop" are the same here.

    If any gradient on any device is not finite, every update on every device is NaN, and residuals
    stay as they were.

    Args:
      exchange: how gradients are exchanged: `jaxcomm.mean`, `jaxcomm.majority_vote` without error
        feedback, or `jaxcomm.set_to_zero`, which gathers frozen parameters and sends no gradient;
        `jaxcomm.no_exchange` is the control. `algorithm=None` means "native" for float32, and else
        "direct", which rounds each value once, after sums within a host in float32. Exempt leaves
        that are not split are averaged in float32.
      gather: the codec in which shards are gathered. All devices decode the same bits, so they
        compute with the same weights; each shard itself stays as it is. In float16, weights above
        65504 become infinite.

    Returns:
      A transformation whose `update` takes the gradients of `jaxcomm.value_and_grad` at
      `jaxcomm.sharded_params`, and returns updates in the shapes and shardings of the parameters.

    Raises:
      TypeError, ValueError: immediately, for any other exchange and for a format that cannot
        gather; by `init` for a leaf that is neither split nor exempt or is split in another way,
        and for a mesh with other axes; by `update` for gradients that were not gathered.

    Wire: for each bucket of n values, backward (N-1) messages of ceil(n/N) values in the format
    of `exchange`, and forward (N-1) in that of `gather`, twice where `jax.checkpoint` gathers
    again: with bfloat16 for all, 3 (N-1)/N of 2 bytes per value. One float32 all-reduce of what is
    not split, and of one flag.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.sharded(jaxcomm.mean("data", "bfloat16"))
      >>> def loss_fn(params, x):
      ...     return jnp.mean(x @ jaxcomm.gather(params)["w"])
      >>> with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
      ...     params = jaxcomm.shard({"w": jnp.ones((4, 1))}, "data")
      ...     state, x = tx.init(params), jnp.arange(8.0).reshape(2, 4)
      ...     at = jaxcomm.sharded_params(params, state)
      ...     loss, grads = jax.jit(jaxcomm.value_and_grad(loss_fn, "data"))(at, x)
      ...     updates, state = jax.jit(tx.update)(grads, state)
      >>> updates["w"].addressable_shards[0].data.shape, updates["w"].ravel().tolist()
      ((2, 1), [2.0, 3.0, 4.0, 5.0])

    References:
      S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
      SC 2020, arXiv:1910.02054.
      G. Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model
      Training", 2023, arXiv:2306.10209.

    Differs from the paper: ZeRO++ quantizes gradients without error feedback, and only to four
    bits; here the format is a choice. `docs/sharded.md` shows all three parts of ZeRO++.
    """
    if not isinstance(exchange, Exchange):
        raise TypeError(
            "sharded takes what jaxcomm.mean, jaxcomm.majority_vote, jaxcomm.set_to_zero or "
            f"jaxcomm.no_exchange returned, got {_name_of(exchange)}; the optimizer goes after it: "
            'optax.chain(jaxcomm.sharded(jaxcomm.mean("data", "bfloat16")), optax.adamw(1e-3)). '
            "Sparse and low-rank methods cannot be sharded; for few bytes use "
            'jaxcomm.mean("data", "int4", error_feedback=True), or "scaled_sign" there with SGD.'
        )
    scheme, exempt = _checked(exchange.scheme, gather), exchange.exempt

    def init_fn(params: Any) -> Any:
        refuse_wrappers()
        refuse_states_before("jaxcomm.sharded")
        if isinstance(scheme.reduction, CodedMean) and scheme.reduction.keeps_errors:
            sent = scheme.reduction.codec
            warn_of_few_bits(params, f"a mean in {sent.name}", sent.bits_per_value)
        layout = _shard_layout.layout_of(params, scheme, exempt)
        scheme.algorithm.require_own_blocks(layout.axis_name)
        scheme.algorithm.warn_of_mesh(layout.axis_name)
        residual = _shard_layout.zero_residual(layout, scheme)
        return ShardedState(layout, scheme, jnp.zeros((), jnp.int32), residual)

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        refuse_wrappers()
        require_kind(state, ShardedState)
        require_dtype(state.residual, scheme.residual_dtype)
        leaves, treedef = jax.tree.flatten(updates, is_leaf=is_sharded)
        _check_gradients(leaves, state.layout)
        results, residual = _on_every_device([unmark_local(leaf) for leaf in leaves], state)
        return treedef.unflatten(results), state._replace(step=state.step + 1, residual=residual)

    return optax.GradientTransformation(init_fn, update_fn)


def _name_of(exchange: Any) -> str:
    """What to call an argument: a transformation by its factory."""
    if not isinstance(exchange, optax.GradientTransformation):
        return repr(exchange)
    return getattr(exchange.init, "__qualname__", repr(exchange)).partition(".")[0]


def _checked(scheme: Scheme, gather: str | codecs.Codec) -> Scheme:
    """The scheme of a reduce-scatter.

    Raises:
      TypeError: for a seed in an array.
      ValueError: for an exchange or a codec that shards cannot use.
    """
    codec = codecs.from_name(gather)
    if isinstance(scheme.seed, jax.Array):
        raise TypeError(
            "the seed of an exchange of shards is part of the program and must be a Python number; "
            'under optax.inject_hyperparams pass static_args=("seed",).'
        )
    if codec.needs_error_feedback or isinstance(codec, RandomK):
        raise ValueError(
            f"parameters cannot be gathered in {codec.name}, which does not represent them; use "
            "float32, bfloat16, int8 or another codec that works without error feedback."
        )
    reduction, algorithm = scheme.reduction, scheme.algorithm
    if scheme.bucket_order:
        raise ValueError(
            "gradients of sharded parameters travel in the order of jaxcomm.gather's calls; leave "
            "out bucket_order."
        )
    if reduction is None and scheme.signs:
        raise ValueError(
            "majority_vote with error feedback needs the scale of a whole leaf, and cannot be "
            'sharded; use jaxcomm.mean(..., "scaled_sign", error_feedback=True), or no feedback.'
        )
    if isinstance(reduction, RandomKMean):
        raise ValueError("random_k draws from whole buckets and cannot be sharded; use int4.")
    if isinstance(reduction, CodedMean) and reduction.second_hop != reduction.codec:
        raise ValueError(
            "second_hop is the format of the mean on its way back, and nothing travels back to "
            f"shards; leave it out, and give sharded(..., gather={reduction.second_hop.name!r})."
        )
    if isinstance(algorithm, Default) and algorithm.sent != "votes":
        algorithm = Default("shards")
    return dataclasses.replace(scheme, gather=codec, algorithm=algorithm)


def _check_gradients(leaves: list[Any], layout: Layout) -> None:
    """Raises unless these are the gradients of the layout's parameters, as `gather` leaves them."""
    for leaf in leaves:
        if not is_sharded(leaf):
            raise ValueError(
                "these gradients were not exchanged as shards: differentiate with "
                "jaxcomm.value_and_grad at jaxcomm.sharded_params(params, state), and call "
                "jaxcomm.gather in the loss. Only one exchange belongs in a chain."
            )
    paths, expected = [x.place.path for x in leaves], [leaf.path for leaf in layout.leaves]
    if paths != expected:
        raise ValueError(
            f"the state was made for the parameters {', '.join(expected[:5])}, ... and the "
            f"gradients are of {', '.join(paths[:5])}, ...; call tx.init again on these parameters."
        )


def _on_every_device(grads: list[ShardedParam], state: ShardedState) -> tuple[Arrays, PerDevice]:
    """Finishes a step on every device, in either view: the updates and the next residuals."""
    own, axis = state.residual, state.layout.axis_name
    require_own(own, state.layout)
    finish = functools.partial(_finished, state)
    if _axes.is_manual(axis):
        old = [x[0] for x in own.values]
        if not _axes.checks_on(axis):
            results, kept = finish(grads, old)
        else:
            results, kept = _axes.unchecked(lambda args: finish(*args))((grads, old))
            axes = frozenset(_axes.names_of(axis))
            results = [
                x if g.place.dim is None else _axes.as_varying(x, axes)
                for x, g in zip(results, grads, strict=True)
            ]
            kept = [_axes.as_varying(x, axes) for x in kept]
        return results, PerDevice([x[None] for x in kept], own.specs)

    def run(grads: list[ShardedParam], old: Arrays) -> tuple[Arrays, Arrays]:
        results, kept = finish(_shards.arriving(grads), [x[0] for x in old])
        return results, [x[None] for x in kept]

    results, kept = jax.shard_map(
        run,
        in_specs=(_shards.out_specs(grads, PartitionSpec()), list(own.specs)),
        out_specs=([g.place.spec for g in grads], list(own.specs)),
        check_vma=False,
    )(grads, list(own.values))
    return results, PerDevice(kept, own.specs)


def _finished(state: ShardedState, grads: list[ShardedParam], old: Arrays) -> tuple[Arrays, Arrays]:
    """The updates, all NaN if anything is not finite, and the next residuals.

    Args:
      state: the state before the step.
      grads: shards of the exchanged gradient, and local gradients of what is not split; with them,
        what the exchange left as residuals, and how often each layer was gathered.
      old: the residuals before the step.
    """
    scheme, axis = state.scheme, state.layout.axis_name
    values, split_up = [g.value for g in grads], [g.place.dim is not None for g in grads]
    with_state = [g for g in grads if g.residual is not None]
    counts = [g.tick[..., 0] for g in with_state]
    whole = {i: x for i, x in enumerate(values) if not split_up[i]}
    finite = jnp.bool_(True)
    if scheme.frozen:
        whole = {i: jnp.zeros_like(x) for i, x in whole.items()}
    elif scheme.reduction is not None:
        # A parameter that was gathered twice has the sum of two residuals. Code that computes with
        # the leaves of a `ShardedParam`, such as a norm of the tree, changes its ticks too. Both
        # make the step NaN.
        twice = [jnp.where(count > 1, jnp.nan, 0.0) for count in counts]
        ticks = [g.tick for g in grads if g.tick is not None]
        twice += [jnp.where(t[..., 1:] != t[..., :1], jnp.nan, 0.0) for t in ticks]
        local = [x for x, is_split in zip(values, split_up, strict=True) if is_split]
        seen = [x.reshape(-1) for x in (*local, *(g.residual for g in with_state), *twice)]
        small: dict[Any, jax.Array] = whole | {FLAG: 1 - all_finite(seen).astype(jnp.float32)}
        with noted(state.layout), noted(Message("exempt", tuple(whole))):
            whole = split(collectives.float32_mean(joined(small), axis), small)
        finite = (whole.pop(FLAG) == 0) & all_finite([x.reshape(-1) for x in whole.values()])
        whole = {i: jnp.sign(x) if scheme.signs else x for i, x in whole.items()}
    results = [
        jnp.where(finite, whole[i] if i in whole else value, jnp.nan).astype(value.dtype)
        for i, value in enumerate(values)
    ]
    kept = []
    for g, count, before in zip(with_state, counts, old, strict=True):
        # A layer that was not gathered has sent nothing: its residual stays as it was.
        used = (count > 0).reshape(*count.shape, *[1] * (before.ndim - count.ndim))
        kept.append(jnp.where(finite & used, g.residual, before))
    return results, kept
