"""The mean of gradients over devices, as an optax transformation."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axes, codecs, collectives
from jaxcomm._axes import AxisName
from jaxcomm.transforms._buckets import buckets_of, bytes_of, joined, split_off_exempt
from jaxcomm.transforms._exchange import (
    Arrays,
    Own,
    by_leaf,
    exchange_buckets,
    kept_if,
    local_leaves,
    on_every_device,
    updates_of,
)
from jaxcomm.transforms._layout import Exempt, Layout, layout_of
from jaxcomm.transforms._wrappers import refuse_wrappers
from jaxcomm.transforms.per_device import NOTHING, PerDevice, zeros_per_device


class MeanState(NamedTuple):
    """The state of `mean`.

    Attributes:
      layout: what `init` saw of the parameters.
      step: int32, from which the keys are made.
      residual: with error feedback, what of each device's gradients is in no update yet; else
        nothing. Divided by the number of devices, their sum is what the updates still owe.
    """

    layout: Layout
    step: jax.Array
    residual: PerDevice


def mean(
    axis_name: AxisName,
    codec: str | codecs.Codec = "float32",
    algorithm: str | collectives.algorithms.Algorithm | None = None,
    *,
    error_feedback: bool | str = False,
    second_hop: str | codecs.Codec | None = None,
    exempt: Exempt = (),
    seed: int = 0,
    bucket_mib: float = 8.0,
    bucket_order: Sequence[str] | None = None,
) -> optax.GradientTransformation:
    """Replaces local gradients by their mean over a mesh axis.

    Put it before the optimizer, and once. What comes after it sees the mean, so clipping there is
    what everyone is used to:
    `optax.chain(jaxcomm.mean("data"), optax.clip_by_global_norm(1.0), optax.adam(1e-3))`. What
    comes before it must be `jaxcomm.local`.

    Leaves of at most one dimension (norms, biases) travel together in float32, by XLA's own
    all-reduce. All others are exchanged in buckets, each in one message per hop.

    With error feedback, nothing that rounding takes away is lost: each device keeps what its own
    messages did not say, on every hop, and adds it to its next gradients. Whoever owns a block
    keeps so, N times, what the encoded mean did not say. Over all steps, updates and residuals add
    up to the mean of the gradients. Codecs whose error can exceed the value (`Codec.variance`),
    such as qsgd with few levels in large blocks, are not for this: their residuals may grow
    without end, and a UserWarning says so.

    If any gradient on any device is not finite, every update on every device is NaN, so that
    `optax.apply_if_finite` around the optimizer skips the step everywhere, and the residuals stay
    as they are. So it is if devices have different seeds, where they must draw alike.

    Args:
      axis_name: the mesh axis, or axes, over which the batch is spread.
      codec: a name in `jaxcomm.codecs.BY_NAME`, such as "bfloat16", "cnat" or "int8", or a codec
        such as `jaxcomm.codecs.qsgd(levels=7)`.
      algorithm: "native", "direct", "ring", "halving_doubling", "circulant" or an algorithm such
        as `jaxcomm.algorithms.halving_doubling(order="far_first")`; None is "native" for float32
        and "direct" for everything else.
      error_feedback: whether devices keep what their messages do not say, in one float32 copy of
        the gradients; "first_hop" keeps nothing of what brings the mean back.
      second_hop: the format of the mean on its way back, as `codec`; None is the same.
      exempt: what else travels in float32: patterns of paths such as ["head/*"] for leaves beside
        those of at most one dimension, or a function of path and shape in place of both rules.
      seed: of codecs that round or draw at random.
      bucket_mib: MiB of float32 gradients that a bucket holds at most; a larger leaf has a bucket
        of its own. Smaller buckets start earlier, larger ones waste less on latency.
      bucket_order: paths of leaves in the order in which their gradients appear, as
        `jaxcomm.backward_order` finds them; None is the reverse of the tree's order.

    Returns:
      A transformation whose `update` takes local gradients (from `jaxcomm.value_and_grad`) and
      returns updates with the shapes of the parameters and the dtypes of the gradients, bitwise
      equal on all devices. It works under plain `jax.jit` with a mesh set, and inside
      `jax.shard_map`.

    Raises:
      TypeError, ValueError: at once for bad arguments; by `init` for parameters that are not
        float or sharded over the axis, or when no mesh is set; by `update` for gradients that
        are not local.

    Wire: for each bucket of n elements, that of `jaxcomm.pmean`; and one float32 all-reduce of
    all exempt elements and one flag (with random_k also a tag of the key); on a mesh of several
    axes, one int32 over the others.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.mean("data", codec="bfloat16")
      >>> with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
      ...     params = {"w": jnp.zeros((2, 2))}
      ...     state = tx.init(params)
      ...     grads = {"w": jnp.stack([jnp.zeros((2, 2)), jnp.ones((2, 2))])}  # of 2 devices
      ...     updates, state = jax.jit(tx.update)(grads, state)
      >>> updates["w"]
      Array([[0.5, 0.5],
             [0.5, 0.5]], dtype=float32)

    References:
      S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
      VLDB 2020, arXiv:2006.15704 (buckets in the order of the backward pass).
      S. P. Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression
      Schemes", ICML 2019, arXiv:1901.09847.
      H. Tang et al., "DoubleSqueeze: Parallel Stochastic Gradient Descent with Double-pass
      Error-Compensated Compression", ICML 2019, arXiv:1905.05957 (errors on both hops).

    Differs from the paper: an owner's error is not a second state but joins its residual, in the
    block that it owns and does not send.
    """
    _axes.names_of(axis_name)
    reduction, chosen = collectives.mean_of(codec, algorithm, second_hop, error_feedback)
    limit = bytes_of(bucket_mib)

    def init_fn(params: Any) -> Any:
        refuse_wrappers()
        layout = layout_of(params, axis_name, exempt)
        large, _ = split_off_exempt(layout)
        residual = zeros_per_device(layout, params, large) if error_feedback else NOTHING
        return MeanState(layout, jnp.zeros((), jnp.int32), residual)

    def on_device(grads: Arrays, own: Own, step: jax.Array, layout: Layout) -> tuple[Arrays, Own]:
        large, exempt_ = split_off_exempt(layout)
        buckets = buckets_of(layout, large, bucket_order, limit)
        key = jax.random.fold_in(jax.random.key(seed), step)
        (old,) = own
        residual = dict(zip(large, old, strict=True)) if error_feedback else {}

        def on_bucket(number: int, parts: dict[int, jax.Array]) -> tuple[jax.Array, Any]:
            vector = joined(
                {i: g.astype(jnp.float32) + residual.get(i, 0.0) for i, g in parts.items()}
            )
            keyed = dataclasses.replace(reduction, key=jax.random.fold_in(key, number))
            return collectives.all_reduce_with_residual(vector, axis_name, keyed, chosen)

        done = exchange_buckets(
            dict(enumerate(grads)),
            buckets,
            on_bucket,
            small={i: grads[i] for i in exempt_},
            must_be_finite=grads,
            axis_name=axis_name,
            equal_key=key if reduction.needs_equal_keys else None,
        )
        means = done.exact | by_leaf(done.buckets, buckets, grads)
        left = by_leaf(done.kept, buckets, grads) if error_feedback else {}
        kept = kept_if(done.finite, [left[i] for i in residual], old)
        return updates_of(means, done.finite, grads), (kept,)

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        grads, treedef = local_leaves(updates, state.layout)
        means, (residual,) = on_every_device(
            functools.partial(on_device, layout=state.layout),
            grads,
            state.layout,
            (state.residual,),
            state.step,
        )
        return treedef.unflatten(means), MeanState(state.layout, state.step + 1, residual)

    return optax.GradientTransformation(init_fn, update_fn)
