"""What the methods that are optimizer and exchange in one have in common."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jaxcomm import _axes
from jaxcomm._axes import AxisName
from jaxcomm._numbers import is_integer, is_real
from jaxcomm.transforms._layout import Layout
from jaxcomm.transforms.per_device import made_sharded


def check_rate(rate: optax.ScalarOrSchedule) -> None:
    """Raises a TypeError unless a learning rate is a number or a schedule."""
    is_array = isinstance(rate, jax.Array) or (isinstance(rate, np.ndarray) and rate.ndim == 0)
    if not (callable(rate) or is_real(rate) or is_array):
        raise TypeError(f"learning_rate must be a number or a schedule, got {rate!r}.")


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


def decays(mask: Any, params: Any, decay: float) -> list[float]:
    """The weight decay of each leaf of the parameters: 0 where the mask says False.

    Raises:
      ValueError: if the mask is neither a prefix of the parameters' tree nor makes one.
    """
    found = True if mask is None else mask(params) if callable(mask) else mask
    try:
        full = jax.tree.map(lambda m, part: jax.tree.map(lambda _: bool(m), part), found, params)
    except ValueError as error:
        raise ValueError(
            "mask must have the structure of the parameters, or a prefix of it: "
            f"{jax.tree.structure(params)}, got {jax.tree.structure(found)}."
        ) from error
    return [decay * keeps for keeps in jax.tree.leaves(full)]
