"""The majority of signs over devices, as an optax transformation."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomm import collectives
from jaxcomm._axes import AxisName
from jaxcomm._numbers import check_seed
from jaxcomm._pieces import cut
from jaxcomm.collectives import algorithms
from jaxcomm.collectives.algorithms._default import Default
from jaxcomm.collectives.reductions import Majority, check_majority
from jaxcomm.kernels import bitplanes
from jaxcomm.kernels.random_bits import own_key, random_bits, seeded_key
from jaxcomm.transforms import _roles
from jaxcomm.transforms._buckets import (
    Bucket,
    alone_or_joined,
    buckets_of,
    bytes_of,
    joined,
    keys_of,
    split,
    split_off_exempt,
)
from jaxcomm.transforms._exchange import (
    Arrays,
    Exchanged,
    Own,
    exchange_buckets,
    kept_if,
    local_leaves,
    on_every_device,
    on_further_axes,
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


class MajorityVoteState(NamedTuple):
    """The state of `majority_vote`.

    Attributes:
      layout: what `init` recorded about the parameters.
      step: int32, from which the coins are drawn.
      residual: with error feedback, the part of each device's gradients that its votes have not
        expressed, for each compressed leaf; else empty. In `residual_dtype`, with a leading device
        axis, sharded over the axis; inside `jax.shard_map`, this device's only.
    """

    layout: Layout
    step: jax.Array
    residual: PerDevice
    roles = frozenset({_roles.SIGNS})


def majority_vote(
    axis_name: AxisName,
    algorithm: str | algorithms.Algorithm | None = None,
    *,
    ties: str = "random",
    zeros: str = "random",
    error_feedback: bool = False,
    seed: int = 0,
    exempt: Exempt = (),
    bucket_mib: float = 16.0,
    bucket_order: Sequence[str] | None = None,
    residual_dtype: jax.typing.DTypeLike = "float32",
) -> optax.GradientTransformation:
    """Replaces local gradients by the signs on which most devices agree.

    signSGD with majority vote is `optax.chain(jaxcomm.majority_vote("data"), optax.sgd(lr))`. With
    each device's own momentum before the vote this is Signum:
    `optax.chain(jaxcomm.local("data", optax.trace(0.9)), jaxcomm.majority_vote("data"), ...)`.

    Leaves of at most one dimension (as in `jaxcomm.mean`) are averaged exactly in float32 and
    replaced by the signs of their means, so that one learning rate fits all leaves.

    One bit has no code for zero, so the vote of a zero gradient is a choice. With zeros="random", a
    parameter without gradient does a random walk; with zeros="abstain", it does not move.

    With error feedback, a device votes with the signs of its gradient plus its residual. Its next
    residual is that sum minus the signs times the mean magnitude of the leaf. The update is the
    vote times the mean of the devices' scales, so it has the size of a gradient; the updates of
    exempt leaves are then their means. Where a leaf is sharded over another axis, each shard has
    its own scale.

    Votes are biased where the devices' data differ, with and without error feedback. In that case,
    put `jaxcomm.control_variates` before the vote, or use `jaxcomm.mean("data", "scaled_sign",
    error_feedback=True)`, which is not biased and sends 2(N-1)/N bits per weight.

    If any gradient on any device is not finite, every update on every device is NaN and the
    residuals stay as they were.

    Args:
      axis_name: the mesh axis, or axes, over which the batch is spread.
      algorithm: "circulant", "ring", "two_way_ring", "halving_doubling", "direct", "two_clusters"
        or an algorithm such as `jaxcomm.algorithms.direct(aggregator=0)`; None means "direct" on up
        to 16 devices, and "circulant" on more; between CPU processes, short vectors use algorithms
        with fewer rounds. Where hosts have several devices, these count their votes first, and the
        above is between hosts (`jaxcomm.algorithms.hierarchical`).
      ties: the result if both signs have equally many votes: "random" (a fair coin that all devices
        share), "zero", "positive" or "negative".
      zeros: the vote of a zero: "random" (a fair coin of each device) or "abstain".
      error_feedback: whether each device keeps a residual, what its votes do not express.
      seed: the seed for the coins.
      exempt: which leaves are not compressed, as in `jaxcomm.mean`.
      bucket_mib: the maximum size of a bucket, in MiB of float32 gradients. A bucket takes several
        hops, so the default is larger than that of `jaxcomm.mean`.
      bucket_order: paths of leaves in the order in which their gradients appear, as
        `jaxcomm.backward_order` finds them; None means the reverse of the tree's order.
      residual_dtype: "float32", or "bfloat16" for half of the memory, as in `jaxcomm.mean`.

    Returns:
      A transformation used like `jaxcomm.mean`. Its updates are +1, -1 or 0; with error feedback,
      these times a scale per leaf.

    Raises:
      TypeError, ValueError: immediately for bad arguments; otherwise as for `jaxcomm.mean`.

    Wire: a message with votes of k devices has ceil(log2(k+1)) bits per weight. The result has
    one bit, or two if it can be zero (ties="zero" at an even number of devices, or zeros="abstain",
    which also doubles the bits of votes). Bits per weight: direct 2(N-1)/N; for N = 2^q devices
    halving_doubling sum_{j=1..q} j/2^j + (N-1)/N, ring log2 N and two_way_ring log2 N - 1 + (log2 N
    + 1)/N; circulant 2.2 for 16 devices, 2.4 for 32 and 2.6 for 1,024. Exempt leaves are sent in
    one float32 all-reduce, together with a flag or, with error feedback, the scales; on a mesh of
    several axes, one int32 is sent over the others. Where hosts have several devices,
    algorithm=None sends what `jaxcomm.algorithms.hierarchical` does.

    Example:
      >>> import jaxcomm, optax
      >>> momentum = jaxcomm.local("data", optax.trace(0.9))  # of each device
      >>> vote = jaxcomm.majority_vote("data", ties="zero")
      >>> signum = optax.chain(momentum, vote, optax.sgd(1e-3))

    References:
      J. Bernstein et al., "signSGD with Majority Vote is Communication Efficient and Fault
      Tolerant", ICLR 2019, arXiv:1810.05291.
      S. P. Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression
      Schemes", ICML 2019, arXiv:1901.09847.

    Differs from the paper: ties are decided by a fair coin by default; in the paper one sign always
    wins. The learning rate is not part of the residual, unlike in EF-signSGD. Devices vote on signs
    instead of averaging scaled signs: only votes can be all-reduced in few bits.
    """
    check_names(axis_name, exempt, bucket_order)
    dtype = _checked(ties, zeros, seed, error_feedback, residual_dtype)
    chosen = Default("votes") if algorithm is None else _known(algorithm, axis_name)
    limit, order = bytes_of(bucket_mib), tuple(bucket_order or ())
    reduction = None if error_feedback else Majority(ties, zeros, None)
    scheme = Scheme(axis_name, reduction, chosen, seed, limit, order, True, residual_dtype=dtype)

    def init_fn(params: Any) -> Any:
        refuse_wrappers(has_zero=error_feedback or zeros == "abstain")
        chosen.warn_of_mesh(axis_name)
        if error_feedback:
            warn_of_few_bits(params, "a majority vote")
        layout = layout_of(params, axis_name, exempt, bucket_order, (ties, zeros, scheme))
        chosen.require_world(layout.world)
        large, _ = split_off_exempt(layout)
        residual = zeros_per_device(layout, params, large, dtype) if error_feedback else NOTHING
        return MajorityVoteState(layout, jnp.zeros((), jnp.int32), residual)

    def on_device(grads: Arrays, own: Own, step: jax.Array, layout: Layout) -> tuple[Arrays, Own]:
        large, exempt_ = split_off_exempt(layout)
        buckets = buckets_of(layout, large, bucket_order, limit)
        key = jax.random.fold_in(seeded_key(seed), step)
        zero_key, tie_key = jax.random.split(key)
        (old,), tie_keys = own, keys_of(tie_key, layout, buckets)
        ballots = _ballots(grads, large, old)
        votes, scales = ballots, {}
        if error_feedback:
            zero_keys = keys_of(zero_key, layout, buckets)
            votes = _decided(ballots, zeros, buckets, zero_keys, axis_name)
            scales = {("scale", i): _mean_magnitude(x) for i, x in ballots.items()}

        def on_bucket(number: int, parts: dict[int, jax.Array]) -> tuple[bitplanes.Planes, None]:
            reduction = Majority(ties, zeros, tie_keys[number])
            vectors = [joined(group) for group in _packed_together(parts)]
            return collectives.majority_of(vectors, axis_name, reduction, chosen), None

        done = exchange_buckets(
            votes,
            buckets,
            on_bucket,
            small={i: grads[i] for i in exempt_} | scales,
            # Scales carry what is not finite, and can overflow where no gradient does.
            look_at="results" if error_feedback else "parts",
            axis_name=axis_name,
            results_are_finite=True,
        )
        small = {i: done.exact[i] for i in exempt_}
        if not error_feedback:
            return _signs(done, buckets, grads, small, axis_name), own
        signs = _by_leaf(done.buckets, buckets, ballots)
        results = {i: s * done.exact["scale", i] for i, s in signs.items()} | small
        left = {i: ballots[i] - scales["scale", i] * votes[i] for i in large}
        results, left = within_range(results, left, grads)
        updates, finite = updates_of(results, done.finite, grads, axis_name)
        new = rounded_leaves(list(left.values()), old, key, layout, tuple(left))
        return updates, (kept_if(finite, new, old),)

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        require_state(state, MajorityVoteState, exempt, {"residual": error_feedback}, dtype=dtype)
        grads, treedef = local_leaves(updates, state.layout)
        run, own = functools.partial(on_device, layout=state.layout), (state.residual,)
        votes, (residual,) = on_every_device(run, grads, state.layout, own, state.step)
        return treedef.unflatten(votes), MajorityVoteState(state.layout, state.step + 1, residual)

    return exchange(init_fn, update_fn, scheme, exempt)


def _ballots(grads: Arrays, large: Bucket, residual: Arrays) -> dict[int, jax.Array]:
    """What this device votes on: its gradients in float32, and residuals if there are any."""
    ballots = {i: grads[i].astype(jnp.float32) for i in large}
    for i, owed in zip(large, residual, strict=bool(residual)):
        ballots[i] += owed.astype(jnp.float32)
    return ballots


def _packed_together(parts: Mapping[int, jax.Array]) -> list[dict[int, jax.Array]]:
    """The leaves of a bucket in groups; those of all but the last fill whole words."""
    return alone_or_joined(parts, lambda n: n % bitplanes.BITS == 0)[0]


def _signs(
    done: Exchanged,
    buckets: Sequence[Bucket],
    grads: Arrays,
    small: Mapping[int, jax.Array],
    axis_name: AxisName,
) -> Arrays:
    """The outcomes and the signs of exempt leaves; NaN on every device if any was not finite."""
    unit = jnp.where(on_further_axes(done.finite, axis_name), jnp.float32(1), jnp.nan)
    signs = _by_leaf(done.buckets, buckets, grads, unit)
    signs |= {i: jnp.sign(x) * unit for i, x in small.items()}
    return [signs[i].astype(g.dtype) for i, g in enumerate(grads)]


def _by_leaf(
    outcomes: Sequence[bitplanes.Planes],
    buckets: Sequence[Bucket],
    like: Any,
    unit: jax.Array | None = None,
) -> dict[int, jax.Array]:
    """What `majority_of` returned for each bucket, in the shapes of the leaves.

    It has the dtype of leaves that are packed together, if they have one. The unit is NaN if the
    step is not taken: to choose afterwards would read and write all again.
    """
    signs = {}
    for planes, bucket in zip(outcomes, buckets, strict=True):
        groups = _packed_together({i: like[i] for i in bucket})
        sizes = [sum(x.size for x in group.values()) for group in groups]
        words = [cut(plane, [bitplanes.words_for(n) for n in sizes]) for plane in planes]
        for n, group, (won, *voted) in zip(sizes, groups, zip(*words, strict=True), strict=True):
            dtypes = {x.dtype for x in group.values()}
            dtype = dtypes.pop() if len(dtypes) == 1 else jnp.float32
            vector = bitplanes.signs(won, n, voted[0] if voted else None, unit, dtype)
            signs |= split(vector, group)
    return signs


def _mean_magnitude(x: jax.Array) -> jax.Array:
    """Divided before the sum: a sum that overflows would do so in every later step too."""
    return jnp.sum(jnp.abs(x) * np.float32(1 / x.size))


def _decided(
    ballots: dict[int, jax.Array],
    zeros: str,
    buckets: Sequence[Bucket],
    keys: Sequence[jax.Array],
    axis_name: AxisName,
) -> dict[int, jax.Array]:
    """This device's votes: +1 or -1; for a zero a coin, or 0 if zeros abstain."""
    coins = {i: jnp.zeros_like(x) for i, x in ballots.items()}
    for bucket, key in zip(buckets, keys, strict=True) if zeros == "random" else ():
        # The coins of a bucket are drawn at once: each draw has to be compiled.
        own = own_key(key, jax.lax.axis_index(axis_name))
        counts = [bitplanes.words_for(ballots[i].size) for i in bucket]
        words = cut(random_bits(own, (sum(counts),)), counts)
        for i, drawn in zip(bucket, words, strict=True):
            coins[i] = bitplanes.signs(drawn, ballots[i].size).reshape(ballots[i].shape)
    return {i: jnp.where(x == 0, coins[i], jnp.sign(x)) for i, x in ballots.items()}


def _known(algorithm: str | algorithms.Algorithm, axis_name: AxisName) -> algorithms.Algorithm:
    """The algorithm; a ValueError for what cannot carry votes over these axes."""
    chosen = algorithms.from_name(algorithm)
    if chosen.name == "native":
        raise ValueError('XLA has no native majority vote; leave algorithm out, or write "direct".')
    chosen.require_axes(axis_name)
    if getattr(chosen, "near_codec", None) is not None:
        raise ValueError("near_codec is the format of a mean, and votes have none; leave it out.")
    return chosen


def _checked(ties: str, zeros: str, seed: Any, error_feedback: Any, residual_dtype: Any) -> str:
    """The dtype of residuals.

    Raises:
      TypeError, ValueError: for what is none of a vote's options.
    """
    check_majority(ties, zeros)
    check_seed(seed)
    if not isinstance(error_feedback, bool):
        raise ValueError(f"error_feedback of a vote must be True or False, got {error_feedback!r}.")
    return checked_dtype(residual_dtype, error_feedback)
