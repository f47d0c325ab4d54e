"""State that differs from device to device, and the specs of a whole state."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxcomm import _compat
from jaxcomm.transforms._layout import Layout


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class PerDevice:
    """Arrays with a leading device axis, sharded over the mesh axis.

    In the manual view the leading axis is 1: each device sees its own.

    Attributes:
      values: the arrays, in the order of the parameters.
      specs: how they are sharded, the leading axis included.
    """

    values: list[jax.Array]
    specs: tuple[PartitionSpec, ...] = dataclasses.field(metadata={"static": True})


def zeros_per_device(layout: Layout) -> PerDevice:
    """A float32 zero for every element of every parameter on every device."""
    specs = tuple(PartitionSpec(layout.axis_name, *leaf.spec) for leaf in layout.leaves)
    manual = _compat.manual_axes()
    if layout.axis_name in manual:
        checked = manual if _compat.checks_on(layout.axis_name) else frozenset()
        values = [jnp.zeros((1, *leaf.shape)) for leaf in layout.leaves]
        return PerDevice([_compat.as_varying(v, checked) for v in values], specs)
    shapes = [(layout.world, *leaf.shape) for leaf in layout.leaves]
    make = jax.jit(lambda: [jnp.zeros(shape) for shape in shapes], out_shardings=list(specs))
    return PerDevice(make(), specs)


def state_spec(tx: optax.GradientTransformation, params: Any, over: jax.sharding.Mesh) -> Any:
    """How a transformation's state is sharded: the specs to give `jax.shard_map`.

    Args:
      tx: a transformation, alone or in a chain.
      params: placed parameters, or `jax.ShapeDtypeStruct`s with shardings.
      over: the mesh of the `jax.shard_map` that the state is passed to.

    Returns:
      The pytree of `tx.init(params)` with a `PartitionSpec` for each array: leading axis over the
      mesh axis for per-device state, replicated for the rest.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm, optax
      >>> tx = optax.chain(jaxcomm.mean("data"), optax.sgd(0.1, momentum=0.9))
      >>> mesh = jaxcomm.data_mesh()
      >>> jaxcomm.state_spec(tx, {"w": jnp.zeros(3)}, mesh)[1]
      (TraceState(trace={'w': PartitionSpec()}), EmptyState())
    """
    with jax.set_mesh(over):
        state = jax.eval_shape(lambda: tx.init(params))
    return jax.tree.map(
        lambda x: (
            dataclasses.replace(x, values=list(x.specs))
            if isinstance(x, PerDevice)
            else PartitionSpec()
        ),
        state,
        is_leaf=lambda x: isinstance(x, PerDevice),
    )
