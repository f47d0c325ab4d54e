"""The mean of gradients over devices, as an optax transformation."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomm import codecs, collectives
from jaxcomm._axes import AxisName
from jaxcomm._notes import noted
from jaxcomm._numbers import check_seed
from jaxcomm.collectives.reductions import CodedMean
from jaxcomm.kernels import _device, _implementations
from jaxcomm.kernels.random_bits import seeded_key
from jaxcomm.transforms import _roles, _undecoded
from jaxcomm.transforms._buckets import (
    LAYER,
    Bucket,
    buckets_of,
    bytes_of,
    joined,
    joined_sums,
    keys_of,
    split_off_empty,
    split_off_exempt,
)
from jaxcomm.transforms._exchange import (
    Arrays,
    Exchanged,
    Own,
    Partly,
    by_leaf,
    exchange_buckets,
    kept_if,
    local_leaves,
    on_every_device,
    updates_of,
    within_range,
)
from jaxcomm.transforms._layout import Layout, layout_of
from jaxcomm.transforms._options import Exempt, check_names
from jaxcomm.transforms._residuals import checked_dtype, rounded_leaves
from jaxcomm.transforms._scheme import Scheme, exchange
from jaxcomm.transforms._states import require_state
from jaxcomm.transforms._wrappers import refuse_wrappers, warn_of_few_bits
from jaxcomm.transforms.per_device import NOTHING, PerDevice, zeros_per_device

_OPERAND = 2**18  # elements of a leaf that is an operand of its own of XLA's all-reduce


class MeanState(NamedTuple):
    """The state of `mean`.

    Attributes:
      layout: what `init` recorded about the parameters.
      step: int32, from which the keys are made.
      residual: with error feedback, the part of each device's gradients that is in no update yet,
        for each compressed leaf; else empty. The mean of the residuals over devices is what the
        updates still lack, but for the rounding of means that "first_hop" drops. In
        `residual_dtype`, with a leading device axis, sharded over the axis; inside `jax.shard_map`,
        this device's only.
    """

    layout: Layout
    step: jax.Array
    residual: PerDevice
    roles = frozenset({_roles.MEANS})


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
    implementation: _implementations.Option = None,
    residual_dtype: jax.typing.DTypeLike = "float32",
) -> optax.GradientTransformation:
    """Replaces local gradients by their mean over a mesh axis.

    Put it once in a chain, before the optimizer. Transformations after it see the mean, so clipping
    there works as usual:
    `optax.chain(jaxcomm.mean("data"), optax.clip_by_global_norm(1.0), optax.adam(1e-3))`. A
    transformation before it must be wrapped in `jaxcomm.local`.

    Leaves of at most one dimension (norms, biases) are sent together in float32, by XLA's own
    all-reduce; so are larger ones named bias, scale, offset, beta or gamma, and the weight of a
    norm. All other leaves are exchanged in buckets; a bucket is one message per hop.

    With `error_feedback=True`, each device keeps the rounding errors of its own messages, on every
    hop, and adds them to its next gradients. The owner of a block also keeps N times the rounding
    error of the encoded mean. Over all steps, the updates and the mean of the residuals add up to
    the mean of the gradients, except for the rounding of 16-bit updates and residuals. Errors are
    fed back some steps late: momentum after the exchange repeats them, and Adam is not linear in
    them (arXiv:2102.02888). So with fewer bits than int4, put SGD's momentum before the mean,
    `jaxcomm.local(axis_name, optax.trace(0.9, nesterov=True))`; with Adam, put the mean inside
    `jaxcomm.factored_adam`. `init` warns about fewer than 4 bits with feedback before an optimizer
    that keeps a variance, and fewer than 8 before Muon, but only if both are in the same
    `optax.chain` or `optax.named_chain`. If a codec's error can exceed the value
    (`Codec.variance`), residuals may grow without bound, and a UserWarning is issued.

    If any gradient on any device is not finite, every update on every device is NaN, and the
    residuals stay as they were. `optax.apply_if_finite` around the optimizer then skips the step on
    all devices. Updates are also NaN with random_k if devices have different seeds.

    Under `jax.shard_map` with `check_vma=False`, jaxcomm cannot check that the axis is that of
    `jaxcomm.value_and_grad`; with a different axis, devices would diverge.

    Args:
      axis_name: the mesh axis, or axes, over which the batch is spread.
      codec: a name in `jaxcomm.codecs.BY_NAME`, such as "bfloat16", "cnat" or "int8", or a codec
        such as `jaxcomm.codecs.qsgd(levels=7)`.
      algorithm: "native", "direct", "ring", "two_way_ring", "halving_doubling", "circulant" or an
        algorithm such as `jaxcomm.algorithms.halving_doubling(order="far_first")`; None means
        "native" for float32; between CPU processes "ring" for 16 bits and int8 (short vectors take
        fewer rounds), "two_way_ring" for cnat on 3 to 8 devices and "circulant" on more than 32;
        "direct" for everything else. Where hosts have several devices, these are added up in
        float32 first (`jaxcomm.algorithms.hierarchical`), and the above is between hosts.
      error_feedback: whether each device keeps the errors of its messages, in one copy of the
        gradients; "first_hop" keeps only those of the first hop, not the rounding errors of the
        means.
      second_hop: the codec of the mean in the all-gather; None means `codec`.
      exempt: which leaves are sent in float32. Patterns of paths such as ["head/*"] add to those
        above; a function of path and shape decides for all leaves.
      seed: the seed for codecs that round or draw at random.
      bucket_mib: the maximum size of a bucket, in MiB of float32 gradients; a larger leaf has its
        own bucket. Smaller buckets start earlier; larger ones lose less time to latency.
      bucket_order: paths of leaves in the order in which their gradients appear, as
        `jaxcomm.backward_order` finds them; None means the reverse of the tree's order.
      implementation: which version of a kernel to use, if there are several: None, "xla", "mosaic",
        "triton", "measure" (time them once on this device), or a mapping from operations to these.
        `docs/kernels.md` lists the operations.
      residual_dtype: "float32", or "bfloat16" for half of the memory: residuals are then rounded at
        random, so that what they lack is zero on average.

    Returns:
      A transformation whose `update` takes local gradients (from `jaxcomm.value_and_grad`) and
      returns updates with the shapes of the parameters and the dtypes of the gradients, bitwise
      equal on all devices. It works under plain `jax.jit` with a mesh set, and inside
      `jax.shard_map`.

    Raises:
      TypeError, ValueError: immediately for bad arguments; by `init` for parameters that are not
        float arrays, or that are sharded over the axis, or when no mesh is set; by `update` for
        gradients that are not local.

    Wire: for each bucket of n values, (N-1) messages of ceil(n/N) values in the format of each hop,
    2(N-1)/N of the bucket; see `jaxcomm.pmean` for other algorithms. Once per step, one float32
    all-reduce of all exempt values, and on a mesh of several axes one int32 over the other axes.
    With random_k, the all-reduce includes a flag and a tag of the key.

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

    Differs from the paper: the owner of a block has no second state for the error of the mean; it
    adds that error to its residual, in the block that it owns and never sends.
    """
    check_names(axis_name, exempt, bucket_order)
    check_seed(seed)
    dtype = checked_dtype(residual_dtype, error_feedback)
    reduction, chosen = collectives.mean_of(
        codec, algorithm, second_hop, error_feedback, implementation
    )
    chosen.require_axes(axis_name)
    limit, sent, order = bytes_of(bucket_mib), codecs.from_name(codec), tuple(bucket_order or ())
    scheme = Scheme(axis_name, reduction, chosen, seed, limit, order, residual_dtype=dtype)
    arriving = sent if second_hop is None else codecs.from_name(second_hop)
    float32 = codecs.float32()
    is_plain = chosen.name == "native" and reduction == CodedMean(float32, float32)

    def init_fn(params: Any) -> Any:
        refuse_wrappers(not (sent.needs_error_feedback or arriving.needs_error_feedback))
        chosen.warn_of_mesh(axis_name)
        coarsest = _fed_back(error_feedback, sent, arriving)
        warn_of_few_bits(params, f"a mean in {coarsest.name}", coarsest.bits_per_value)
        layout = layout_of(params, axis_name, exempt, bucket_order, scheme)
        chosen.require_world(layout.world)
        large, _ = split_off_exempt(layout)
        residual = zeros_per_device(layout, params, large, dtype) if error_feedback else NOTHING
        return MeanState(layout, jnp.zeros((), jnp.int32), residual)

    def on_device(grads: Arrays, own: Own, step: jax.Array, layout: Layout) -> tuple[Arrays, Own]:
        large, exempt_ = _split_off_small(layout, is_plain)
        buckets = buckets_of(layout, large, bucket_order, limit)
        key = jax.random.fold_in(seeded_key(seed), step)
        keys = keys_of(key, layout, buckets)
        (old,) = own
        residual = dict(zip(large, old, strict=True)) if error_feedback else {}

        def on_bucket(number: int, parts: dict[int, jax.Array]) -> tuple[Any, Any]:
            if is_plain:
                with noted("float32, native"):
                    return plain_mean(parts, axis_name), None
            keyed = dataclasses.replace(reduction, key=keys[number])
            if _undecoded.stays_encoded(parts, residual, axis_name, keyed, chosen):
                ordered = _undecoded.in_order(parts, keyed)
                vector = _one_vector(ordered, residual, reduction, chosen.blocks(layout.world))
                mean = collectives.undecoded_mean(vector, axis_name, keyed, chosen)
                return mean.result.units, mean
            vector = _one_vector(parts, residual, reduction, chosen.blocks(layout.world))
            return collectives.all_reduce_with_residual(vector, axis_name, keyed, chosen)

        done = exchange_buckets(
            dict(enumerate(grads)),
            buckets,
            on_bucket,
            small={i: grads[i] for i in exempt_},
            look_at="results" if reduction.carries_nonfinite else "parts",
            axis_name=axis_name,
            equal_key=key if reduction.needs_equal_keys else None,
        )
        updates, kept = _finished(done, buckets, grads, residual, reduction, key, layout)
        return updates, (kept,)

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        require_state(state, MeanState, exempt, {"residual": bool(error_feedback)}, dtype=dtype)
        grads, treedef = local_leaves(updates, state.layout)
        run, own = functools.partial(on_device, layout=state.layout), (state.residual,)
        means, (residual,) = on_every_device(run, grads, state.layout, own, state.step)
        return treedef.unflatten(means), MeanState(state.layout, state.step + 1, residual)

    return exchange(init_fn, update_fn, scheme, exempt)


def _finished(
    done: Exchanged,
    buckets: Sequence[Bucket],
    grads: Arrays,
    residual: dict[int, jax.Array],
    reduction: CodedMean,
    key: jax.Array,
    layout: Layout,
) -> tuple[Arrays, Arrays]:
    """The updates, and the next residuals."""
    decoded: list[tuple[Bucket, Any, Any]] = []
    encoded: list[tuple[Bucket, collectives.Undecoded]] = []
    for bucket, result, kept in zip(buckets, done.buckets, done.kept, strict=True):
        if isinstance(kept, collectives.Undecoded):
            encoded.append((bucket, kept))
        else:
            decoded.append((bucket, result, kept))
    others, results, errors = zip(*decoded, strict=True) if decoded else ((), (), ())
    left = by_leaf(errors, others, grads) if residual else {}
    means, left = within_range(done.exact | by_leaf(results, others, grads), left, grads)
    order = sorted(means)
    of_order = {n: means[i] for n, i in enumerate(order)}
    found, finite = updates_of(of_order, done.finite, [grads[i] for i in order], layout.axis_name)
    updates, which = dict(zip(order, found, strict=True)), tuple(i for i in residual if i in left)
    old = [residual[i] for i in which]
    new = rounded_leaves([left[i] for i in which], old, key, layout, which)
    after = dict(zip(which, kept_if(finite, new, old), strict=True))
    for bucket, mean in encoded:
        parts = {i: grads[i] for i in bucket}
        more, waiting = _undecoded.finished(mean, parts, residual, reduction, finite)
        updates, after = updates | more, after | waiting
    return [updates[i] for i in range(len(grads))], [after[i] for i in residual]


def _one_vector(
    parts: dict[int, jax.Array], residual: dict[int, jax.Array], reduction: CodedMean, blocks: int
) -> jax.Array:
    """Gradients, and residuals if there are any, as the vector that is sent, padding included."""
    n = sum(g.size for g in parts.values())
    size = reduction.padded(n, blocks)
    vector = joined_sums(parts, residual, size) if residual else joined(parts, size)
    return reduction.filled(vector, n, blocks)


def _fed_back(
    error_feedback: bool | str, sent: codecs.Codec, arriving: codecs.Codec
) -> codecs.Codec:
    """The coarsest codec whose errors are fed back; float32 where none are."""
    of_both = {False: [], "first_hop": [sent]}.get(error_feedback, [sent, arriving])
    return min(of_both, key=lambda codec: codec.bits_per_value, default=codecs.float32())


def _split_off_small(layout: Layout, is_plain: bool) -> tuple[Bucket, Bucket]:
    """The leaves that travel in buckets, and the others.

    A plain mean sends exempt leaves like all others, to save a latency. In a loop their gradients
    come after all products, which on GPUs hide the buckets that do not wait for these gradients.
    """
    in_a_loop = LAYER.get() is not None and not _device.is_between_cpu_processes()
    return split_off_empty(layout) if is_plain and not in_a_loop else split_off_exempt(layout)


def plain_mean(parts: dict[int, jax.Array], axis_name: AxisName) -> Partly:
    """XLA's own float32 mean: a vector of a bucket's small leaves, and its large ones by leaf.

    Joining a large leaf would take as long as reducing it. Exempt leaves are sent the same way and
    are included, so that all leaves together take the latency of one all-reduce.
    """
    small = {i: part for i, part in parts.items() if part.size < _OPERAND}
    large = {i: part.astype(jnp.float32) for i, part in parts.items() if i not in small}
    vector = joined(small) if small else None
    scale = np.float32(1 / jax.lax.axis_size(axis_name))
    return jax.tree.map(lambda x: x * scale, jax.lax.psum((vector, large), axis_name))
