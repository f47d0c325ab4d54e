"""The mean of gradients over devices, as an optax transformation."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _compat, codecs, collectives
from jaxcomm._compat import AxisName
from jaxcomm.transforms._buckets import buckets_of, split_off_exempt
from jaxcomm.transforms._fusion import bytes_of, exact_means, fused
from jaxcomm.transforms._layout import Layout, check_gradients, layout_of
from jaxcomm.transforms._views import Arrays, on_every_device
from jaxcomm.transforms._wrappers import refuse_wrappers
from jaxcomm.transforms.per_device import NOTHING


class MeanState(NamedTuple):
    """The state of `mean`: no arrays, only what `init` saw of the parameters."""

    layout: Layout


def mean(
    axis_name: AxisName,
    codec: str | codecs.Codec = "float32",
    algorithm: str | collectives.Algorithm | None = None,
    *,
    bucket_mib: float = 32.0,
    bucket_order: Sequence[str] | None = None,
) -> optax.GradientTransformation:
    """Replaces local gradients by their mean over a mesh axis.

    Put it before the optimizer, and once. What comes after it sees the mean, so clipping there is
    what everyone is used to:
    `optax.chain(jaxcomm.mean("data"), optax.clip_by_global_norm(1.0), optax.adam(1e-3))`. What
    comes before it must be `jaxcomm.local`.

    Leaves of at most one dimension (norms, biases) travel together in float32, by XLA's own
    all-reduce. All others are exchanged in buckets, each in one message per hop.

    If any gradient on any device is not finite, every update on every device is NaN, so that
    `optax.apply_if_finite` around the optimizer skips the step everywhere.

    Args:
      axis_name: the mesh axis, or axes, over which the batch is spread.
      codec: "float32", "bfloat16", "float16" or a codec.
      algorithm: "native", "direct", "ring", "halving_doubling", "circulant" or an algorithm such
        as `jaxcomm.halving_doubling(order="far_first")`; None is "native" for float32 and
        "direct" for everything else.
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
    all exempt elements and one flag; on a mesh of several axes, one int32 over the others.

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
    """
    reduction, chosen = collectives.mean_of(codec, algorithm)
    limit = bytes_of(bucket_mib)

    def compressed(x: jax.Array) -> jax.Array:
        return collectives.all_reduce(x, axis_name, reduction, chosen)

    def exchange(grads: Arrays, layout: Layout) -> Arrays:
        large, exempt = split_off_exempt(layout)
        means, finite = exact_means({i: grads[i] for i in exempt}, grads, axis_name)
        for bucket in buckets_of(layout, large, bucket_order, limit):
            means |= fused({i: grads[i] for i in bucket}, compressed)
        return [jnp.where(finite, means[i], jnp.nan).astype(g.dtype) for i, g in enumerate(grads)]

    return _synchronising(axis_name, exchange)


def no_exchange(axis_name: AxisName) -> optax.GradientTransformation:
    """Leaves every device with its own gradients: for measuring, and as a control.

    A step with it is the same step without communication, so the difference in time to `mean` is
    what communication costs. The updates claim to be equal on all devices and are not: parameters
    drift apart, and training on them shows what never talking is worth. To look at a device's own
    copy, use `x.addressable_shards[i].data`; jax takes them all for one.

    Args:
      axis_name: the mesh axis, or axes, over which the batch is spread.

    Returns:
      A transformation used as `mean` is.

    Wire: nothing.
    """
    return _synchronising(axis_name, lambda grads, layout: grads)


def _synchronising(
    axis_name: AxisName, exchange: Callable[[Arrays, Layout], Arrays]
) -> optax.GradientTransformation:
    """The transformation that carries out `exchange` on every device."""
    _compat.names_of(axis_name)

    def init_fn(params: Any) -> Any:
        refuse_wrappers()
        return MeanState(layout_of(params, axis_name))

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        refuse_wrappers()
        grads, treedef = jax.tree.flatten(updates)
        check_gradients(grads, state.layout)
        means, _ = on_every_device(
            lambda grads, own, shared: (exchange(grads, state.layout), own),
            grads,
            state.layout,
            NOTHING,
        )
        return treedef.unflatten(means), state

    return optax.GradientTransformation(init_fn, update_fn)
