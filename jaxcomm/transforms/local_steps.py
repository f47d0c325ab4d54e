"""Local SGD and DiLoCo: devices take their own steps, and exchange how far they moved.

Device w has its own parameters p_w; the shared parameters s are equal on all devices.

    every step         p_w <- p_w + inner(gradient of device w at p_w)
    every H steps      d_w = s - p_w              the pseudo-gradient
                       d = exchange of d_w        the only communication
                       s <- s + outer(d)          what `update` returns
                       p_w <- s

With `fragments=P` the leaves are dealt to P fragments, and every H/P steps one of them is
exchanged. With `delay=D` the pseudo-gradient of a fragment is taken D steps before it is exchanged.
Then it depends on nothing in the step in which it is sent, and a device keeps its steps since then:

    D steps before     q_w = p_w
    exchange           d_w = s - q_w,  s <- s + outer(d),  p_w <- s + (p_w - q_w)

The shared parameters are those of the training loop: what `update` returns is added to them;
evaluate and save these. Each device's own parameters are in the state, and `local_params` returns
them in a dtype that only `jaxcomm.value_and_grad` accepts.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axes, _branches
from jaxcomm._marks import GRADIENT, kind_of, mark_local, unmark_local
from jaxcomm._numbers import is_integer
from jaxcomm.kernels.reductions import all_finite
from jaxcomm.transforms import _roles, _wrappers
from jaxcomm.transforms._fragments import dealt
from jaxcomm.transforms._layout import axis_of, check_gradients, filled_leaves, layout_of
from jaxcomm.transforms._state_of_each import (
    by_device,
    equal_on_shards,
    is_sound,
    on_each_device,
)
from jaxcomm.transforms._states import require_no_exchange
from jaxcomm.transforms.local_params import LocalStepsState, own_tree, require_delay
from jaxcomm.transforms.per_device import NOTHING, next_of, require_own, sharded_as_before

Arrays = list[jax.Array]


def local_steps(
    inner: optax.GradientTransformation,
    every: int,
    outer: optax.GradientTransformation,
    exchange: optax.GradientTransformation,
    *,
    fragments: int = 1,
    delay: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Lets every device take its own steps, and exchanges how far they moved: DiLoCo.

    Each device trains its own parameters with its own optimizer on its own gradients, and nothing
    is sent. Once in `every` steps, the devices exchange the difference between the shared
    parameters and their own. The outer optimizer uses the mean difference as a gradient, and all
    devices continue from the updated shared parameters. With `outer=optax.sgd(1.0)` this is local
    SGD; with the outer optimizer of the example, DiLoCo.

    The parameters of the training loop are the shared ones: evaluate and save these. Between
    exchanges their updates are zero. Gradients are taken at the devices' own parameters, which the
    state holds and `jaxcomm.local_params` returns.

    To send the fewest bytes with Adam, exchange signs with feedback in every 4th step, like
    `few_bytes` in the example. The residual of the signs is about as large as a device's movement
    since the last exchange. So the devices should take small steps, and the momentum of the outer
    optimizer accumulates what they have in common.

    A device whose update or state would not be finite skips that step; the others take it. If the
    outer update is not finite, it is NaN on every device, and the devices' own parameters and all
    states stay as they were. Shared parameters that it is applied to are NaN: to skip what a
    difference makes NaN, take `outer=optax.apply_if_finite(optimizer, n)`.

    Call `init` with the initial parameters of the training: the devices' own start as copies of
    them.

    Args:
      inner: each device's optimizer. It exchanges nothing; put clipping into it, too.
      every: the number of steps H from one exchange of a leaf to the next. The learning rates of
        both optimizers depend on it.
      outer: the optimizer that uses the mean difference as a gradient.
      exchange: how the differences are exchanged, such as a `jaxcomm.mean` with any codec and error
        feedback, or `jaxcomm.low_rank_mean`. It has a separate state for each fragment, so with
        several fragments its `exempt` cannot name paths; it may be a function of path and shape.
      fragments: the number of parts in which the leaves are exchanged, one part every
        `every / fragments` steps, which lowers the peak (streaming DiLoCo). Whole leaves are
        assigned, the largest first, each to the fragment with the fewest values.
      delay: how many steps before its exchange a pseudo-gradient is taken, less than `every`. With
        1, what is sent in a step does not depend on what the step computes. The exchanges that
        `every` decides about come that many steps later. A delay costs one copy of the parameters
        on each device.

    Returns:
      A transformation that is the whole optimizer: nothing belongs after it. Every device keeps
      its own parameters and inner state. `update(..., due=True)`, or False, decides instead of
      `every` whether this step exchanges; with several fragments, `due` is the number of one,
      counted from 1, or 0. With a delay, whatever its length, it exchanges the movement up to the
      previous step, or up to where the count has begun an exchange. This makes no conditional:
      where steps are jitted, `due` is a static argument, and each of its values has a program. On
      GPUs, XLA overlaps an exchange only outside of conditionals.

    Raises:
      TypeError: by `update` if `due` is known on the devices only.
      ValueError: immediately, for bad numbers; by `init` if `inner` exchanges, `exchange` does not
        or is not a mean, an optimizer goes uphill, or there are more fragments than leaves; by
        `update` without the shared parameters, for gradients that were taken at them, and for
        another `due`.

    Wire: that of `exchange` for a fragment, in one step of `every / fragments`, in a branch of a
    conditional, unless `due` is given; in other steps only the mean of the loss, if
    `jaxcomm.value_and_grad` is used.

    Example:
      Local SGD, with an exchange in every 2nd step:

      >>> import jax, jax.numpy as jnp, jaxcomm, optax
      >>> def loss_fn(w, batch):
      ...     return jnp.mean((w - batch) ** 2) / 2
      >>> tx = jaxcomm.local_steps(
      ...     optax.sgd(0.5), every=2, outer=optax.sgd(1.0), exchange=jaxcomm.mean("data")
      ... )
      >>> with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
      ...     w, batch = jaxcomm.replicate(jnp.zeros(1)), jnp.array([4.0, 8.0])
      ...     state, f = tx.init(w), jax.jit(jaxcomm.value_and_grad(loss_fn, "data"))
      ...     for _ in range(2):
      ...         _, grads = f(jaxcomm.local_params(state), batch)
      ...         updates, state = jax.jit(tx.update)(grads, state, w)
      ...         w = optax.apply_updates(w, updates)
      >>> w  # the devices arrived at 3 and 6
      Array([4.5], dtype=float32)

      DiLoCo, four bits per value in every 32nd step; and one bit in every 4th for Adam:

      >>> diloco = jaxcomm.local_steps(
      ...     optax.adamw(1e-3),
      ...     every=32,
      ...     outer=optax.sgd(0.7, momentum=0.9, nesterov=True),
      ...     exchange=jaxcomm.mean("data", "int4", error_feedback=True),
      ... )
      >>> few_bytes = jaxcomm.local_steps(
      ...     optax.adam(4e-3, b1=0.5),
      ...     every=4,
      ...     outer=optax.sgd(1.0, momentum=0.75, nesterov=True),
      ...     exchange=jaxcomm.mean("data", "scaled_sign", error_feedback=True),
      ... )
      >>> weights = jax.ShapeDtypeStruct((1024, 1024), "float32")
      >>> with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:4])):
      ...     for tx, every in (diloco, 32), (few_bytes, 4):
      ...         sent = jaxcomm.explain(tx, weights).bytes_max
      ...         print(f"{float(sent) / weights.size / every:.3f} bytes per weight and step")
      0.026 bytes per weight and step
      0.048 bytes per weight and step

    References:
      S. U. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, arXiv:1805.09767.
      J. Wang et al., "SlowMo: Improving Communication-Efficient Distributed SGD with Slow
      Momentum", ICLR 2020, arXiv:1910.00643.
      A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
      2023, arXiv:2311.08105.
      A. Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a Distributed
      Free Lunch", 2025, arXiv:2501.18512.

    Differs from the paper: with a delay, a device keeps its steps since its pseudo-gradient was
    taken; streaming DiLoCo mixes its parameters with the shared ones by a factor. Fragments have
    about equal sizes and consist of leaves, not of whole layers. Any exchange can replace the mean.
    """
    _check_counts(every, fragments, delay)
    inner, outer, exchange = _wrappers.parts_of_local_steps(inner, outer, exchange)

    def init_fn(params: Any) -> Any:
        _wrappers.refuse_for_local_steps(inner, outer)
        start = lambda params: outer.init(_float32(params))  # noqa: E731
        with _wrappers.before_outer(start):  # which the exchange warns of
            exchange_state = exchange.init(params)
        inner_state = inner.init(params)
        axis_name = axis_of(exchange_state, "local_steps")
        _roles.require_means(exchange_state, "local_steps")
        require_no_exchange(inner_state, "local_steps", "optax.adamw(1e-3)", "as exchange=")
        layout = layout_of(params, axis_name, settings=(every, fragments, delay))
        split = dealt(layout, fragments)
        structure, each = on_each_device(inner_state, layout)
        tree, own = on_each_device(params, layout)
        taken = on_each_device(params, layout)[1] if delay else NOTHING
        parts = [split.part(params, number) for number in range(fragments)]
        states = tuple(exchange.init(part) for part in parts)
        outers = tuple(outer.init(_float32(part)) for part in parts)
        require_no_exchange(outers, "local_steps", "optax.sgd(1.0)", "as exchange=", "outer")
        step = jnp.zeros((), jnp.int32)
        return LocalStepsState(
            layout, split, tree, step, own, structure, each, taken, states, outers
        )

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        require_delay(state, delay)
        grads = _own_gradients(updates, state)
        if params is None:
            raise ValueError("local_steps needs the shared parameters in tx.update(..., params).")
        known, extra_args = _branches.known_on_the_host("local_steps", extra_args, fragments)
        state = _inner_steps(inner, grads, state, extra_args)
        number = state.step + 1  # of this step

        def exchanged(k: int, given: tuple[Any, ...], kept: tuple[Any, ...]) -> tuple[Any, ...]:
            params, taken = given
            _, own, exchanges, outers = kept
            before = state._replace(
                params=dataclasses.replace(state.params, values=own),
                taken=dataclasses.replace(state.taken, values=taken),
                exchange=exchanges,
                outer=outers,
            )
            return _exchange_fragment(exchange, outer, k, params, before, extra_args)

        offsets = [state.fragments.offset(k, every) + delay for k in range(fragments)]
        due = known or [(number >= o) & (number % every == o % every) for o in offsets]
        zeros = _typed(optax.tree.zeros_like(params), params)
        updates, own, exchanges, outers = _branches.if_one_is_due(
            due,
            [f"local_steps: fragment {k + 1}" for k in range(fragments)],
            every,
            [functools.partial(exchanged, k) for k in range(fragments)],
            (params, state.taken.values),
            (zeros, state.params.values, state.exchange, state.outer),
        )
        state = state._replace(
            step=number,
            params=next_of(state.params, own),
            exchange=sharded_as_before(exchanges),
            outer=outers,
        )
        return updates, _take(state, every, delay, due, known is not None) if delay else state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _own_gradients(updates: Any, state: LocalStepsState) -> Any:
    """The gradients, without their mark, checked.

    Raises:
      ValueError: if they are not local, or were taken at the shared parameters.
    """
    _wrappers.refuse_wrappers()
    for part in (state.params, state.inner, state.taken):
        require_own(part, state.layout)
    leaves = jax.tree.leaves(updates)
    if GRADIENT in {kind_of(g) for g in leaves}:
        raise ValueError(
            "these gradients were taken at the shared parameters, which do not move between "
            "exchanges. Take them at each device's own: jaxcomm.value_and_grad(loss_fn, axis)("
            "jaxcomm.local_params(state), batch)."
        )
    check_gradients(leaves, state.layout)
    return unmark_local(updates)


