"""The two views: a transformation asks here which of them it is in, and nothing else knows.

Global view: plain `jax.jit`; gradients and per-device state have a leading device axis, sharded
over the mesh axis. Manual view: inside the user's `jax.shard_map`, where gradients are local and
per-device state has a leading axis of 1.
"""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec

from jaxcomm import _compat
from jaxcomm.transforms._layout import Layout, restrict

Arrays = list[jax.Array]


def on_every_device(exchange: Callable[[Arrays], Arrays], grads: Arrays, layout: Layout) -> Arrays:
    """Runs `exchange` on every device, in a region that is manual over all axes of the mesh.

    There, the checks of `jax.shard_map` are off: `exchange` vouches that its results are equal on
    all devices of the axis. Under an axis that is not manual, flattening a leaf would gather it.

    Args:
      exchange: from local gradients to values that are equal on all devices of the axis.
      grads: the gradients as they are in the view we are in.
      layout: what `init` saw.

    Returns:
      What `exchange` returned: in the shapes of the parameters in both views.
    """
    specs = [leaf.spec for leaf in layout.leaves]
    if not _compat.is_manual(layout.axis_name):
        with_device = [PartitionSpec(layout.axis_name, *spec) for spec in specs]
        return jax.shard_map(
            lambda grads: exchange([g[0] for g in grads]),
            in_specs=(with_device,),
            out_specs=specs,
            check_vma=False,
        )(grads)
    further = frozenset(_compat.current_mesh().axis_names) - _compat.manual_axes()
    specs = [restrict(spec, further) for spec in specs]
    means = jax.shard_map(exchange, in_specs=(specs,), out_specs=specs, check_vma=False)(grads)
    return [
        _compat.as_varying(
            mean, _compat.varying_axes(grad).difference(_compat.names_of(layout.axis_name))
        )
        for mean, grad in zip(means, grads, strict=True)
    ]
