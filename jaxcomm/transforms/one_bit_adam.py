"""1-bit Adam: the optimizer and the exchange of its momentum, as one optax transformation."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomm import _branches, _hosts, collectives
from jaxcomm._axes import AxisName
from jaxcomm._notes import Message, noted
from jaxcomm.collectives.one_bit import BLOCK, chunk_length, one_bit_mean
from jaxcomm.kernels.reductions import all_finite, computed_once
from jaxcomm.transforms import _roles
from jaxcomm.transforms._buckets import (
    Bucket,
    Buckets,
    buckets_of,
    bytes_of,
    joined,
    split,
    split_off_exempt,
)
from jaxcomm.transforms._exchange import (
    Arrays,
    Own,
    as_vectors,
    by_leaf,
    exchange_buckets,
    in_turn,
    local_leaves,
    on_every_device,
    on_further_axes,
    vectors_in_view,
)
from jaxcomm.transforms._frozen_adam import FrozenAdam
from jaxcomm.transforms._layout import Layout, layout_of
from jaxcomm.transforms._optimizer import (
    check_number,
    is_count,
    replicated,
    require_params,
    zeros_like_params,
)
from jaxcomm.transforms._options import Exempt, check_names
from jaxcomm.transforms._states import require_state
from jaxcomm.transforms._wrappers import refuse_optimizer_behind, refuse_wrappers
from jaxcomm.transforms.per_device import PerDevice, next_of, values_of, zeros_per_group

_DENSE_SHARE = 0.15  # of the run; H. Tang et al.: 23,000 of 152,000 steps of BERT-Large


class OneBitAdamState(NamedTuple):
    """The state of `one_bit_adam`.

    Attributes:
      layout: what `init` recorded about the parameters.
      buckets: which leaves travel together.
      count: int32, the steps taken; steps that were not finite do not count.
      m: float32 momentum, shaped and sharded as the parameters, equal on all devices.
      v: float32 variance, likewise.
      worker_error: for each bucket, each device's first-hop error: float32 (devices, the bucket's
        padded length), sharded over the axis; inside `jax.shard_map` this device's.
      server_error: for each bucket, each device's second-hop error, of the chunk that it owns:
        float32 (devices, that length over N), likewise.
      frozen_at: int32, the value of `count` at which the dense steps ended; 0 before.
      norms: float32, with `variance_stability` a ring buffer of the last 1/(1-b2) norms of v;
        else ().
    """

    layout: Layout
    buckets: Buckets
    count: jax.Array
    m: Any
    v: Any
    worker_error: PerDevice
    server_error: PerDevice
    frozen_at: jax.Array
    norms: Any
    roles = frozenset({_roles.FINISHED})


def one_bit_adam(
    axis_name: AxisName,
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Any = None,
    total_steps: int | None = None,
    dense_steps: int | None = None,
    variance_stability: float | None = None,
    exempt: Exempt = (),
    bucket_mib: float = 8.0,
    bucket_order: Sequence[str] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam on the mean of local gradients; after some dense steps its momentum is sent in one bit.

    It is optimizer and exchange in one: its updates are final, so neither `jaxcomm.mean` nor
    `optax.adam` belongs in its chain. `jaxcomm.local("data", optax.clip_by_global_norm(1.0))` may
    come before it.

    In the dense steps it is `optax.adamw` on the exact mean. Then the variance v is frozen for all
    leaves. From then on, each device adds its own gradient to the shared momentum m, and the next
    shared momentum is the mean of the results, exchanged as signs and scales with the errors of
    both hops fed back. Leaves of at most one dimension keep their exact float32
    mean.

    A coordinate whose v is 0 when v is frozen has never had a gradient. Its momentum would still be
    decoded as plus or minus a scale and then divided by eps, so such a coordinate is no longer
    updated, except by weight decay. Where v is tiny, a larger eps bounds the step.

    If a gradient on any device, its square or the learning rate is not finite, every update on
    every device is NaN and the state stays as it was. The exchange of a bucket begins once all
    gradients of that bucket exist.

    Args:
      axis_name: the mesh axis, or axes, over which the batch is spread.
      learning_rate: a number, or a schedule of `count`.
      b1: decay of the momentum, in [0, 1).
      b2: decay of the variance, in [0, 1).
      eps: added to the root of the variance, >= 0.
      weight_decay: decoupled, as in `optax.adamw`; `update` then needs the parameters.
      mask: which leaves decay, as in `optax.adamw`: a tree of bools with the structure of the
        parameters or a prefix of it, or a function from parameters to such a tree; None means all.
      total_steps: the steps of the run, of which the first 15 % are dense, as for the paper's
        BERT-Large; then v is frozen.
      dense_steps: the number of steps before v is frozen, instead of `total_steps`.
      variance_stability: a number in (0, 1]; the paper's is 0.96. v is frozen once its L1 norm and
        that of 1/(1-b2) steps ago, both corrected for their start at 0, have a ratio (smaller over
        larger) of at least this number. So v is frozen after 1/(1-b2) steps at the earliest: 1000
        for the default b2. The warm-up of the learning rate should end before. With `total_steps`
        or `dense_steps`, v is frozen at that step at the latest; without, it may never be frozen.
      exempt: which leaves are not compressed, as in `jaxcomm.mean`.
      bucket_mib: the maximum size of a bucket, in MiB of float32 gradients.
      bucket_order: paths of leaves in the order in which their gradients appear, as
        `jaxcomm.backward_order` finds them; None means the reverse of the tree's order. A resumed
        run needs the order of the first run, because errors are kept by bucket.

    Returns:
      A transformation whose `update` takes local gradients (from `jaxcomm.value_and_grad`) in
      either view, and returns what `optax.apply_updates` takes, bitwise equal on all devices.
      `update(..., dense=True)`, or False, decides instead of the state whether this step is dense,
      and makes no conditional: where steps are jitted, `dense` is a static argument, and there are
      two programs. v changes in the dense steps until the first other one, or until the state says
      that it is frozen; without a dense step, updates are NaN.

    Raises:
      TypeError, ValueError: immediately for bad arguments; by `init` if an optimizer with its own
        moments, or a chain such as `optax.sgd`, follows in the same `optax.chain`; by `update` if
        weight decay lacks the parameters, the mask does not fit them, or `dense` is neither True
        nor False; otherwise as for `jaxcomm.mean`.

    Wire: for each bucket of b blocks, 2(N-1) messages of 33 uint32 words for each of ceil(b/N)
    blocks, which is 2(N-1)/N of 1.03 bits per value; a leaf is padded to whole blocks of 1024
    values. Between H hosts of D devices, as far as jax knows, these are 2(H-1) such messages of a
    device, and within a host an all-to-all of float32 and an all-gather of bits: the devices of a
    host add up first. Once per step, one float32 all-reduce of all exempt values; on a mesh of
    several axes, one int32 over the other axes, and with `variance_stability` one float32. A dense
    step sends 8(N-1)/N more bytes per parameter, in a branch of a conditional. The bits are also
    sent in dense steps, and discarded: on GPUs XLA does not overlap a collective that is inside a
    conditional. With `dense`, a step sends either, outside of conditionals.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.one_bit_adam("data", 0.1, dense_steps=1)
      >>> with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
      ...     state = tx.init(jnp.zeros((1, 2)))
      ...     grads = jnp.array([[[1.0, -3.0]], [[3.0, 1.0]]])  # of 2 devices; their mean is 2, -1
      ...     updates, state = jax.jit(tx.update)(grads, state)
      >>> updates.round(3), int(state.frozen_at)
      (Array([[-0.1,  0.1]], dtype=float32), 1)

    References:
      H. Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's
      Convergence Speed", ICML 2021, arXiv:2102.02888.

    Differs from the paper: the scale is the paper's, L2 norm / sqrt(n), but each block of 1024
    values of a leaf has one, not the whole momentum. With a common scale, leaves whose gradients
    are smaller than others' would get steps that are far too large: Adam divides each by its own
    variance. Leaves of at most one dimension (as in `jaxcomm.mean`) are not compressed. Both
    moments are corrected for their start at 0; v keeps the correction of the step at which it was
    frozen. The test of stability compares corrected norms and rejects growth too; the paper tests
    v_t / v_{t-D} >= 0.96 only. Coordinates with v = 0 do not move. DeepSpeed has the paper's scale,
    corrects no moment, decodes 0 as +1 (here -1), counts padding in scales and errors, asks the
    user for masks where v = 0, and does not save the errors in a checkpoint. GRACE's `onebit` is
    another method: it sends two means for each tensor and a byte for each sign.
    """
    check_names(axis_name, exempt, bucket_order)
    end = _dense_steps(total_steps, dense_steps), variance_stability
    adam = FrozenAdam(learning_rate, b1, b2, eps, weight_decay, mask, *end)
    limit = bytes_of(bucket_mib)

    def init_fn(params: Any) -> Any:
        refuse_wrappers(has_zero=False)
        refuse_optimizer_behind(params, "one_bit_adam")
        layout = layout_of(params, axis_name, exempt, bucket_order, (adam, limit))
        _hosts.warn_of_order(axis_name, instead="")
        large, _ = split_off_exempt(layout)
        m, v = (zeros_like_params(params, layout) for _ in range(2))
        count, end = (jnp.zeros((), jnp.int32) for _ in range(2))
        kept = adam.norms_kept
        norms = replicated(lambda: jnp.zeros(kept, jnp.float32), axis_name) if kept else ()
        buckets = buckets_of(layout, large, bucket_order, limit)
        lengths = [BLOCK * sum(_blocks_of(layout, bucket)) for bucket in buckets]
        chunks = [chunk_length(n, layout.world) for n in lengths]
        worker, server = (zeros_per_group(layout, params, buckets, n) for n in (lengths, chunks))
        server = dataclasses.replace(server, are_shares=True)
        return OneBitAdamState(layout, Buckets(buckets), count, m, v, worker, server, end, norms)

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        require_state(state, OneBitAdamState, exempt, {})
        known, _ = _branches.known_on_the_host("one_bit_adam", extra_args, name="dense")
        grads, treedef = local_leaves(updates, state.layout)
        require_params(params, weight_decay)
        old_m, old_v = jax.tree.leaves(state.m), jax.tree.leaves(state.v)
        large, _ = split_off_exempt(state.layout)
        buckets = buckets_of(state.layout, large, bucket_order, limit)
        state.buckets.require_same(buckets)
        frozen = not known[0] if known else state.frozen_at > 0
        count, leaves = state.count + 1, range(len(grads))
        in_one_bit = [frozen & (i in large) for i in leaves]

        grads32 = [g.astype(jnp.float32) for g in grads]
        sent = [jnp.where(in_one_bit[i], adam.m(old_m[i], grads32[i]), grads32[i]) for i in leaves]
        means, finite, *errors = _exchange(sent, frozen, state, buckets)
        m = [jnp.where(in_one_bit[i], means[i], adam.m(old_m[i], means[i])) for i in leaves]
        finite &= adam.is_sound(state, frozen)
        m, v = _written(finite, m, old_m), old_v
        if frozen is not True:  # which the host says
            moves = finite & (state.frozen_at == 0)  # not in a dense step that the host adds later
            v = _written(moves, [adam.v(old_v[i], means[i]) for i in leaves], old_v)
        steps = adam.steps(m, v, state, params, frozen)
        steps = [step.astype(g.dtype) for step, g in zip(steps, grads, strict=True)]
        if any(step.dtype.itemsize < 4 for step in steps):
            narrow = all_finite(vectors_in_view(steps, state.layout))
            finite = on_further_axes(finite & narrow, axis_name)
            m = _written(finite, m, old_m)
            v = v if frozen is True else _written(finite, v, old_v)
        kept = (state.worker_error, state.server_error)
        worker, server = map(partial(_chosen, finite & frozen), errors, kept)

        end = adam.end_of_warmup(v, count, state, frozen)
        old = (state.count, state.frozen_at, state.norms)
        count, *end = jax.tree.map(partial(jnp.where, finite), (count, *end), old)
        kept = (count, treedef.unflatten(m), treedef.unflatten(v), worker, server, *end)
        state = OneBitAdamState(state.layout, state.buckets, *kept)
        return treedef.unflatten(jnp.where(finite, step, jnp.nan) for step in steps), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _dense_steps(total_steps: int | None, dense_steps: int | None) -> int | None:
    """How many there are at most."""
    if total_steps is None:
        return dense_steps
    if dense_steps is not None:
        raise ValueError(
            f"give either total_steps or dense_steps, got total_steps={total_steps!r} and "
            f"dense_steps={dense_steps!r}."
        )
    check_number("total_steps", total_steps, is_count, "a whole number >= 1")
    return math.ceil(_DENSE_SHARE * total_steps)