def _inner_steps(
    inner: optax.GradientTransformationExtraArgs,
    grads: Any,
    state: LocalStepsState,
    extra_args: dict[str, Any],
) -> LocalStepsState:
    """Each device's own step; skipped by one whose update or state would not be finite."""

    def one(grads: Any, params: Any, leaves: Arrays) -> tuple[Arrays, Arrays]:
        old = state.structure.state_of(leaves)
        updates, new = inner.update(grads, old, params, **extra_args)
        kept = state.structure.arrays_of(new)
        sound = is_sound(updates, kept, leaves, state.inner, state.layout)
        moved = state.tree.arrays_of(optax.apply_updates(params, updates))
        before, after = (state.tree.arrays_of(params), leaves), (moved, kept)
        return jax.tree.map(lambda a, b: jnp.where(sound, a, b), after, before)

    params = own_tree(state, state.params.values)
    grads = state.tree.treedef.unflatten(jax.tree.leaves(grads))  # nnx.Optimizer strips variables
    if _axes.is_manual(state.layout.axis_name):
        moved, leaves = one(grads, params, [x[0] for x in state.inner.values])
        moved, leaves = [x[None] for x in moved], [x[None] for x in leaves]
    else:
        axis_name = state.layout.axis_name
        moved, leaves = by_device(one, axis_name, grads, params, state.inner.values)
    return state._replace(
        params=next_of(state.params, _typed(moved, state.params.values)),
        inner=next_of(state.inner, _typed(leaves, state.inner.values)),
    )


