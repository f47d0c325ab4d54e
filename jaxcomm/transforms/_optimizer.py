"""What the methods that are optimizer and exchange in one have in common."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from jaxcomm import _axes
from jaxcomm._axes import AxisName
from jaxcomm._numbers import is_integer, is_real
from jaxcomm.transforms._layout import Layout
from jaxcomm.transforms._options import require_call
from jaxcomm.transforms.per_device import made_sharded


def check_adam(
    rate: optax.ScalarOrSchedule, b1: float, b2: float, eps: float, weight_decay: float
) -> None:
    """Raises a TypeError or a ValueError for options that Adam does not take."""
    _check_rate(rate)
    for name, decay in (("b1", b1), ("b2", b2)):
        check_number(name, decay, lambda x: 0 <= x < 1, "in [0, 1)")
    for name, size in (("eps", eps), ("weight_decay", weight_decay)):
        check_number(name, size, lambda x: 0 <= x < math.inf, ">= 0")


def rates_of(rate: optax.ScalarOrSchedule) -> list[float]:
    """A learning rate at some steps, for comparisons between processes; nothing in a trace."""
    if isinstance(jnp.zeros((), bool), Tracer):
        return []
    rates = [rate(jnp.int32(i)) if callable(rate) else rate for i in (0, 1, 1000)]
    return [float(np.asarray(x).item()) for x in rates]


def _check_rate(rate: optax.ScalarOrSchedule) -> None:
    """Raises a TypeError unless a learning rate is a number or a schedule."""
    is_array = isinstance(rate, jax.Array | np.ndarray) and rate.ndim == 0
    if not (callable(rate) or is_real(rate) or is_array):
        raise TypeError(f"learning_rate must be a number or a schedule, got {rate!r}.")
    if callable(rate):
        require_call(rate, "learning_rate", "count")


def check_number(name: str, x: Any, valid: Callable[[Any], bool], wanted: str) -> None:
    """Raises unless `x` is a Python number that is valid."""
    if not is_real(x):
        raise TypeError(
            f"{name} must be a Python number, got {x!r}; under optax.inject_hyperparams only "
            "learning_rate can be injected, and static_args must name all other numbers."
        )
    if not valid(x):
        raise ValueError(f"{name} must be {wanted}, got {x!r}.")


def is_count(x: Any) -> bool:
    """Whether this is a whole number of at least 1."""
    return is_integer(x) and x >= 1


def replicated(make: Callable[[], Any], axis_name: AxisName) -> Any:
    """What `make` returns, on all devices, placed as a compiled update places it."""
    if _axes.is_manual(axis_name):
        return make()
    treedef = jax.tree.structure(jax.eval_shape(make))
    specs = [PartitionSpec()] * treedef.num_leaves
    return treedef.unflatten(made_sharded(lambda: jax.tree.leaves(make()), specs))


def zeros_like_params(params: Any, layout: Layout) -> Any:
    """Float32 zeros, shaped and placed like the parameters, equal on all devices of the axis."""
    leaves, treedef = jax.tree.flatten(params)
    if _axes.is_manual(layout.axis_name):
        own = _axes.names_of(layout.axis_name)
        return treedef.unflatten(
            _axes.as_varying(
                jnp.zeros(jnp.shape(x), jnp.float32), _axes.varying_axes(x).difference(own)
            )
            for x in leaves
        )

    def make() -> list[jax.Array]:
        return [jnp.zeros(leaf.shape, jnp.float32) for leaf in layout.leaves]

    return treedef.unflatten(made_sharded(make, [leaf.spec for leaf in layout.leaves]))


def rate_after(rate: optax.ScalarOrSchedule, count: jax.Array) -> jax.Array:
    """The learning rate of the step after `count` steps, float32."""
    return jnp.asarray(rate(count) if callable(rate) else rate, jnp.float32)


def require_params(params: Any, weight_decay: float) -> None:
    """Raises a ValueError if weights are to decay and are missing."""
    if weight_decay and params is None:
        raise ValueError("weight decay needs the parameters: call tx.update(grads, state, params).")


def decayed(
    steps: Sequence[jax.Array], params: Any, mask: Any, weight_decay: float
) -> list[jax.Array]:
    """The steps, float32, with the decay of the weights for which the mask is True."""
    if not weight_decay:
        return list(steps)
    of_each, weights = _decays(mask, params, weight_decay), jax.tree.leaves(params)
    return [
        step + decay * w.astype(jnp.float32)
        for step, decay, w in zip(steps, of_each, weights, strict=True)
    ]


def _decays(mask: Any, params: Any, decay: float) -> list[float]:
    """The weight decay of each leaf of the parameters: 0 where the mask says False.

    Raises:
      TypeError: if the mask has something else than bools.
      ValueError: if it is neither a prefix of the parameters' tree nor makes one.
    """
    found = True if mask is None else mask(params) if callable(mask) else mask
    for keeps in jax.tree.leaves(found):
        dtype = getattr(keeps, "dtype", type(keeps))
        is_bool = any(jnp.issubdtype(dtype, kind) for kind in (jnp.bool_, jnp.integer))
        if not is_bool or np.size(keeps) != 1 or keeps not in (0, 1):
            raise TypeError(f"mask must have True or False for each leaf, got {keeps!r}.")
    try:
        full = jax.tree.map(lambda m, part: jax.tree.map(lambda _: bool(m), part), found, params)
    except ValueError as error:
        raise ValueError(
            "mask must have the structure of the parameters, or a prefix of it: "
            f"{jax.tree.structure(params)}, got {jax.tree.structure(found)}."
        ) from error
    return [decay * keeps for keeps in jax.tree.leaves(full)]