def _exchange(
    sent: Arrays,
    compressed: jax.Array | bool,
    state: OneBitAdamState,
    buckets: tuple[Bucket, ...],
) -> tuple[Arrays, jax.Array, PerDevice, PerDevice]:
    """The means of what was sent, whether all of it is finite, and the next errors.

    The state tells whether the step is compressed, or a Python bool, which makes no conditional.
    """
    layout = state.layout
    axis_name, (_, exempt) = layout.axis_name, split_off_exempt(layout)
    known = compressed if isinstance(compressed, bool) else None

    def in_float32(vectors: dict[int, jax.Array], sent: Arrays) -> Arrays:
        means = []
        for number, x in vectors.items():
            parts = _out_of_blocks(x, {i: sent[i] for i in buckets[number]})
            with noted(Message("dense", buckets[number])):
                mean = collectives.float32_mean(joined(parts), axis_name)
            means.append(_in_blocks(split(mean, parts)))
        return means

    def on_device(sent: Arrays, own: Own, compressed: jax.Array) -> tuple[Arrays, Own]:
        def on_bucket(number: int, parts: dict[int, jax.Array]) -> tuple[jax.Array, Any]:
            vector, errors = _in_blocks(parts), (own[0][number], own[1][number])
            if known is False:
                return in_float32({number: vector}, list(sent))[0], (vector, *errors)
            # If only the state knows, this runs during the dense steps too and its result is
            # discarded: XLA does not overlap collectives inside a conditional.
            counts = _counts([part.size for part in parts.values()])
            with noted(f"1 bit{_hosts.note_of(axis_name) or ', direct'}"):
                mean, *errors = one_bit_mean(vector, *errors, counts, axis_name)
            return mean, (vector, *errors)

        done = exchange_buckets(
            dict(enumerate(sent)),
            buckets,
            on_bucket,
            small={i: sent[i] for i in exempt},
            look_at="results",  # scales and means carry what is not finite
            axis_name=axis_name,
            results_are_finite=True,  # checked below, as those of a dense step are
        )
        means = done.buckets
        if known is None:
            vectors, means = in_turn(dict(enumerate(kept[0] for kept in done.kept)), means)
            means = _branches.replaced_if(
                ~compressed, "one_bit_adam: dense", lambda v: in_float32(v, sent), vectors, means
            )
        # The square of a finite gradient may overflow, and v with it.
        squares = [jnp.square(x) for x in (*means, *done.exact.values())]
        finite = on_further_axes(done.finite & all_finite(as_vectors(squares)), axis_name)
        parts = [
            _out_of_blocks(mean, {i: sent[i] for i in bucket})
            for mean, bucket in zip(means, buckets, strict=True)
        ]
        means = done.exact | by_leaf(parts, buckets, sent)
        new = [[kept[hop] for kept in done.kept] for hop in (1, 2)]
        return [means[i] for i in range(len(sent))] + [finite], tuple(new)

    own = (state.worker_error, state.server_error)
    (*means, finite), (worker, server) = on_every_device(
        on_device, sent, layout, own, jnp.asarray(compressed), further_results=1
    )
    return means, finite, worker, server