def _take(
    state: LocalStepsState, every: int, delay: int, exchanged: Sequence[Any], is_told: bool
) -> LocalStepsState:
    """The state with `taken` renewed, except for the fragments that wait for their exchange.

    Where `due` decides, it may ask for any of them in the next step, so none waits.
    """
    offsets = [state.fragments.offset(k, every) for k in range(state.fragments.count)]
    waits: list[Any] = [False] * len(offsets)
    if not is_told:
        pairs = zip(offsets, exchanged, strict=True)
        waits = [
            (state.step > o) & ((state.step - o - 1) % every < delay) & ~done for o, done in pairs
        ]
    filled = filled_leaves(state.layout)
    values = [
        jnp.where(waits[state.fragments.of[i]], t, p)
        for i, p, t in zip(filled, state.params.values, state.taken.values, strict=True)
    ]
    return state._replace(taken=next_of(state.taken, values))


def _exchange_fragment(
    exchange: optax.GradientTransformationExtraArgs,
    outer: optax.GradientTransformationExtraArgs,
    number: int,
    params: Any,
    state: LocalStepsState,
    extra_args: dict[str, Any],
) -> tuple[Any, ...]:
    """The shared parameters' updates, each device's own parameters, and the next states."""
    fragments, is_manual = state.fragments, _axes.is_manual(state.layout.axis_name)
    taken = own_tree(state, state.taken.values or state.params.values)
    taken = jax.tree.structure(params).unflatten(jax.tree.leaves(taken))
    lack = jax.tree.map(
        lambda s, q: (s if is_manual else s[None]).astype(jnp.float32) - q.astype(jnp.float32),
        params,
        taken,
    )
    part, shared = fragments.part(mark_local(lack), number), fragments.part(params, number)
    means, exchanged = exchange.update(part, state.exchange[number], shared, **extra_args)
    updates, outer_state = outer.update(means, state.outer[number], _float32(shared), **extra_args)
    updates = jax.tree.map(lambda u, p: u.astype(p.dtype), updates, shared)
    finite = equal_on_shards(all_finite(jax.tree.leaves(updates)), state.layout)
    exchanged, outer_state = jax.tree.map(
        lambda a, b: jnp.where(finite, a, b),
        (exchanged, outer_state),
        (state.exchange[number], state.outer[number]),
    )
    updates = jax.tree.map(lambda u: jnp.where(finite, u, jnp.nan), updates)
    updates = fragments.whole(updates, number, optax.tree.zeros_like(params))
    new = jax.tree.leaves(optax.apply_updates(params, updates))
    own = []
    for k, i in enumerate(filled_leaves(state.layout)):
        p = state.params.values[k]
        since = p - state.taken.values[k] if state.taken.values else jnp.zeros_like(p)
        is_due = fragments.of[i] == number
        own.append(jnp.where(finite, new[i][None] + since, p) if is_due else p)
    return (
        _typed(updates, params),
        _typed(own, state.params.values),
        _typed(_with(state.exchange, number, exchanged), state.exchange),
        _typed(_with(state.outer, number, outer_state), state.outer),
    )


