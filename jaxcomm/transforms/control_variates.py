"""Local gradients corrected towards their mean (control variates), as an optax transformation."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axes, _branches
from jaxcomm._marks import GRADIENT, mark, mark_local
from jaxcomm._numbers import is_integer
from jaxcomm.transforms import _roles
from jaxcomm.transforms._exchange import clipped, local_leaves
from jaxcomm.transforms._layout import Layout, axis_of, filled_leaves, layout_of
from jaxcomm.transforms._states import require_kind
from jaxcomm.transforms._wrappers import refuse_wrappers, with_extra_args
from jaxcomm.transforms.per_device import (
    PerDevice,
    next_of,
    require_own,
    sharded_as_before,
    zeros_per_device,
)


class ControlVariatesState(NamedTuple):
    """The state of `control_variates`.

    Attributes:
      layout: what `init` recorded about the parameters.
      step: int32, steps since the last exchange.
      average: the sum of each device's gradients in these steps divided by `every`, for each leaf.
        float32, with a leading device axis, sharded over the axis; inside `jax.shard_map`, this
        device's only.
      correction: what each device adds to its gradients; likewise.
      inner: the state of the mean.
    """

    layout: Layout
    step: jax.Array
    average: PerDevice
    correction: PerDevice
    inner: Any
    roles = frozenset({_roles.LOCAL})


def control_variates(
    inner: optax.GradientTransformation, every: int = 8
) -> optax.GradientTransformationExtraArgs:
    """Corrects local gradients by their recent difference from the mean.

    If devices hold different data, most of them may agree on a sign that differs from that of the
    mean. Every few steps, the devices exchange the mean of their gradients since the last exchange.
    Until the next one, each device adds the difference between that mean and its own average to its
    gradients. These corrections add up to zero over devices, so the mean of the gradients does not
    change, but each device votes on something closer to it.

    The rounding errors of `inner` are the same on all devices, so they bias the gradients that the
    devices vote on; error feedback in `inner` corrects that later.

    Values that are not finite are passed on to the next exchange in the chain, which makes the
    update NaN. If any of them is in the average of a device, the corrections stay as they are.

    Args:
      inner: the exchange that takes the mean: a `jaxcomm.mean`.
      every: the number of steps from one exchange to the next, over which gradients are averaged.
        Before the first exchange, gradients are not corrected.

    Returns:
      A transformation to put before `jaxcomm.majority_vote`, and before a `jaxcomm.local`: it takes
      and returns local gradients. Every device keeps two float32 copies of them.

    Raises:
      ValueError: if `every` is not a positive integer; by `init` if `inner` exchanges nothing, or
        over several axes, or is not a mean.

    Wire: that of `inner` in one step of `every`, in a branch of a conditional; otherwise nothing.

    Example:
      >>> import jaxcomm, optax
      >>> tx = optax.chain(
      ...     jaxcomm.control_variates(jaxcomm.mean("data", "bfloat16"), every=8),
      ...     jaxcomm.majority_vote("data"),
      ...     optax.sgd(1e-3, momentum=0.9),
      ... )

    References:
      S. P. Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
      ICML 2020, arXiv:1910.06378.

    Differs from the paper: all devices take every step together, so the corrections serve the vote,
    not local steps; and the averages are of gradients that are computed anyway.
    """
    if not is_integer(every) or every < 1:
        raise ValueError(f"control_variates needs a positive number of steps, got {every!r}.")
    inner = with_extra_args(inner, "control_variates", "inner")

    def init_fn(params: Any) -> Any:
        refuse_wrappers()
        state = inner.init(params)
        layout = layout_of(params, axis_of(state, "control_variates"), settings=every)
        _roles.require_means(state, "control_variates")
        average, correction = (
            zeros_per_device(layout, params, filled_leaves(layout)) for _ in range(2)
        )
        return ControlVariatesState(layout, jnp.zeros((), jnp.int32), average, correction, state)

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        require_kind(state, ControlVariatesState)
        grads, treedef = local_leaves(updates, state.layout)
        require_own(state.average, state.layout)
        filled, is_local = filled_leaves(state.layout), _axes.is_manual(state.layout.axis_name)
        own = {
            i: grads[i].reshape(old.shape).astype(jnp.float32)
            for i, old in zip(filled, state.average.values, strict=True)
        }
        averages = {
            i: old + own[i] / every for i, old in zip(filled, state.average.values, strict=True)
        }

        def exchange(given: tuple[Any, ...], kept: tuple[Any, Any]) -> tuple[Any, Any]:
            grads, averages = given
            local = list(grads)
            for i, average in averages.items():
                local[i] = average[0] if is_local else average
            local = mark_local(treedef.unflatten(local))
            means, inner_state = inner.update(local, kept[1], params, **extra_args)
            means = jax.tree.leaves(means)
            means = [means[i][None] for i in averages]
            # The means are equal on all devices, so all corrections of a value stay, or none. The
            # zeros give them the sharding of the averages, also on one device.
            lacks = [
                jnp.where(jnp.isfinite(m + jnp.zeros_like(a)), m - a, old)
                for m, a, old in zip(means, averages.values(), kept[0], strict=True)
            ]
            return lacks, inner_state

        corrected, near = list(grads), []
        for i, c in zip(filled, state.correction.values, strict=True):
            x = jnp.where(jnp.isfinite(own[i]), clipped(own[i] + c, grads[i].dtype), own[i])
            near.append(x.astype(grads[i].dtype).reshape(grads[i].shape))
        # First, so that the next corrections can be written over those that are used here.
        near, before = _barrier(near, state.correction.values)
        for i, x in zip(filled, near, strict=True):
            corrected[i] = x

        is_last = state.step == every - 1
        given, kept = (grads, averages), (before, state.inner)
        correction, inner_state = _branches.if_due(
            is_last, "control_variates: mean", every, exchange, given, kept
        )
        state = ControlVariatesState(
            state.layout,
            (state.step + 1) % every,
            next_of(state.average, [jnp.where(is_last, 0.0, a) for a in averages.values()]),
            next_of(state.correction, correction),
            sharded_as_before(inner_state),
        )
        axes = _axes.names_of(state.layout.axis_name)
        return mark(treedef.unflatten(corrected), GRADIENT, axes), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _barrier(
    near: list[jax.Array], before: list[jax.Array]
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Both unchanged, from one barrier for all that vary over the same axes.

    In jax 0.10 a barrier types all that it takes as varying over the axes of any of them.
    """
    groups: dict[frozenset[str], list[int]] = {}
    for k, x in enumerate(before):
        groups.setdefault(_axes.varying_axes(x), []).append(k)
    near, before = list(near), list(before)
    for group in groups.values():
        both = jax.lax.optimization_barrier([(near[k], before[k]) for k in group])
        for k, (a, b) in zip(group, both, strict=True):
            near[k], before[k] = a, b
    return near, before