def _written(finite: jax.Array, new: Arrays, old: Arrays) -> Arrays:
    """The next moments, or the old ones if something was not finite.

    They are computed once, so that XLA on CPU writes them over the old ones: a second loop that
    recomputed them for the step would need the old ones too, and so a copy of them.
    """
    pairs = zip(new, old, strict=True)
    return computed_once([jnp.where(finite, *pair) for pair in pairs])


def _blocks(n: int) -> int:
    """The blocks of a leaf of n values; none holds values of two leaves."""
    return -(-n // BLOCK)


def _blocks_of(layout: Layout, bucket: Bucket) -> list[int]:
    """Those of the part of each leaf that one device has."""
    return [_blocks(values_of(layout, (i,))) for i in bucket]


def _counts(sizes: Sequence[int]) -> np.ndarray:
    """The values of each block of leaves of these sizes."""
    return np.concatenate([np.clip(n - BLOCK * np.arange(_blocks(n)), 0, BLOCK) for n in sizes])


def _in_blocks(parts: Mapping[int, jax.Array]) -> jax.Array:
    """The arrays as one vector, each padded with zeros to whole blocks."""
    flat = {i: part.reshape(-1) for i, part in parts.items()}
    return joined({i: jnp.pad(x, (0, BLOCK * _blocks(x.size) - x.size)) for i, x in flat.items()})


def _out_of_blocks(vector: jax.Array, parts: Mapping[int, jax.Array]) -> dict[int, jax.Array]:
    """The reverse, in the shapes of `parts`."""
    whole = {i: jax.ShapeDtypeStruct((BLOCK * _blocks(x.size),), x.dtype) for i, x in parts.items()}
    padded = split(vector, whole)
    return {i: padded[i][: x.size].reshape(x.shape) for i, x in parts.items()}


def _chosen(taken: jax.Array, new: PerDevice, old: PerDevice) -> PerDevice:
    """The next errors; the old ones, where the step is not taken or was dense."""
    pairs = zip(new.values, old.values, strict=True)
    return next_of(old, [jnp.where(taken, *pair) for pair in pairs])