def _float32(params: Any) -> Any:
    """The parameters as the outer optimizer sees them: its gradients are float32."""

    def wide(p: Any) -> Any:
        is_shape = isinstance(p, jax.ShapeDtypeStruct)
        return p.update(dtype=jnp.float32) if is_shape else jnp.asarray(p).astype(jnp.float32)

    return jax.tree.map(wide, params)


def _with(states: tuple[Any, ...], number: int, new: Any) -> tuple[Any, ...]:
    return (*states[:number], new, *states[number + 1 :])


def _typed(new: Any, like: Any) -> Any:
    """Arrays, typed as varying over the axes that those in their places vary over."""
    return jax.tree.map(lambda x, o: _axes.as_varying(x, _axes.varying_axes(o)), new, like)


def _check_counts(every: Any, fragments: Any, delay: Any) -> None:
    for name, x, least in (("every", every, 1), ("fragments", fragments, 1), ("delay", delay, 0)):
        if not is_integer(x) or x < least:
            raise ValueError(f"local_steps needs {name} to be an integer >= {least}, got {x!r}.")
    if every % fragments:
        raise ValueError(
            f"fragments={fragments} does not divide every={every}: one of them is exchanged every "
            "`every / fragments` steps. Choose a number that divides it."
        )
    if delay >= every:
        raise ValueError(f"delay must be less than every={every}, got {delay}.")
