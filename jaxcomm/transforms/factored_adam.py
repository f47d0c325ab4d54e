"""Adam with a factored variance that all devices share, and a momentum in few bits.

How a step works, for a matrix with gradients G_i on devices i:

1. The mean squares of the rows and columns of G_i are sent in float32: they are few. R and C are
   their decaying means over steps and devices, and P = sqrt(R C^T / mean(R)) is the same on all
   devices. All devices divide by P: U_i = G_i / P.
2. Device i adds its U_i to the momentum m that all share: x_i = b1 m + (1 - b1) U_i.
3. `exchange` takes the mean of the x_i, in few bits. The result is the next m, and the update is
   -rate m.

With Nesterov momentum, the look-ahead is sent: x_i = b1^2 m + (1 - b1^2) U_i. The mean u is the
update, so each residual moves the weights once, and the next m is (b1 m + u) / (1 + b1).

Everything before the exchange is linear in the gradient, except for P. All devices share P, and it
changes slowly, so error feedback works here as it does for SGD. Divided by P, the values of a block
are about equally large, which is what signs and scales need.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomm import _axes
from jaxcomm._marks import mark_local
from jaxcomm._placing import note_settings
from jaxcomm.kernels.reductions import all_finite
from jaxcomm.transforms import _roles
from jaxcomm.transforms._exchange import Arrays, local_leaves, vectors_in_view
from jaxcomm.transforms._factors import next_squares_and_roots, no_squares, require_squares
from jaxcomm.transforms._layout import Layout, axis_of, layout_of
from jaxcomm.transforms._optimizer import (
    check_adam,
    decayed,
    rate_after,
    rates_of,
    replicated,
    require_params,
    zeros_like_params,
)
from jaxcomm.transforms._states import require_kind
from jaxcomm.transforms._wrappers import refuse_optimizer_behind, refuse_wrappers


class FactoredAdamState(NamedTuple):
    """The state of `factored_adam`.

    Attributes:
      layout: what `init` recorded about the parameters.
      count: int32, the steps taken; steps that were not finite do not count.
      momentum: float32, shaped and sharded as the parameters, equal on all devices, in units of the
        root mean square of the gradients.
      squares: float32 vector, the mean squares of the rows and columns of all matrices, and of all
        values of biases and norms; equal on all devices.
      inner: the state of the exchange.
    """

    layout: Layout
    count: jax.Array
    momentum: Any
    squares: jax.Array
    inner: Any
    roles = frozenset({_roles.FINISHED})


def factored_adam(
    exchange: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Any = None,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Adam in few bits without a dense warm-up: devices exchange their shared momentum.

    It is optimizer and exchange in one: its updates are final, and no optimizer belongs after it.
    The exchange in the example sends one bit per value on each hop, and a scale per 128 values.

    The root mean square of a matrix is the product of a row factor and a column factor (Adafactor),
    which all devices share exactly. So they all divide their gradients by the same numbers before
    they send anything, and need no dense steps to learn these numbers. A convolution has such
    factors at each position of its kernel, one of few channels at each row of positions, and
    stacked layers have them in each layer; a projection to heads, (inputs, heads, width), is a
    matrix. By its shape alone a stack of many thin layers may look like one:
    `jaxcomm.with_layer_axis` names stacks. Biases and norms (recognised as in `jaxcomm.mean`) keep
    the squares of all their values.

    With `nesterov=True`, a transformer ended with a lower loss, with one bit as in float32
    (`python -m benchmarks.pareto`).

    Quotients are clipped at 1/sqrt(1-b2), a bound that those of Adam never exceed. The exchange
    waits for the rows and columns of all gradients, so it does not overlap with the backward pass.

    If any gradient on any device, its square or the learning rate is not finite, every update on
    every device is NaN and the state stays as it was, but for the step of the inner exchange. If an
    update overflows its 16 bits, all are NaN too, and the residuals of that step are lost.

    Args:
      exchange: the exchange that takes the mean of momenta: a `jaxcomm.mean` with error feedback,
        or another exchange of means.
      learning_rate: a number, or a schedule of `count`.
      b1: decay of the momentum, in [0, 1).
      b2: decay of the mean squares, in [0, 1).
      eps: added to the root mean square, >= 0.
      weight_decay: decoupled, as in `optax.adamw`; `update` then needs the parameters.
      mask: which leaves decay, as in `optax.adamw`: a tree of bools with the structure of the
        parameters or a prefix of it, or a function from parameters to such a tree; None means all.
      nesterov: whether the momentum looks ahead, as in `optax.adam(nesterov=True)`.

    Returns:
      A transformation whose `update` takes local gradients (from `jaxcomm.value_and_grad`) in
      either view, and returns what `optax.apply_updates` takes, bitwise equal on all devices.

    Raises:
      TypeError, ValueError: immediately for bad arguments; by `init` if `exchange` exchanges
        nothing, or over several axes, or is not a mean, or if an optimizer with moments, or a
        nested chain such as `optax.sgd`, follows in the same `optax.chain`; by `update` if weight
        decay lacks the parameters, or the mask does not fit them.

    Wire: that of `exchange`, and one float32 all-reduce of a + b values for an a x b matrix, and of
    all values of biases and norms. Where leaves are sharded over another axis, it goes over that
    axis too, and so does a flag.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> signs = jaxcomm.codecs.scaled_sign(128)
      >>> exchange = jaxcomm.mean("data", signs, error_feedback=True)
      >>> tx = jaxcomm.factored_adam(exchange, 0.1)
      >>> with jax.set_mesh(jaxcomm.data_mesh(devices=jax.devices()[:2])):
      ...     state = tx.init(jnp.zeros((1, 2)))
      ...     grads = jnp.array([[[1.0, -3.0]], [[3.0, -1.0]]])  # of 2 devices
      ...     for _ in range(2):
      ...         updates, state = jax.jit(tx.update)(grads, state)
      >>> updates.round(3)
      Array([[-0.089,  0.089]], dtype=float32)

    References:
      H. Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's
      Convergence Speed", ICML 2021, arXiv:2102.02888 (the momentum is what travels).
      N. Shazeer and M. Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", ICML
      2018, arXiv:1804.04235 (rows and columns).
      Y. Lu et al., "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam",
      ICLR 2023, arXiv:2202.06009 (a variance without a dense stage).

    Differs from the paper: 1-bit Adam sends the momentum of gradients and divides by a variance
    that is frozen after a dense stage. Here gradients are divided first, by factors that are never
    frozen. The squares are those of each device's gradients; Adam's are those of their mean, which
    are smaller. So learning rates are up to twice as large here. Adafactor has no momentum by
    default, clips updates by their root mean square, and takes relative learning rates.
    """
    if not isinstance(exchange, optax.GradientTransformation):
        raise TypeError(
            "factored_adam takes an exchange of means, such as jaxcomm.mean(...), got "
            f"{exchange!r}."
        )
    check_adam(learning_rate, b1, b2, eps, weight_decay)
    if not isinstance(nesterov, bool | np.bool_):
        raise TypeError(f"nesterov must be True or False, got {nesterov!r}.")
    exchange, bound = optax.with_extra_args_support(exchange), (1 - b2) ** -0.5
    kept = b1 * b1 if nesterov else b1  # of the momentum, in what travels

    def init_fn(params: Any) -> Any:
        refuse_wrappers()
        refuse_optimizer_behind(params, "factored_adam")
        rates = rates_of(learning_rate)
        is_masked = "a function" if callable(mask) else mask
        note_settings((rates, b1, b2, eps, weight_decay, is_masked, nesterov))
        inner = exchange.init(params)
        layout = layout_of(params, axis_of(inner, "factored_adam"))
        _roles.require_means(inner, "factored_adam")
        squares = replicated(lambda: no_squares(layout), layout.axis_name)
        momentum = zeros_like_params(params, layout)
        return FactoredAdamState(layout, jnp.zeros((), jnp.int32), momentum, squares, inner)

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        require_kind(state, FactoredAdamState)
        require_squares(state.squares, state.layout)
        grads, treedef = local_leaves(updates, state.layout)
        require_params(params, weight_decay)
        rate = rate_after(learning_rate, state.count)
        seen = (state.count + 1).astype(jnp.float32)  # gradients in the squares
        squares, roots = next_squares_and_roots(grads, state.layout, state.squares, b2, seen)

        def sent(m: jax.Array, g: jax.Array, root: jax.Array) -> jax.Array:
            g, ahead = g.astype(jnp.float32), range(g.ndim - m.ndim)  # of devices, or none
            m, root = jnp.expand_dims(m, ahead), jnp.expand_dims(root, ahead)
            quotient = jnp.where(root != 0, jnp.clip(g / (root + eps), -bound, bound), 0.0)
            # A square that is not finite, or a sum of finite ones that is not, must not enter the
            # squares of any device. An exchange that is given NaN keeps its residuals.
            good = jnp.isfinite(jnp.square(g)) & jnp.isfinite(root) & jnp.isfinite(rate)
            quotient = jnp.where(good, quotient, jnp.nan)
            return kept * m + (1 - kept) * quotient

        shared = jax.tree.leaves(state.momentum)
        local = [sent(m, g, root) for m, g, root in zip(shared, grads, roots, strict=True)]
        local = mark_local(treedef.unflatten(local))
        means, inner = exchange.update(local, state.inner, params, **extra_args)
        means = [m.astype(jnp.float32) for m in jax.tree.leaves(means)]
        momentum, steps = _momentum_and_steps(shared, means, b1, seen, nesterov)
        steps = decayed(steps, params, mask, weight_decay)
        updates = [(-rate * step).astype(g.dtype) for step, g in zip(steps, grads, strict=True)]
        finite = _are_finite(means, updates, state.layout)
        updates = [jnp.where(finite, u, jnp.nan) for u in updates]
        new = (state.count + 1, treedef.unflatten(momentum), squares)
        old = (state.count, state.momentum, state.squares)
        count, momentum, squares = jax.tree.map(functools.partial(jnp.where, finite), new, old)
        state = FactoredAdamState(state.layout, count, momentum, squares, inner)
        return treedef.unflatten(updates), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _momentum_and_steps(
    last: Arrays, means: Arrays, b1: float, seen: jax.Array, nesterov: bool
) -> tuple[Arrays, Arrays]:
    """The next momentum, and the steps, with optax's correction for the start at zero.

    Args:
      last: the previous momentum.
      means: what the exchange returned.
      b1: the decay of the momentum.
      seen: float32, the number of gradients in the momentum, this one included.
      nesterov: whether the means are looks ahead.
    """
    correction = 1 / (1 - b1**seen)
    if not nesterov:
        return means, [correction * m for m in means]
    momentum = [(b1 * m + u) / (1 + b1) for m, u in zip(last, means, strict=True)]
    ahead = b1 / (1 - b1 ** (seen + 1))
    pairs = zip(momentum, means, strict=True)
    return momentum, [ahead * m + correction * (u - b1 * m) for m, u in pairs]


def _are_finite(means: Arrays, updates: Arrays, layout: Layout) -> jax.Array:
    """Whether the means are finite, and the updates too, which may overflow in 16 bits."""
    finite = _all_finite_everywhere(means, layout)
    if any(u.dtype.itemsize < 4 for u in updates):
        finite &= _all_finite_everywhere(updates, layout)
    return finite


def _all_finite_everywhere(arrays: Arrays, layout: Layout) -> jax.Array:
    """Whether all elements are finite, typed as equal on all devices, which it is."""
    finite = all_finite(vectors_in_view(arrays, layout))
    return _axes.on_all(finite, _axes.varying_axes(finite))
